"""A task as a directory, in Harbor's format (schema 1.x): read, checked, and refused where it cannot be run
here.

    TASK/  task.toml  instruction.md  environment/Dockerfile  tests/test.sh  [solution/solve.sh]  [steps/…]
      └──read_task_directory──► TaskDirectory: instruction, limits, users, Dockerfile ──►
      rllm.data.task_images

Every field of `task.toml` is honoured, or refused by its name: a task that names a GPU, a service or a
network that
is not there is a ConfigError, and its collection goes on without it. Names that the format does not have
are left alone, as Harbor does. Tasks of Terminal-Bench 1 are read as well (rllm.data.terminal_bench).
"""

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllm.data.image import Image
from rllm.data.image_bases import require_fitting
from rllm.data.task_images import image_of
from rllm.data.terminal_bench import (
    RUN_TESTS,
    TEST_COMMAND,
    is_terminal_bench,
    terminal_bench_settings,
)
from rllm.errors import ConfigError
from rllm.sandbox.types import machine_memory_mb

INSTRUCTION, SETTINGS = "instruction.md", "task.toml"
_CANARY = re.compile(
    r"\A(?:\s*(?:<!--.*?canary.*?-->|#[^\n]*canary[^\n]*)[ \t]*\n)+", re.IGNORECASE | re.DOTALL
)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
NETWORK_MODES = ("public", "no-network", "allowlist")
STRATEGIES = ("mean", "final")
MOST_DISK_MB = 16_384
"""The disk space that a task may ask for: files lie in memory until they are gone."""

REFUSED = {
    "environment": ("gpu_types", "tpu", "skills_dir", "allowed_hosts"),
    "agent": ("allowed_hosts",),
    "verifier": ("environment", "collect", "allowed_hosts"),
    "solution": (),
}
"""Settings of a section that ask for what a sandbox here does not have."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HealthCheck:
    """A command that must succeed before the agent comes."""

    command: str
    interval_s: float = 5.0
    timeout_s: float = 30.0
    start_period_s: float = 0.0
    """In which it may fail, tried every `start_interval_s`."""
    start_interval_s: float = 5.0
    retries: int = 3
    """The number of failures that are tried again after that."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskDirectory:
    """The declarations of a task directory."""

    path: Path
    name: str
    instruction: str
    dockerfile: Path | None = None
    variables: dict[str, str] = field(default_factory=dict[str, str])
    """The environment variables of all phases, beside the image's."""
    workdir: str = ""
    """In place of the image's."""
    build_timeout_s: float = 600.0
    agent_timeout_s: float | None = None
    """The time of all commands of an attempt together."""
    agent_user: str = ""
    """Name or id, in place of the image's."""
    verifier_timeout_s: float = 600.0
    verifier_user: str = ""
    verifier_variables: dict[str, str] = field(default_factory=dict[str, str])
    solution_variables: dict[str, str] = field(default_factory=dict[str, str])
    memory_mb: int | None = None
    storage_mb: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    """Free: difficulty, category, tags."""
    mcp_servers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Name -> `command`, `args` and `env` of what is started in the agent's machine, and spoken to over its
    standard input and output."""
    artifacts: dict[str, str] = field(default_factory=dict[str, str])
    """Absolute paths of what the agent makes, beside what lies in its folders -> the names that they are
    collected under."""
    health: HealthCheck | None = None
    tests: Path
    """A directory; /tests when the agent has finished."""
    test_command: tuple[str, ...] = ("bash", "-c", "chmod +x /tests/test.sh; exec bash /tests/test.sh")
    test_packages: tuple[str, ...] = ()
    """Distributions of this machine that the tests import."""
    test_files: dict[str, Path] = field(default_factory=dict[str, Path])
    """Path inside -> file or directory that is there beside `tests` when they run."""
    solution: Path
    """The script of the oracle's, which may be absent."""
    steps: tuple["TaskDirectory", ...] = ()
    """The steps of a task of several: what each asks, checks and begins with, in the same machine."""
    strategy: str = "mean"
    """The combination of the rewards of several steps: their mean, or that of the last."""
    step_files: Path | None = None
    """A step's directory whose files come into the working directory before it; `setup.sh` is run."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """The lowest and the highest reward that its tests may pay."""
    min_rewards: dict[str, float] = field(default_factory=dict[str, float])
    """The rewards of a step below which the steps after it are not asked for."""

    def image(self, *, builds: bool = True) -> Image:
        """The image of its Dockerfile, from the cache or made now. Raises ConfigError that names the line."""
        if self.dockerfile is None:
            return Image(variables=self.variables, workdir=self.workdir or "/app")
        image = image_of(
            self.dockerfile, variables=self.variables, timeout_s=self.build_timeout_s, builds=builds
        )
        return replace(image, workdir=self.workdir or image.workdir)


def is_task_directory(path: Path) -> bool:
    return (path / SETTINGS).is_file() or is_terminal_bench(path)


def is_task_collection(path: Path) -> bool:
    """A task directory, or a directory with such directories in it."""
    if not path.is_dir():
        return False
    return is_task_directory(path) or any(is_task_directory(each) for each in path.iterdir())


def what_is_missing(path: Path) -> str:
    """The reason that there is no task at `path`, in a sentence."""
    if not path.is_dir():
        return f"{path} is a file; a task is a directory with {SETTINGS}, {INSTRUCTION} and tests/test.sh."
    required_names = (SETTINGS, INSTRUCTION, "tests/test.sh", "environment")
    there = [each for each in required_names if (path / each).exists()]
    if there:
        missing = [each for each in required_names[:3] if each not in there]
        return f"{path} is no task yet: it has {', '.join(there)}, and lacks {', '.join(missing)}."
    return (
        f"{path} holds no task: neither it nor a directory in it has a {SETTINGS}. A task is a directory "
        f"with {SETTINGS}, {INSTRUCTION} and tests/test.sh."
    )


def task_directories(path: Path) -> list[Path]:
    """The task directories of a collection by name. Raises ConfigError where there are none."""
    if is_task_directory(path):
        return [path]
    directories = sorted(each for each in path.iterdir() if is_task_directory(each)) if path.is_dir() else []
    if not directories:
        raise ConfigError(f"{path} holds no task: no directory in it has a {SETTINGS}.")
    return directories


def read_task_directory(path: Path, environment: Mapping[str, str] | None = None) -> TaskDirectory:
    """Everything that a task says. Raises ConfigError, naming the file, for what is missing or cannot be run.

    `environment` is what `${VAR}` in the verifier's variables is taken from.
    """
    is_old = is_terminal_bench(path) and not (path / SETTINGS).is_file()
    settings, instruction = terminal_bench_settings(path) if is_old else (_settings(path), "")
    sections = {name: _section(settings, name, path) for name in REFUSED}
    _refuse_unsupported(path, settings, sections)
    has_steps = bool(settings.get("steps"))
    if not (is_old or has_steps):
        instruction = _instruction(path, path)
        _require_tests(path, path / "tests")
    # In the order of REFUSED.
    world, agent, verifier, solution = sections.values()
    dockerfile = path / "Dockerfile" if is_old else path / "environment" / "Dockerfile"
    process_variables = environment or {}
    task = TaskDirectory(
        path=path,
        name=str(_section(settings, "task", path).get("name", path.name)),
        instruction=instruction,
        dockerfile=dockerfile if dockerfile.is_file() else None,
        variables=_variables(world, "environment", process_variables, path),
        workdir=str(world.get("workdir") or ""),
        build_timeout_s=_seconds(world, 600.0, path, "environment", "build_timeout_sec") or 600.0,
        agent_timeout_s=_seconds(agent, None, path, "agent"),
        agent_user=str(agent.get("user") or ""),
        verifier_timeout_s=_seconds(verifier, 600.0, path, "verifier") or 600.0,
        verifier_user=str(verifier.get("user") or ""),
        verifier_variables=_variables(verifier, "verifier", process_variables, path),
        solution_variables=_variables(solution, "solution", process_variables, path),
        memory_mb=_size_mb(world, "memory", path),
        storage_mb=_size_mb(world, "storage", path),
        metadata=_section(settings, "metadata", path),
        reward_range=_reward_range(settings, path),
        mcp_servers=_mcp_servers(world, process_variables, path),
        artifacts=_artifacts(settings, path),
        health=_health(world, path),
        tests=path / "tests",
        solution=path / ("solution.sh" if is_old else "solution/solve.sh"),
        strategy=str(settings.get("multi_step_reward_strategy", "mean")),
    )
    if is_old:
        task = replace(task, test_command=TEST_COMMAND, test_files={f"/tests/{RUN_TESTS}": path / RUN_TESTS})
    if has_steps:
        task = replace(task, steps=tuple(_steps(task, settings["steps"], process_variables)))
    # Says what is wrong with a line of the Dockerfile before any agent starts.
    task.image(builds=False)
    return task


def _instruction(folder: Path, path: Path) -> str:
    if not (folder / INSTRUCTION).is_file():
        raise ConfigError(f"{path} has no {(folder / INSTRUCTION).relative_to(path)}; a task needs one.")
    instruction = _CANARY.sub("", (folder / INSTRUCTION).read_text("utf-8")).strip()
    if not instruction:
        raise ConfigError(f"{folder / INSTRUCTION} is empty.")
    return instruction


def _require_tests(path: Path, tests: Path) -> None:
    if not (tests / "test.sh").is_file():
        raise ConfigError(f"{path} has no {(tests / 'test.sh').relative_to(path)}; a task needs one.")


def _steps(task: TaskDirectory, tables: Any, environment: Mapping[str, str]) -> Iterator[TaskDirectory]:
    """The steps of a task: what one does not say is as for the whole task."""
    path = task.path
    if task.strategy not in STRATEGIES:
        raise ConfigError(
            f"{path / SETTINGS}: `multi_step_reward_strategy` is {task.strategy!r:.60}; it is "
            f"{' or '.join(STRATEGIES)}."
        )
    if not isinstance(tables, list):
        raise ConfigError(f"{path / SETTINGS}: `steps` is {tables!r:.60}; it must be a list of tables.")
    names: set[str] = set()
    for table in tables:
        name = table.get("name") if isinstance(table, dict) else None
        folder = path / "steps" / str(name)
        is_plain = isinstance(name, str) and Path(name).name == name and name not in ("", ".", "..")
        if not is_plain or name in names or not folder.is_dir():
            raise ConfigError(
                f"{path / SETTINGS}: a step's `name` is {name!r:.60}; each has one of its own, and a folder "
                "`steps/NAME`."
            )
        names.add(str(name))
        yield _step(task, table, folder, environment)


def _step(
    task: TaskDirectory, table: Mapping[str, Any], folder: Path, environment: Mapping[str, str]
) -> TaskDirectory:
    path, name = task.path, folder.name
    agent, verifier = (_section(table, each, path) for each in ("agent", "verifier"))
    for section, values in (("agent", agent), ("verifier", verifier)):
        _refuse_section(path / SETTINGS, section, values)
    if agent.get("user") and str(agent["user"]) != task.agent_user:
        raise ConfigError(
            f"{path / SETTINGS}: `steps.{name}.agent.user` is {agent['user']!r:.60}; one user works on all "
            "steps here: leave this task out."
        )
    own_tests = (folder / "tests" / "test.sh").is_file()
    if not own_tests:
        _require_tests(path, path / "tests")
    shared_tests = path / "tests"
    return replace(
        task,
        name=f"{task.name}/{name}",
        instruction=_instruction(folder, path),
        agent_timeout_s=_seconds(agent, task.agent_timeout_s, path, f"steps.{name}.agent"),
        verifier_timeout_s=_seconds(verifier, task.verifier_timeout_s, path, f"steps.{name}.verifier")
        or task.verifier_timeout_s,
        verifier_user=str(verifier.get("user") or task.verifier_user),
        verifier_variables=task.verifier_variables | _variables(verifier, "verifier", environment, path),
        artifacts=task.artifacts | _artifacts(table, path),
        health=_health(table, path),
        tests=folder / "tests" if own_tests else shared_tests,
        test_files={"/tests": shared_tests} if own_tests and shared_tests.is_dir() else {},
        solution=folder / "solution" / "solve.sh",
        step_files=folder / "workdir" if (folder / "workdir").is_dir() else None,
        min_rewards=_min_rewards(table, path),
    )


def _reward_range(settings: Mapping[str, Any], path: Path) -> tuple[float, float]:
    value = _section(settings, "metadata", path).get("reward_range", [0.0, 1.0])
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(isinstance(end, int | float) and math.isfinite(end) for end in value)
        and value[0] < value[1]
    ):
        return float(value[0]), float(value[1])
    raise ConfigError(
        f"{path / SETTINGS}: `metadata.reward_range` is {value!r:.60}; it must be two numbers, the lowest "
        "reward and the highest, such as [0, 10]."
    )


def _min_rewards(table: Mapping[str, Any], path: Path) -> dict[str, float]:
    value = table.get("min_reward")
    rewards = value if isinstance(value, dict) else {} if value is None else {"reward": value}
    for name, least in rewards.items():
        if isinstance(least, bool) or not isinstance(least, int | float):
            raise ConfigError(
                f"{path / SETTINGS}: `steps.min_reward` is {least!r:.60} for {name}; it must be a number."
            )
    return {str(name): float(least) for name, least in rewards.items()}


def _settings(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((path / SETTINGS).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} has no {SETTINGS}; it is no task directory.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path / SETTINGS} cannot be read: {error}.") from error


def _section(table: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = table.get(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{path / SETTINGS}: `{name}` is {section!r:.60}; it must be a table.")
    return section


def _refuse_unsupported(
    path: Path, settings: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]
) -> None:
    where = path / SETTINGS
    version = str(settings.get("schema_version", settings.get("version", "1")))
    if version.split(".")[0] != "1":
        raise ConfigError(f"{where}: `schema_version` is {version}; schema 1 is read.")
    for section in REFUSED:
        _refuse_section(where, section, sections[section])
    world, verifier = sections["environment"], sections["verifier"]
    if world.get("gpus"):
        raise ConfigError(f"{where}: `environment.gpus` is not there in the sandbox; leave this task out.")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (path / "environment" / name).exists():
            raise ConfigError(f"{path / 'environment' / name}: several containers need a container engine.")
    if world.get("docker_image") and not (path / "environment" / "Dockerfile").exists():
        require_fitting(str(world["docker_image"]), f"{where}: `environment.docker_image`")
    if str(world.get("os", "linux")) != "linux":
        raise ConfigError(f"{where}: `environment.os` is {world['os']!r}; tasks run on linux alone.")
    if verifier.get("environment_mode", "shared") not in ("shared", "separate"):
        raise ConfigError(
            f"{where}: `verifier.environment_mode` is {verifier['environment_mode']!r}; it is "
            f"shared or separate."
        )
    _require_machine(where, world)
    storage_mb = _size_mb(world, "storage", path) or 0
    if storage_mb > MOST_DISK_MB:
        raise ConfigError(
            f"{where}: `environment.storage_mb` is {storage_mb:,}; files lie in memory here, and a task may "
            f"have {MOST_DISK_MB:,} MiB of them: lower it where the task can be done with less."
        )


def _refuse_section(where: Path, section: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings of a section that ask for what a sandbox here does not have."""
    for name in REFUSED[section]:
        if values.get(name):
            raise ConfigError(
                f"{where}: `{section}.{name}` is not there in the sandbox; leave this task out."
            )
    mode = values.get("network_mode", "no-network")
    if mode not in NETWORK_MODES:
        raise ConfigError(
            f"{where}: `{section}.network_mode` is {mode!r}; it is one of {', '.join(NETWORK_MODES)}."
        )
    name, value = ("allow_internet", True) if values.get("allow_internet") else ("network_mode", mode)
    if value != "no-network":
        raise ConfigError(
            f"{where}: `{section}.{name}` is {value!r}, and sandboxes reach no network; leave the key "
            "out where the task can be done without one."
        )


def _require_machine(where: Path, world: Mapping[str, Any]) -> None:
    """Raises ConfigError for more processors or memory than this machine has."""
    cpus = world.get("cpus") or 0
    if isinstance(cpus, bool) or not isinstance(cpus, int | float) or cpus > (os.cpu_count() or 1):
        raise ConfigError(f"{where}: `environment.cpus` is {cpus!r}; this machine has {os.cpu_count()}.")
    here_mb = machine_memory_mb()
    memory_mb = _size_mb(world, "memory", where.parent) or 0
    if memory_mb > here_mb:
        raise ConfigError(
            f"{where}: `environment.memory_mb` is {memory_mb:,}; this machine has {here_mb:,} MiB of memory."
        )


def _variables(
    section: Mapping[str, Any], name: str, environment: Mapping[str, str], path: Path
) -> dict[str, str]:
    table = _section(section, "env", path)
    return {str(key): _fill(str(value), environment, path, name) for key, value in table.items()}


def _health(world: Mapping[str, Any], path: Path) -> HealthCheck | None:
    table = _section(world, "healthcheck", path)
    if not table:
        return None
    command = table.get("command")
    if not isinstance(command, str) or not command.strip():
        raise ConfigError(f"{path / SETTINGS}: `environment.healthcheck` has no `command`.")
    retries = table.get("retries", 3)
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise ConfigError(
            f"{path / SETTINGS}: `environment.healthcheck.retries` is {retries!r:.60}; it must be a whole "
            "number, 0 or more."
        )
    names = [name for name in ("interval_s", "timeout_s", "start_interval_s") if f"{name}ec" in table]
    if table.get("start_period_sec"):  # 0, its default, is none
        names.append("start_period_s")
    seconds = {
        name: _seconds(table, None, path, "environment.healthcheck", f"{name}ec") or 0.0 for name in names
    }
    return HealthCheck(command=command, retries=retries, **seconds)


def _mcp_servers(
    world: Mapping[str, Any], environment: Mapping[str, str], path: Path
) -> dict[str, dict[str, Any]]:
    """Raises ConfigError for one that is elsewhere: sandboxes reach no network."""
    tables, where = world.get("mcp_servers", []), f"{path / SETTINGS}: `environment.mcp_servers`"
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ConfigError(f"{where} is {tables!r:.60}; it must be a list of tables.")
    servers: dict[str, dict[str, Any]] = {}
    for table in tables:
        name, transport = table.get("name"), table.get("transport", "sse")
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name in servers:
            raise ConfigError(f"{where} has the name {name!r:.60}; each has one of its own, a word.")
        if transport != "stdio":
            raise ConfigError(
                f"{where}: the `transport` of {name} is {transport!r:.40}, which is a server elsewhere, and "
                "sandboxes reach no network; `stdio` ones are started in the sandbox: leave this task out."
            )
        command, arguments = table.get("command"), table.get("args", [])
        if not isinstance(command, str) or not command:
            raise ConfigError(f"{where}: {name} has no `command`.")
        if not isinstance(arguments, list) or not all(isinstance(each, str) for each in arguments):
            raise ConfigError(
                f"{where}: the `args` of {name} are {arguments!r:.60}; they must be a list of texts."
            )
        variables = _variables(table, f"environment.mcp_servers of {name}", environment, path)
        servers[name] = {"command": command, "args": arguments, "env": variables}
    return servers


def _artifacts(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """`artifacts`: paths, or tables with a `source` and a `destination`."""
    artifacts = settings.get("artifacts", [])
    if not isinstance(artifacts, list):
        raise ConfigError(f"{path / SETTINGS}: `artifacts` is {artifacts!r:.60}; it must be a list.")
    names: dict[str, str] = {}
    for entry in artifacts:
        each = entry.get("source") if isinstance(entry, dict) else entry
        for name in ("service", "exclude"):
            if isinstance(entry, dict) and entry.get(name):
                raise ConfigError(
                    f"{path / SETTINGS}: `artifacts.{name}` is not read here; leave this task out."
                )
        if not isinstance(each, str) or not each.startswith("/") or ".." in each.split("/"):
            raise ConfigError(f"{path / SETTINGS}: `artifacts` names {each!r:.60}; give absolute paths.")
        destination = entry.get("destination") if isinstance(entry, dict) else None
        names[each] = str(destination or each.rstrip("/").rpartition("/")[2])
    return names


def _seconds(
    table: Mapping[str, Any], default: float | None, path: Path, section: str, name: str = "timeout_sec"
) -> float | None:
    value = table.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{path / SETTINGS}: `{section}.{name}` is {value!r}; it must be more than 0.")
    return float(value)


def _size_mb(world: Mapping[str, Any], name: str, path: Path) -> int | None:
    """`memory_mb` or `storage_mb`; or `memory = "2G"` of older tasks."""
    value = world.get(f"{name}_mb")
    if value is not None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(
                f"{path / SETTINGS}: `environment.{name}_mb` is {value!r}; it must be more than 0."
            )
        return int(value)
    text = str(world.get(name, "")).strip().upper().removesuffix("B").removesuffix("I")
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MG])", text)
    if match is None:
        raise ConfigError(f"{path / SETTINGS}: `environment.{name}` is {world[name]!r}; write it as `2G`.")
    return int(float(match[1]) * (1024 if match[2] == "G" else 1))


def _fill(text: str, environment: Mapping[str, str], path: Path, section: str) -> str:
    def value(match: re.Match[str]) -> str:
        variable = environment.get(match[1], match[2])
        if variable is None:
            raise ConfigError(f"{path / SETTINGS}: the {section} needs the variable {match[1]}; set it.")
        return variable

    return _VARIABLE.sub(value, text)
