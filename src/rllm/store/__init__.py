"""A run on disk: its directory and lock, and its episodes."""

from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory, runs_under

__all__ = ["TRAIN_PHASE", "EpisodeStore", "RunDirectory", "runs_under"]
