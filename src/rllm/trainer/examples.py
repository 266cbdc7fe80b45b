"""The units of a dataset that a run takes or leaves as a whole, and which of them are held out.

examples ──► those whose rows fit ──► whole tasks to one side or the other: (trained on, held out)
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rllm.errors import ConfigError
from rllm.types.draws import draw_seed
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True)
class Example:
    """The unit that one update takes or leaves: all rows of a conversation, or of the answers that are
    compared."""

    where: str
    """For people: the row of a file, or an episode."""
    task: str
    """Examples of one task are held out together."""
    rows: list[TrainingSample]

    @property
    def longest(self) -> int:
        return max(row.num_tokens for row in self.rows)


@dataclass(kw_only=True, slots=True)
class ExampleSets:
    """The examples that a run trains on and those that it is measured by."""

    train: list[Example]
    heldout: list[Example]
    is_heldout: bool
    """False: the reports are about examples that are trained on."""
    num_dropped: int = 0
    """Examples with a row that is longer than `data.max_length`."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
    """The numbers of everything that was read to make them, by what became of it."""

    def all(self) -> list[Example]:
        return [*self.train, *self.heldout] if self.is_heldout else self.train


def split_heldout(
    examples: Sequence[Example], fraction: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(trained on, held out): whole tasks, drawn by the seed; at least one on each side where there are
    two."""
    # Sorted, because a set of texts has another order in each process.
    tasks = sorted({example.task for example in examples})
    num_heldout = 0
    if fraction and len(tasks) > 1:
        num_heldout = min(max(1, round(fraction * len(tasks))), len(tasks) - 1)
    order = np.random.default_rng(draw_seed(seed, "heldout")).permutation(len(tasks))
    heldout = {tasks[place] for place in order[:num_heldout]}
    return (
        [example for example in examples if example.task not in heldout],
        [example for example in examples if example.task in heldout],
    )


def row_limit(max_length: int, max_positions: int) -> int:
    """Tokens that a row may have. Raises ConfigError for more than the model can read."""
    if max_length > max_positions:
        raise ConfigError(
            f"`data.max_length` is {max_length}, and the model reads {max_positions} tokens; set it to "
            f"{max_positions} or less, or 0."
        )
    return max_length or max_positions


def rows_sha256(examples: Iterable[Example]) -> str:
    """Hash of all that is learned: ids, which of them are trained, and how."""
    digest = hashlib.sha256()
    for example in examples:
        for row in example.rows:
            for values_T in (row.token_ids_T, row.trainable_T, row.advantages_T):
                digest.update(values_T.tobytes())
    return digest.hexdigest()


def largest_examples(examples: Sequence[Example], number: int) -> list[TrainingSample]:
    """The rows of so many examples that have most tokens."""
    by_size = sorted(examples, key=lambda example: -sum(row.num_tokens for row in example.rows))
    return [row for example in by_size[:number] for row in example.rows]
