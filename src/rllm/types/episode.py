"""The records of play: a Step is one model call, a Trajectory one agent's Steps, an Episode one attempt at
one Task.

    Episode ──► trajectories ──► steps
       │             └ name: the role
       └ id: EpisodeId(task_id, attempt), outcome, termination_reason

All of them have defaults for every field, accept the spellings of published programs (`info`/`metadata`,
`policy_version`/`weight_version`) and round-trip through `to_dict` / `from_dict` and JSON without loss.
"""

import itertools
import os
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from rllm.types.aliases import with_aliases
from rllm.types.messages import Message, ModelOutput
from rllm.types.prefix import shared
from rllm.types.task import EpisodeId

CUT_THOUGHT = "cut_thought"
"""Key in the info of a Step whose answer has a cut thought; see `ModelOutput.has_cut_thought`."""


class TerminationReason(StrEnum):
    """The reason that a rollout ended."""

    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    MAX_COST_EXCEEDED = "max_cost_exceeded"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNKNOWN = "unknown"

    @property
    def is_limit(self) -> bool:
        """A limit of turns, tokens, cost or time ended it."""
        return self in _LIMITS


_LIMITS = frozenset(
    {
        TerminationReason.MAX_TURNS_EXCEEDED,
        TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
        TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
        TerminationReason.MAX_COST_EXCEEDED,
        TerminationReason.TIMEOUT,
    }
)


class Outcome(StrEnum):
    """The outcome of a rollout. Only SCORED and TRUNCATED carry a reward that may be learned from."""

    SCORED = "scored"
    """It ran to its end and was judged."""
    TRUNCATED = "truncated"
    """A limit of turns, tokens, cost or time cut it off; its reward is what had been earned until then."""
    POLICY_FAILURE = "policy_failure"
    """The agent's own code could not go on with what the model wrote."""
    INFRASTRUCTURE_FAILURE = "infrastructure_failure"
    """Engine, environment or network failed: says nothing about the policy, never a reward."""
    CANCELLED = "cancelled"


LEARNABLE = frozenset({Outcome.SCORED, Outcome.TRUNCATED})
"""Outcomes whose reward says something about the policy. A failure is removed and counted: it is never a
zero."""


def ending(outcome: Outcome | None, reason: TerminationReason) -> str:
    """The end of an episode, as reports count it: `env_done`, `timeout`, `policy_failure (timeout)`."""
    if outcome in LEARNABLE:
        return str(outcome if reason is TerminationReason.UNKNOWN else reason)
    name = str(outcome or Outcome.INFRASTRUCTURE_FAILURE)
    says_more = reason not in (TerminationReason.UNKNOWN, TerminationReason.ERROR)
    return f"{name} ({reason})" if says_more else name


class _Ids:
    """Unique without asking the system for random bytes: a rollout makes thousands of steps a second."""

    def __init__(self) -> None:
        self.begin()
        if hasattr(os, "register_at_fork"):  # a child would go on where its parent is, as would its siblings
            os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        self._process, self._numbers = uuid.uuid4().hex[:16], itertools.count()

    def next(self) -> str:
        return f"{self._process}{next(self._numbers):016x}"


_new_id = _Ids().next


@with_aliases(metadata="info", weight_version="policy_version")
@dataclass(kw_only=True, slots=True, weakref_slot=True)
class Step:
    """One model call and the environment's answer to it."""

    id: str = field(default_factory=_new_id)
    prompt_ids: list[int] = field(default_factory=list[int])
    """[P] tokens the model read; filled by the inference client. In a trajectory that an engine made or a
    store gave back, a view of one row of all turns."""
    response_ids: list[int] = field(default_factory=list[int])
    """[R] tokens the model wrote, end token included; filled by the inference client."""
    logprobs: list[float] = field(default_factory=list[float])
    """[R] log-probability of each response token under the weights that sampled it, in nats."""
    policy_versions: list[int] = field(default_factory=list[int])
    """[R] optimizer updates those weights had seen, per token."""
    chat_completions: list[Message] = field(default_factory=list[Message])
    """Messages up to and including this answer; as with `prompt_ids`, a view of one list of all turns."""
    input: Any = None
    """The question of this step as a program notes it, and `output` the answer; both are its own to set."""
    output: Any = None
    observation: Any = None
    """The environment's observation when the model was asked."""
    thought: str = ""
    action: Any = None
    model_response: str = ""
    model_output: ModelOutput | None = None
    reward: float = 0.0
    done: bool = False
    mc_return: float = 0.0
    """Discounted sum of rewards from this step on."""
    advantage: float | list[float] | None = None
    policy_version: int | None = None
    """The oldest version among `policy_versions`."""
    usage: dict[str, int] = field(default_factory=dict[str, int])
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds: `model_s`, that the answer took, of it `queue_s` before the built-in engine began it; `env_s`,
    that the environment took, of it `grader_s` in its graders. An evaluator's `grader_s` stands alone."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("logprobs", "policy_versions"):
            values = getattr(self, name)
            if values and len(values) != len(self.response_ids):
                raise ValueError(
                    f"Step: {len(values)} {name} for {len(self.response_ids)} response_ids; each sampled "
                    "token has one."
                )

    @classmethod
    def from_model_output(
        cls, output: ModelOutput, messages: list[Message], action: Any = None, reward: float = 0.0
    ) -> "Step":
        """The step of a model call: `messages` are what was asked; the answer is added to them."""
        step = cls(
            chat_completions=[*messages, {"role": "assistant", "content": output.text}],
            model_response=output.text,
            thought=output.reasoning,
            action=action,
            reward=reward,
        )
        step.record_output(output)
        return step

    def record_output(self, output: ModelOutput) -> None:
        """Take over tokens, log-probabilities and versions of the model call that this step is made of."""
        self.model_output = output
        if output.queue_s:
            self.timings["queue_s"] = output.queue_s
        self.prompt_ids = output.prompt_ids
        self.response_ids = output.completion_ids
        self.logprobs = output.logprobs
        self.policy_versions = output.policy_versions
        self.policy_version = output.weight_version
        self.usage = output.usage
        if output.has_cut_thought:
            self.info[CUT_THOUGHT] = True

    def share_history(self, earlier: "Step | None") -> None:
        """Make prompt and messages views of the row and the list that `earlier`, the step before, has: cost
        and memory of a trajectory then grow with its turns, and not with their square."""
        ids = None if earlier is None else earlier.prompt_ids
        self.prompt_ids = cast("list[int]", shared(ids, self.prompt_ids, by_value=True))
        messages = None if earlier is None else earlier.chat_completions
        self.chat_completions = cast("list[Message]", shared(messages, self.chat_completions))
        if self.model_output is not None:
            self.model_output.prompt_ids = self.prompt_ids

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["prompt_ids"], data["chat_completions"] = list(self.prompt_ids), list(self.chat_completions)
        data["action"] = self.action.to_dict() if isinstance(self.action, Action) else self.action
        data["model_output"] = None if self.model_output is None else self.model_output.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Step":
        known = dict(data)
        if known.get("model_output") is not None:
            known["model_output"] = ModelOutput.from_dict(known["model_output"])
        action = known.get("action")
        if isinstance(action, dict) and set(action) == {_ACTION_KEY}:  # pyright: ignore[reportUnknownArgumentType]
            known["action"] = Action(action=action[_ACTION_KEY])
        return cls(**known)


_ACTION_KEY = "__action__"


@dataclass(slots=True)
class Action:
    """A move of the agent, parsed from what the model wrote."""

    action: Any = None

    def to_dict(self) -> dict[str, Any]:
        return {_ACTION_KEY: self.action}


@with_aliases(metadata="info", result="output")
@dataclass(kw_only=True, slots=True, weakref_slot=True)
class Trajectory:
    """The steps of one agent in one episode."""

    uid: str = field(default_factory=_new_id)
    name: str = "agent"
    """The role; attempts are compared within a role."""
    task: Any = None
    steps: list[Step] = field(default_factory=list[Step])
    reward: float | None = None
    """The reward of the trajectory; None until somebody scored it."""
    signals: dict[str, float] = field(default_factory=dict[str, float])
    input: Any = None
    output: Any = None
    termination_reason: TerminationReason = TerminationReason.UNKNOWN
    outcome: Outcome | None = None
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def is_cumulative(self) -> bool:
        """True when each step's messages begin with all the messages of the step before."""
        return all(
            later.chat_completions[: len(earlier.chat_completions)] == earlier.chat_completions
            for earlier, later in zip(self.steps, self.steps[1:], strict=False)
        )

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["steps"] = [step.to_dict() for step in self.steps]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Trajectory":
        fields = _with_ending(data)
        fields["steps"] = [Step.from_dict(step) for step in data.get("steps", [])]
        return cls(**fields)


@with_aliases(metadata="info")
@dataclass(kw_only=True, slots=True, weakref_slot=True)
class Episode:
    """One attempt at one task: the trajectories of all its agents, and what it counts as."""

    id: str = ""
    """For people and logs; set from `task_id` and `rollout_idx` when left empty."""
    task: Any = None
    task_id: str = ""
    rollout_idx: int = 0
    """Which of the attempts at the task this is."""
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    is_correct: bool = False
    termination_reason: TerminationReason = TerminationReason.UNKNOWN
    outcome: Outcome | None = None
    session_id: str = ""
    artifacts: dict[str, Any] = field(default_factory=dict[str, Any])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    info: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if not self.id and self.task_id:
            self.id = str(self.episode_id)

    @property
    def episode_id(self) -> EpisodeId:
        return EpisodeId(task_id=self.task_id, attempt=self.rollout_idx)

    @property
    def reward(self) -> float:
        """Sum of what its trajectories were paid."""
        return sum(trajectory.reward or 0.0 for trajectory in self.trajectories)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        data["trajectories"] = [trajectory.to_dict() for trajectory in self.trajectories]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Episode":
        fields = _with_ending(data)
        fields["trajectories"] = [Trajectory.from_dict(each) for each in data.get("trajectories", [])]
        return cls(**fields)


def _with_ending(data: dict[str, Any]) -> dict[str, Any]:
    """`data` of a trajectory or an episode, with how it ended as what it is."""
    reason, outcome = data.get("termination_reason", TerminationReason.UNKNOWN), data.get("outcome")
    return data | {
        "termination_reason": TerminationReason(reason),
        "outcome": None if outcome is None else Outcome(outcome),
    }


@dataclass(kw_only=True, slots=True)
class TrajectoryGroup:
    """Attempts at one task by one role: what a group-relative advantage compares."""

    task_id: str
    role: str
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])

    @property
    def group_id(self) -> str:
        return f"{self.task_id}:{self.role}"

    @property
    def group_role(self) -> str:
        """Another name for `role`."""
        return self.role


class TerminationEvent(Exception):
    """Raised inside a workflow or agent to end the rollout with a reason."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN) -> None:
        super().__init__(str(reason))
        self.reason = reason
