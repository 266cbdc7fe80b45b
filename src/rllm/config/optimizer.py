"""`[optimizer]`: from gradients to weights."""

from dataclasses import dataclass

from rllm.config.limits import at_least, one_of, positive
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = "adamw"
    """`adamw`, or `muon`: Muon (momentum 0.95) for the matrices of the layers, AdamW for everything else."""
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    final_lr_fraction: float = 0.1
    """The rate falls linearly from its peak to this fraction of it at the last step."""
    beta1: float = 0.9
    """Of AdamW's mean of gradients."""
    beta2: float = 0.95
    """Of AdamW's mean of squared gradients."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm. A norm that is not finite stops the run before the weights
    change."""
    micro_batch_tokens: int = 16_384
    """Tokens that one forward and backward pass holds; smaller needs less memory and gives the same
    gradient."""

    def validate(self) -> None:
        one_of("optimizer.name", self.name, ("adamw", "muon"))
        positive("optimizer.learning_rate", self.learning_rate)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.micro_batch_tokens", self.micro_batch_tokens, 1)
        positive("optimizer.max_grad_norm", self.max_grad_norm)
        if not 0.0 <= self.final_lr_fraction <= 1.0:
            raise ConfigError(
                f"`optimizer.final_lr_fraction` is {self.final_lr_fraction}; it must lie between 0 and 1."
            )
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"`optimizer.{name}` is {getattr(self, name)}; it must be 0 or more and below 1."
                )
        if not 0.0 <= self.weight_decay < float("inf"):
            raise ConfigError(
                f"`optimizer.weight_decay` is {self.weight_decay}; it must be a finite number, 0 or more."
            )
