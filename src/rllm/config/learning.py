"""Agreements between the keys of `[algorithm]`, `[critic]`, `[filters]` and `[rollout]`."""

from collections.abc import Mapping

from rllm.config.algorithm import AlgorithmConfig, is_own
from rllm.config.critic import CriticConfig
from rllm.config.distill import TEACHER
from rllm.config.filters import FiltersConfig
from rllm.config.limits import unused
from rllm.config.policies import ESTIMATORS, RoleConfig
from rllm.errors import ConfigError

WITH_CRITIC = ("gae",)
"""Estimators that ask a critic."""
WITH_GREEDY = ("remax",)
"""Estimators that compare with one more attempt at each task, by the likeliest tokens."""
WITH_GAMMA = ("gae", "gigpo")
"""Estimators that discount, whatever the credit."""
OWN_KEYS = {"gae_lambda": "gae", "pass_k": "pass_at_k", "gigpo_omega": "gigpo", "gigpo_norm": "gigpo"}
"""Keys of `[algorithm]` that one estimator alone looks at."""
WITH_OWN_TIES = ("gpg",)
"""Estimators whose advantages are the larger the more groups tie."""
WITH_OWN_CREDIT = ("gae", "gigpo", TEACHER)
"""Estimators that tell the turns of a trajectory apart themselves."""

WITH_FIRST_ATTEMPTS = ("grpo", "dr_grpo", "rloo", "opo", "maxrl", "pass_at_k")
"""Estimators of which a group depends on no other group and gets zeros where its attempts are paid alike."""


def estimator_keys(algorithm: AlgorithmConfig, roles: Mapping[str, RoleConfig]) -> dict[str, str]:
    """Key -> the estimator that it names."""
    of_roles = {f"roles.{name}.estimator": role.estimator for name, role in roles.items() if role.estimator}
    return {"algorithm.estimator": algorithm.estimator, **of_roles}


def validate_estimators(
    algorithm: AlgorithmConfig, critic: CriticConfig, roles: Mapping[str, RoleConfig]
) -> None:
    """Raises ConfigError for an estimator that lacks what it asks, and for what no estimator looks at."""
    keys = estimator_keys(algorithm, roles)
    for key, name in keys.items():
        if name in WITH_CRITIC and not critic.is_on:
            raise ConfigError(
                f'`{key}` is {name!r}, which asks a critic, and `critic.trunk` is "none"; set it to '
                '"separate" or "shared", or choose an estimator without one, such as "rloo".'
            )
        if name in WITH_OWN_CREDIT and algorithm.credit != "trajectory":
            raise ConfigError(
                f"`algorithm.credit` is {algorithm.credit!r}, but `{key}` is {name!r}, which credits the "
                'turns of an attempt in its own way; set the credit to "trajectory".'
            )
        if name in WITH_OWN_TIES and algorithm.ties == "drop":
            raise ConfigError(
                f"`algorithm.ties` is 'drop', but `{key}` is {name!r}, which makes up for groups that tie by "
                'its own factor: dropping them would do so twice. Set it to "count".'
            )
    if not any(ESTIMATORS.get(name, is_own(name)) for name in keys.values()):
        why = f"{algorithm.estimator} compares no attempts at one task, so none of its groups tie"
        unused("algorithm", algorithm, "ties", why)
    if not set(keys.values()) & set(WITH_CRITIC):
        choose = f"choose the estimator {' or '.join(WITH_CRITIC)}"
        unused("critic", critic, "trunk", f"no estimator asks a critic; {choose}")
    for name, estimator in OWN_KEYS.items():
        if estimator not in keys.values():
            why = f"the estimator is `{algorithm.estimator}`; choose the estimator {estimator}"
            unused("algorithm", algorithm, name, why)
    others = {key: name for key, name in keys.items() if name not in WITH_CRITIC}
    if others and critic.trunk == "shared":
        key, name = next(iter(others.items()))
        raise ConfigError(
            f'`critic.trunk` is "shared", but `{key}` is {name!r}, which has no use for a critic; set the '
            f'trunk to "separate", or the estimator to {WITH_CRITIC[0]!r}.'
        )
    if algorithm.credit == "discounted" and algorithm.gamma == 1.0:
        raise ConfigError(
            '`algorithm.credit` is "discounted" but `algorithm.gamma` is 1.0, so nothing is discounted; '
            'set gamma below 1, or the credit to "trajectory".'
        )
    if algorithm.kl_in == "reward" and algorithm.credit == "turn":
        raise ConfigError(
            '`algorithm.kl_in` is "reward" and `algorithm.credit` is "turn": the divergence is subtracted '
            'from what a trajectory is paid, not turn by turn. Set `kl_in` to "loss", or the credit to '
            '"trajectory".'
        )


def validate_groups(
    algorithm: AlgorithmConfig,
    filters: FiltersConfig,
    roles: Mapping[str, RoleConfig],
    *,
    group_size: int,
    tasks_per_step: int,
) -> None:
    """Raises ConfigError for groups that are too small to be compared or too few to be shared out."""
    for name in estimator_keys(algorithm, roles).values():
        if ESTIMATORS.get(name, False) and group_size < 2:
            raise ConfigError(
                f"`rollout.group_size` is {group_size}; {name} compares attempts at one task with each "
                "other, so set it to 2 or more."
            )
    if algorithm.pass_k > group_size:
        raise ConfigError(
            f"`algorithm.pass_k` is {algorithm.pass_k} and `rollout.group_size` is {group_size}; nothing "
            "tells the best of more attempts than there are: lower the one or raise the other."
        )
    if filters.rejects and group_size < 2:
        key = "dynamic" if filters.dynamic else "min_reward_std"
        raise ConfigError(
            f"`rollout.group_size` is {group_size}, and with `filters.{key}` groups are rejected whose "
            "rewards are alike, as those of one attempt always are; set it to 2 or more."
        )
    if algorithm.updates_per_step > tasks_per_step:
        raise ConfigError(
            f"`algorithm.updates_per_step` is {algorithm.updates_per_step} but a step has only "
            f"{tasks_per_step} groups to share out; raise `rollout.tasks_per_step` or lower it."
        )


def validate_first_attempts(
    algorithm: AlgorithmConfig,
    filters: FiltersConfig,
    roles: Mapping[str, RoleConfig],
    *,
    group_size: int,
    steps_ahead: int,
) -> None:
    """Raises ConfigError for `filters.first_attempts` where a group could not be stopped after them."""
    first = filters.first_attempts
    where = f"`filters.first_attempts` is {first}"
    if first == 0:
        return
    if not 2 <= first < group_size:
        raise ConfigError(
            f"{where} and `rollout.group_size` is {group_size}; set it to 2 at least and below the size of "
            "the group, or to 0, which plays whole groups at once."
        )
    for key, name in estimator_keys(algorithm, roles).items():
        if name not in WITH_FIRST_ATTEMPTS and not is_own(name):
            raise ConfigError(
                f"{where}, but `{key}` is {name!r}, which may learn from attempts that were paid alike; "
                f"choose one of {', '.join(WITH_FIRST_ATTEMPTS)}, or set `filters.first_attempts` to 0."
            )
    if algorithm.credit == "turn":
        raise ConfigError(
            f'{where}, but `algorithm.credit` is "turn", which may learn from attempts that were paid alike; '
            'set the credit to "trajectory" or "discounted".'
        )
    if algorithm.kl_coef and algorithm.kl_in == "reward":
        raise ConfigError(
            f'{where}, but `algorithm.kl_in` is "reward", so that no two attempts are paid alike; set it to '
            '"loss".'
        )
    if steps_ahead:
        raise ConfigError(
            f"{where} and `schedule.max_staleness` is {steps_ahead}: the rest of a group would be played by "
            'newer weights than its first attempts. Set `schedule.kind` to "sync".'
        )


def validate_overlong(
    filters: FiltersConfig, roles: Mapping[str, RoleConfig], *, max_tokens_per_turn: int
) -> None:
    """Raises ConfigError for a buffer that is as long as an answer may be."""
    if not filters.overlong_buffer:
        return
    limits = {"rollout.max_tokens_per_turn": max_tokens_per_turn}
    limits |= {f"roles.{name}.max_tokens": role.max_tokens for name, role in roles.items() if role.max_tokens}
    for key, limit in limits.items():
        if -1 < limit <= filters.overlong_buffer:  # -1 is open until the run has chosen it
            raise ConfigError(
                f"`filters.overlong_buffer` is {filters.overlong_buffer} and `{key}` is {limit}; an answer "
                "is overlong in the last part of what it may be long, so set the limit above the buffer."
            )
