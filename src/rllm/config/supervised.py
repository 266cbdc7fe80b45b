"""The common keys of runs that learn from rows instead of rewards: SFT, preferences, distillation.

SupervisedConfig ──► EpochsConfig ──► SftConfig
 model, optimizer,    passes over      where the rows
 checkpoint, seed     a dataset        come from
"""

from dataclasses import dataclass, field, fields, is_dataclass

from rllm.config.limits import at_least, one_of, seed_in_range
from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.config.schema import CheckpointConfig, ModelConfig, TrainConfig
from rllm.config.tracking import TrackingConfig
from rllm.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class HeldOutConfig:
    """The measurement on rows that are not trained on."""

    num_rows: int = 256
    """Held-out examples of the reports before and after, and of those between."""
    every_steps: int = 0
    """Measure every so many steps as well; 0 does not."""

    def validate(self) -> None:
        at_least("evaluation.num_rows", self.num_rows, 1)
        at_least("evaluation.every_steps", self.every_steps, 0)


@dataclass(kw_only=True, slots=True)
class SupervisedConfig:
    """A run whose steps are updates on rows."""

    seed: int = 0
    """Seed of every random draw of the run: weights of a built-in model, the order of the rows."""
    threads: int = 0
    """Threads of torch; 0 takes one per core."""
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path=""))
    """Where its path is empty, what the run has made that the data come from, or else `builtin:tiny`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: HeldOutConfig = field(default_factory=HeldOutConfig)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(every_steps=50))
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def validate(self) -> None:
        """Raises ConfigError for the first value that cannot be honoured."""
        seed_in_range("seed", self.seed)
        at_least("threads", self.threads, 0)
        for section in fields(self):
            value = getattr(self, section.name)
            if is_dataclass(value) and hasattr(value, "validate"):
                value.validate()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def train_config(self) -> TrainConfig:
        """The same settings as those of a training run, for what makes policies and samplers of them."""
        return TrainConfig(
            seed=self.seed,
            threads=self.threads,
            model=self.model,
            lora=self.lora,
            optimizer=self.optimizer,
            checkpoint=self.checkpoint,
        )


@dataclass(kw_only=True, slots=True)
class EpochsConfig(SupervisedConfig):
    """A run that goes through a dataset."""

    epochs: int = 1
    """Number of passes over the examples; every pass is shuffled anew."""
    max_steps: int = 0
    """End after so many updates, if the epochs take more; 0 has no limit."""
    batch_size: int = 32
    """Examples of one update: conversations, or pairs. The last update of the run has what is left."""

    def validate(self) -> None:
        SupervisedConfig.validate(self)  # super() does not know a class with slots that was made anew
        at_least("epochs", self.epochs, 1)
        at_least("max_steps", self.max_steps, 0)
        at_least("batch_size", self.batch_size, 1)


@dataclass(kw_only=True, slots=True)
class ChatDataConfig:
    """Where conversations come from: a file, or the episodes of a stored run."""

    dataset: str = ""
    """JSONL file: one conversation a line, `{"messages": […]}` or `{"prompt": …, "completion": …}`."""
    val_dataset: str = ""
    """The same for what is held out."""
    heldout_fraction: float = 0.1
    """Share of the examples that is held out and never trained on, where `val_dataset` is empty. Of a stored
    run, whole tasks are held out. 0 measures on examples that are trained on, and says so."""
    run: str = ""
    """A run directory instead of a file: its successful training episodes, by their recorded token ids."""
    min_reward: float = 1.0
    """Trajectories of `run` that were paid less are left out."""
    max_per_task: int = 0
    """At most so many trajectories of one task of `run`, the best paid and of those the latest; 0 takes
    all."""
    role: str = ""
    """Whose trajectories of `run`; needed where there are several roles."""
    allowed_media_domains: list[str] = field(default_factory=list[str])
    """Hosts that images of rows are fetched from, such as `images.example.org`; those at other addresses are
    refused. What was fetched is in the run, and is not fetched again."""
    max_length: int = 0
    """Tokens of one row; 0 takes what the model can read."""
    max_length_policy: str = "refuse"
    """The treatment of examples with longer rows: `refuse` ends the run before it begins, `drop` leaves them
    out, `truncate` keeps the first `max_length` tokens of each row. The last two are counted and shown."""

    def validate(self) -> None:
        if self.dataset and self.run:
            raise ConfigError(
                f"`data.dataset` is {self.dataset!r} and `data.run` is {self.run!r}; train on one of them."
            )
        if self.val_dataset and self.heldout_fraction:
            raise ConfigError(
                f"`data.val_dataset` is {self.val_dataset!r} and `data.heldout_fraction` is "
                f"{self.heldout_fraction}; hold out one or the other: set the fraction to 0."
            )
        if not 0.0 <= self.heldout_fraction < 1.0:
            raise ConfigError(
                f"`data.heldout_fraction` is {self.heldout_fraction}; it must be 0 or more and below 1."
            )
        if not self.run:
            self._require_default("min_reward", "max_per_task", "role")
        elif self.allowed_media_domains:
            raise ConfigError(
                f"`data.allowed_media_domains` is {self.allowed_media_domains}, which does nothing here: the "
                "episodes of `data.run` have their images. Leave it at []."
            )
        if not abs(self.min_reward) < float("inf"):
            raise ConfigError(f"`data.min_reward` is {self.min_reward}; it must be a finite number.")
        at_least("data.max_per_task", self.max_per_task, 0)
        at_least("data.max_length", self.max_length, 0)
        one_of("data.max_length_policy", self.max_length_policy, ("refuse", "drop", "truncate"))

    def _require_default(self, *names: str) -> None:
        for name in names:
            value, default = getattr(self, name), getattr(ChatDataConfig(), name)
            if value != default:
                raise ConfigError(
                    f"`data.{name}` is {value!r}, which does nothing here: it chooses among the episodes of "
                    f"`data.run`. Leave it at {default!r}."
                )


@dataclass(kw_only=True, slots=True)
class SftConfig(EpochsConfig):
    """A whole run of supervised fine-tuning."""

    aggregation: str = "token_mean"
    """`token_mean` over all labelled tokens of an update, or `sequence_mean` of each row's token mean."""
    data: ChatDataConfig = field(default_factory=ChatDataConfig)

    def validate(self) -> None:
        EpochsConfig.validate(self)
        one_of("aggregation", self.aggregation, ("token_mean", "sequence_mean"))
