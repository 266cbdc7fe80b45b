"""`backend = "verl"`: what it honours of a configuration, and how its learners are made.

Nothing of verl is imported before a learner is made.
"""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rllm.algorithms.losses import policy_loss
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.integrations.verl.contract import WORKER, require_contract, require_installed
from rllm.integrations.verl.keys import is_published, translate
from rllm.trainer.backends.base import refuse_unsupported

if TYPE_CHECKING:
    from rllm.integrations.verl.backend import VerlBackend, VerlCritic

SUPPORTS = frozenset(
    {
        "model.path",
        "optimizer.learning_rate",
        "optimizer.schedule",
        "optimizer.warmup_steps",
        "optimizer.final_lr_fraction",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.weight_decay",
        "optimizer.max_grad_norm",
        "optimizer.on_bad_update",
        "optimizer.micro_batch_tokens",
        "optimizer.gradient_checkpointing",
    }
)
"""Keys of `[model]` and `[optimizer]` that may differ from their defaults."""


class VerlKind:
    """A `BackendKind`."""

    shards = True

    def translated(self, config: Any, num_tasks: int) -> Any:
        return translate(config, num_tasks) if is_published(config) else config

    def require(self, config: TrainConfig) -> None:
        refuse_unsupported("model", config.model, SUPPORTS, "verl")
        refuse_unsupported("optimizer", config.optimizer, SUPPORTS, "verl")
        _require(config)
        require_installed()

    def policy(self, config: TrainConfig, policy_model: Any, publish: Callable[[int], None]) -> "VerlBackend":
        _require_decoder(policy_model)
        return _learners().VerlBackend(config, policy_model, publish)

    def critic(self, config: TrainConfig, policy_model: Any) -> "VerlCritic":
        return _learners().VerlCritic(config, policy_model)


VERL = VerlKind()
"""The entry point `verl` of the group `rllm.backends`."""


def _learners() -> ModuleType:
    """The module of the learners, which imports verl: ten seconds, and warnings of engines that it lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rllm.integrations.verl.platform import use_cpu

        use_cpu()
        require_contract(WORKER)
        from rllm.integrations.verl import backend
    return backend


def _require(config: TrainConfig) -> None:
    """Raises ConfigError for keys of other sections that only the torch backend honours."""
    for name in config.named_policies:
        if rank := config.adapter_of(name).rank:
            raise ConfigError(f"`lora.rank` is {rank}, but the verl backend trains all weights; set it to 0.")
    if config.critic.trunk == "shared":
        raise ConfigError(
            '`critic.trunk` is "shared", but verl has a trunk of its own for values; set it to "separate".'
        )
    if config.distill.is_over_vocabulary:
        raise ConfigError(
            f"`distill.divergence` is {config.distill.divergence!r}, which needs all logits of the student, "
            "and the verl backend hands on those of the sampled tokens; leave it out, or set `backend` "
            "to local."
        )
    if policy_loss(config.algorithm).needs_whole_groups:
        raise ConfigError(
            f"`algorithm.loss` is {config.algorithm.loss!r}, which may compare the rows of a group, and verl "
            "splits groups between micro-batches; choose a loss by name, or set `backend` to local."
        )


def _require_decoder(policy_model: Any) -> None:
    """Raises ConfigError for a model whose weights cannot be put back into the sampler one by one."""
    if not hasattr(policy_model.model, "load_hf"):
        kind = policy_model.config.get("model_type", "unknown")
        raise ConfigError(
            f"`model.path` is {policy_model.directory}, a model of the type {kind!r}, which is sampled by "
            "transformers' own code; with the verl backend it must be one of the built-in decoder's."
        )
