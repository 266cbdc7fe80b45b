"""`[lora]`: train small matrices beside the weights of a model, which stay as they are."""

from dataclasses import dataclass, field

from rllm.config.limits import at_least, one_of, positive, unused
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """The adapter of each chosen linear layer, which adds alpha / rank · B·A·x (Hu et al. 2021,
    arXiv:2106.09685)."""

    rank: int = 0
    """Rows of A and columns of B; 0 trains the weights themselves."""
    alpha: float = 32.0
    """The sum is scaled by alpha / rank, so that one learning rate serves every rank."""
    dropout: float = 0.0
    """0, the only one there is: sampler and trainer share the layers, and a pass that drops some of their
    inputs is none that the tokens were sampled by."""
    targets: list[str] = field(default_factory=list[str])
    """Names of the layers, as in Hugging Face's weights: `["q_proj", "v_proj"]`. Where empty all linear
    layers between embedding and output."""

    base_dtype: str = "auto"
    """The precision of the weights that the adapters stand beside, while they sample and train: `auto`, that
    of the model; or `nf4`, 4 bits for the matrices of its layers (QLoRA: Dettmers et al. 2023,
    arXiv:2305.14314; extra `bitsandbytes`)."""

    def validate(self) -> None:
        one_of("lora.base_dtype", self.base_dtype, ("auto", "nf4"))
        at_least("lora.rank", self.rank, 0)
        require_scale_and_targets("lora.", self.alpha, self.targets)
        if self.dropout != 0.0:
            raise ConfigError(
                f"`lora.dropout` is {self.dropout}; sampler and trainer share the adapter's layers, so their "
                "log-probabilities agree, and micro-batches add up, only without dropout: leave it at 0."
            )
        if not self.rank:
            for name in ("alpha", "base_dtype", "targets"):
                unused("lora", self, name, "there is no adapter; set `lora.rank` to 1 or more")


def require_scale_and_targets(prefix: str, alpha: float, targets: list[str]) -> None:
    """Raises ConfigError for what no adapter can have; the keys begin with `prefix`."""
    positive(f"{prefix}alpha", alpha)
    if any(type(name) is not str or not name for name in targets) or len(set(targets)) < len(targets):
        raise ConfigError(
            f"`{prefix}targets` is {targets!r}; list each name of a linear layer once, such as "
            '["q_proj", "v_proj"].'
        )
