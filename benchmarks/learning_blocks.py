"""Which training blocks there are to measure, and how each is run.

catalogue: worlds whose file says for how many steps they train ──┐
learning_blocks.toml: examples, members of families, counts ──────┴──► Block by name
"""

import hashlib
import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rllm.build.configs import training_config
from rllm.config.loader import config_dict
from rllm.eval.catalogue import benchmark_named, benchmarks

ROOT = Path(__file__).resolve().parents[1]


def current_config(name: str, files: Sequence[str] = ()) -> str:
    """Hash of the configuration that a block ships with, whatever the seed; of an example, of its files."""
    if files:
        content = b"\0".join((ROOT / each).read_bytes() for each in files)
    else:
        config = config_dict(training_config(name))
        del config["seed"]
        content = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:12]


@dataclass(kw_only=True, slots=True, frozen=True)
class Block:
    """One task with its configuration."""

    name: str
    category: str
    environment: str = ""
    tried: int = 0
    command: tuple[str, ...] = ()
    run: str = ""
    before: str = ""
    files: tuple[str, ...] = ()

    @property
    def config(self) -> str:
        return current_config(self.name, self.files)

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
        return [*start, "--output", str(output), *held_out, "--json"]

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
        extra = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in table.get(name, {}).items()
        }
        if "command" not in extra:
            benchmark = benchmark_named(name)
            extra |= {"category": benchmark.category, "environment": benchmark.environment}
        by_name[name] = Block(name=name, **extra)
    return by_name
