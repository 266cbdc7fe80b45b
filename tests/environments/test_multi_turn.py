"""Environments of one and of several answers: the published frame, and graders in it."""

from types import SimpleNamespace
from typing import Any

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.engine.rollout import run_trajectory
from rllm.environments import (
    CodeEnv,
    CompetitionCodingEnv,
    MultiTurnEnvironment,
    SelfCorrectionEnvironment,
    SingleTurnEnvironment,
    check_env,
)
from rllm.environments.multi_turn import CHECK, LOOK_AGAIN
from rllm.errors import AgentError, ConfigError, RewardError
from rllm.inference.scripted import ScriptedClient
from rllm.rewards.grade import Grade
from rllm.types import Action
from rllm.types.episode import Outcome

TASK = {"question": "6 * 7 = ?", "ground_truth": "42"}
GRADED = {
    "task_id": "t",
    "question": "Reach 12.",
    "grader": "countdown",
    "grading": {"numbers": [3, 4], "target": 12},
}


class Published:
    """What published reward functions return."""

    def __init__(self, reward: float) -> None:
        self.reward = reward
        self.is_correct = reward == 1.0
        self.metadata = {"seen": True}


def right(task: dict[str, Any], answer: str) -> Published:
    return Published(float(answer == task["ground_truth"]))


class Guess(MultiTurnEnvironment):
    """A world of one's own, in the published way."""

    def get_reward_and_next_obs(self, task: dict[str, Any], action: Any) -> tuple[float, Any]:
        return float(action == task["ground_truth"]), {"hint": len(self.history)}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Guess":
        return Guess(info)


def test_a_world_of_ones_own_ends_after_its_turns_and_remembers_its_answers() -> None:
    env = Guess(TASK, max_turns=3)
    assert env.reset() == (TASK, {})
    assert env.step(Action("1")) == ({"hint": 1}, 0.0, False, TASK)
    assert env.step("42") == ({"hint": 2}, 1.0, False, TASK)
    assert env.step("3") == ({}, 0.0, True, TASK)
    assert env.history == ["1", "42", "3"]
    with pytest.raises(AgentError, match="call reset first"):
        env.step("4")
    assert env.reset({"ground_truth": "9"})[0] == {"ground_truth": "9"}
    assert (env.history, env.current_turn) == ([], 0)


def test_they_keep_the_contract_of_environments() -> None:
    check_env(Guess(TASK), "1")
    check_env(SingleTurnEnvironment(TASK, reward_fn=right), "1")
    check_env(SelfCorrectionEnvironment(TASK, reward_fn=right), "1")
    check_env(CodeEnv(TASK, reward_fn=right), "1")


def test_one_answer_is_judged_by_the_reward_function_of_a_published_program() -> None:
    env = SingleTurnEnvironment.from_dict({"task": TASK, "reward_fn": right})
    assert env.reset() == (TASK, {})
    observation, reward, done, info = env.step("42")
    assert (observation, reward, done) == ({}, 1.0, True)
    assert info == {**TASK, "is_correct": True, "seen": True}
    flat = SingleTurnEnvironment.from_dict({**TASK, "reward_fn": right})
    assert flat.task == TASK
    unpaid = SingleTurnEnvironment(TASK)
    unpaid.reset()
    assert unpaid.step("42") == ({}, 0.0, True, TASK)


@pytest.mark.parametrize("shown", ["question", "messages"])
def test_a_graded_task_shows_its_question_and_never_its_answer(shown: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Reach 12."}]
    task = {**GRADED, "messages": messages} if shown == "messages" else GRADED
    observation, info = SingleTurnEnvironment.from_dict(task).reset()
    assert observation == (messages if shown == "messages" else "Reach 12.")
    assert info == {}


@pytest.mark.parametrize(("answer", "reward"), [("3*4", 1.0), ("3+4", 0.0), ("no idea", 0.0)])
def test_a_graded_task_is_paid_what_its_grader_says_with_the_reason(answer: str, reward: float) -> None:
    env = SingleTurnEnvironment.from_dict(GRADED)
    env.reset()
    _, paid, done, info = env.step(answer)
    assert (paid, done, info["is_correct"]) == (reward, True, reward == 1.0)
    assert "target" not in info


def test_graders_of_one_name_and_options_are_one_object() -> None:
    from rllm.environments.judging import shared_grader

    assert shared_grader("countdown") is shared_grader("countdown")


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({**GRADED, "grader": "contdown"}, "did you mean `countdown`"),
        ({**GRADED, "grader": 3}, "the name of a grader"),
        ({**GRADED, "grader_args": {"nonsense": 1}}, "nonsense"),
        ({"grader": "countdown", "question": "?"}, "`grading` is None"),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused_before_it_is_played(task: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        SingleTurnEnvironment.from_dict(task)


def test_a_task_without_a_question_and_an_environment_without_a_judge_are_refused() -> None:
    with pytest.raises(ConfigError, match="no `messages` and no `question`"):
        SingleTurnEnvironment.from_dict({name: GRADED[name] for name in ("grader", "grading")}).reset()
    with pytest.raises(ConfigError, match="Nobody judges"):
        SelfCorrectionEnvironment(TASK).reset()
    with pytest.raises(ConfigError, match="`max_turns` is 0"):
        Guess(TASK, max_turns=0)
    with pytest.raises(ConfigError, match="does not know `max_steps`"):
        Guess(TASK, max_steps=3)


@pytest.mark.parametrize("reward", [None, float("inf"), "1"])
def test_a_reward_function_that_returns_no_number_is_an_error_and_no_zero(reward: Any) -> None:
    env = SingleTurnEnvironment(TASK, reward_fn=lambda task, answer: reward)
    env.reset()
    with pytest.raises(RewardError):
        env.step("42")


async def test_a_grader_that_cannot_judge_fails_the_episode_and_not_the_run() -> None:
    task = {**GRADED, "grading": {"numbers": [3, 4]}}
    trajectory = await run_trajectory(
        ConversationAgent(), SingleTurnEnvironment.from_dict(task), ScriptedClient(["3*4"])
    )
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert trajectory.info["error"]["type"] == "GraderFailure"
    assert "target" in trajectory.info["error"]["message"]


def test_who_is_wrong_is_told_so_and_may_answer_again_until_the_turns_are_used_up() -> None:
    env = SelfCorrectionEnvironment.from_dict({"task": TASK, "reward_fn": right, "max_turns": 3})
    env.reset()
    assert env.step("1")[:3] == (LOOK_AGAIN, 0.0, False)
    assert env.step("42")[:3] == ({}, 1.0, True)
    env.reset()
    assert [env.step("1")[2] for _ in range(3)] == [False, False, True]


def test_without_a_verdict_everyone_checks_again_and_the_last_answer_alone_is_paid() -> None:
    env = SelfCorrectionEnvironment(TASK, max_turns=2, reward_fn=right, tells_verdict=False)
    env.reset()
    assert env.step("42")[:3] == (CHECK, 0.0, False)
    assert env.step("1")[:3] == ({}, 0.0, True)
    env.reset()
    env.step("1")
    assert env.step("42")[:3] == ({}, 1.0, True)


def graded_program(task: dict[str, Any], answer: str) -> Grade:
    score = float(answer)
    first = {"first_failure": {"test": "f(1)", "expected": "2", "got": "3"}} if score < 1.0 else {}
    return Grade(score=score, is_correct=score == 1.0, reason="as told", metadata=first)


def test_a_program_that_fails_is_shown_the_test_and_one_that_passes_ends_the_episode() -> None:
    env = CodeEnv(TASK, max_turns=3, reward_fn=graded_program)
    env.reset()
    shown, reward, done, info = env.step("0.25")
    assert (reward, done, info["is_correct"]) == (0.25, False, False)
    assert shown == {
        "test_results": [{"input": "f(1)", "expected": "2", "actual": "3", "error": None, "passed": False}]
    }
    assert env.step("1.0")[:3] == ({}, 1.0, True)


def test_getting_better_pays_and_getting_worse_costs() -> None:
    env = CompetitionCodingEnv(TASK, max_turns=3, reward_bonus_coeff=0.5, reward_fn=graded_program)
    env.reset()
    assert [env.step(answer)[1] for answer in ("0.5", "0.25", "1.0")] == [0.5, 0.125, 1.375]
    env.reset()
    assert env.step("0.5")[1] == 0.5, "the attempt before a reset does not count"


def test_of_a_judge_that_tells_no_tests_apart_the_reason_is_shown() -> None:
    env = CodeEnv(TASK, reward_fn=lambda task, answer: 0.0)
    env.reset()
    (only,) = env.step("x")[0]["test_results"]
    assert only["passed"] is False


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_step_says_how_long_its_grader_took(is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(SingleTurnEnvironment):
        async def step(self, action: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().step(action)

    now_s = iter([10.0, 13.0])
    monkeypatch.setattr("rllm.rewards.clock.time", SimpleNamespace(perf_counter=lambda: next(now_s)))
    env = (Later if is_async else SingleTurnEnvironment)(GRADED)
    trajectory = await run_trajectory(ConversationAgent(), env, ScriptedClient(["3 * 4"]))
    assert trajectory.steps[0].timings["grader_s"] == 3.0
