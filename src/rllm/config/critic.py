"""`[critic]`: what expects the reward, for the estimator that asks it (`gae`)."""

from dataclasses import dataclass

from rllm.config.limits import at_least, finite, one_of, unused
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    trunk: str = "none"
    """`none`: there is no critic. `separate`: a second model, which has the policy's weights when
    reinforcement learning begins, and an optimizer of its own. `shared`: one more output of the policy's own
    model, updated together with it."""
    learning_rate: float = 0.0
    """The learning rate of a separate critic, constant; 0 takes the policy's at each step."""
    clip: float = 0.2
    """The distance from the values before the step beyond which the value loss has no gradient (PPO2); 0 does
    not clip."""
    coef: float = 0.5
    """Weight of the value loss beside the policy's, on a shared trunk."""
    warmup_steps: int = 0
    """Steps of reinforcement learning at the beginning in which only a separate critic learns."""

    @property
    def is_on(self) -> bool:
        return self.trunk != "none"

    def validate(self) -> None:
        one_of("critic.trunk", self.trunk, ("none", "separate", "shared"))
        finite("critic.learning_rate", self.learning_rate)
        finite("critic.clip", self.clip)
        finite("critic.coef", self.coef)
        at_least("critic.warmup_steps", self.warmup_steps, 0)
        if not self.is_on:
            for name in ("learning_rate", "clip", "coef", "warmup_steps"):
                unused("critic", self, name, "there is no critic; set `critic.trunk`")
        elif self.trunk == "separate":
            unused(
                "critic", self, "coef", "a separate critic has a loss of its own; set `critic.learning_rate`"
            )
        else:
            for name in ("learning_rate", "warmup_steps"):
                unused("critic", self, name, "on a shared trunk the critic learns with the policy")
            if self.coef == 0.0:
                raise ConfigError(
                    "`critic.coef` is 0.0, so the critic on the shared trunk learns nothing; set it above 0."
                )
