"""A command-line agent as a TOML file ──► HarnessSpec.

    npm = ["@openai/codex@0.169.0"]                       what is installed, with exact versions
    command = ["{harness}/node_modules/.bin/codex", "exec", "--model", "{model}", "{task}"]
    [environment]
    OPENAI_BASE_URL = "{base_url}"

Places in `command`, `stdin`, `environment` and `files` are filled in for each episode: `{task}` (what is
asked), `{model}`, `{base_url}` (ends in /v1, as OpenAI's clients take it), `{root_url}` (without /v1, as
Anthropic's do), `{harness}` (where it is installed). Other braces stay as they are.
"""

import difflib
import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any, cast

from rllm.data.swe_repository import PLACE as REPOSITORY
from rllm.errors import ConfigError, choices_of
from rllm.types.call_budget import CallBudget, budget_problem

PREFIX = "harness:"
"""The prefix of the name of an agent that is a harness."""
HOME = "/opt/harness"
"""Where it lies inside, read-only."""
PLACEHOLDERS = ("task", "model", "base_url", "root_url", "harness")
PROMPT = (
    f"The repository in {REPOSITORY} has this issue. Mend it in its source; tests that you do not see will "
    "check.\n\n{issue}"
)
_EXACT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.+!-]*")
"""A requirement of one version, which leaves no choice to pip."""
_WHERE_THE_TASK_GOES = ("command", "stdin", "files")


@dataclass(kw_only=True, slots=True, frozen=True)
class HarnessSpec:
    """A harness as its file describes it."""

    name: str
    about: str = ""
    """One line for people."""
    pip: tuple[str, ...] = ()
    """Requirements that are installed into a virtual environment of its own, as wheels."""
    build: tuple[str, ...] = ()
    """Requirements of exact versions that are built from source for it, because they have no wheel."""
    python: str = ""
    """Release of Python that those are for, as in `3.12`; that of sandboxes unless given."""
    npm: tuple[str, ...] = ()
    """Packages that are installed below `node_modules`; their install scripts are not run."""
    copy: tuple[str, ...] = ()
    """Files beside the TOML file that are put into `{harness}`."""
    command: tuple[str, ...]
    """Words of what is started in the repository."""
    stdin: str = ""
    prompt: str = PROMPT
    """The text of `{task}`; `{issue}` stands for the problem statement."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    """Absolute path inside -> content, written before it starts."""
    wall_s: float = 1800.0
    """Seconds that it may take; the limit of the run's episodes counts as well."""
    memory_mb: int = 4096
    budget: dict[str, float] = field(default_factory=dict[str, float])
    """Limits of its model calls in one episode, as in CallBudget; those of the run count as well."""
    folder: Path = field(default_factory=Path)
    """Where `copy` is from."""

    def content(self) -> dict[str, Any]:
        """All that its file says, with hashes of what it copies: as JSON, the same for the same harness."""
        copy_hashes = {
            name: hashlib.sha256((self.folder / name).read_bytes()).hexdigest() for name in self.copy
        }
        return {**asdict(self), "folder": "", "copy": copy_hashes}

    @property
    def call_budget(self) -> CallBudget:
        return CallBudget(**cast(dict[str, Any], self.budget))

    def with_values(self, values: Mapping[str, str]) -> "FilledSpec":
        """The same with its places filled in."""

        def fill(text: str) -> str:
            for name in PLACEHOLDERS:
                text = text.replace(f"{{{name}}}", values[name])
            return text

        return FilledSpec(
            command=[fill(each) for each in self.command],
            stdin=fill(self.stdin),
            environment={name: fill(value) for name, value in self.environment.items()},
            files={path: fill(text) for path, text in self.files.items()},
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class FilledSpec:
    """The processes of one episode."""

    command: list[str]
    stdin: str
    environment: dict[str, str]
    files: dict[str, str]


def shipped_names() -> list[str]:
    folder = resources.files("rllm") / "environments" / "harness" / "shipped"
    return sorted(each.name.removesuffix(".toml") for each in folder.iterdir() if each.name.endswith(".toml"))


def harness_named(name: str) -> HarnessSpec:
    """The harness of a shipped name, or of a TOML file.

    Raises ConfigError that says what is wrong with it.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"There is no harness file {name}; give the path of a TOML file.")
        return _read(path.read_bytes(), name, path.stem, path.resolve().parent)
    if name not in shipped_names():
        nearest = difflib.get_close_matches(name, shipped_names(), n=1)
        hint = (
            f"did you mean `{PREFIX}{nearest[0]}`?" if nearest else f"there are {', '.join(shipped_names())}."
        )
        raise ConfigError(f"There is no harness `{name}`; {hint} One's own is a file: {PREFIX}my_agent.toml.")
    content = (resources.files("rllm") / "environments" / "harness" / "shipped" / f"{name}.toml").read_bytes()
    return _read(content, f"{PREFIX}{name}", name, Path())


def _read(content: bytes, where: str, name: str, folder: Path) -> HarnessSpec:
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{where} is no TOML file: {error}") from error
    keys = {each.name for each in fields(HarnessSpec)} - {"name", "folder"}
    for key in table:
        if key not in keys:
            nearest = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(sorted(keys))}."
            raise ConfigError(f"{where} has `{key}`, which no harness has; {hint}")
    spec = HarnessSpec(
        name=name,
        folder=folder,
        **{key: _value(where, key, value) for key, value in ({"command": []} | table).items()},
    )
    _require_sense(spec, where)
    return spec


def _value(where: str, key: str, value: Any) -> Any:
    """The value as the field has it. Raises ConfigError for another type."""
    if key in ("pip", "build", "npm", "copy", "command"):
        if isinstance(value, list) and all(isinstance(each, str) and each for each in value):
            return tuple(value)
        expected = "a list of texts"
    elif key in ("environment", "files"):
        if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
            return value
        expected = "a table of texts"
    elif key == "budget":
        names = [each.name for each in fields(CallBudget)]
        if isinstance(value, dict):
            if unknown := [name for name in value if name not in names]:
                raise ConfigError(
                    f"{where}: `budget.{unknown[0]}` limits nothing; {choices_of(unknown[0], names)}."
                )
            if (problem := budget_problem(CallBudget(**value)))[0]:
                raise ConfigError(f"{where}: `budget.{problem[0]}` {problem[1]}.")
            return value
        expected = f"a table with {', '.join(names)}"
    elif key in ("wall_s", "memory_mb"):
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return value
        expected = "a number above 0"
    elif isinstance(value, str):
        return value
    else:
        expected = "a text"
    raise ConfigError(f"{where}: `{key}` is {value!r:.80}; it must be {expected}.")


def _require_sense(spec: HarnessSpec, where: str) -> None:
    if not spec.command:
        raise ConfigError(f"{where} has no `command`; give the words of what is started.")
    if not any("{task}" in str(getattr(spec, name)) for name in _WHERE_THE_TASK_GOES):
        raise ConfigError(
            f"{where} does not say where the task goes; write {{task}} in `command`, `stdin` or `files`."
        )
    if "{issue}" not in spec.prompt:
        raise ConfigError(f"{where}: `prompt` has no {{issue}}, so nobody would be told what is asked.")
    for name in spec.copy:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not (spec.folder / name).is_file():
            raise ConfigError(f"{where}: `copy` has {name!r}; it must be a file beside {where}.")
    for path in spec.files:
        if not path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise ConfigError(f"{where}: `files` has {path!r}; it must be an absolute path inside.")
    if spec.python and not re.fullmatch(r"3\.\d+", spec.python):
        raise ConfigError(f"{where}: `python` is {spec.python!r:.40}; it must be a release such as 3.12.")
    if spec.python and not spec.pip:
        raise ConfigError(f"{where}: `python` is for packages of `pip`, and there are none.")
    for package in spec.pip:
        if package.startswith("-") or "://" in package:
            raise ConfigError(f"{where}: `pip` has {package!r}; give names with versions, such as `a==1.2`.")
    for package in spec.build:
        if not _EXACT.fullmatch(package):
            raise ConfigError(
                f"{where}: `build` has {package!r}; its setup runs on this machine, so name one version of "
                "it, such as `a==1.2`."
            )
    if spec.build and not spec.pip:
        raise ConfigError(f"{where}: `build` is for packages that those of `pip` need, and there are none.")
    for package in spec.npm:
        if package.startswith("-") or ":" in package:
            raise ConfigError(f"{where}: `npm` has {package!r}; give names with versions, such as `a@1.2`.")
