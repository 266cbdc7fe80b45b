"""Which training blocks there are to measure, and how each is run.

catalogue: worlds whose file says for how many steps they train ──┐
learning_blocks.toml: examples, members of families, counts ──────┴──► Block by name
"""

import hashlib
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.build.configs import training_config
from rllm.config.loader import config_dict
from rllm.config.open_keys import MEMORY_KEYS, OPEN_KEYS
from rllm.config.schema import TrainConfig
from rllm.eval.catalogue import benchmark_named, benchmarks
from rllm.trainer.defaults import model_facts, settle_for_model

ROOT = Path(__file__).resolve().parents[1]


def shipped_settings(name: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """What a block ships with, whatever the seed: dotted key -> value; of an example, hashes of its files."""
    if files:
        return {each: hashlib.sha256((ROOT / each).read_bytes()).hexdigest()[:12] for each in files}
    return settings_of_task(name)


def settings_of_task(name: str, assignments: tuple[str, ...] = ()) -> dict[str, Any]:
    """Of a task by its name, with some of them changed."""
    config = training_config(name, None, assignments)
    settle_for_model(config, model_facts(config.model.path))
    settings = _flat(config_dict(config)) | {"model.dtype": config.model.number_type}
    del settings["seed"]
    return json.loads(json.dumps(settings))  # as the results hold them: tuples are lists


def has_changed(measured: Mapping[str, Any], shipped: Mapping[str, Any]) -> bool:
    """Whether a run would now be another one; a key that came since, at its default, changes nothing, nor
    does one that a run chooses by the memory of its machine."""
    config = TrainConfig()
    settle_for_model(config, model_facts(config.model.path))
    defaults = json.loads(json.dumps(_flat(config_dict(config))))
    compared = {*measured, *shipped} - {key for key in MEMORY_KEYS if shipped.get(key) == OPEN_KEYS[key]}
    return any(
        shipped.get(key, defaults.get(key)) != measured.get(key, defaults.get(key)) for key in compared
    )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@dataclass(kw_only=True, slots=True, frozen=True)
class Block:
    """One task with its configuration."""

    name: str
    category: str
    environment: str = ""
    tried: int = 0
    earlier: tuple[dict[str, Any], ...] = ()
    """Other settings that were measured with the reported seeds before: `commit` and `scores` by seed."""
    command: tuple[str, ...] = ()
    run: str = ""
    before: str = ""
    files: tuple[str, ...] = ()
    nproc: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        return shipped_settings(self.name, self.files)

    @property
    def config(self) -> str:
        """Hash of the settings and of the number of processes: the name of a directory of runs."""
        whole = json.dumps([self.settings, self.nproc], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()[:12]

    def words(self, seed: int, place: Path, split: str) -> list[str]:
        """The process that trains it."""
        output = place / "run"
        if self.command:
            return [
                sys.executable,
                *(each.format(seed=seed, output=output, split=split) for each in self.command),
            ]
        held_out = ["--set", f"evaluation.split={split}"] if split != "test" else []
        start = [sys.executable, "-m", "rllm", "train", self.name, "--seed", str(seed)]
        processes = ["--nproc", str(self.nproc)] if self.nproc > 1 else []
        return [*start, "--output", str(output), *processes, *held_out, "--json"]

    def runs(self, place: Path) -> tuple[Path, list[Path]]:
        """The run that is reported, and those before it."""
        output = place / "run"
        return output / self.run, [output / self.before] if self.before else []


def blocks() -> dict[str, Block]:
    """Every block there is: worlds of the catalogue that train, and what learning_blocks.toml adds."""
    table = tomllib.loads((ROOT / "benchmarks/learning_blocks.toml").read_text())
    names = [each.name for each in benchmarks() if "steps" in each.train and "/" not in each.name]
    by_name: dict[str, Block] = {}
    for name in sorted({*names, *table}):
        extra: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in table.get(name, {}).items()
        }
        if "command" not in extra:
            benchmark = benchmark_named(name)
            extra |= {"category": benchmark.category, "environment": benchmark.environment}
        by_name[name] = Block(name=name, **extra)
    return by_name
