"""Checkpoints: everything a run needs to go on, in one directory that is there whole or not at all.

    checkpoints/step-000120/  weights.safetensors  optimizer.safetensors
                              NAME/ weights.safetensors  optimizer.safetensors       (of several policies)
                              state.json  about.json  manifest.json

Of a sharded run weights/ and optimizer/ are directories, to which every rank has written its part.

The newest few stay, and the one that did best on the validation split. With `checkpoint.background` a thread
writes them while the run goes on:

    learner ──snapshot──► tensors of their own ──► thread ──► the directory, then its name

There is no generator state to save: every draw is a function of the seed and of what it is for
(`rllm.types.draws`).
"""

import copy
import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from rllm.config.schema import CheckpointConfig
from rllm.distributed import ALONE, RankGroup, world_size
from rllm.files.atomic import (
    StorageErrors,
    remove_directory_atomic,
    remove_leftovers,
    verify_manifest,
    write_directory_atomic,
)
from rllm.trainer.backends.base import Copyable, Critic, Saveable, TrainingBackend

log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RunState:
    """Where a run is."""

    warm_steps: int = 0
    """Finished steps of the warm start."""
    steps: int = 0
    """Finished steps of reinforcement learning."""
    curriculum: dict[str, Any] = field(default_factory=dict[str, Any])
    """The state that decides about the tasks of the next step; see `Curriculum.state`."""
    kl_coefs: dict[str, float] = field(default_factory=dict[str, float])
    """The values of an adaptive `kl_coef`, by policy."""
    canaries: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The row that each policy's canary compares with next; see `Canary.state`."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """`untrained`, `before` and `after`, as far as they have been measured."""
    phase_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of work per phase, over all the processes that worked on the run."""
    sampled_tokens: int = 0
    best: dict[str, float] = field(default_factory=dict[str, float])
    """`position` and `score` of the checkpoint that did best on held-out tasks between; empty before any."""
    patience: dict[str, Any] = field(default_factory=dict[str, Any])
    """The state that decides whether the run ends early; see `Patience.state`."""
    has_ended_early: bool = False

    def is_best(self, score: float) -> bool:
        """Whether `score`, of this position, is above all before; it is noted then. NaN never is."""
        if math.isnan(score) or (self.best and score <= self.best["score"]):
            return False
        self.best = {"position": self.position, "score": score}
        return True

    @property
    def position(self) -> int:
        return self.warm_steps + self.steps

    @property
    def wall_s(self) -> float:
        """Seconds of work on the run so far."""
        return sum(self.phase_s.values())

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to those of the phase, also where it raises."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.phase_s[phase] = self.phase_s.get(phase, 0.0) + time.perf_counter() - start_s


Backends = Mapping[str, TrainingBackend | Critic]
"""The saved learners, by their place in the checkpoint: the name of a directory, or "" for the checkpoint
itself."""


class Checkpoints:
    """Those of a run, one at a time: written before it goes on, or by a thread from a copy of what they
    hold. As a context it ends once the last one is written.

    Of layers that several ranks compute together a whole copy is made first, and one rank writes it.
    """

    def __init__(self, root: Path, config: CheckpointConfig, ranks: RankGroup = ALONE) -> None:
        """`ranks`: those that hold parts of the weights; all of them have to be here."""
        self._root, self._keep = root, config.keep
        self._gathers, self._writes = ranks.tensor_size > 1, ranks.is_writer or ranks.shard_size > 1
        writers = ranks if ranks.shard_size > 1 else ALONE
        # Collectives of the thread must not meet those of the loop, which go on meanwhile.
        self._ranks = writers.for_another_thread() if config.background else writers
        self._thread = ThreadPoolExecutor(1, "rllm-checkpoint") if config.background else None
        self._checkpoint_write: Future[Path] | None = None

    def save(self, state: RunState, backends: Backends) -> None:
        """Save one, or begin to. Raises what became of the one before, where a thread could not write it."""
        # One at a time: each one under way holds a copy of weights and moments in memory.
        self.finish()
        sources: Mapping[str, Saveable] = backends
        if self._thread is not None or self._gathers:
            sources = {place: self._snapshot(backend) for place, backend in backends.items()}
        if not self._writes:
            return
        if self._thread is None:
            save_checkpoint(self._root, state, sources, self._keep, self._ranks)
            return
        self._checkpoint_write = self._thread.submit(
            # The loop changes its state while the thread writes it.
            save_checkpoint,
            self._root,
            copy.deepcopy(state),
            sources,
            self._keep,
            self._ranks,
        )

    def _snapshot(self, backend: TrainingBackend | Critic) -> Saveable:
        assert isinstance(backend, Copyable), "others have neither background nor ranks"
        return backend.snapshot(self._ranks)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.finish()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def finish(self) -> None:
        """Return once the last one is on disk; raises what its thread raised."""
        # Forgotten before it may raise, so that `__exit__` does not raise the same error again.
        checkpoint_write, self._checkpoint_write = self._checkpoint_write, None
        if checkpoint_write is not None:
            checkpoint_write.result()


def save_checkpoint(
    root: Path,
    state: RunState,
    backends: Mapping[str, Saveable],
    keep: int,
    ranks: RankGroup = ALONE,
) -> Path:
    """Write a checkpoint of `state`, then delete all but the newest `keep` and the best.

    Ranks that hold parts of the weights write them together: all of `ranks` have to be here.
    """
    target = _path_of(root, state.position)

    def fill(directory: Path) -> None:
        for place in backends:
            (directory / place).mkdir(exist_ok=True)
        # The directory still has the temporary name that the writer gave it, so the others are told that.
        _save_together(ranks.gather(directory)[0], backends, ranks)
        (directory / "state.json").write_text(json.dumps(asdict(state), indent=2))
        (directory / "about.json").write_text(json.dumps(_about(root), indent=2))

    if ranks.is_writer:
        write_directory_atomic(target, fill)
        # Only now: until the new one has its name, the run goes on from the one before.
        remove_old(root, state, keep)
    else:
        with StorageErrors(target):
            _save_together(ranks.gather(target)[0], backends, ranks)
    return target


def _save_together(directory: Path, backends: Mapping[str, Saveable], ranks: RankGroup) -> None:
    """Returns once every rank has written its part."""
    with ranks.inside_torch():
        for place, backend in backends.items():
            backend.save(directory / place)
    # The writer goes on to hash and rename the directory.
    ranks.wait()


def remove_old(root: Path, state: RunState, keep: int) -> None:
    """Delete all checkpoints but the newest `keep` and the best.

    Also before a run goes on: the process before may have ended between a save and this.
    """
    best = _path_of(root, int(state.best["position"])) if state.best else None
    for old in _checkpoints(root)[:-keep]:
        if old != best:
            remove_directory_atomic(old)


def load_latest(root: Path, backends: Backends) -> RunState | None:
    """Restore the newest checkpoint; None where there is none yet.

    Half-written ones never bear a checkpoint's name and are removed. Raises CheckpointError for one that is
    damaged: to fall back silently would repeat, or lose, what the user believes is done.
    """
    remove_leftovers(root)
    checkpoints = _checkpoints(root)
    if not checkpoints:
        return None
    # All files before any is read: else some learners would have changed when a damaged one is met.
    verify_manifest(checkpoints[-1])
    state = RunState(**json.loads((checkpoints[-1] / "state.json").read_text()))
    for place, backend in backends.items():
        backend.load(checkpoints[-1] / place)
    _warn_of_another_order(checkpoints[-1])
    return state


def _warn_of_another_order(checkpoint: Path) -> None:
    """torch adds in another order on another number of threads, and ranks do on another number of them."""
    from rllm.models.devices import num_threads

    about = json.loads((checkpoint / "about.json").read_text())
    for what, now in (("threads", num_threads()), ("ranks", world_size())):
        before = about.get(what, now)
        if before != now:
            log.warning(
                "%s was written with %d %s and the run goes on with %d: from here on the last bits of its "
                "numbers are not those of a run that never stopped. Begin runs that may move with `threads` "
                "set, and go on with the same number of ranks.",
                checkpoint,
                before,
                what,
                now,
            )


def ranks_of(root: Path) -> int:
    """The number of ranks that wrote the newest checkpoint; 1 where there is none."""
    checkpoints = _checkpoints(root)
    return json.loads((checkpoints[-1] / "about.json").read_text())["ranks"] if checkpoints else 1


def _about(root: Path) -> dict[str, Any]:
    """The maker of a checkpoint, for a reader who finds it without its run."""
    from rllm.models.devices import num_threads

    config = root.parent / "config.json"
    return {
        "python": platform.python_version(),
        "threads": num_threads(),
        "ranks": world_size(),
        "packages": {name: _version(name) for name in ("rllm", "torch", "transformers", "peft")},
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "",
    }


@cache
def _version(package: str) -> str:
    """Empty where it is not installed; finding out reads all that the package says of itself."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _path_of(root: Path, position: int) -> Path:
    return root / f"step-{position:06d}"


def _checkpoints(root: Path) -> list[Path]:
    return sorted(root.glob("step-*")) if root.is_dir() else []
