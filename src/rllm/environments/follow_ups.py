"""A conversation of several questions, each answer judged by what was asked of it so far.

    reset ──► question ──► answer ──► next question ──► answer ──► … ──► done
                              └─ grading["turns"][n] ──► grader ──► reward: its share of the whole

    {"question": …, "follow_ups": [text, …], "grader": …, "grading": {"turns": [fields, …], …}}

An episode is worth the mean of its turns, and is right where every turn is. What follows an answer does not
depend on it, so episodes that are stored can be judged again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rllm.environments.judging import RewardFn, Verdict, judge_of
from rllm.environments.multi_turn import MultiTurnEnvironment, require_judge, shown_question, split_task
from rllm.errors import ConfigError

FOLLOW_UPS, TURNS = "follow_ups", "turns"


class FollowUpEnvironment(MultiTurnEnvironment):
    """Asks the next question whatever the answer was. A `reward_fn` pays for the last answer alone."""

    def __init__(self, task: dict[str, Any], *, reward_fn: RewardFn | None = None) -> None:
        self.follow_ups: list[str] = list(task.get(FOLLOW_UPS) or ())
        super().__init__(task, max_turns=1 + len(self.follow_ups))
        if reward_fn is None:
            require_turns(task)
        require_judge(task, reward_fn, type(self).__name__)
        self.reward_fn = reward_fn
        self._verdict: Verdict | None = None

    def first_observation(self) -> Any:
        return shown_question(self.task)

    def get_reward_and_next_obs(self, task: dict[str, Any], action: Any) -> tuple[float, Any]:
        follows = self.follow_ups[self.current_turn : self.current_turn + 1]
        reward = 0.0
        if self.reward_fn is None:
            reward = turn_verdict(task, self.current_turn, str(action)).reward / self.max_turns
        elif not follows:
            self._verdict = require_judge(task, self.reward_fn, type(self).__name__)(str(action))
            reward = self._verdict.reward
        return reward, follows[0] if follows else {}

    def info(self) -> dict[str, Any]:
        """At the end what the whole conversation was worth."""
        if not self.is_over():
            return {}
        verdict = self._verdict or conversation_verdict(self.task, [str(each) for each in self.history])
        return {**verdict.info, "is_correct": verdict.is_correct}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "FollowUpEnvironment":
        """A task as above, with a `reward_fn` beside it or without."""
        task, own = split_task(info, ("reward_fn",))
        return FollowUpEnvironment(task, **own)


def conversation_verdict(task: Mapping[str, Any], answers: Sequence[str]) -> Verdict:
    """The mean over all turns; one that was not answered is worth nothing."""
    count = len(require_turns(task))
    verdicts = [turn_verdict(task, turn, answer) for turn, answer in enumerate(answers[:count])]
    reasons = [f"turn {turn}: {each.info.get('reason', '')}" for turn, each in enumerate(verdicts, start=1)]
    last = verdicts[-1].info if verdicts else {}
    return Verdict(
        reward=sum(each.reward for each in verdicts) / count,
        is_correct=len(verdicts) == count and all(each.is_correct for each in verdicts),
        info={**last, "reason": "; ".join(reasons), "turns": [each.reward for each in verdicts]},
    )


def turn_verdict(task: Mapping[str, Any], turn: int, answer: str) -> Verdict:
    """The verdict on the answer to question number `turn`, from 0."""
    judge = judge_of({**task, "grading": require_turns(task)[turn]})
    assert judge is not None, "the task names its grader"
    return judge(answer)


def require_turns(task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The references that the answers are graded by. Raises ConfigError where they are not as many as the
    questions."""
    grading = task.get("grading")
    turns = grading.get(TURNS) if isinstance(grading, Mapping) else None
    num_turns = 1 + len(task.get(FOLLOW_UPS) or ())
    if not isinstance(turns, list) or len(turns) != num_turns:
        there = len(turns) if isinstance(turns, list) else "none"
        raise ConfigError(
            f"Task {task.get('task_id')!r} asks {num_turns} questions, and `grading.{TURNS}` has {there}; "
            "there must be as many."
        )
    return turns
