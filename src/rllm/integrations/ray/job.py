"""The job that a process of the cluster gets once, when it begins, and its report about itself."""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

import rllm.config
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.integrations.ray.user_files import UserFile

MUST_AGREE = ("rllm", "torch", "transformers", "tokenizers", "numpy", "ray")
"""Packages whose versions decide what is sampled, or how processes understand each other."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkerJob:
    """The job that a worker gets once, when it begins."""

    config: TrainConfig
    pickled_player: bytes
    """An `EpisodePlayer`, which needs `user_files` to be read."""
    user_files: Sequence[UserFile]
    places: Mapping[str, str]
    """policy -> the directory of its initial model, as its files are named."""

    def config_in(self, directory: Path) -> TrainConfig:
        """The configuration with the models where this worker has them, in `directory`."""
        config, paths = self.config, {name: str(directory / place) for name, place in self.places.items()}
        return replace(
            config,
            model=replace(config.model, path=next(iter(paths.values()))),
            policies={name: replace(each, path=paths[name]) for name, each in config.policies.items()},
            threads=config.cluster.cpus_per_worker,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    """Where a process runs, and with what."""

    host: str
    pid: int
    versions: Mapping[str, str]
    """The versions of Python, of `MUST_AGREE` (empty where one is not installed), and of our own files."""
    clock_s: float
    """Its time, in seconds since 1970."""


def this_machine() -> Machine:

    return Machine(
        host=socket.gethostname(),
        pid=os.getpid(),
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in MUST_AGREE},
            "rllm source": _source_digest(),
        },
        clock_s=time.time(),
    )


def require_same_versions(mine: Machine, theirs: Machine) -> None:
    for name, version in mine.versions.items():
        if theirs.versions[name] != version:
            raise ConfigError(
                f"Node {theirs.host} has {name} {theirs.versions[name] or 'not installed'}, and the run "
                f"has {version}: they would not sample alike. Install the same on both."
            )


@cache
def _source_digest() -> str:
    """A digest of the package's files: two checkouts of one version may differ."""
    digest = hashlib.blake2b(digest_size=6)
    root = Path(rllm.config.__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
