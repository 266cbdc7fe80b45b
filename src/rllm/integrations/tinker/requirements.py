"""The limits of a Tinker service, refused before any work: by key, with the mend.

It trains LoRA adapters with losses over sampled tokens, and says log-probabilities: it has no critic, no
entropy, no reference beside the policy, no temperature while it trains and no grammar while it samples.
"""

from dataclasses import fields

from rllm.config.algorithm import AlgorithmConfig
from rllm.config.learning import WITH_CRITIC, estimator_keys
from rllm.config.lora import LoraConfig
from rllm.config.policies import PolicyConfig
from rllm.config.schema import TrainConfig
from rllm.distributed import world_size
from rllm.errors import ConfigError, choices_of
from rllm.trainer.backends.base import refuse_unsupported

LOSSES = ("ppo", "cispo", "importance_sampling", "policy_gradient")
"""The values of `algorithm.loss` that a service computes."""
SUPPORTS = frozenset(
    {
        "model.path",
        "inference.max_context",
        "inference.lockstep",
        "lora.rank",
        "optimizer.learning_rate",
        "optimizer.schedule",
        "optimizer.warmup_steps",
        "optimizer.final_lr_fraction",
        "optimizer.beta1",
        "optimizer.beta2",
        "optimizer.weight_decay",
        "optimizer.max_grad_norm",
    }
)
_OF_ALGORITHM = {
    "dual_clip": "its `ppo` has no third bound; leave it at 0",
    "entropy_coef": "its losses have no entropy; leave it at 0",
    "kl_coef": "it holds no reference beside the policy; leave it at 0, or lower `optimizer.learning_rate`",
    "correction": 'it weighs tokens by what sampled them already; leave it at "none"',
}


def require_supported(config: TrainConfig) -> None:
    """Raises ConfigError for the first key that the service would not honour."""
    for section in ("model", "optimizer", "inference", "lora"):
        refuse_unsupported(section, getattr(config, section), SUPPORTS, "tinker")
    _require_one_adapter(config)
    _require_algorithm(config.algorithm)
    _require_no_critic(config)
    _require_plain_sampling(config)
    if world_size() > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size()}, but a Tinker service trains for one process; start the run "
            "without --nproc or torchrun."
        )
    if config.distill.teacher:
        raise _refusal("distill.teacher", config.distill.teacher, "teachers score on torch; leave it empty")


def _require_one_adapter(config: TrainConfig) -> None:
    if len(config.policies) > 1:
        raise _refusal("policies", list(config.policies), "a run has one adapter there; leave them out")
    if config.model.path.partition(":")[0] == "builtin":
        raise _refusal(
            "model.path",
            config.model.path,
            "the service trains a model that it serves; give the directory with that model's tokenizer",
        )
    if config.policies and next(iter(config.policies.values())) != PolicyConfig():
        key = f"policies.{next(iter(config.policies))}"
        raise _refusal(key, "set", "say it in [model], [lora] and [optimizer]")
    if not config.lora.rank:
        raise _refusal(
            "lora.rank",
            config.lora.rank,
            "it trains adapters and never the weights themselves; set it to 1 or more, such as 32 "
            f"(with `lora.alpha` {LoraConfig().alpha:g}, which is fixed there)",
        )


def _require_algorithm(algorithm: AlgorithmConfig) -> None:
    if algorithm.loss not in LOSSES:
        raise _refusal("algorithm.loss", algorithm.loss, choices_of(algorithm.loss, LOSSES))
    default = AlgorithmConfig()
    for each in fields(algorithm):
        value = getattr(algorithm, each.name)
        if each.name in _OF_ALGORITHM and value != getattr(default, each.name):
            raise _refusal(f"algorithm.{each.name}", value, _OF_ALGORITHM[each.name])


def _require_no_critic(config: TrainConfig) -> None:
    for key, estimator in estimator_keys(config.algorithm, config.roles).items():
        if estimator in WITH_CRITIC:
            raise _refusal(key, estimator, "it trains no critic; choose one without, such as grpo")


def _require_plain_sampling(config: TrainConfig) -> None:
    """Require plain sampling: the service scores and trains the model at temperature 1."""
    rollout = config.rollout
    temperatures = {
        "rollout.temperature": rollout.temperature,
        "rollout.final_temperature": rollout.final_temperature,
        **{f"roles.{name}.temperature": role.temperature for name, role in config.roles.items()},
    }
    for key, value in temperatures.items():
        if value not in (0.0, 1.0):
            raise _refusal(key, value, "it trains the policy at temperature 1; set it to 1")


def _refusal(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"`{key}` is {value!r}, which a Tinker service cannot honour: {why}.")
