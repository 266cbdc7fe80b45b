"""Published keys of the unified trainer and of Tinker's, and what becomes of each: tables alone."""

from dataclasses import dataclass
from typing import Any

from rllm.integrations.verl.values import Reader, number, one_of, switch, text, whole


@dataclass(slots=True, frozen=True)
class KeySource:
    """A published key that says one of ours."""

    key: str
    default: Any
    """Published; None leaves the value to another key, or to us."""
    reader: Reader


_ESTIMATORS = {name: name for name in ("grpo", "reinforce", "rloo", "reinforce_plus_plus_baseline", "prpo")}
_LOSSES = {name: name for name in ("ppo", "cispo", "importance_sampling")}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
}
_SCHEDULES = {name: name for name in ("constant", "linear", "cosine")}
_LEVELS = {"token": "token", "sequence": "sequence"}


def _sources(reader: Reader, **default_of_key: Any) -> tuple[KeySource, ...]:
    """Sources in the order of their weight; `__` in a name is a dot."""
    return tuple(
        KeySource(key.replace("__", "."), default, reader) for key, default in default_of_key.items()
    )


TRANSLATED: dict[str, tuple[KeySource, ...]] = {
    "model.path": _sources(text, model__name="Qwen/Qwen3-8B"),
    "lora.rank": _sources(whole(0), model__lora_rank=32),
    "seed": _sources(whole(0), rllm__data__seed=0),
    "rollout.group_size": _sources(whole(1), rllm__rollout__n=8, training__group_size=None),
    "rollout.tasks_per_step": _sources(whole(1), data__train_batch_size=32, rllm__data__train_batch_size=64),
    "prompt_length": _sources(whole(1), data__max_prompt_length=30720, rllm__data__max_prompt_length=2048),
    "response_length": _sources(
        whole(1),
        data__max_response_length=2048,
        rllm__data__max_response_length=30720,
        rllm__rollout__train__max_tokens=30720,
    ),
    "rollout.temperature": _sources(
        number, rllm__rollout__train__temperature=1.0, sampling__train__temperature=1.0
    ),
    "rollout.top_p": _sources(number, rllm__rollout__train__top_p=1.0, sampling__train__top_p=1.0),
    "rollout.num_parallel": _sources(
        whole(1), rllm__workflow__n_parallel_tasks=256, workflow__n_parallel_tasks=256
    ),
    "rollout.retry_limit": _sources(whole(1), rllm__workflow__retry_limit=3, workflow__retry_limit=3),
    # A limit of all the time, so it bounds the episode's own as well.
    "rollout.episode_timeout_s": _sources(number, rllm__agent__trajectory_timeout=None),
    "rollout.wall_timeout_s": _sources(number, rllm__agent__trajectory_timeout=None),
    "optimizer.learning_rate": _sources(number, training__learning_rate=2e-5),
    "optimizer.schedule": _sources(
        one_of(_SCHEDULES), rllm__algorithm__lr_schedule="constant", training__lr_schedule="constant"
    ),
    "optimizer.warmup_steps": _sources(whole(), rllm__algorithm__warmup_steps=-1),
    "optimizer.beta1": _sources(number, training__beta1=0.9),
    "optimizer.beta2": _sources(number, training__beta2=0.95),
    "algorithm.updates_per_step": _sources(whole(1), training__num_minibatches=1),
    "algorithm.estimator": _sources(
        one_of(_ESTIMATORS), rllm__algorithm__adv_estimator="grpo", algorithm__adv_estimator="grpo"
    ),
    "algorithm.loss": _sources(one_of(_LOSSES), rllm__algorithm__loss_fn=None),
    "algorithm.aggregation": _sources(one_of(_AGGREGATIONS), rllm__algorithm__loss_agg_mode=None),
    "algorithm.kl_coef": _sources(number, rllm__algorithm__kl_beta=0.0),
    "checkpoint.every_steps": _sources(whole(-1), rllm__trainer__save_freq=20, trainer__save_freq=20),
    "evaluation.at_start": _sources(
        switch, rllm__trainer__val_before_train=False, trainer__val_before_train=False
    ),
    "evaluation.every_steps": _sources(whole(-1), rllm__trainer__test_freq=5, trainer__test_freq=5),
    # taken together with others
    "epochs": _sources(whole(0), rllm__trainer__total_epochs=10, trainer__total_epochs=10),
    "batches": _sources(whole(), rllm__trainer__total_batches=-1),
    "warmup_ratio": _sources(
        number, rllm__algorithm__warmup_steps_ratio=0.0, training__warmup_steps_ratio=0.0
    ),
    "by_std": _sources(
        switch,
        rllm__algorithm__norm_adv_by_std_in_grpo=True,
        algorithm__norm_adv_by_std_in_grpo=True,
    ),
    "clip": _sources(number, rllm__algorithm__eps_clip=0.2),
    "clip_high": _sources(number, rllm__algorithm__eps_clip_high=None),
    "correction_level": _sources(one_of(_LEVELS), rllm__algorithm__rollout_correction__tis_mode=None),
    "correction_cap": _sources(number, rllm__algorithm__rollout_correction__tis_cap=2.0),
}
"""Our key, or a part of one -> the published keys that say it, the weightiest first."""

ASYNC_DEFAULTS = {
    "rllm.async_training.enable": False,
    "rllm.async_training.mini_batch_size": 64,
    "rllm.async_training.staleness_threshold": 0.0,
}
"""Keys of asynchronous training, with their published values: tasks of an update, and how many of its batches
may be sampled beyond it."""
TOGETHER = ("rllm.agent.max_steps", "agent.max_steps", "rllm.backend", *ASYNC_DEFAULTS)
"""Published keys that are read in their own way."""

CONSTANTS: dict[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.final_lr_fraction": 0.0,
    "optimizer.weight_decay": 0.0,
    "warm_start.steps": 0,
}
"""The values that the published trainer takes and no key of it says."""

_ATTEMPTS = "`rollout.truncation` says what an attempt that hit a limit counts; one that failed is left out"
_REASONING = "the model's chat template says what of its thoughts is kept"

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "training.eps": ((1e-8,), "AdamW adds 1e-8"),
    "training.resume_mode": (("auto", None), "a run that is there goes on; another output begins anew"),
    "training.resume_from_path": ((None,), "a run that is there goes on"),
    "trainer.resume_from_tinker_id": ((None,), "a run that is there goes on"),
    "rllm.trainer.val_only": ((False,), "`rllm eval` measures without training"),
    "rllm.algorithm.use_precomputed_advantage": ((False,), "`rllm distill` learns from a teacher's words"),
    "rllm.algorithm.env_loss_coef": ((None, 0, 0.0), "only what the policy sampled is learned"),
    "rllm.algorithm.router_replay": (("disabled",), "no mixture of experts is trained here"),
    "rllm.stepwise_advantage.mode": (
        ("broadcast",),
        "`algorithm.credit` gives turns their own advantages",
    ),
    "rllm.stepwise_advantage.normalize_by_steps": ((False,), "`algorithm.aggregation` weighs tokens"),
    "rllm.mask_truncated_samples": ((False,), _ATTEMPTS),
    "rllm.compact_filtering.enable": ((False,), _ATTEMPTS),
    "rllm.rejection_sample.enable": ((False,), "`filters.dynamic` replaces groups that were paid alike"),
    "rllm.rejection_sample.multiplier": ((1,), "`filters.dynamic` replaces groups that were paid alike"),
    "rllm.rejection_sample.filter_uniform_groups": ((False,), "`filters.min_reward_std` leaves them out"),
    "rllm.remote_runtime.enabled": (
        (False,),
        "programs run here, or on a cluster: `cluster.kind`",
    ),
    "rllm.async_training.trigger_parameter_sync_step": ((1,), "new weights are published after each step"),
    "rllm.disable_thinking": ((False,), _REASONING),
    "rllm.accumulate_reasoning": ((False,), _REASONING),
    "rollout_engine.disable_thinking": ((False,), _REASONING),
    "rollout_engine.accumulate_reasoning": ((False,), _REASONING),
    "rollout_engine.bypass_render_with_parser": ((False,), _REASONING),
    "rollout_engine.renderer_name": ((None,), _REASONING),
    "algorithm.grouping_level": (("trajectory",), "attempts at one task are compared"),
    "algorithm.remove_constant_reward_groups": ((False,), "`filters.min_reward_std` leaves them out"),
    "algorithm.gamma": ((1, 1.0), "no advantage of the published estimators is discounted"),
    "data.train_files": ((None,), "give `train_dataset` to AgentTrainer"),
    "data.val_files": ((None,), "give `val_dataset` to AgentTrainer"),
}
"""Published key -> the values that are true here, and what says more."""

SILENT = (
    *("hydra.*", "*.default_local_dir", "*.project_name", "*.experiment_name"),
    *("rllm.rollout.val.max_tokens", "rllm.gateway.tokenizer_model", "rllm.episode_logging.episode_log_dir"),
    "algorithm.teacher_rollout_args.*",
)
"""Patterns of published keys that say nothing of what is learned: names of the record, and the like."""

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "tinker_base_url": (None,),
    "fuse_forward_backward_and_optim_step": (False,),
    "model.train_*": (True,),
    "training.max_length": (32768,),
    "validation.group_size": (1,),
    "rllm.rollout.n_val": (1,),
    "rllm.rollout.val.*": (1.0,),
    "sampling.val.*": (1.0,),
    "rollout_engine.reasoning_effort": ("medium",),
    "data.val_batch_size": (32, -1),
    "rllm.data.val_batch_size": (-1,),
    "rllm.trainer.logger": (["console"],),
    "trainer.logger": (["console"],),
    "rllm.agent.name": ("math_agent",),
    "rllm.agent.overlong_filter": (False,),
    "rllm.env.name": ("custom",),
    "rllm.workflow.*": (False, "single_turn_workflow", None, 1e6, 0.0, True, -1),
    "rllm.algorithm.use_rllm": (None, True),
    "rllm.algorithm.rollout_correction.bypass_mode": (None, True, False),
    "rllm.stepwise_advantage.enable": (False, True),
    "rllm.filter_token_mismatch": (True,),
    "rllm.compact_filtering.*": (True, False),
    "rllm.rejection_sample.*": (1, 2),
    "rllm.remote_runtime.*": (
        *("agentcore", "", 25, "mini-swe-agent", "docker", None, 300.0),
        *(600.0, {}),
    ),
    "rllm.gateway.*": (9090, None, 0, "memory", False, "auto"),
    "rllm.async_training.*": (None, False),
    "rllm.episode_logging.*": (False,),
    "algorithm.lam": (0.95,),
    "algorithm.shared_tokenizer": (False,),
}
"""Pattern of published keys that change nothing here -> the values of which nobody has to be told."""
