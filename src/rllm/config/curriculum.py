"""`[curriculum]`: which tasks a step plays."""

from dataclasses import dataclass

from rllm.config.limits import at_least, unused
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class CurriculumConfig:
    replay_fraction: float = 0.0
    """The part of a step's tasks that were played before and were not solved by every attempt, the likelier
    drawn the nearer to half of the attempts solved them; 0 plays all tasks in their order."""
    capacity: int = 256
    """Tasks that are remembered for it; the one that was played longest ago is forgotten first."""

    def validate(self) -> None:
        if not 0.0 <= self.replay_fraction < 1.0:
            raise ConfigError(
                f"`curriculum.replay_fraction` is {self.replay_fraction}; it must be 0 or more and below 1, "
                "so that there are new tasks as well."
            )
        at_least("curriculum.capacity", self.capacity, 1)
        if not self.replay_fraction:
            unused(
                "curriculum", self, "capacity", "no task is played again; set `curriculum.replay_fraction`"
            )
