"""A run on disk: its directory and lock, its episodes, and files that are whole or absent."""

from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.files import (
    StorageErrors,
    remove_leftovers,
    require_free_space,
    verify_manifest,
    write_atomic,
    write_directory_atomic,
)
from rllm.store.run_directory import RunDirectory, runs_under

__all__ = [
    "TRAIN_PHASE",
    "EpisodeStore",
    "RunDirectory",
    "StorageErrors",
    "remove_leftovers",
    "require_free_space",
    "runs_under",
    "verify_manifest",
    "write_atomic",
    "write_directory_atomic",
]
