"""Configurations of published scripts, in verl's own keys ──► ours, key by key; imports nothing of verl.

    actor_rollout_ref.actor.optim.lr=1e-6   one of TRANSLATED: becomes a key of ours
    actor_rollout_ref.actor.ppo_epochs=1    one of FIXED: accepted at the value that is true here
    trainer.n_gpus_per_node=8               one of WITHOUT_EFFECT: a warning names it
    anything else                           ConfigError

Where a script leaves a key out it means verl's default, which DEFAULTS has where ours is another.
"""

import difflib
import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any, cast

from rllm.config.loader import parse_assignment
from rllm.errors import ConfigError
from rllm.integrations.verl.composed import as_dict, chosen, is_composed
from rllm.integrations.verl.contract import require_installed
from rllm.integrations.verl.trees import leaves, nested

log = logging.getLogger(__name__)

FAMILIES = ("actor_rollout_ref", "critic", "data", "trainer", "rllm")
"""Sections that ours has not, or, of `critic` and `algorithm`, has as well."""
_ONLY_THEIRS = frozenset(FAMILIES) - {"critic"}

DEFAULTS: dict[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 1e-6,
    "optimizer.schedule": "constant",
    "optimizer.weight_decay": 0.01,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "rollout.group_size": 1,
    "rollout.tasks_per_step": 1024,
    "warm_start.steps": 0,
    "algorithm.updates_per_step": 1,
}
DUAL_CLIP = 3.0
"""verl's `vanilla` loss always has one."""

LOSSES = {
    "vanilla": "ppo",
    "gspo": "gspo",
    "cispo": "cispo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
    "gpg": "policy_gradient",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
}
_ESTIMATORS = ("grpo", "gae", "rloo", "opo", "remax", "gpg", "reinforce_plus_plus")
ESTIMATORS = {name: name for name in (*_ESTIMATORS, "reinforce_plus_plus_baseline")}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
KL_KINDS = {"low_var_kl": "k3", "kl": "k1", "low_var_kl+": "k3+", "kl+": "k1+"} | {
    name: name for name in ("k1", "k2", "k3", "abs", "mse", "k1+", "k3+", "abs+")
}
SCHEDULES = {"constant": "constant", "cosine": "cosine"}


def _one_of(names: Mapping[str, str]) -> Callable[[Any], str]:
    def translate(value: Any) -> str:
        if value not in names:
            raise ValueError(f"choose one of {', '.join(names)}")
        return names[value]

    return translate


TRANSLATED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "actor_rollout_ref.model.path": ("model.path", str),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("optimizer.gradient_checkpointing", bool),
    "actor_rollout_ref.actor.optim.lr": ("optimizer.learning_rate", float),
    "actor_rollout_ref.actor.optim.weight_decay": ("optimizer.weight_decay", float),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": (
        "optimizer.warmup_steps",
        lambda value: max(0, int(value)),
    ),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("optimizer.schedule", _one_of(SCHEDULES)),
    "actor_rollout_ref.actor.optim.warmup_style": ("optimizer.schedule", _one_of(SCHEDULES)),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("optimizer.final_lr_fraction", float),
    "actor_rollout_ref.actor.optim.clip_grad": ("optimizer.max_grad_norm", float),
    "actor_rollout_ref.actor.grad_clip": ("optimizer.max_grad_norm", float),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("optimizer.micro_batch_tokens", int),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.aggregation", _one_of(AGGREGATIONS)),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("algorithm.loss", _one_of(LOSSES)),
    "actor_rollout_ref.actor.clip_ratio_low": ("algorithm.clip_low", float),
    "actor_rollout_ref.actor.clip_ratio_high": ("algorithm.clip_high", float),
    "actor_rollout_ref.actor.clip_ratio_c": ("algorithm.dual_clip", float),
    "actor_rollout_ref.rollout.n": ("rollout.group_size", int),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature", float),
    "actor_rollout_ref.rollout.seed": ("seed", int),
    "algorithm.adv_estimator": ("algorithm.estimator", _one_of(ESTIMATORS)),
    "critic.optim.lr": ("critic.learning_rate", float),
    "critic.cliprange_value": ("critic.clip", float),
    "data.train_batch_size": ("rollout.tasks_per_step", int),
    "rllm.agent.max_steps": ("rollout.max_turns", int),
    "rllm.workflow.n_parallel_tasks": ("rollout.num_parallel", int),
    "rllm.workflow.retry_limit": ("rollout.retry_limit", int),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep", int),
    "trainer.total_training_steps": ("steps", int),
}
"""Published key -> ours, and how its value is read."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.actor.entropy_coeff": (
        (0, 0.0),
        "here the bonus falls to 0: `algorithm.entropy_coef`",
    ),
    "actor_rollout_ref.actor.ppo_epochs": ((1,), "every update here sees its rows once"),
    "actor_rollout_ref.model.lora_rank": ((0,), "the verl backend trains all weights"),
    "actor_rollout_ref.rollout.top_p": ((1, 1.0), "truncated log-probabilities cannot be trained on"),
    "actor_rollout_ref.rollout.top_k": ((-1, 0), "truncated log-probabilities cannot be trained on"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        (0, 0.0, -1, -1.0),
        "say the steps: `actor_rollout_ref.actor.optim.lr_warmup_steps`",
    ),
    "algorithm.clip_advantages": ((False,), "advantages are clipped by no estimator here"),
    "algorithm.kl_ctrl.type": (("fixed",), "its horizon is in samples: `algorithm.kl_target` is ours"),
    "algorithm.norm_adv_by_std_in_grpo": ((True, False), ""),
    "algorithm.rollout_correction.rollout_is": ((None,), "ours is `algorithm.correction`"),
    "data.shuffle": ((True,), "tasks are always drawn in a random order"),
    "data.truncation": (("error",), "a prompt that is too long ends its episode, and is never cut"),
    "rllm.accumulate_reasoning": ((False,), "ours is `roles.NAME.history`"),
    "rllm.agent.overlong_filter": ((False,), "ours is `rollout.truncation`"),
    "rllm.disable_thinking": ((False,), "an agent's prompt says so"),
    "rllm.rejection_sample.multiplier": ((1, 1.0), "ours is `filters.max_rounds`"),
    "rllm.stepwise_advantage.enable": ((False,), "ours is `algorithm.credit`"),
    "rllm.compact_filtering.enable": ((False,), "ours is `rollout.truncation`"),
    "rllm.rejection_sample.enable": ((False,), "ours is `filters.dynamic`"),
    "rllm.mask_truncated_samples": ((False,), "ours is `rollout.truncation`"),
}
"""Published key -> the values that are accepted, and why no other is."""

_SERVER = (
    *("name", "mode", "dtype", "load_format", "gpu_memory_utilization", "enforce_eager", "max_model_len"),
    *("free_cache_engine", "tensor_model_parallel_size", "max_num_batched_tokens", "max_num_seqs"),
    *("enable_chunked_prefill", "disable_log_stats", "val_kwargs.*", "calculate_log_probs", "log_prob_*"),
)
_PLACES = (
    *("logger", "project_name", "experiment_name", "nnodes", "n_gpus_per_node", "device", "resume_mode"),
    *("default_hdfs_dir", "default_local_dir", "val_before_train", "log_val_generations"),
)
WITHOUT_EFFECT = (
    "actor_rollout_ref.hybrid_engine",
    *(f"actor_rollout_ref.{part}.*micro_batch_size*" for part in ("actor", "ref", "rollout")),
    *(f"actor_rollout_ref.{part}.fsdp_config.*" for part in ("actor", "ref")),
    *(f"actor_rollout_ref.{part}.ulysses_sequence_parallel_size" for part in ("actor", "ref")),
    *(f"actor_rollout_ref.{part}.strategy" for part in ("actor", "ref")),
    "actor_rollout_ref.actor.checkpoint.*",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.ref.log_prob_*",
    *(f"actor_rollout_ref.rollout.{name}" for name in _SERVER),
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.chat_scheduler",
    "critic.model.path",
    "data.val_batch_size",
    "data.dataloader_num_workers",
    "ray_init.*",
    "ray_kwargs.*",
    "rllm.agent.async_engine",
    "rllm.agent.name",
    "rllm.compact_filtering.mask_*",
    "rllm.env.name",
    "rllm.stepwise_advantage.mode",
    "rllm.workflow.name",
    "rllm.workflow.use_workflow",
    *(f"trainer.{name}" for name in _PLACES),
)
"""What says where and how verl's own servers, shards and loggers run, what is given to `AgentTrainer` itself,
and how something works that is off; none of it changes what is learned."""

_TOGETHER = frozenset(
    {
        "actor_rollout_ref.actor.clip_ratio",
        "actor_rollout_ref.actor.kl_loss_coef",
        "actor_rollout_ref.actor.kl_loss_type",
        "actor_rollout_ref.actor.loss_scale_factor",
        "actor_rollout_ref.actor.optim.betas",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.gamma",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_penalty",
        "algorithm.lam",
        "algorithm.use_kl_in_reward",
        "data.max_prompt_length",
        "data.max_response_length",
        "rllm.agent.trajectory_timeout",
        "trainer.critic_warmup",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.total_epochs",
    }
)
"""Published keys that mean something together with others."""


def is_published(config: Any) -> bool:
    """Whether it is in verl's keys: a mapping (an OmegaConf config counts), or a list of "a.b=c"."""
    if isinstance(config, Mapping):
        return bool(_ONLY_THEIRS & set(map(str, config)))
    if isinstance(config, list | tuple):
        return any(str(each).lstrip("+").partition(".")[0] in _ONLY_THEIRS for each in config)
    return False


def translated(config: Any, num_tasks: int) -> dict[str, Any]:
    """Our configuration, for `num_tasks` training tasks.

    Raises ConfigError for the first key that has no counterpart, or whose value has none.
    """
    given = _given(config)
    ours, ignored = dict(DEFAULTS), list[str]()
    for key, value in given.items():
        if key in TRANSLATED:
            name, read = TRANSLATED[key]
            ours[name] = _read(key, value, read)
        elif key in FIXED:
            _require_value(key, value)
        elif any(fnmatch(key, pattern) for pattern in WITHOUT_EFFECT):
            ignored.append(key)
        elif key not in _TOGETHER:
            raise ConfigError(_unknown(key))
    _translate_sizes(given, ours, num_tasks)
    _translate_algorithm(given, ours)
    _translate_trainer(given, ours)
    if ignored:
        log.warning(
            "Without effect here, where the built-in engine samples and the run's own files keep the record: "
            "%s.",
            ", ".join(ignored),
        )
    return nested(ours)


def _translate_sizes(given: Mapping[str, Any], ours: dict[str, Any], num_tasks: int) -> None:
    prompt, response = (int(given.get(f"data.max_{name}_length", 512)) for name in ("prompt", "response"))
    ours["rollout.max_tokens_per_turn"] = response
    ours["inference.max_context"] = prompt + response
    batch = ours["rollout.tasks_per_step"]
    key = "actor_rollout_ref.actor.ppo_mini_batch_size"
    mini = int(given.get(key, batch))
    if mini < 1 or batch % mini:
        raise ConfigError(f"`{key}` is {mini}, which does not divide `data.train_batch_size`, {batch}.")
    ours["algorithm.updates_per_step"] = batch // mini
    if "steps" not in ours:
        epochs = int(given.get("trainer.total_epochs", 30))
        if num_tasks < batch:
            raise ConfigError(
                f"`data.train_batch_size` is {batch} and there are {num_tasks} training tasks, so an epoch "
                "has no step; lower it, or set `trainer.total_training_steps`."
            )
        ours["steps"] = epochs * (num_tasks // batch)


def _translate_algorithm(given: Mapping[str, Any], ours: dict[str, Any]) -> None:
    actor = "actor_rollout_ref.actor"
    if f"{actor}.optim.betas" in given:
        ours["optimizer.beta1"], ours["optimizer.beta2"] = map(float, given[f"{actor}.optim.betas"])
    if ours.get("algorithm.aggregation") == "constant":
        longest = given.get(f"{actor}.loss_scale_factor") or ours["rollout.max_tokens_per_turn"]
        ours["algorithm.aggregation_constant"] = int(longest)
    elif given.get(f"{actor}.loss_scale_factor") is not None:
        raise ConfigError(
            f"`{actor}.loss_scale_factor` is {given[f'{actor}.loss_scale_factor']!r}, which "
            f"`seq-mean-token-sum-norm` alone divides by: set `{actor}.loss_agg_mode` to that."
        )
    loss = ours.get("algorithm.loss", "ppo")
    if f"{actor}.clip_ratio" in given:
        both = float(given[f"{actor}.clip_ratio"])
        ours.setdefault("algorithm.clip_low", both)
        ours.setdefault("algorithm.clip_high", both)
    if loss == "ppo":
        ours.setdefault("algorithm.dual_clip", DUAL_CLIP)
    if ours.get("algorithm.estimator") == "grpo" and given.get("algorithm.norm_adv_by_std_in_grpo") is False:
        ours["algorithm.estimator"] = "dr_grpo"
    ours.setdefault("algorithm.estimator", "gae")
    if ours["algorithm.estimator"] == "gae":
        ours["critic.trunk"] = "separate"
        ours["critic.warmup_steps"] = int(given.get("trainer.critic_warmup", 0))
        ours["algorithm.gamma"] = float(given.get("algorithm.gamma", 1.0))
        ours["algorithm.gae_lambda"] = float(given.get("algorithm.lam", 1.0))
    else:
        _require_no_critic(given, ours["algorithm.estimator"])
    in_loss, in_reward = given.get(f"{actor}.use_kl_loss"), given.get("algorithm.use_kl_in_reward")
    if in_loss and in_reward:
        raise ConfigError(
            f"`{actor}.use_kl_loss` and `algorithm.use_kl_in_reward` are both true; a run here has the "
            "divergence in one place: set one of them to false."
        )
    if in_loss or in_reward:
        coef, kind = (
            (f"{actor}.kl_loss_coef", f"{actor}.kl_loss_type")
            if in_loss
            else ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
        )
        ours["algorithm.kl_coef"] = float(given.get(coef, 0.001))
        ours["algorithm.kl_kind"] = _read(
            kind, given.get(kind, "low_var_kl" if in_loss else "kl"), _one_of(KL_KINDS)
        )
        ours["algorithm.kl_in"] = "loss" if in_loss else "reward"


def _require_no_critic(given: Mapping[str, Any], estimator: str) -> None:
    for key, value in (("trainer.critic_warmup", 0), ("algorithm.gamma", 1), ("algorithm.lam", 1)):
        if key in given and float(given[key]) != value:
            raise ConfigError(
                f"`{key}` is {given[key]!r}, which only `gae` honours here, and the estimator is "
                f"`{estimator}`; set it to {value}."
            )


def _translate_trainer(given: Mapping[str, Any], ours: dict[str, Any]) -> None:
    """verl's -1 is never: here the last step is always kept, and evaluations between are 0."""
    if (timeout_s := given.get("rllm.agent.trajectory_timeout")) is not None:
        ours["rollout.episode_timeout_s"] = float(timeout_s)
    save, test = (int(given.get(f"trainer.{name}_freq", -1)) for name in ("save", "test"))
    ours["checkpoint.every_steps"] = save if save > 0 else max(1, ours["steps"])
    ours["evaluation.every_steps"] = max(0, test)


def _require_value(key: str, value: Any) -> None:
    accepted, why = FIXED[key]
    if value not in accepted:
        raise ConfigError(f"`{key}` is {value!r}, and only {accepted[0]!r} is honoured: {why}.")


def _read(key: str, value: Any, read: Callable[[Any], Any]) -> Any:
    try:
        return read(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"`{key}` is {value!r}, which has no counterpart: {error}.") from error


def _unknown(key: str) -> str:
    section, _, argument = key.removeprefix("rllm.").partition("_args.")
    if argument and (name := section.rpartition(".")[2]) in ("agent", "env", "workflow"):
        return f"`{key}` has no counterpart: give `{name}_args` to AgentTrainer, with `{argument}` in it."
    known = [*TRANSLATED, *FIXED, *_TOGETHER]
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else " Leave it out."
    return f"`{key}` has no counterpart here, and rLLM ignores no key.{hint}"


def _given(config: Any) -> dict[str, Any]:
    """What a script sets, by whole key."""
    if not isinstance(config, Mapping):
        tree: dict[str, Any] = {}
        for each in config:
            _put(tree, parse_assignment(str(each).lstrip("+")))
        return dict(leaves(tree))
    mapping = cast(Mapping[str, Any], config)
    if not is_composed(mapping):
        return dict(leaves(as_dict(mapping, resolve=True)))
    require_installed()
    return chosen(mapping)


def _put(tree: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        if isinstance(value, Mapping):
            _put(tree.setdefault(key, {}), value)
        else:
            tree[key] = {"null": None, "True": True, "False": False}.get(str(value), value)
