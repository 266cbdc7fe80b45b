"""Several answers to one task: what each earns, and what is said to it.

    task ──► reset: the question
    answer ──► get_reward_and_next_obs ──► reward, what is shown next ──► … ──► done after `max_turns`

`MultiTurnEnvironment` is the frame that a world of one's own fills in. `SelfCorrectionEnvironment` fills it
with a grader: who is wrong is asked to look again.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from rllm.environments.base import BaseEnv
from rllm.environments.judging import GRADER_KEYS, Judge, RewardFn, Verdict, judge_of
from rllm.errors import AgentError, ConfigError
from rllm.types.episode import Action

LOOK_AGAIN = "That answer is not right. Go over your solution, find the mistake, and answer again."
CHECK = "Go over your solution once more. Mend it if it is wrong, and give the final answer again."


class MultiTurnEnvironment(BaseEnv):
    """Shows the task; ends after `max_turns` answers. Derive from it and write `get_reward_and_next_obs`."""

    def __init__(self, task: dict[str, Any] | None = None, max_turns: int = 3, **kwargs: Any) -> None:
        if max_turns < 1:
            raise ConfigError(f"`max_turns` is {max_turns}; it must be at least 1.")
        if kwargs:
            raise ConfigError(
                f"{type(self).__name__} does not know `{next(iter(kwargs))}`; it takes a `task` and "
                "`max_turns`."
            )
        self.task: dict[str, Any] = dict(task or {})
        self.max_turns = max_turns
        self.current_turn = 0
        self.done = True
        self.history: list[Any] = []
        """The answers so far."""

    def reset(  # pyright: ignore[reportIncompatibleMethodOverride]  published programs give a task first
        self, task: dict[str, Any] | None = None, seed: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """The question. Nothing is drawn, so the seed changes nothing."""
        if task is not None:
            self.task = dict(task)
        self.current_turn, self.done, self.history = 0, False, []
        return self.first_observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        if self.done:
            raise AgentError(f"{type(self).__name__}.step: the episode is over; call reset first.")
        action = action.action if isinstance(action, Action) else action
        self.history.append(action)
        reward, next_observation = self.get_reward_and_next_obs(self.task, action)
        self.current_turn += 1
        if self.is_over():
            self.done = True
            next_observation = {}
        return next_observation, reward, self.done, self.info()

    @abstractmethod
    def get_reward_and_next_obs(self, task: dict[str, Any], action: Any) -> tuple[float, Any]:
        """The reward of an answer, and the next observation."""

    def first_observation(self) -> Any:
        """The first observation: the whole task, as agents of published programs expect it."""
        return self.task

    def is_over(self) -> bool:
        """Whether the answer that was just judged was the last."""
        return self.current_turn >= self.max_turns

    def info(self) -> dict[str, Any]:
        """The info of a step: the task."""
        return self.task


class SelfCorrectionEnvironment(MultiTurnEnvironment):
    """Judges every answer and asks for a better one.

    With `tells_verdict` an answer that is right ends the episode, and one that is wrong is called so. Without
    it nobody tells: the model is asked to check its work until the turns are used up, and the last answer
    alone is paid.
    """

    def __init__(
        self,
        task: dict[str, Any] | None = None,
        max_turns: int = 2,
        *,
        reward_fn: RewardFn | None = None,
        tells_verdict: bool = True,
    ) -> None:
        super().__init__(task, max_turns)
        self.tells_verdict = tells_verdict
        self.reward_fn = reward_fn
        self.verdict: Verdict | None = None
        self._judge: Judge | None = None

    def reset(
        self, task: dict[str, Any] | None = None, seed: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        start = super().reset(task, seed)
        self.verdict = None
        self._judge = require_judge(self.task, self.reward_fn, type(self).__name__)
        return start

    def first_observation(self) -> Any:
        return shown_question(self.task)

    def get_reward_and_next_obs(self, task: dict[str, Any], action: Any) -> tuple[float, Any]:
        assert self._judge is not None, "`step` made sure that reset came first"
        self.verdict = self._judge(str(action))
        is_last = self.current_turn + 1 >= self.max_turns
        reward = self.verdict.reward if self.tells_verdict or is_last else 0.0
        return reward, self.feedback(self.verdict)

    def feedback(self, verdict: Verdict) -> Any:
        """The environment's response to an answer that is not the last."""
        return LOOK_AGAIN if self.tells_verdict else CHECK

    def is_over(self) -> bool:
        right = self.verdict is not None and self.verdict.is_correct
        return super().is_over() or (self.tells_verdict and right)

    def info(self) -> dict[str, Any]:
        assert self.verdict is not None, "an answer was judged"
        return {**self.verdict.info, "is_correct": self.verdict.is_correct}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "SelfCorrectionEnvironment":
        """A task as `SingleTurnEnvironment` takes it, with `max_turns` and `tells_verdict`."""
        task, own = split_task(info, ("max_turns", "reward_fn", "tells_verdict"))
        return SelfCorrectionEnvironment(task, **own)


def split_task(info: Mapping[str, Any], own: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the task, the environment's own arguments) of a dict that holds both.

    Where there is a `task` in it, that is the task; else it is all the rest.
    """
    arguments = {name: info[name] for name in own if name in info}
    task = info["task"] if isinstance(info.get("task"), Mapping) else info
    return {name: value for name, value in task.items() if name not in own}, arguments


def shown_question(task: Mapping[str, Any]) -> Any:
    """The part of a graded task that an agent sees: its messages or its question, never its answer."""
    if not any(name in task for name in GRADER_KEYS):
        return dict(task)
    for name in ("messages", "question", "prompt"):
        if name in task:
            return task[name]
    raise ConfigError(
        f"A graded task has no `messages` and no `question`: it has {', '.join(task) or 'nothing'}."
    )


def require_judge(task: Mapping[str, Any], reward_fn: RewardFn | None, name: str) -> Judge:
    judge = judge_of(task, reward_fn)
    if judge is None:
        raise ConfigError(
            f"Nobody judges the answers to this task of {name}; give it a `grader` (and its fields under "
            "`grading`), or the environment a `reward_fn`."
        )
    return judge
