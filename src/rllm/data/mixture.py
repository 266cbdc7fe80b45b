"""Several data sets as one: each task comes from a set as often as that set's weight says.

parse_mixture("math.jsonl=3,gsm8k=1") ──► {"math.jsonl": 3.0, "gsm8k": 1.0}
mix(sets, weights) ──► tasks: three of math.jsonl for one of gsm8k, every row of each at least once
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rllm.errors import ConfigError
from rllm.types.task import Task

SOURCE = "dataset"
"""Key of a task's metadata: the set that it is of."""
MAX_TASKS = 1_000_000


def parse_mixture(text: str) -> dict[str, float]:
    """Set -> weight; empty for the name of one set. Raises ConfigError for half a mixture."""
    parts = [each.strip().rpartition("=") for each in text.split(",")]
    if len(parts) == 1 and not parts[0][1]:
        return {}
    weights: dict[str, float] = {}
    for name, separator, weight_text in parts:
        try:
            weight = float(weight_text) if separator and name else math.nan
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"`{text:.200}` is no mixture at {name + separator + weight_text!r:.80}; write NAME=WEIGHT,"
                "NAME=WEIGHT, with weights above 0."
            )
        if name in weights:
            raise ConfigError(f"`{text:.200}` has {name} twice; add up its weights.")
        weights[name] = weight
    return weights


def mix(sets: Mapping[str, Sequence[Task]], weights: Mapping[str, float]) -> list[Task]:
    """As few tasks as hold every row once and each set by its weight; rows that come again have ids of their
    own, so that their attempts are compared among themselves.

    Raises ConfigError for an empty set, and for weights that would take more than a million tasks.
    """
    for name, tasks in sets.items():
        if not tasks:
            raise ConfigError(f"{name} has no tasks; leave it out of the mixture.")
    most = max(sets, key=lambda name: len(sets[name]) / weights[name])
    passes = len(sets[most]) / weights[most]
    if passes * sum(weights.values()) > MAX_TASKS:
        raise ConfigError(
            f"All {len(sets[most]):,} rows of {most} at its weight {weights[most]:g} make a mixture of more "
            f"than {MAX_TASKS:,} tasks; raise its weight, or take fewer of its rows."
        )
    return [
        replace(
            task,
            id=f"{name}/{task.id}{f'#{again}' if again else ''}",
            metadata={**task.metadata, SOURCE: name},
        )
        for name, tasks in sets.items()
        for again, task in itertools.islice(
            ((again, task) for again in itertools.count() for task in tasks),
            round(passes * weights[name]) or 1,
        )
    ]
