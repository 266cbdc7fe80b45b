"""`[distributed]`: a run on several processes."""

from dataclasses import dataclass

from rllm.config.limits import positive


@dataclass(kw_only=True, slots=True)
class DistributedConfig:
    timeout_s: float = 600.0
    """Seconds that one process may work on one thing, such as a turn of an episode or a micro-batch, without
    a sign of life before all of them end."""

    def validate(self) -> None:
        positive("distributed.timeout_s", self.timeout_s)
