"""`[schedule]`: are episodes sampled while an update runs, and how old may they be when they train?"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rllm.config.distill import TEACHER
from rllm.config.limits import at_least, one_of, unused
from rllm.errors import ConfigError

if TYPE_CHECKING:
    from rllm.config.algorithm import AlgorithmConfig

SYNC, ASYNC = "sync", "async"
WITHOUT_RATIO = ("policy_gradient",)
"""Losses that do not compare what they update with what sampled: nothing in them makes up for age."""
AUTO, OF_LOSS, CORRECTIONS = "auto", "loss", ("auto", "loss", "token", "sequence")
OLD = 2
"""Publishes from which `ppo`'s ratio alone learns less from the same episodes: most of what a row would teach
lies beyond its bounds by then."""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    kind: str = SYNC
    """`sync`: a step's episodes are sampled, then learned from. `async`: up to `max_staleness` further steps
    are being sampled while one is learned from; conversations go on across new weights."""
    max_staleness: int = 1
    """Maximum age of a sampled token, for `async`: the number of publishes between the version that sampled
    the oldest token of a row and the step that trains on it. A step's first attempt begins no earlier, and
    nothing is thrown away for being slow. 0 samples and learns in turn, with the same bits as `sync`."""
    correction: str = AUTO
    """Correction for age, for `async`. `loss`: the loss's own ratio, new policy by sampler, and the keys of
    `algorithm`. `token` and `sequence`: decoupled PPO, which is `algorithm.old_logprobs = "trainer"` and
    weights truncated by token or sequence. `auto`: `token` for `ppo` from a `max_staleness` of 2 on, and for
    rows that nothing else would make up for; else `loss`."""

    def validate(self) -> None:
        one_of("schedule.kind", self.kind, (SYNC, ASYNC))
        at_least("schedule.max_staleness", self.max_staleness, 0)
        if self.kind == SYNC:
            unused("schedule", self, "max_staleness", "nothing is ever stale; set `schedule.kind` to async")
        if not self.steps_ahead:
            why = "nothing is ever stale; set `schedule.kind` to async and `schedule.max_staleness` above 0"
            unused("schedule", self, "correction", why)
        one_of("schedule.correction", self.correction, CORRECTIONS)

    @property
    def steps_ahead(self) -> int:
        """Steps that may be sampled beside the one that is learned from."""
        return self.max_staleness if self.kind == ASYNC else 0


def choose_correction(
    schedule: ScheduleConfig, algorithm: "AlgorithmConfig", *, sampler_differs: bool = False
) -> None:
    """Set the keys of `algorithm` that `schedule.correction` means, and what `auto` came to.

    A sampler in another data type than the trainer (`sampler_differs`) is corrected for like one that is a
    step older: by the loss's ratio, or by token where the loss has none.
    """
    needs_weights = algorithm.correction == "none" and (
        algorithm.loss in WITHOUT_RATIO or algorithm.old_logprobs == "trainer"
    )
    if not schedule.steps_ahead:
        if sampler_differs and needs_weights:
            algorithm.old_logprobs, algorithm.correction = "trainer", "truncate"
            algorithm.correction_level = "token"
        return
    if schedule.correction == AUTO:
        is_old = algorithm.loss == "ppo" and schedule.max_staleness >= OLD
        is_chosen = needs_weights or (algorithm.correction == "none" and is_old)
        schedule.correction = "token" if is_chosen else OF_LOSS
    if schedule.correction in ("token", "sequence"):
        if algorithm.correction == "none":
            algorithm.old_logprobs, algorithm.correction = "trainer", "truncate"
            algorithm.correction_level = schedule.correction
        elif algorithm.correction_level != schedule.correction or algorithm.correction != "truncate":
            raise ConfigError(
                f"`schedule.correction` is {schedule.correction!r}, `algorithm.correction` "
                f"{algorithm.correction!r} and `algorithm.correction_level` {algorithm.correction_level!r}; "
                "leave one of the two sections out."
            )


def validate_schedule(
    schedule: ScheduleConfig,
    algorithm: "AlgorithmConfig",
    estimators: set[str],
    *,
    lockstep: bool,
    elsewhere: str,
) -> None:
    """Raises ConfigError for what cannot learn from episodes of older weights, or sample beside an update.

    `elsewhere`: the key that moves learning out of this process, if one does.
    """
    if not schedule.steps_ahead:
        return
    where = f"`schedule.max_staleness` is {schedule.max_staleness}"
    if elsewhere:
        raise ConfigError(
            f"{where}, and {elsewhere}: so far only the built-in trainer, in one process, learns while it is "
            'sampled for. Set `schedule.kind` to "sync", or leave the other out.'
        )
    if lockstep:
        raise ConfigError(
            f"{where} and `inference.lockstep` is true: the engine would wait for all conversations of every "
            "step under way. Set `inference.lockstep` to false."
        )
    if algorithm.old_logprobs == "trainer" and algorithm.correction == "none":
        raise ConfigError(
            f'{where}, `algorithm.old_logprobs` is "trainer" and `algorithm.correction` is "none": nothing '
            "would make up for the weights that sampled being older. Set `algorithm.correction` to truncate "
            'or mask (decoupled PPO), or `algorithm.old_logprobs` to "sampler".'
        )
    if algorithm.loss in WITHOUT_RATIO and algorithm.correction == "none":
        raise ConfigError(
            f"{where}, and the loss `{algorithm.loss}` does not look at how likely the sampler found its "
            "tokens; choose another such as ppo, or set `algorithm.correction` and "
            '`algorithm.old_logprobs = "trainer"`.'
        )
    if TEACHER in estimators:
        raise ConfigError(
            f"{where}, and the estimator `{TEACHER}` compares the teacher with the student that sampled, "
            'which would be an older one; set `schedule.kind` to "sync".'
        )
