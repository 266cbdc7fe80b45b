"""Several agents and several models in one run: `[policies.NAME]` and `[roles.NAME]`.

    role (the name of a trajectory) ──► policy (weights, optimizer, version) ──► model directory
      └ estimator, sampling, weight       └ trainable or frozen

Without `[policies]` there is one policy, named `policy`, made from `[model]`, and every role is played by it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rllm.config.limits import at_least, finite, one_of, unused
from rllm.config.lora import LoraConfig, require_scale_and_targets
from rllm.errors import ConfigError, choices_of

ESTIMATORS = {
    "grpo": True,
    "dr_grpo": True,
    "rloo": True,
    "opo": True,
    "maxrl": True,
    "pass_at_k": True,
    "gigpo": True,
    "gpg": True,
    "reinforce_plus_plus_baseline": True,
    "reinforce_plus_plus": False,
    "reinforce_baseline": False,
    "prpo": False,
    "reinforce": False,
    "remax": False,
    "gae": False,
    "teacher": False,
}
"""Name -> whether it compares the attempts at one task with each other, and so needs two of them."""
ONLY_POLICY = "policy"
"""Name of the policy of a run that names none."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    """One model of the run."""

    path: str = ""
    """As `model.path`, which it is where empty. Each policy has weights of its own, also of the same path;
    policies that train adapters share what these stand beside."""
    trainable: bool = True
    """False: it plays its roles and is never updated."""
    learning_rate: float = 0.0
    """Peak of its reinforcement learning; 0 takes `optimizer.learning_rate`."""
    lora_rank: int = -1
    """As `lora.rank`, which -1 takes: 0 trains the weights themselves."""
    lora_alpha: float = 0.0
    """As `lora.alpha`, which 0 takes."""
    lora_targets: list[str] = field(default_factory=list[str])
    """As `lora.targets`, which it is where empty."""
    servers: list[str] = field(default_factory=list[str])
    """As `inference.servers`, in a run with several policies: the servers that sample this one alone."""


@dataclass(kw_only=True, slots=True)
class RoleConfig:
    """Settings with which one role plays and learns."""

    policy: str = ""
    """Which policy plays it; where empty the only one, or the one that bears the role's name."""
    estimator: str = ""
    """Its advantage estimator; `algorithm.estimator` where empty."""
    temperature: float = 0.0
    """Its sampling temperature in training; 0 takes `rollout.temperature`."""
    max_tokens: int = 0
    """Maximum tokens per answer; 0 takes `rollout.max_tokens_per_turn`."""
    reward_weight: float = 1.0
    """The factor of its advantages: its weight beside other roles of the same policy. It is applied after the
    estimator, which would divide it out again. With 0 nothing is learned from it: its rows are left out, also
    of the means of the loss, as those of a frozen policy are."""
    history: str = "keep"
    """`keep`: the next prompt of a conversation goes on behind the ids of all that it has said, thoughts
    included, as long as the model's chat template keeps them; a segment begins where it does not. `strip`:
    the thoughts of earlier answers are not sent again, so each turn is a segment of its own, with the prompt
    that was really sent."""


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
        if role.estimator and ":" not in role.estimator:  # `file.py:function` is one of the user's own
            one_of(f"roles.{name}.estimator", role.estimator, tuple(ESTIMATORS))
        one_of(f"roles.{name}.history", role.history, ("keep", "strip"))
        finite(f"roles.{name}.temperature", role.temperature)
        finite(f"roles.{name}.reward_weight", role.reward_weight)
        at_least(f"roles.{name}.max_tokens", role.max_tokens, 0)
        policy_of_role(name, policies, roles)
    if policies and not any(policy.trainable for policy in policies.values()):
        raise ConfigError(
            f"No policy is trainable ({', '.join(policies)}); set `trainable = true` for one of them, or "
            "measure them with `rllm eval`."
        )


def adapter_of(policy: PolicyConfig, lora: LoraConfig) -> LoraConfig:
    """The adapter that is trained instead of the policy's weights; of rank 0 where none is."""
    if not policy.trainable:
        return LoraConfig()
    rank = lora.rank if policy.lora_rank < 0 else policy.lora_rank
    return LoraConfig(
        rank=rank,
        alpha=policy.lora_alpha or lora.alpha,
        dropout=lora.dropout,
        targets=policy.lora_targets or lora.targets,
        base_dtype=lora.base_dtype if rank else "auto",
    )


def validate_adapters(policies: Mapping[str, PolicyConfig], lora: LoraConfig) -> None:
    """Raises ConfigError for an adapter that cannot be, and for a key of one that nobody trains."""
    for name, policy in policies.items():
        at_least(f"policies.{name}.lora_rank", policy.lora_rank, -1)
        finite(f"policies.{name}.lora_alpha", policy.lora_alpha)
        adapter = adapter_of(policy, lora)
        require_scale_and_targets(f"policies.{name}.lora_", adapter.alpha, adapter.targets)
        why = "it has no adapter; set its `lora_rank`" if policy.trainable else "the policy is frozen"
        for key in ("rank", "alpha", "targets"):
            value = getattr(policy, f"lora_{key}")
            if not adapter.rank and value not in (-1, 0, []):
                raise ConfigError(f"`policies.{name}.lora_{key}` is {value!r}, but {why}, or leave it out.")
    own = [policy.lora_rank >= 0 for policy in policies.values() if policy.trainable]
    if lora.rank and own and all(own):
        raise ConfigError(
            f"`lora.rank` is {lora.rank}, but every policy that learns has a `lora_rank` of its own; "
            "leave it out."
        )


def validate_servers(policies: Mapping[str, PolicyConfig], servers: list[str], num_replicas: int) -> None:
    """Raises ConfigError unless all of them are sampled by servers, in one of three ways.

    `servers`: those of the only policy. `num_replicas`: those that the run starts for each policy.
    """
    own = {f"policies.{name}.servers": policy.servers for name, policy in policies.items()}
    keys = [key for key, urls in own.items() if urls]
    ways = [
        *([f"{num_replicas} `inference.replicas`"] if num_replicas else ()),
        *([f"{len(servers)} `inference.servers`"] if servers else ()),
        *([f"{len(own[key])} `{key}`" for key in keys]),
    ]
    if not ways or (keys and (num_replicas or servers)) or (num_replicas and servers):
        raise ConfigError(
            f"`inference.engine` is 'vllm', with {' and '.join(ways) or 'no servers'}; set one of "
            "`inference.replicas` (servers to start), `inference.servers` (that run, of the only policy), or "
            "`policies.NAME.servers` of every policy."
        )
    if servers and len(policies) > 1:
        raise ConfigError(
            f"There are {len(policies)} policies, and `inference.servers` does not say which servers are "
            f"whose; set {', '.join(f'`{key}`' for key in own)}, or `inference.replicas`."
        )
    if keys and (missing := [key for key in own if key not in keys]):
        raise ConfigError(
            f"`{keys[0]}` is set and {', '.join(f'`{key}`' for key in missing)} not; a policy is sampled by "
            "servers of its own: name them."
        )


def policy_of_role(role: str, policies: Mapping[str, PolicyConfig], roles: Mapping[str, RoleConfig]) -> str:
    """Name of the policy that plays `role`.

    Raises ConfigError where several could, or the one that is named does not exist.
    """
    names = tuple(policies) or (ONLY_POLICY,)
    policy_name = roles[role].policy if role in roles else ""
    if policy_name:
        if policy_name not in names:
            raise ConfigError(
                f"`roles.{role}.policy` is {policy_name!r}, but there is no such policy; "
                f"{choices_of(policy_name, names)}."
            )
        return policy_name
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
    """The treatment of a trajectory that a limit cut off, by the limit.

    `keep`: paid as it was until then, compared and learned from. `zero`: paid 0 instead. `penalise`: paid
    `penalty` less. `mask`: neither compared nor learned from.
    """

    max_turns: str = "keep"
    prompt_length: str = "mask"
    response_length: str = "mask"
    timeout: str = "mask"
    cost: str = "mask"
    penalty: float = 1.0

    def validate(self) -> None:
        limits = ("max_turns", "prompt_length", "response_length", "timeout", "cost")
        for limit in limits:
            treatment = getattr(self, limit)
            one_of(f"rollout.truncation.{limit}", treatment, ("mask", "zero", "penalise", "keep"))
        finite("rollout.truncation.penalty", self.penalty)
        if "penalise" not in [getattr(self, limit) for limit in limits]:
            unused("rollout.truncation", self, "penalty", 'no limit is treated by it; set one to "penalise"')
