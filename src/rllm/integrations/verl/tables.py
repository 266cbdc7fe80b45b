"""Published keys, in verl's names, and what becomes of each: tables alone, which `keys` goes by."""

from typing import Any

from rllm.integrations.verl.values import Reader, number, one_of, switch, text, whole

FAMILIES = ("actor_rollout_ref", "critic", "data", "trainer", "rllm")
"""Sections of a published configuration that ours has not, or, of `critic`, has as well."""

DEFAULTS: dict[str, Any] = {
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 1e-6,
    "optimizer.schedule": "constant",
    "optimizer.weight_decay": 0.01,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.999,
    "optimizer.final_lr_fraction": 0.0,
    "rollout.group_size": 1,
    "rollout.tasks_per_step": 1024,
    "algorithm.estimator": "gae",
    "algorithm.loss": "ppo",
    "algorithm.aggregation": "token_mean",
    "warm_start.steps": 0,
}
"""verl's values for keys that a script leaves out, where ours would be others."""
TASKS_PER_UPDATE = 256
"""verl's `ppo_mini_batch_size`."""
LENGTH = 512
"""The length keys of a prompt and of a response."""
EPOCHS = 30
CLIP = 0.2
"""The clipping bounds of every loss that clips, where ours takes those of its paper."""
DEFAULTS_OF_LOSS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm.dual_clip": 3.0},
    "kl_cov": {"algorithm.cov_kl_coef": 0.1},
}
DEFAULTS_OF_CRITIC: dict[str, Any] = {"critic.learning_rate": 1e-5, "critic.clip": 0.5}

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
MEANS_OF_ROWS = ("gmpo", "sapo")
"""Losses of which verl takes the mean over rows whatever `loss_agg_mode` is."""
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

TRANSLATED: dict[str, tuple[str, Reader]] = {
    "actor_rollout_ref.model.path": ("model.path", text),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("optimizer.gradient_checkpointing", switch),
    "actor_rollout_ref.actor.optim.lr": ("optimizer.learning_rate", number),
    "actor_rollout_ref.actor.optim.weight_decay": ("optimizer.weight_decay", number),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": (
        "optimizer.warmup_steps",
        lambda value: max(0, whole(-1)(value)),
    ),
    "actor_rollout_ref.actor.optim.lr_scheduler_type": ("optimizer.schedule", one_of(SCHEDULES)),
    "actor_rollout_ref.actor.optim.warmup_style": ("optimizer.schedule", one_of(SCHEDULES)),
    "actor_rollout_ref.actor.optim.min_lr_ratio": ("optimizer.final_lr_fraction", number),
    "actor_rollout_ref.actor.optim.clip_grad": ("optimizer.max_grad_norm", number),
    "actor_rollout_ref.actor.grad_clip": ("optimizer.max_grad_norm", number),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": ("optimizer.micro_batch_tokens", whole(1)),
    "actor_rollout_ref.actor.loss_agg_mode": ("algorithm.aggregation", one_of(AGGREGATIONS)),
    "actor_rollout_ref.actor.policy_loss.loss_mode": ("algorithm.loss", one_of(LOSSES)),
    "actor_rollout_ref.actor.clip_ratio_low": ("algorithm.clip_low", number),
    "actor_rollout_ref.actor.clip_ratio_high": ("algorithm.clip_high", number),
    "actor_rollout_ref.actor.clip_ratio_c": ("algorithm.dual_clip", number),
    "actor_rollout_ref.actor.tau_pos": ("algorithm.sapo_positive", number),
    "actor_rollout_ref.actor.tau_neg": ("algorithm.sapo_negative", number),
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": ("algorithm.cov_low", number),
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub": ("algorithm.cov_high", number),
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": ("algorithm.cov_kl_coef", number),
    "actor_rollout_ref.rollout.n": ("rollout.group_size", whole(1)),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature", number),
    "actor_rollout_ref.rollout.seed": ("seed", whole(0)),
    "algorithm.adv_estimator": ("algorithm.estimator", one_of(ESTIMATORS)),
    "data.train_batch_size": ("rollout.tasks_per_step", whole(1)),
    "rllm.agent.max_steps": ("rollout.max_turns", whole(1)),
    "rllm.agent.trajectory_timeout": ("rollout.wall_timeout_s", number),
    "rllm.workflow.n_parallel_tasks": ("rollout.num_parallel", whole(1)),
    "rllm.workflow.retry_limit": ("rollout.retry_limit", whole(1)),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep", whole(1)),
    "trainer.val_before_train": ("evaluation.at_start", switch),
    "trainer.total_training_steps": ("steps", whole(0)),
}
"""Published key -> ours, and how its value is read."""

OF_CRITIC: dict[str, tuple[str, Reader]] = {
    "critic.optim.lr": ("critic.learning_rate", number),
    "critic.cliprange_value": ("critic.clip", number),
    "trainer.critic_warmup": ("critic.warmup_steps", whole(0)),
    "algorithm.gamma": ("algorithm.gamma", number),
    "algorithm.lam": ("algorithm.gae_lambda", number),
}
"""The same of an estimator with a critic; others take verl's defaults alone, with which they do nothing."""

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.actor.entropy_coeff": (
        (0, 0.0),
        "here the bonus falls to 0: `algorithm.entropy_coef`",
    ),
    "actor_rollout_ref.actor.ppo_epochs": ((1,), "every update here sees its rows once"),
    "actor_rollout_ref.model.lora_rank": ((0,), "the verl backend trains all weights"),
    "actor_rollout_ref.model.trust_remote_code": (
        (False,),
        "weights go back into models of the built-in decoder alone",
    ),
    "actor_rollout_ref.rollout.top_p": ((1, 1.0), "truncated log-probabilities cannot be trained on"),
    "actor_rollout_ref.rollout.top_k": ((-1, 0), "truncated log-probabilities cannot be trained on"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        (0, 0.0, -1, -1.0),
        "say the steps: `actor_rollout_ref.actor.optim.lr_warmup_steps`",
    ),
    "algorithm.clip_advantages": ((False,), "advantages are clipped by no estimator here"),
    "algorithm.kl_ctrl.type": (("fixed",), "its horizon is in samples: `algorithm.kl_target` is ours"),
    "algorithm.rollout_correction.rollout_is": ((None,), "ours is `algorithm.correction`"),
    "data.filter_overlong_prompts": ((False,), "leave such tasks out of `train_dataset`"),
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
    *("enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats", "val_kwargs.*"),
    *("calculate_log_probs", "log_prob_*"),
)
_PLACES = (
    *("logger", "project_name", "experiment_name", "nnodes", "n_gpus_per_node", "device", "resume_mode"),
    *("default_hdfs_dir", "default_local_dir", "log_val_generations", "balance_batch"),
    *("log_episodes", "episode_log_dir", "max_critic_ckpt_to_keep"),
)
_LEARNERS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
WITHOUT_EFFECT = (
    "actor_rollout_ref.hybrid_engine",
    *(f"{part}.*micro_batch_size*" for part in (*_LEARNERS, "actor_rollout_ref.rollout")),
    *(f"{part}.fsdp_config.*" for part in _LEARNERS),
    *(f"{part}.ulysses_sequence_parallel_size" for part in _LEARNERS),
    *(f"{part}.strategy" for part in _LEARNERS),
    *(f"{part}.use_dynamic_bsz" for part in ("actor_rollout_ref.actor", "critic")),
    *(f"{part}.checkpoint.*" for part in ("actor_rollout_ref.actor", "critic")),
    *(f"{part}.model.use_remove_padding" for part in ("actor_rollout_ref", "critic")),
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.ref.log_prob_*",
    *(f"actor_rollout_ref.rollout.{name}" for name in _SERVER),
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.chat_scheduler",
    *("critic.fsdp.*", "critic.model.fsdp_config.*", "critic.model.enable_gradient_checkpointing"),
    *("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"),
    *(f"data.{name}" for name in ("val_batch_size", "dataloader_num_workers", "return_raw_chat")),
    *("data.return_multi_modal_inputs", "data.filter_overlong_prompts_workers"),
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
"""Keys that say where and how verl's own servers, shards and loggers run, that `AgentTrainer` itself takes,
or that belong to something that is off; none of them changes what is learned."""

TOGETHER = frozenset(
    {
        "actor_rollout_ref.actor.clip_ratio",
        "actor_rollout_ref.actor.kl_loss_coef",
        "actor_rollout_ref.actor.kl_loss_type",
        "actor_rollout_ref.actor.loss_scale_factor",
        "actor_rollout_ref.actor.optim.betas",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio",
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.use_kl_loss",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_penalty",
        "algorithm.norm_adv_by_std_in_grpo",
        "algorithm.use_kl_in_reward",
        "critic.model.path",
        "data.gen_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.total_epochs",
    }
)
"""Published keys that mean something together with others."""

NULLABLE = frozenset(
    {
        "actor_rollout_ref.actor.loss_scale_factor",
        "actor_rollout_ref.actor.optim.warmup_style",
        "data.gen_batch_size",
        "rllm.agent.trajectory_timeout",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.total_training_steps",
    }
)
"""Keys of which null is verl's own default: as if they were left out."""

ARGUMENTS = {
    "data.train_files": "train_dataset",
    "data.val_files": "val_dataset",
    "custom_reward_function.path": "env_args",
    "reward.custom_reward_function.path": "env_args",
}
"""Published keys that are an argument of `AgentTrainer` here."""

PUBLISHED_DEFAULTS: dict[str, Any] = {
    "data.gen_batch_size": "${mul:${data.train_batch_size},${rllm.rejection_sample.multiplier}}",
    "trainer.log_episodes": False,
    "trainer.episode_log_dir": "logs/${trainer.project_name}/${trainer.experiment_name}",
    "fireworks.deployment_id": None,
    "fireworks.model_id_prefix": "test-model",
    "fireworks.concurrency": 32,
    "rllm.agent.name": "math_agent",
    "rllm.agent.max_steps": 20,
    "rllm.agent.trajectory_timeout": None,
    "rllm.agent.overlong_filter": False,
    "rllm.env.name": "custom",
    "rllm.workflow.use_workflow": False,
    "rllm.workflow.name": "single_turn_workflow",
    "rllm.workflow.workflow_args.agent_cls": None,
    "rllm.workflow.workflow_args.env_cls": None,
    "rllm.workflow.workflow_args.timeout": 1e6,
    "rllm.workflow.workflow_args.gamma": 0.0,
    "rllm.workflow.workflow_args.reward_bonus_coeff": 0.0,
    "rllm.workflow.n_parallel_tasks": 256,
    "rllm.workflow.raise_on_error": True,
    "rllm.workflow.retry_limit": 3,
    "rllm.disable_thinking": False,
    "rllm.accumulate_reasoning": False,
    "rllm.mask_truncated_samples": False,
    "rllm.filter_token_mismatch": True,
    "rllm.stepwise_advantage.enable": False,
    "rllm.stepwise_advantage.mode": "broadcast",
    "rllm.stepwise_advantage.normalize_by_steps": False,
    "rllm.compact_filtering.enable": False,
    "rllm.rejection_sample.enable": False,
    "rllm.rejection_sample.multiplier": 1,
    "rllm.rejection_sample.min_trajs_per_group": -1,
    "rllm.rejection_sample.min_partial_solve_tasks": 4,
    "rllm.sdk.store.path": "~/.rllm/traces.db",
    "rllm.sdk.processing.groupby_key": None,
    "rllm.sdk.processing.traj_name_key": None,
    "rllm.sdk.proxy.host": "127.0.0.1",
    "rllm.sdk.proxy.port": 4000,
    "rllm.sdk.proxy.mode": "subprocess",
    "rllm.sdk.proxy.admin_token": "my-shared-secret",
}
"""The values that the configuration of published scripts, `agent_ppo_trainer`, adds to verl's: nobody chose
them."""
