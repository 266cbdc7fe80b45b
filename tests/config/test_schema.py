import math

import pytest

from rllm.algorithms.aggregation import AGGREGATIONS
from rllm.algorithms.estimators import ESTIMATORS
from rllm.algorithms.grouping import CREDITS
from rllm.algorithms.kl import KL_KINDS
from rllm.algorithms.surrogates import SURROGATES
from rllm.config import TrainConfig, load_config
from rllm.config.algorithm import AGGREGATIONS as CONFIGURED_AGGREGATIONS
from rllm.config.algorithm import CREDITS as CONFIGURED_CREDITS
from rllm.config.algorithm import KL_KINDS as CONFIGURED_KL_KINDS
from rllm.config.algorithm import LOSSES
from rllm.config.learning import WITH_CRITIC, WITH_GREEDY, WITH_OWN_CREDIT
from rllm.errors import ConfigError

AT_LEAST = {
    "seed": 0,
    "steps": 0,
    "threads": 0,
    "task.num_train_tasks": 1,
    "inference.num_slots": 0,
    "inference.max_context": 2,
    "inference.max_prefill_tokens": 1,
    "inference.cache_tokens": 0,
    "rollout.group_size": 1,
    "rollout.max_turns": 1,
    "rollout.max_tokens_per_turn": -1,
    "rollout.num_parallel": 1,
    "rollout.env_workers": 1,
    "rollout.retry_limit": 1,
    "algorithm.updates_per_step": 1,
    "optimizer.warmup_steps": -1,
    "optimizer.micro_batch_tokens": 0,
    "warm_start.steps": -1,
    "warm_start.episodes_per_step": 1,
    "evaluation.num_tasks": 1,
    "evaluation.every_steps": -1,
    "evaluation.patience": 0,
    "evaluation.every_num_tasks": 1,
    "checkpoint.every_steps": 0,
    "checkpoint.keep": 1,
}
ABOVE_ZERO = [
    "rollout.step_timeout_s",
    "rollout.episode_timeout_s",
    "rollout.temperature",
    "optimizer.max_grad_norm",
]
BETWEEN = {
    "algorithm.gamma": (0.0, 1.0),
    "rollout.max_failed_fraction": (0.0, 1.0),
    "optimizer.final_lr_fraction": (0.0, 1.0),
    "warm_start.noise": (0.0, 1.0),
    "optimizer.beta1": (0.0, math.nextafter(1.0, 0.0)),
    "optimizer.beta2": (0.0, math.nextafter(1.0, 0.0)),
    "optimizer.weight_decay": (0.0, 1e9),
    "rollout.truncation.penalty": (0.0, 1e9),
    "algorithm.clip_low": (0.0, 1.0),
    "algorithm.clip_high": (0.0, 1e9),
    "algorithm.kl_coef": (0.0, 1e9),
}
CHOICES = {
    "algorithm.loss": ["ppo"],
    "algorithm.old_logprobs": ["sampler", "trainer"],
    "rollout.truncation.max_turns": ["mask", "zero", "penalise", "keep"],
    "rollout.truncation.prompt_length": ["mask", "zero", "penalise", "keep"],
    "rollout.truncation.response_length": ["mask", "zero", "penalise", "keep"],
    "rollout.truncation.timeout": ["mask", "zero", "penalise", "keep"],
    "evaluation.split": ["test", "validation"],
}


def test_a_count_below_its_limit_is_refused_with_key_value_and_limit(subtests: pytest.Subtests) -> None:
    for key in AT_LEAST:
        with subtests.test(key=key):
            limit = AT_LEAST[key]
            alone = ["steps=0"] if key == "rollout.group_size" else []
            load_config([*alone, f"{key}={limit}"])
            with pytest.raises(ConfigError, match=f"`{key}` is {limit - 1};.* {limit}"):
                load_config([*alone, f"{key}={limit - 1}"])


def test_what_must_be_positive_is_neither_zero_nor_negative_nor_infinite_nor_nan(
    subtests: pytest.Subtests,
) -> None:
    for key in ABOVE_ZERO:
        with subtests.test(key=key):
            load_config([f"{key}=1e-9"])
            for value in ("0.0", "-1.0", "inf", "nan"):
                with pytest.raises(ConfigError, match=f"`{key}` is .*finite.* 0"):
                    load_config([f"{key}={value}"])
    for key in ("optimizer.learning_rate", "warm_start.learning_rate"):  # 0 is chosen for the model
        with subtests.test(key=key):
            for value in ("-1.0", "inf", "nan"):
                with pytest.raises(ConfigError, match=f"`{key}` is .*finite.* 0"):
                    load_config([f"{key}={value}"])


@pytest.mark.parametrize("key", BETWEEN)
def test_what_has_two_limits_keeps_to_both(key: str) -> None:
    low, high = BETWEEN[key]
    looked_at = ["rollout.truncation.timeout=penalise"] if key == "rollout.truncation.penalty" else []
    load_config([*looked_at, f"{key}={low!r}"])
    load_config([*looked_at, f"{key}={high!r}"])
    too_much = "inf" if high == 1e9 else repr(math.nextafter(high, 2.0))
    for value in (repr(math.nextafter(low, -1.0)), too_much, "nan"):
        with pytest.raises(ConfigError, match=f"`{key}` is"):
            load_config([f"{key}={value}"])


def test_a_choice_is_one_of_those_that_are_named(subtests: pytest.Subtests) -> None:
    for key in CHOICES:
        with subtests.test(key=key):
            for choice in CHOICES[key]:
                load_config([f"{key}={choice}"])
            with pytest.raises(ConfigError, match=f"`{key}` is 'other'.*{', '.join(CHOICES[key])}"):
                load_config([f"{key}=other"])


def test_a_group_of_one_is_refused_where_attempts_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"`rollout.group_size` is 1;.*grpo"):
        load_config(["rollout.group_size=1"])
    assert load_config(["rollout.group_size=1", "steps=0"]).rollout.group_size == 1
    whole_step = ["rollout.group_size=1", "algorithm.estimator=reinforce_plus_plus"]
    assert load_config(whole_step).rollout.group_size == 1


@pytest.mark.parametrize("assignment", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_truncated_sampling_is_refused_for_training(assignment: str) -> None:
    with pytest.raises(ConfigError, match="training needs top_p = 1 and top_k = 0"):
        load_config([assignment])


def test_more_updates_than_groups_are_refused() -> None:
    load_config(["rollout.tasks_per_step=4", "algorithm.updates_per_step=4"])
    with pytest.raises(ConfigError, match="3 groups"):
        load_config(["rollout.tasks_per_step=3", "algorithm.updates_per_step=4"])


def test_tasks_per_step_has_a_floor() -> None:
    with pytest.raises(ConfigError, match=r"`rollout.tasks_per_step` is 0;.* 1"):
        load_config(["rollout.tasks_per_step=0"])


GAE = ["algorithm.estimator=gae", "critic.trunk=separate"]
KL = ["algorithm.kl_coef=0.1"]
CORRECTED = ["algorithm.old_logprobs=trainer", "algorithm.correction=truncate"]
REFUSED = {
    r"`algorithm.estimator`.*'gae'.*critic": ["algorithm.estimator=gae"],
    r"`roles.solver.estimator`.*'gae'.*critic": ["roles.solver.estimator=gae"],
    r"`critic.trunk`.*'separate'.*nothing": ["critic.trunk=separate"],
    "`critic.trunk` is \"shared\", but `roles.judge.estimator` is 'rloo'": [
        "algorithm.estimator=gae",
        "critic.trunk=shared",
        "roles.judge.estimator=rloo",
    ],
    r"`critic.clip`.*0.1.*nothing": ["critic.clip=0.1"],
    r"`critic.coef`.*0.1.*nothing": [*GAE, "critic.coef=0.1"],
    "`critic.coef` is 0.0": ["algorithm.estimator=gae", "critic.trunk=shared", "critic.coef=0.0"],
    r"`critic.learning_rate`.*0.1.*nothing": [
        "algorithm.estimator=gae",
        "critic.trunk=shared",
        "critic.learning_rate=0.1",
    ],
    "`critic.warmup_steps` is 9 and `steps` is 9": [*GAE, "critic.warmup_steps=9", "steps=9"],
    r"`algorithm.gae_lambda`.*0.5.*nothing": ["algorithm.gae_lambda=0.5"],
    r"`algorithm.pass_k`.*2.*nothing.*choose.*pass_at_k": ["algorithm.pass_k=2"],
    r"`algorithm.pass_k`.*1.*2": [
        "algorithm.estimator=pass_at_k",
        "algorithm.pass_k=1",
    ],
    "`algorithm.pass_k` is 9 and `rollout.group_size` is 8": [
        "algorithm.estimator=pass_at_k",
        "algorithm.pass_k=9",
        "rollout.group_size=8",
    ],
    r"`algorithm.gigpo_omega`.*0.5.*nothing": ["algorithm.gigpo_omega=0.5"],
    r"`algorithm.gigpo_norm`.*'none'.*nothing": ["algorithm.gigpo_norm=none"],
    r"`algorithm.gigpo_norm`.*'mean'.*std, none": [
        "algorithm.estimator=gigpo",
        "algorithm.gigpo_norm=mean",
    ],
    "`algorithm.credit` is 'turn', but `algorithm.estimator` is 'gae'": [*GAE, "algorithm.credit=turn"],
    '`algorithm.credit` is "discounted" but `algorithm.gamma` is 1.0': ["algorithm.credit=discounted"],
    r"`algorithm.clip_low`.*0.1.*nothing": [
        "algorithm.loss=policy_gradient",
        "algorithm.clip_low=0.1",
    ],
    r"`algorithm.dual_clip`.*3.0.*nothing here.*choose ppo": [
        "algorithm.loss=gspo",
        "algorithm.dual_clip=3.0",
    ],
    r"`algorithm.dual_clip`.*0.5.*above 1": ["algorithm.dual_clip=0.5"],
    r"`algorithm.sapo_negative`.*2.0.*nothing here.*choose sapo": ["algorithm.sapo_negative=2.0"],
    r"`algorithm.aggregation_constant`.*9.*nothing": ["algorithm.aggregation_constant=9"],
    "`algorithm.aggregation_constant` is 0; `constant` divides by it": ["algorithm.aggregation=constant"],
    r"`algorithm.kl_target`.*0.1.*nothing": ["algorithm.kl_target=0.1"],
    r"`algorithm.kl_kind`.*'k1'.*nothing": ["algorithm.kl_kind=k1"],
    r"`algorithm.kl_in`.*'reward'.*nothing": ["algorithm.kl_in=reward"],
    r"`algorithm.kl_horizon`.*7.*nothing": [*KL, "algorithm.kl_horizon=7"],
    "`algorithm.kl_kind` is 'k3\\+', which differs from 'k3' in its gradient": [
        *KL,
        "algorithm.kl_in=reward",
        "algorithm.kl_kind=k3+",
    ],
    '`algorithm.kl_in` is "reward" and `algorithm.credit` is "turn"': [
        *KL,
        "algorithm.kl_in=reward",
        "algorithm.credit=turn",
    ],
    "`algorithm.correction` is 'mask', but `algorithm.old_logprobs` is 'sampler'": [
        "algorithm.correction=mask"
    ],
    r"`algorithm.correction_level`.*'sequence'.*nothing": ["algorithm.correction_level=sequence"],
    "`algorithm.correction_low` is 1.5 and `correction_high` is 2.0": [
        *CORRECTED,
        "algorithm.correction_low=1.5",
    ],
    r"`filters.max_rounds`.*3.*nothing": ["filters.max_rounds=3"],
    r"`filters.max_rounds`.*1.*2": ["filters.dynamic=true", "filters.max_rounds=1"],
    "`rollout.group_size` is 1, and with `filters.dynamic` groups are rejected": [
        "filters.dynamic=true",
        "rollout.group_size=1",
        "algorithm.estimator=reinforce",
    ],
    "`rollout.group_size` is 1, and with `filters.min_reward_std` groups are rejected": [
        "filters.min_reward_std=0.1",
        "rollout.group_size=1",
        "algorithm.estimator=reinforce",
    ],
    "`filters.first_attempts` is 1 and `rollout.group_size` is 8": ["filters.first_attempts=1"],
    "`filters.first_attempts` is 8 and `rollout.group_size` is 8": ["filters.first_attempts=8"],
    "`filters.first_attempts` is 2, but `algorithm.estimator` is 'gpg'": [
        "filters.first_attempts=2",
        "algorithm.estimator=gpg",
    ],
    "`filters.first_attempts` is 2, but `roles.solver.estimator` is 'reinforce'": [
        "filters.first_attempts=2",
        "roles.solver.estimator=reinforce",
    ],
    '`filters.first_attempts` is 2, but `algorithm.credit` is "turn"': [
        "filters.first_attempts=2",
        "algorithm.credit=turn",
    ],
    '`filters.first_attempts` is 2, but `algorithm.kl_in` is "reward"': [
        *KL,
        "filters.first_attempts=2",
        "algorithm.kl_in=reward",
        "algorithm.kl_kind=k1",
    ],
    "`filters.first_attempts` is 2 and `schedule.max_staleness` is 1: .* newer weights": [
        "filters.first_attempts=2",
        "schedule.kind=async",
        "inference.lockstep=false",
    ],
    r"`filters.overlong_penalty`.*0.5.*nothing": ["filters.overlong_penalty=0.5"],
    "`filters.overlong_buffer` is 4 and `rollout.max_tokens_per_turn` is 4": [
        "filters.overlong_buffer=4",
        "rollout.max_tokens_per_turn=4",
    ],
    "`filters.overlong_buffer` is 2 and `roles.solver.max_tokens` is 2": [
        "filters.overlong_buffer=2",
        "roles.solver.max_tokens=2",
    ],
    "`filters.overlong_buffer` is 2 but `filters.overlong_penalty` is 0.0": [
        "filters.overlong_buffer=2",
        "filters.overlong_penalty=0.0",
    ],
    "`checkpoint.background` is true, and `backend` is 'tinker'": [
        "checkpoint.background=true",
        "backend=tinker",
    ],
    r"`rollout.group_size`.*1; rloo": ["rollout.group_size=1", "algorithm.estimator=rloo"],
    r"`rollout.group_size`.*1; grpo": [
        "rollout.group_size=1",
        "algorithm.estimator=reinforce",
        "roles.judge.estimator=grpo",
    ],
}


def test_what_would_do_nothing_or_cannot_be_done_is_refused_with_what_to_do(
    subtests: pytest.Subtests,
) -> None:
    for message in REFUSED:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            load_config(REFUSED[message])


def test_what_belongs_together_is_taken(subtests: pytest.Subtests) -> None:
    for assignments in [
        GAE,
        [
            *GAE,
            "algorithm.gae_lambda=1.0",
            "critic.warmup_steps=5",
            "critic.learning_rate=0.1",
            "critic.clip=0",
        ],
        ["algorithm.estimator=gae", "critic.trunk=shared", "critic.coef=1"],
        ["algorithm.estimator=remax", "rollout.group_size=1", "algorithm.credit=turn"],
        ["algorithm.credit=discounted", "algorithm.gamma=0.9"],
        ["algorithm.loss=gspo", "algorithm.clip_high=0.0004"],
        ["algorithm.estimator=pass_at_k", "rollout.group_size=8", "algorithm.pass_k=8"],
        ["roles.solver.estimator=gigpo", "algorithm.gigpo_omega=0", "algorithm.gigpo_norm=none"],
        ["algorithm.loss=sapo", "algorithm.sapo_positive=2"],
        ["algorithm.loss=my_file.py:my_loss", "algorithm.estimator=my_file.py:my_estimator"],
        ["algorithm.aggregation=constant", "algorithm.aggregation_constant=64"],
        [*KL, "algorithm.kl_in=reward", "algorithm.kl_kind=k1", "algorithm.kl_target=0.1"],
        [*KL, "algorithm.kl_kind=k3+", "algorithm.kl_target=0.1", "algorithm.kl_horizon=3"],
        [*CORRECTED, "algorithm.correction_level=geometric", "algorithm.correction_high=5"],
        ["filters.dynamic=true", "filters.max_rounds=9", "filters.min_reward_std=0.1"],
        ["filters.overlong_buffer=2", "filters.overlong_penalty=0.5"],
        ["filters.first_attempts=2", "filters.dynamic=true", "algorithm.estimator=my_file.py:mine"],
    ]:
        with subtests.test(assignments=assignments):
            config = load_config(assignments)
            assert load_config(config) == config


def test_a_policy_needs_a_critic_where_one_of_its_roles_asks_it() -> None:
    pair = ["policies.solver.path=builtin:tiny", "policies.judge.path=builtin:tiny", "critic.trunk=separate"]
    config = load_config([*pair, "roles.solver.estimator=gae"])
    assert [config.needs_critic(name) for name in ("solver", "judge")] == [True, False]
    config = load_config([*pair, "algorithm.estimator=gae"])
    assert [config.needs_critic(name) for name in ("solver", "judge")] == [True, True]


def test_the_names_of_the_configuration_are_those_of_the_algorithms() -> None:
    assert set(LOSSES) == set(SURROGATES)
    assert set(CONFIGURED_AGGREGATIONS) == {*AGGREGATIONS, "constant"}
    assert CONFIGURED_KL_KINDS == KL_KINDS
    assert set(CONFIGURED_CREDITS) == set(CREDITS)
    assert set(WITH_CRITIC) == {name for name, rule in ESTIMATORS.items() if rule.needs_critic}
    assert set(WITH_GREEDY) == {name for name, rule in ESTIMATORS.items() if rule.needs_greedy}
    assert set(WITH_OWN_CREDIT) == {name for name, rule in ESTIMATORS.items() if rule.tells_turns_apart}


def test_the_defaults_are_a_configuration_that_can_be_run() -> None:
    TrainConfig().validate()


def test_what_follows_from_the_keys_is_counted() -> None:
    config = load_config(
        [
            "steps=10",
            "rollout.tasks_per_step=3",
            "rollout.group_size=4",
            "rollout.max_turns=5",
            "rollout.max_tokens_per_turn=2",
            "inference.max_context=512",
            "algorithm.updates_per_step=2",
            "warm_start.steps=7",
            "warm_start.episodes_per_step=6",
        ]
    )
    assert config.derived() == {
        "cache_tokens": 256 * 512,
        "groups_per_step": 3,
        "episodes_per_step": 12,
        "greedy_episodes_per_step": 0,
        "most_episodes_per_step": 12,
        "episodes_in_total": 120,
        "most_episodes_in_total": 120,
        "optimizer_updates_per_step": 2,
        "optimizer_updates": 27,
        "most_sampled_tokens_per_step": 120,
        "evaluate_every_steps": 11,
        "demonstrations": 42,
    }


def test_rounds_and_greedy_attempts_are_among_what_a_step_may_sample() -> None:
    config = load_config(
        [
            "algorithm.estimator=remax",
            "filters.dynamic=true",
            "filters.max_rounds=3",
            "rollout.tasks_per_step=3",
            "rollout.group_size=4",
        ]
    )
    derived = config.derived()
    assert (derived["episodes_per_step"], derived["greedy_episodes_per_step"]) == (12, 3)
    assert derived["most_episodes_per_step"] == 39
    first = load_config(["filters.first_attempts=2", "rollout.tasks_per_step=3", "rollout.group_size=4"])
    assert first.derived()["fewest_episodes_per_step"] == 6
