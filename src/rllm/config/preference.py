"""Every key of `rllm dpo`: which answers are compared, and the loss that learns from it."""

from dataclasses import dataclass, field, fields

from rllm.config.limits import finite, one_of, positive
from rllm.config.supervised import ChatDataConfig, EpochsConfig
from rllm.errors import ConfigError

SETTINGS: dict[str, frozenset[str]] = {
    "dpo": frozenset({"label_smoothing", "length_average", "sft_coef"}),
    "robust_dpo": frozenset({"label_smoothing", "length_average", "sft_coef"}),
    "ipo": frozenset({"length_average", "sft_coef"}),
    "hinge": frozenset({"length_average", "sft_coef"}),
    "simpo": frozenset({"target_margin", "sft_coef"}),
    "orpo": frozenset(),
    "kto": frozenset({"desirable_weight", "undesirable_weight"}),
}
"""Loss -> the keys that mean something to it, beyond `beta`; any other must keep its default."""
USUAL_BETA = dict.fromkeys(SETTINGS, 0.1) | {"simpo": 2.0}


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    loss: str = "dpo"
    """The loss. For pairs: `dpo`, `robust_dpo`, `ipo`, `hinge`, `simpo`, `orpo`. For answers with a label:
    `kto`."""
    beta: float = 0.0
    """Strength of the pull to the reference policy (DPO, IPO's τ, KTO), scale of the reward (SimPO), weight
    of the odds ratio (ORPO's λ); 0 takes the usual 0.1, or 2 for SimPO."""
    label_smoothing: float = 0.0
    """Share of pairs that are labelled the wrong way round: above 0 `dpo` is conservative; `robust_dpo` needs
    it."""
    length_average: bool = False
    """Compare token means of log-probabilities instead of sums, so that long answers weigh no more."""
    sft_coef: float = 0.0
    """Weight of the chosen answer's negative log-likelihood beside the loss (RPO); ORPO has its own, 1."""
    target_margin: float = 1.0
    """SimPO's γ: how much larger the reward of the chosen answer shall be."""
    desirable_weight: float = 1.0
    """KTO's λ of answers with label true."""
    undesirable_weight: float = 1.0
    """KTO's λ of answers with label false."""

    def validate(self) -> None:
        one_of("preference.loss", self.loss, tuple(SETTINGS))
        if self.beta != 0.0:
            positive("preference.beta", self.beta)
        default = PreferenceConfig()
        for each in fields(self):
            value, used_keys = getattr(self, each.name), SETTINGS[self.loss] | {"loss", "beta"}
            if each.name not in used_keys and value != getattr(default, each.name):
                knowing = [loss for loss, names in SETTINGS.items() if each.name in names]
                raise ConfigError(
                    f"`preference.{each.name}` is {value}, which {self.loss} does not know; leave it out, or "
                    f"set `preference.loss` to one of {', '.join(knowing)}."
                )
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"`preference.label_smoothing` is {self.label_smoothing}; it must be 0 or more and below "
                "0.5, where labels say nothing."
            )
        if self.loss == "robust_dpo" and self.label_smoothing == 0.0:
            raise ConfigError(
                "`preference.label_smoothing` is 0.0, where robust_dpo is dpo; say how many labels are "
                "wrong, such as 0.1, or choose dpo."
            )
        finite("preference.sft_coef", self.sft_coef)
        finite("preference.target_margin", self.target_margin)
        positive("preference.desirable_weight", self.desirable_weight)
        positive("preference.undesirable_weight", self.undesirable_weight)


@dataclass(kw_only=True, slots=True)
class PreferenceDataConfig(ChatDataConfig):
    """`[data]`: a file of preferences, or the attempts of a stored run."""

    dataset: str = ""
    """JSONL file: `{"prompt": …, "chosen": …, "rejected": …}` a line, or for `kto` `{"prompt": …,
    "completion": …, "label": true}`; each text, or chat messages."""
    min_reward: float = 1.0
    """An attempt of `run` that was paid at least so much is a success, any other a failure."""
    pairing: str = "each"
    """Which attempts of `run` at one task become pairs: with `each`, none is in two of them; with `all`,
    every success is compared with every failure."""
    max_per_task: int = 0
    """At most so many pairs (`kto`: answers) of one task of `run`, the first ones; 0 takes all."""
    max_length_policy: str = "refuse"
    """The treatment of examples with a longer row: `refuse` ends the run before it begins, `drop` leaves them
    out, counted and shown. None is cut: an answer without its end is another answer."""

    def validate(self) -> None:
        ChatDataConfig.validate(self)  # super() does not know a class with slots that was made anew
        one_of("data.max_length_policy", self.max_length_policy, ("refuse", "drop"))
        one_of("data.pairing", self.pairing, ("each", "all"))
        if not self.run:
            self.require_default_pairing("it chooses among the attempts of `data.run`")

    def require_default_pairing(self, reason: str) -> None:
        """Raises ConfigError where pairs are not made here."""
        default = PreferenceDataConfig().pairing
        if self.pairing != default:
            raise ConfigError(
                f"`data.pairing` is {self.pairing!r}, which does nothing here: {reason}. Leave it at "
                f"{default!r}."
            )


@dataclass(kw_only=True, slots=True)
class DpoConfig(EpochsConfig):
    """A whole run of learning from preferences."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    data: PreferenceDataConfig = field(default_factory=PreferenceDataConfig)

    def validate(self) -> None:
        EpochsConfig.validate(self)
        if self.preference.loss == "kto":
            self.data.require_default_pairing("kto learns from answers without a pair")
            if self.batch_size < 2:
                raise ConfigError(
                    f"`batch_size` is {self.batch_size}; kto measures how far the policy has moved on "
                    "several answers at a time, so set it to 2 or more."
                )
