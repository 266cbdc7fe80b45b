"""The benchmark catalogue: one TOML file per benchmark, by name."""

import difflib
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True, frozen=True)
class Benchmark:
    """What there is to know about a benchmark before anything of it is loaded."""

    name: str
    description: str
    environment: str
    agent: str
    task: dict[str, Any]
    """Arguments that its tasks are made with."""
    agent_args: dict[str, Any]
    """Arguments of the agent."""
    train_task: dict[str, Any]
    """The same for training tasks alone, on top of `task`."""
    train: dict[str, Any]
    """Its training configuration, on top of the defaults of `TrainConfig`."""


def benchmark_names() -> list[str]:
    return sorted(
        path.name.removesuffix(".toml") for path in _directory().iterdir() if path.name.endswith(".toml")
    )


def benchmark_named(name: str) -> Benchmark:
    """Raises ConfigError with the nearest name for one that is not in the catalogue."""
    names = benchmark_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(names)}."
        raise ConfigError(f"There is no benchmark `{name}`; {hint}")
    return Benchmark(**tomllib.loads((_directory() / f"{name}.toml").read_text()))


def _directory() -> Any:
    return resources.files("rllm.eval") / "benchmarks"
