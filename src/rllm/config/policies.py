"""Several agents and several models in one run: `[policies.NAME]` and `[roles.NAME]`.

    role (the name of a trajectory) ──► policy (weights, optimizer, version) ──► model directory
      └ estimator, sampling, weight       └ trainable or frozen

Without `[policies]` there is one policy, named `policy`, made from `[model]`, and every role is played by it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rllm.config.limits import at_least, finite, one_of
from rllm.errors import ConfigError

ESTIMATORS = {"grpo": True, "dr_grpo": True, "reinforce_plus_plus": False, "reinforce": False}
"""Name -> whether it compares the attempts at one task with each other, and so needs two of them."""
ONLY_POLICY = "policy"
"""Name of the policy of a run that names none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """One model of the run."""

    path: str = ""
    """As `model.path`, which it is where empty. Each policy has weights of its own, also of the same path."""
    trainable: bool = True
    """False: it plays its roles and is never updated."""
    learning_rate: float = 0.0
    """Peak of its reinforcement learning; 0 takes `optimizer.learning_rate`."""


@dataclass(kw_only=True, slots=True)
class RoleConfig:
    """How one role plays and learns."""

    policy: str = ""
    """Which policy plays it; where empty the only one, or the one that bears the role's name."""
    estimator: str = ""
    """Its advantage estimator; `algorithm.estimator` where empty."""
    temperature: float = 0.0
    """Its sampling temperature in training; 0 takes `rollout.temperature`."""
    max_tokens: int = 0
    """Of one answer; 0 takes `rollout.max_tokens_per_turn`."""
    reward_weight: float = 1.0
    """What its advantages are multiplied by: how much it counts beside other roles of the same policy. It is
    applied behind the estimator, which would divide it out again. 0: nothing is learned from it."""
    history: str = "keep"
    """`keep`, the only one there is: the next prompt of a conversation goes on behind the ids of all that it
    has said, thoughts included, as long as the model's chat template keeps them; a segment begins where it
    does not."""


def validate_policies(policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig]) -> None:
    """Raises ConfigError for the first key that cannot be honoured."""
    for name, policy in policies.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"`policies.{name}` names a directory of the run; use letters, digits, `_` and `-`."
            )
        finite(f"policies.{name}.learning_rate", policy.learning_rate)
        if not policy.trainable and policy.learning_rate:
            raise ConfigError(
                f"`policies.{name}.learning_rate` is {policy.learning_rate}, but the policy is frozen; leave "
                "it out, or set `trainable = true`."
            )
    for name, role in roles.items():
        if role.estimator:
            one_of(f"roles.{name}.estimator", role.estimator, tuple(ESTIMATORS))
        one_of(f"roles.{name}.history", role.history, ("keep",))
        finite(f"roles.{name}.temperature", role.temperature)
        finite(f"roles.{name}.reward_weight", role.reward_weight)
        at_least(f"roles.{name}.max_tokens", role.max_tokens, 0)
        policy_of_role(name, policies, roles)
    if policies and not any(policy.trainable for policy in policies.values()):
        raise ConfigError(
            f"No policy is trainable ({', '.join(policies)}); set `trainable = true` for one of them, or "
            "measure them with `rllm eval`."
        )


def policy_of_role(role: str, policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig]) -> str:
    """Name of the policy that plays `role`.

    Raises ConfigError where several could, or the one that is named does not exist.
    """
    names = tuple(policies) or (ONLY_POLICY,)
    named = roles[role].policy if role in roles else ""
    if named:
        if named not in names:
            raise ConfigError(
                f"`roles.{role}.policy` is {named!r}, but there is no such policy; choose one of "
                f"{', '.join(names)}."
            )
        return named
    if len(names) == 1:
        return names[0]
    if role in names:
        return role
    raise ConfigError(
        f"The run has the policies {', '.join(names)}, and none is chosen for the role `{role}`; set "
        f"`roles.{role}.policy`."
    )


@dataclass(kw_only=True, slots=True)
class TruncationConfig:
    """What becomes of a trajectory that a limit cut off, by the limit.

    `keep`: paid as it was until then, compared and learned from. `zero`: paid 0 instead. `penalise`: paid
    `penalty` less. `mask`: neither compared nor learned from.
    """

    max_turns: str = "keep"
    prompt_length: str = "mask"
    response_length: str = "mask"
    timeout: str = "mask"
    penalty: float = 1.0

    def validate(self) -> None:
        for limit in ("max_turns", "prompt_length", "response_length", "timeout"):
            treatment = getattr(self, limit)
            one_of(f"rollout.truncation.{limit}", treatment, ("mask", "zero", "penalise", "keep"))
        finite("rollout.truncation.penalty", self.penalty)
