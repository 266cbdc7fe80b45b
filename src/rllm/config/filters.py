"""`[filters]`: which groups are learned from, and what long answers cost."""

from dataclasses import dataclass

from rllm.config.limits import at_least, finite, unused
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class FiltersConfig:
    dynamic: bool = False
    """Groups in which all attempts were paid alike are replaced by groups at further tasks, until a step has
    `rollout.tasks_per_step` of those that differ (DAPO's dynamic sampling)."""
    max_rounds: int = 4
    """Rounds of rollouts that a step may take for it, the first one included; then it makes do with what
    there is."""
    min_reward_std: float = 0.0
    """Groups whose rewards deviate by no more than this are rejected: neither compared nor learned from. At 0
    that are the tied ones, and only with `filters.dynamic`."""
    first_attempts: int = 0
    """Attempts at each task that are played first. Where all of them solve it and are paid alike, the rest of
    the group is not played; the other groups are weighted up for it. 0 plays whole groups at once."""
    overlong_buffer: int = 0
    """The last so many tokens of `rollout.max_tokens_per_turn` cost the more the further an answer goes into
    them (DAPO's soft overlong punishment); 0 costs nothing."""
    overlong_penalty: float = 1.0
    """The cost of an answer that fills the whole buffer."""

    @property
    def rejects(self) -> bool:
        """Whether groups without signal are left out."""
        return self.dynamic or self.min_reward_std > 0.0

    def validate(self) -> None:
        at_least("filters.max_rounds", self.max_rounds, 2)
        finite("filters.min_reward_std", self.min_reward_std)
        at_least("filters.overlong_buffer", self.overlong_buffer, 0)
        finite("filters.overlong_penalty", self.overlong_penalty)
        if not self.dynamic:
            unused("filters", self, "max_rounds", "no group is replaced; set `filters.dynamic` to true")
        if not self.overlong_buffer:
            unused(
                "filters", self, "overlong_penalty", "no answer is overlong; set `filters.overlong_buffer`"
            )
        elif self.overlong_penalty == 0.0:
            raise ConfigError(
                f"`filters.overlong_buffer` is {self.overlong_buffer} but `filters.overlong_penalty` is 0.0, "
                "so it costs nothing; set the penalty above 0, or the buffer to 0."
            )
