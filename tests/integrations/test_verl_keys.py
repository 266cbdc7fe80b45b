"""Configurations of published scripts, key by key; needs no verl."""

import logging

import pytest

from rllm import AgentTrainer
from rllm.agents.conversation import ConversationAgent
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import ConfigError
from rllm.integrations.verl.keys import is_published, translate
from rllm.integrations.verl.tables import FIXED, OF_CRITIC, TRANSLATED

SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=128",
    "data.val_batch_size=30",
    "data.max_prompt_length=2048",
    "data.max_response_length=8192",
    "actor_rollout_ref.model.path=deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "actor_rollout_ref.hybrid_engine=True",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.clip_ratio_high=0.28",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.name=vllm",
    'actor_rollout_ref.rollout.mode="async"',
    "actor_rollout_ref.rollout.temperature=0.6",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.85",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.val_kwargs.n=1",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "rllm.mask_truncated_samples=False",
    "trainer.critic_warmup=0",
    "trainer.logger=['console','wandb']",
    "trainer.project_name=rllm-agent",
    "trainer.val_before_train=True",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
    "trainer.save_freq=10",
    "trainer.test_freq=10",
    "trainer.default_hdfs_dir=null",
    "rllm.agent.max_steps=1",
    "rllm.stepwise_advantage.enable=False",
    "trainer.total_epochs=2",
]
"""What a published training script passes on its command line."""


def config_of(*assignments: str, num_tasks: int = 1000) -> TrainConfig:
    return load_config(translate([*SCRIPT, *assignments], num_tasks))


def test_a_published_script_becomes_our_configuration(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = config_of()
    assert config.model.path == "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    assert (config.rollout.tasks_per_step, config.rollout.group_size, config.rollout.max_turns) == (128, 8, 1)
    assert (config.rollout.max_tokens_per_turn, config.inference.max_context) == (8192, 10_240)
    assert config.rollout.temperature == 0.6
    assert (config.algorithm.estimator, config.algorithm.aggregation) == ("grpo", "sequence_sum")
    assert (config.algorithm.loss, config.algorithm.clip_high, config.algorithm.dual_clip) == (
        "ppo",
        0.28,
        3.0,
    )
    assert (config.algorithm.kl_coef, config.algorithm.updates_per_step) == (0.0, 2)
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("adamw", 1e-6)
    assert (config.optimizer.schedule, config.optimizer.weight_decay) == ("constant", 0.01)
    assert (config.optimizer.gradient_checkpointing, config.optimizer.micro_batch_tokens) == (True, 32_768)
    assert (config.steps, config.warm_start.steps) == (2 * (1000 // 128), 0)
    assert (config.checkpoint.every_steps, config.evaluation.every_steps) == (10, 10)
    assert "trainer.n_gpus_per_node" in caplog.text
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in caplog.text


def test_every_key_of_the_tables_is_known(subtests: pytest.Subtests) -> None:
    for key in [*TRANSLATED, *OF_CRITIC, *FIXED]:
        with subtests.test(key=key):
            with pytest.raises(ConfigError, match="no counterpart") as found:
                translate([f"{key}x=1"], 10)
            assert f"`{key}x`" in str(found.value)


def test_keys_that_mean_something_together(subtests: pytest.Subtests) -> None:
    for assignments, expected in [
        (("actor_rollout_ref.actor.use_kl_loss=True",), {"kl_coef": 0.001, "kl_kind": "k3", "kl_in": "loss"}),
        (
            ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.2"),
            {"kl_coef": 0.2, "kl_kind": "k1", "kl_in": "reward"},
        ),
        (("algorithm.norm_adv_by_std_in_grpo=False",), {"estimator": "dr_grpo"}),
        (
            ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",),
            {"aggregation": "constant", "aggregation_constant": 8192},
        ),
        (
            (
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
                "actor_rollout_ref.actor.loss_scale_factor=100",
            ),
            {"aggregation": "constant", "aggregation_constant": 100},
        ),
        (
            ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo",),
            {"loss": "gspo", "dual_clip": 0.0, "clip_low": 0.2, "clip_high": 0.28},
        ),
        (
            (
                "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
                "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.01",
                "actor_rollout_ref.actor.policy_loss.clip_cov_ub=4",
            ),
            {"loss": "clip_cov", "cov_fraction": 0.01, "cov_low": 1.0, "cov_high": 4.0},
        ),
        (("algorithm.adv_estimator=gae",), {"gamma": 1.0, "gae_lambda": 1.0}),
        (("algorithm.adv_estimator=gae", "algorithm.lam=0.9"), {"estimator": "gae", "gae_lambda": 0.9}),
        (
            ("actor_rollout_ref.actor.clip_ratio=0.1",),
            {"clip_low": 0.1, "clip_high": 0.28},
        ),
    ]:
        with subtests.test(assignments=assignments, expected=expected):
            config = config_of(*assignments)
            assert {name: getattr(config.algorithm, name) for name in expected} == expected


def test_the_first_evaluation_is_left_out_where_that_is_asked_for() -> None:
    assert config_of().evaluation.at_start
    assert config_of("trainer.val_before_train=True").evaluation.at_start
    assert not config_of("trainer.val_before_train=False").evaluation.at_start


def test_a_published_trajectory_timeout_is_wall_time() -> None:
    rollout = config_of("rllm.agent.trajectory_timeout=900").rollout
    assert (rollout.wall_timeout_s, rollout.episode_timeout_s) == (900.0, 900.0)
    assert config_of().rollout.wall_timeout_s == 0.0


def test_what_has_no_counterpart_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for assignment, message in [
        (
            "actor_rollout_ref.actor.clip_ratio_hi=0.3",
            "Did you mean `actor_rollout_ref.actor.clip_ratio_high`",
        ),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "`algorithm.entropy_coef`"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "only 1 is honoured"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=60", "does not divide `data.train_batch_size`, 128"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "did you mean 'token-mean'?"),
        ("actor_rollout_ref.actor.loss_scale_factor=100", "`seq-mean-token-sum-norm` alone"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "say the steps"),
        ("data.truncation=left", "never cut"),
        ("+rllm.env.env_args.max_steps=8", "give `env_args` to AgentTrainer"),
        ("rllm.agent.agent_args.max_steps=8", "give `agent_args` to AgentTrainer"),
        ("rllm.workflow.workflow_args.n_solutions=2", "give `workflow_args` to AgentTrainer"),
        ("rllm.agent.engine_args.n=8", "`rllm.agent.engine_args.n` is 8, which has no counterpart"),
        ("actor_rollout_ref.rollout.top_p=0.9", "truncated"),
        ("actor_rollout_ref.actor.optim.lr=fast", "`actor_rollout_ref.actor.optim.lr` is 'fast'"),
        ("algorithm.adv_estimator=grpo_passk", "choose one of grpo"),
        ("algorithm.gamma=0.9", "only `gae` honours"),
        ("data.train_files=train.parquet", "give `train_dataset` to AgentTrainer"),
        ("data.filter_overlong_prompts=True", "leave such tasks out of `train_dataset`"),
        ("data.gen_batch_size=256", "`data.gen_batch_size` is 256 and `data.train_batch_size` 128"),
        (
            "data.max_prompt_length=long",
            "`data.max_prompt_length` is 'long', which has no counterpart: write",
        ),
        ("data.max_response_length=1.5", "`data.max_response_length` is 1.5"),
        ("data.train_batch_size=0", "`data.train_batch_size` is 0, which has no counterpart: it must be at"),
        ("actor_rollout_ref.rollout.n=2.5", "`actor_rollout_ref.rollout.n` is 2.5"),
        ("actor_rollout_ref.rollout.temperature=0", "`actor_rollout_ref.rollout.temperature` of this config"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing=off", "write true or false"),
        ("actor_rollout_ref.actor.use_kl_loss=maybe", "write true or false"),
        ("actor_rollout_ref.actor.optim.betas=0.9", "write a list of two numbers"),
        ("actor_rollout_ref.actor.optim.lr=-1", "`actor_rollout_ref.actor.optim.lr` of this configuration"),
        ("actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.1", "only the loss `kl_cov` looks at it"),
        ("actor_rollout_ref.actor.tau_pos=2", "`actor_rollout_ref.actor.tau_pos` of this configuration"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov", "`actor_rollout_ref.actor.clip_ratio_high`"),
        ("trainer.save_freq=null", "`trainer.save_freq` is None"),
        ("trainer.total_epochs=-1", "`trainer.total_epochs` is -1"),
        ("critic.optim.lr=1e-5", "`critic.optim.lr` is 1e-05, which only `gae` honours here"),
        ("critic.optim.weight_decay=0.1", "`critic.optim.weight_decay` is 0.1, which has no counterpart"),
        ("data.train_batch_size=2048", "1000 training tasks"),
        ("rllm.rejection_sample.enable=True", "`filters.dynamic`"),
    ]:
        with subtests.test(assignment=assignment, message=message):
            with pytest.raises(ConfigError) as found:
                config_of(assignment)
            assert message in str(found.value)


def test_what_a_script_leaves_out_is_what_verl_has() -> None:
    config = load_config(translate(["algorithm.adv_estimator=gae", "trainer.total_epochs=1"], 2048))
    assert (config.rollout.tasks_per_step, config.algorithm.updates_per_step, config.steps) == (1024, 4, 2)
    critic = config.critic
    assert (critic.trunk, critic.learning_rate, critic.clip) == ("separate", 1e-5, 0.5)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.dual_clip) == (
        0.2,
        0.2,
        3.0,
    )
    assert config.optimizer.final_lr_fraction == 0.0


@pytest.mark.parametrize("loss", ["sapo", "geo_mean"])
def test_a_loss_whose_rows_verl_always_averages_is_that(loss: str, caplog: pytest.LogCaptureFixture) -> None:
    script = [each for each in SCRIPT if "clip_ratio" not in each]
    assignments = [*script, f"actor_rollout_ref.actor.policy_loss.loss_mode={loss}"]
    config = load_config(translate(assignments, 1000))
    assert config.algorithm.aggregation == "sequence_mean"
    assert "actor_rollout_ref.actor.loss_agg_mode (of `" in caplog.text


def test_null_is_a_key_that_is_left_out_where_verl_means_that() -> None:
    names = (
        "trainer.total_training_steps",
        "trainer.max_actor_ckpt_to_keep",
        "rllm.agent.trajectory_timeout",
    )
    assert config_of(*(f"{name}=null" for name in names)) == config_of()


def test_a_section_that_is_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`data` is 3, .*counterpart"):
        translate(["data=3", "data.train_batch_size=8"], 64)


def test_another_model_for_the_critic_is_refused() -> None:
    both = ("algorithm.adv_estimator=gae", "critic.model.path=other")
    with pytest.raises(ConfigError, match=r"critic .*weights"):
        config_of(*both)


def test_two_places_for_the_divergence_are_refused() -> None:
    with pytest.raises(ConfigError, match="both true"):
        config_of("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True")


def test_our_own_configurations_are_left_alone() -> None:
    assert not is_published({"algorithm": {"estimator": "rloo"}, "critic": {"trunk": "separate"}})
    assert not is_published(["algorithm.estimator=rloo"])
    assert is_published({"data": {"train_batch_size": 4}})


def test_the_trainer_takes_them_with_the_backend_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.integrations.verl.kind.require_installed", lambda: None)
    trainer = AgentTrainer(
        {
            "actor_rollout_ref": {"model": {"path": "builtin:tiny"}, "rollout": {"n": 4}},
            "algorithm": {"adv_estimator": "rloo"},
            "data": {"train_batch_size": 2, "max_prompt_length": 64, "max_response_length": 8},
            "trainer": {"total_epochs": 3, "nnodes": 1},
        },
        [{"task_id": str(number), "rows": ["SF", "HG"]} for number in range(4)],
        backend="verl",
        agent_class=ConversationAgent,
        env_class=FrozenLakeEnv,
    )
    assert (trainer.config.backend, trainer.config.steps) == ("verl", 6)
    assert trainer.config.rollout.group_size == 4
