import math

import pytest

from rllm.config import TrainConfig, load_config
from rllm.errors import ConfigError

AT_LEAST = {
    "seed": 0,
    "steps": 0,
    "threads": 0,
    "task.num_train_tasks": 1,
    "inference.num_slots": 1,
    "inference.max_context": 2,
    "inference.max_prefill_tokens": 1,
    "rollout.group_size": 1,
    "rollout.max_turns": 1,
    "rollout.max_tokens_per_turn": 0,
    "rollout.num_parallel": 1,
    "rollout.env_workers": 1,
    "rollout.retry_limit": 1,
    "algorithm.updates_per_step": 1,
    "optimizer.warmup_steps": 0,
    "optimizer.micro_batch_tokens": 1,
    "warm_start.steps": 0,
    "warm_start.episodes_per_step": 1,
    "evaluation.num_tasks": 1,
    "evaluation.every_steps": 0,
    "evaluation.every_num_tasks": 1,
    "checkpoint.every_steps": 1,
    "checkpoint.keep": 1,
}
ABOVE_ZERO = [
    "rollout.step_timeout_s",
    "rollout.episode_timeout_s",
    "rollout.temperature",
    "algorithm.clip_high",
    "optimizer.learning_rate",
    "optimizer.max_grad_norm",
    "warm_start.learning_rate",
]
BETWEEN = {
    "algorithm.gamma": (0.0, 1.0),
    "optimizer.final_lr_fraction": (0.0, 1.0),
    "warm_start.noise": (0.0, 1.0),
    "optimizer.beta1": (0.0, math.nextafter(1.0, 0.0)),
    "optimizer.beta2": (0.0, math.nextafter(1.0, 0.0)),
    "optimizer.weight_decay": (0.0, 1e9),
    "rollout.truncation.penalty": (0.0, 1e9),
    "algorithm.clip_low": (math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0)),
}
CHOICES = {
    "algorithm.estimator": ["grpo", "dr_grpo"],
    "algorithm.aggregation": ["token_mean", "sequence_mean"],
    "algorithm.old_logprobs": ["sampler", "trainer"],
    "rollout.truncation.max_turns": ["mask", "zero", "penalise", "keep"],
    "rollout.truncation.prompt_length": ["mask", "zero", "penalise", "keep"],
    "rollout.truncation.response_length": ["mask", "zero", "penalise", "keep"],
    "rollout.truncation.timeout": ["mask", "zero", "penalise", "keep"],
    "evaluation.split": ["test", "validation"],
}


@pytest.mark.parametrize("key", AT_LEAST)
def test_a_count_below_its_limit_is_refused_with_key_value_and_limit(key: str) -> None:
    limit = AT_LEAST[key]
    alone = ["steps=0"] if key == "rollout.group_size" else []
    load_config([*alone, f"{key}={limit}"])
    with pytest.raises(ConfigError, match=f"`{key}` is {limit - 1}; it must be at least {limit}"):
        load_config([*alone, f"{key}={limit - 1}"])


@pytest.mark.parametrize("key", ABOVE_ZERO)
def test_what_must_be_positive_is_neither_zero_nor_negative_nor_infinite_nor_nan(key: str) -> None:
    load_config([f"{key}=1e-9"])
    for value in ("0.0", "-1.0", "inf", "nan"):
        with pytest.raises(ConfigError, match=f"`{key}` is .*must be a finite number above 0"):
            load_config([f"{key}={value}"])


@pytest.mark.parametrize("key", BETWEEN)
def test_what_has_two_limits_keeps_to_both(key: str) -> None:
    low, high = BETWEEN[key]
    load_config([f"{key}={low!r}"])
    load_config([f"{key}={high!r}"])
    too_much = "inf" if high == 1e9 else repr(math.nextafter(high, 2.0))
    for value in (repr(math.nextafter(low, -1.0)), too_much, "nan"):
        with pytest.raises(ConfigError, match=f"`{key}` is"):
            load_config([f"{key}={value}"])


@pytest.mark.parametrize("key", CHOICES)
def test_a_choice_is_one_of_those_that_are_named(key: str) -> None:
    for choice in CHOICES[key]:
        load_config([f"{key}={choice}"])
    with pytest.raises(ConfigError, match=f"`{key}` is 'other'; choose one of {', '.join(CHOICES[key])}"):
        load_config([f"{key}=other"])


def test_a_group_of_one_is_refused_where_attempts_are_compared() -> None:
    with pytest.raises(ConfigError, match=r"`rollout.group_size` is 1; grpo compares attempts"):
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
    with pytest.raises(ConfigError, match="has only 3 groups to share out"):
        load_config(["rollout.tasks_per_step=3", "algorithm.updates_per_step=4"])


def test_tasks_per_step_has_a_floor() -> None:
    with pytest.raises(ConfigError, match=r"`rollout.tasks_per_step` is 0; it must be at least 1"):
        load_config(["rollout.tasks_per_step=0"])


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
            "algorithm.updates_per_step=2",
            "warm_start.steps=7",
            "warm_start.episodes_per_step=6",
        ]
    )
    assert config.derived() == {
        "episodes_per_step": 12,
        "episodes_in_total": 120,
        "optimizer_updates": 27,
        "most_sampled_tokens_per_step": 120,
        "demonstrations": 42,
    }
