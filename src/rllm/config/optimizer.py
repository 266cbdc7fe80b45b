"""`[optimizer]`: from gradients to weights."""

from dataclasses import dataclass

from rllm.config.limits import at_least, finite, one_of, positive, unused
from rllm.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    name: str = "adamw"
    """`adamw`; `adamw8bit`, whose moments of the layers' matrices take a quarter of the memory (extra
    `bitsandbytes`); `muon`: Muon (momentum 0.95) for the matrices of the layers, AdamW for everything else;
    or `adafactor`, which keeps one number a row and a column of each matrix in place of two a parameter."""
    muon_dtype: str = "auto"
    """Precision of Muon's Newton-Schulz iterations: `float32`, `bfloat16`, or `auto`, which a run replaces by
    what is faster on the machine where it begins, and keeps."""
    learning_rate: float = 0.0
    """Peak of the learning rate. 0 chooses it for the model: by its number of parameters, by whether an
    adapter is trained, and by whether rLLM made the model from random weights (docs/train_your_model.md)."""
    schedule: str = "linear"
    """The course of the learning rate from its peak, after the warm-up, to its end at the last step:
    `linear`, `cosine`, or `constant`, which stays at the peak."""
    warmup_steps: int = -1
    """Steps in which the rate rises linearly to its peak. -1 chooses the number for the model."""
    final_lr_fraction: float = 0.1
    """The fraction of its peak that the rate has at the last step, `constant` excepted."""
    beta1: float = 0.9
    """The decay of AdamW's mean of gradients."""
    beta2: float = 0.95
    """The decay of AdamW's mean of squared gradients."""
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    max_norm_factor: float = 0.0
    """A gradient whose norm is more than so many times the running mean of those before it is a bad update; 0
    lets `max_grad_norm` scale down whatever comes. A loss or norm that is not finite is always a bad one."""
    on_bad_update: str = "stop"
    """`stop` ends the run with the tokens to blame, before the weights change; `skip` leaves the update out,
    says so, and counts it."""
    micro_batch_tokens: int = 0
    """Tokens that one forward and backward pass holds, shared prompts once; smaller needs less memory and
    gives the same gradient. A row that is longer has a pass of its own. 0 chooses it for the model and the
    memory that is free; outside of a run, one pass holds all rows."""
    gradient_checkpointing: bool = False
    """Keep only what enters each layer and compute the rest again in the backward pass: less memory, a third
    more work."""
    logits_mb: float = 0.0
    """Megabytes that logits, with their softmax and gradient, may take at the same time. Where the trained
    tokens of a pass would need more, they are computed in chunks, and once more in the backward pass, so that
    memory does not grow with tokens × vocabulary. 0 chooses it, 512 at most."""

    def validate(self) -> None:
        one_of("optimizer.name", self.name, ("adafactor", "adamw", "adamw8bit", "muon"))
        if self.name == "adafactor":
            for name in ("beta1", "beta2"):
                unused("optimizer", self, name, "Adafactor has no such mean; set `optimizer.name` to adamw")
        one_of("optimizer.muon_dtype", self.muon_dtype, ("auto", "float32", "bfloat16"))
        if self.muon_dtype != "auto" and self.name != "muon":
            raise ConfigError(
                f"`optimizer.muon_dtype` is {self.muon_dtype!r} but `optimizer.name` is {self.name!r}; set "
                "the latter to muon, or leave the former at auto."
            )
        one_of("optimizer.schedule", self.schedule, SCHEDULES)
        one_of("optimizer.on_bad_update", self.on_bad_update, ("stop", "skip"))
        finite("optimizer.learning_rate", self.learning_rate)
        at_least("optimizer.warmup_steps", self.warmup_steps, -1)
        at_least("optimizer.micro_batch_tokens", self.micro_batch_tokens, 0)
        finite("optimizer.logits_mb", self.logits_mb)
        positive("optimizer.max_grad_norm", self.max_grad_norm)
        if self.max_norm_factor != 0.0 and not 1.0 < self.max_norm_factor < float("inf"):
            raise ConfigError(
                f"`optimizer.max_norm_factor` is {self.max_norm_factor}; it must be more than 1, or 0 for no "
                "limit."
            )
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
