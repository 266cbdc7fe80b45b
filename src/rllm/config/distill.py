"""`[distill]`: a teacher that says, token by token, how likely it finds what the student wrote."""

from collections.abc import Collection
from dataclasses import dataclass

from rllm.config.algorithm import LOSSES, AlgorithmConfig
from rllm.config.limits import finite, one_of, unused
from rllm.errors import ConfigError
from rllm.types.addresses import require_base_url

TEACHER = "teacher"
"""The estimator that makes advantages of what the teacher says."""
PROMPTS = "prompts"
"""`task.environment` of a run whose tasks are the prompts in `task.dataset`, answered once and never paid."""


@dataclass(kw_only=True, slots=True)
class DistillConfig:
    teacher: str = ""
    """A model, named as in `model.path`, or the base URL of a server that returns the log-probabilities of a
    prompt, such as vLLM's `http://HOST:8000/v1`. Its vocabulary must be the student's. Empty: no teacher."""
    teacher_model: str = ""
    """The name that a server knows it by; empty takes the first that it serves."""
    gamma: float = 0.0
    """The discount by which a token is held responsible for those behind it in its trajectory: 0 pays each
    for itself alone, 1 pays it all that follows, which is the exact gradient and varies far more."""
    baseline: str = "mean"
    """`mean`: what tokens are credited with is compared with the mean over all tokens of the step; the
    gradient is the same on average, and varies less while the student is far from its teacher. `none`: with
    nothing."""
    clip: float = 0.0
    """The bound of a token's pay, log π_teacher - log π_student, in nats, so that one token that the teacher
    finds impossible does not outweigh all others; 0 sets no bound."""

    divergence: str = "sampled"
    """The loss of a sampled token: `sampled` pays it log π_teacher - log π_student of that token;
    `forward_kl`, `reverse_kl` and `jsd` bring the two distributions over the whole vocabulary together there
    (GKD), which varies far less and takes a teacher in a directory."""
    jsd_beta: float = 0.5
    """β of `jsd`: towards 0 it is like the forward, towards 1 like the reverse divergence."""

    @property
    def is_over_vocabulary(self) -> bool:
        return self.divergence != "sampled"

    @property
    def is_server(self) -> bool:
        return self.teacher.startswith(("http://", "https://"))

    def validate(self) -> None:
        finite("distill.clip", self.clip)
        one_of("distill.baseline", self.baseline, ("mean", "none"))
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"`distill.gamma` is {self.gamma}; it must lie between 0 and 1.")
        one_of("distill.divergence", self.divergence, ("sampled", "forward_kl", "reverse_kl", "jsd"))
        if not 0.0 < self.jsd_beta < 1.0:
            raise ConfigError(
                f"`distill.jsd_beta` is {self.jsd_beta}; it must lie between 0 and 1. The ends are "
                "`distill.divergence` forward_kl and reverse_kl."
            )
        if self.divergence != "jsd":
            why = f"the divergence is `{self.divergence}`; set `distill.divergence` to jsd"
            unused("distill", self, "jsd_beta", why)
        if self.is_over_vocabulary:
            for name in ("gamma", "baseline", "clip"):
                why = f"no token is paid; set `distill.divergence` from {self.divergence} to sampled"
                unused("distill", self, name, why)
        if not self.teacher:
            for name in ("teacher_model", "gamma", "baseline", "clip", "divergence"):
                unused("distill", self, name, "there is no teacher; set `distill.teacher`")
        elif self.is_server:
            require_base_url("`distill.teacher`", self.teacher)
        else:
            unused("distill", self, "teacher_model", "the teacher is no server, but a directory")


def validate_distillation(
    distill: DistillConfig,
    algorithm: AlgorithmConfig,
    estimators: Collection[str],
    *,
    warm_start: tuple[int, float, Collection[str]],
    temperatures: Collection[float],
) -> None:
    """Raises ConfigError unless the teacher is asked, and can be.

    `warm_start`: its steps, its noise, and the names of its `expert_args`. `temperatures`: all that may be
    sampled at in training.
    """
    asks = TEACHER in estimators
    if asks and algorithm.kl_in == "reward":
        raise ConfigError(
            '`algorithm.kl_in` is "reward", but a teacher pays token by token; set it to "loss".'
        )
    if asks and not distill.teacher:
        raise ConfigError(
            "`algorithm.estimator` is 'teacher', but there is none; set `distill.teacher` to a model "
            "directory or the address of a server, or choose another estimator."
        )
    if not distill.teacher:
        return
    warm_steps, noise, expert_args = warm_start
    if expert_args:
        raise ConfigError(
            f"`warm_start.expert_args` has {', '.join(expert_args)}, but the expert is the teacher, and that "
            "is told nothing; leave them out."
        )
    if warm_steps and noise:
        raise ConfigError(
            f"`warm_start.noise` is {noise}, but the warm start learns from what the teacher samples, and "
            "that is never replaced; set it to 0."
        )
    if not asks:
        why = 'no token is paid by the teacher; set `algorithm.estimator` to "teacher"'
        for name in ("gamma", "baseline", "clip", "divergence"):
            unused("distill", distill, name, why)
    if distill.is_over_vocabulary:
        _validate_over_vocabulary(distill, algorithm, estimators)
    if not asks and not warm_steps:
        raise ConfigError(
            f"`distill.teacher` is {distill.teacher!r}, but nobody asks it: set `algorithm.estimator` to "
            '"teacher", or `warm_start.steps` above 0 to learn from what it writes.'
        )
    if distill.is_server and set(temperatures) != {1.0}:
        raise ConfigError(
            f"The training temperatures are {sorted(set(temperatures))}, but a server scores prompts at "
            "temperature 1, so the teacher would be compared with another policy; sample at 1, or give the "
            "teacher as a directory."
        )


def _validate_over_vocabulary(
    distill: DistillConfig, algorithm: AlgorithmConfig, estimators: Collection[str]
) -> None:
    """Raises ConfigError for what a loss of whole distributions cannot have, or would not look at."""
    if distill.is_server:
        raise ConfigError(
            f"`distill.divergence` is {distill.divergence!r}, which compares whole distributions, and a "
            'server tells of single tokens; give the teacher as a directory, or set it to "sampled".'
        )
    if others := set(estimators) - {TEACHER}:
        raise ConfigError(
            f"`distill.divergence` is {distill.divergence!r}, which is a loss of its own, but some role "
            f'learns from rewards by {", ".join(sorted(others))}; set it to "sampled".'
        )
    for name in ("loss", *sorted({key for keys in LOSSES.values() for key in keys})):
        why = f"`distill.divergence` {distill.divergence} is the loss; set that to sampled"
        unused("algorithm", algorithm, name, why)
