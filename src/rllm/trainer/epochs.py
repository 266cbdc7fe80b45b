"""The batches of a run over a dataset as a pure function of (seed, step): asked again, the same again.

positions   0 1 2 3 │ 4 5 6 7 │ 8 9 …      batch_size 4, 5 examples
examples    3 0 4 1 │ 2 1 4 0 │ 3 2 …      each pass over all of them has an order of its own
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rllm.config.supervised import EpochsConfig
from rllm.errors import ConfigError
from rllm.types.draws import draw_seed


class Epochs:
    """Which of `num_examples` are trained on in which step. Every one is there exactly `epochs` times."""

    def __init__(self, num_examples: int, config: EpochsConfig) -> None:
        if num_examples < 1:
            raise ConfigError("There are no examples to train on; give at least one.")
        self._num_examples = num_examples
        self._config = config
        # Two, because a batch may reach from one pass over the examples into the next.
        self._order = lru_cache(maxsize=2)(self._shuffle)

    @property
    def num_steps(self) -> int:
        whole = -(-self._num_positions // self._config.batch_size)
        return min(whole, self._config.max_steps) if self._config.max_steps else whole

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._num_examples // self._config.batch_size)

    def batch(self, step: int) -> list[int]:
        """Indices of the examples of one step; the last step of all has what is left."""
        size = self._config.batch_size
        return [self._at(place) for place in range(step * size, min((step + 1) * size, self._num_positions))]

    @property
    def _num_positions(self) -> int:
        return self._config.epochs * self._num_examples

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self._num_examples)
        return int(self._order(epoch)[place])

    def _shuffle(self, epoch: int) -> NDArray[np.int64]:
        seed = draw_seed(self._config.seed, "examples", epoch)
        return np.random.default_rng(seed).permutation(self._num_examples)
