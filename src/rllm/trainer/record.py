"""The files that a run leaves on disk, written by one of its ranks.

    episodes ──► store.sqlite     weights, optimizer, state ──► checkpoints/     models ──► model/, adapter/

Every rank calls the same methods at the same places; all of them wait where one that went on would look for
what is not written yet.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rllm.config.schema import CheckpointConfig
from rllm.distributed import ALONE, RankGroup
from rllm.store.encoding import EncodedEpisodes
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.trainer.checkpoint import Backends, Checkpoints, RunState
from rllm.trainer.policies import Policies
from rllm.types.episode import Episode


class RunRecord:
    """The files of a run."""

    def __init__(
        self,
        directory: RunDirectory,
        store: EpisodeStore,
        config: CheckpointConfig,
        ranks: RankGroup = ALONE,
        encodings: EncodedEpisodes | None = None,
    ) -> None:
        """All ranks have to be here. `encodings`: episodes whose rows need not be made again."""
        self.path, self.machines = directory.path, directory.machines
        self._store, self._ranks, self._encodings = store, ranks, encodings
        self.checkpoints = Checkpoints(directory.checkpoints_path, config, ranks)

    def save_episodes(self, phase: str, step: int, episodes: Sequence[Episode]) -> None:
        if self._ranks.is_writer:
            self._store.save_episodes(phase, step, episodes, self._encodings)

    def save_token_numbers(
        self, phase: str, step: int, numbers: Iterable[tuple[str, int, NDArray[np.float32]]]
    ) -> None:
        """`numbers`: see `numbers_of_episodes`."""
        if self._ranks.is_writer:
            as_bytes = [(task, attempt, each.astype("<f4").tobytes()) for task, attempt, each in numbers]
            self._store.save_token_numbers(phase, step, as_bytes)

    def episodes(self, phase: str) -> Iterator[Episode]:
        """Episodes of a phase that a checkpoint was saved after."""
        return self._store.episodes(phase)

    def save_checkpoint(self, state: RunState, backends: Backends) -> None:
        """All ranks have to be here."""
        if self._ranks.has_whole:
            self.save_now(state, backends)
        else:
            self.checkpoints.save(state, backends)
        self._ranks.wait()

    def save_now(self, state: RunState, backends: Backends) -> None:
        """The same for a run that is stopped: no rank waits for another, so one whose weights are spread over
        ranks goes on from the checkpoint before."""
        if self._ranks.is_writer and self._ranks.has_whole:
            self.checkpoints.save(state, backends)

    def save_models(self, policies: Policies) -> None:
        """All ranks have to be here; of sharded models each writes a part."""
        if self._ranks.shard_size > 1:
            policies.save_models(self.path, self._ranks)
        elif self._ranks.is_writer:
            policies.save_models(self.path)
        self._ranks.wait()

    def write(self, save: Callable[[Path], None]) -> None:
        """Let `save` write below the run directory, once for all ranks."""
        if self._ranks.is_writer:
            save(self.path)
        self._ranks.wait()
