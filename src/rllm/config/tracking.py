"""`[tracking]`: where a run's numbers go beside its own metrics.jsonl."""

from dataclasses import dataclass, field

from rllm.config.limits import one_of
from rllm.errors import ConfigError

SINKS = ("tensorboard", "wandb", "mlflow", "trackio", "otel")
"""Services and programs that take numbers; each is an extra of the same name."""


@dataclass(kw_only=True, slots=True)
class TrackingConfig:
    sinks: list[str] = field(default_factory=list[str])
    """Any of `tensorboard`, `wandb`, `mlflow`, `trackio` and `otel`, see docs/tracking.md. What a sink does
    not take is left out there, never in metrics.jsonl."""

    def validate(self) -> None:
        for name in self.sinks:
            one_of("tracking.sinks", name, SINKS)
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"`tracking.sinks` is {self.sinks}; name each of them once.")
