"""Agents of one text: thoughts apart from answers, and feedback as the next message."""

from typing import Any

import pytest

from rllm.agents import CompetitionCodingAgent, MathAgent, check_agent
from rllm.agents.code import MAX_SHOWN_CHARS, PASSED
from rllm.engine.rollout import run_trajectory
from rllm.environments import CodeEnv, SelfCorrectionEnvironment, SingleTurnEnvironment
from rllm.environments.multi_turn import LOOK_AGAIN
from rllm.errors import AgentError
from rllm.inference.scripted import ScriptedClient
from rllm.rewards.grade import Grade
from rllm.types.episode import Outcome

TASK = {"question": "6 * 7 = ?", "ground_truth": "42"}


def right(task: dict[str, Any], answer: str) -> float:
    return float(answer == task["ground_truth"])


@pytest.mark.parametrize("agent", [MathAgent(), MathAgent(False), CompetitionCodingAgent()])
def test_they_keep_the_contract_of_agents(agent: Any) -> None:
    check_agent(agent)
    check_agent(agent, observation={"question": "?"}, answer="<think>hm</think>42")
    check_agent(agent, observation=[{"role": "user", "content": "?"}])


def test_the_action_is_what_comes_behind_the_thoughts(subtests: pytest.Subtests) -> None:
    for response, thought, action in [
        ("42", "", "42"),
        ("<think>6 times 7</think>\n\n42", "6 times 7", "42"),
        ("6 times 7</think> 42", "6 times 7", "42"),
        ("<think>a</think>b</think>42", "a</think>b", "42"),
        ("<think>6 times 7 is 42", "6 times 7 is 42", ""),
        ("", "", ""),
    ]:
        with subtests.test(response=response, thought=thought, action=action):
            agent = MathAgent()
            agent.update_from_env(TASK, 0.0, False, {})
            assert agent.update_from_model(response).action == action
            step = agent.trajectory.steps[-1]
            assert (step.thought, step.model_response) == (thought, response)


async def test_a_question_is_answered_in_one_turn() -> None:
    client = ScriptedClient(["<think>easy</think>42"])
    trajectory = await run_trajectory(MathAgent(), SingleTurnEnvironment(TASK, right), client)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    assert client.requests == [[{"role": "user", "content": "6 * 7 = ?"}]]


@pytest.mark.parametrize("accumulates", [True, False])
async def test_who_is_wrong_looks_again_with_or_without_its_earlier_thoughts(accumulates: bool) -> None:
    client = ScriptedClient(["<think>seven sixes</think>\n41", "<think>ah</think>\n42"])
    env = SelfCorrectionEnvironment(TASK, reward_fn=right)
    trajectory = await run_trajectory(MathAgent(accumulates), env, client)
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 2)
    _, answer, feedback = client.requests[1]
    assert answer["content"] == ("<think>seven sixes</think>\n41" if accumulates else "41")
    assert feedback == {"role": "user", "content": LOOK_AGAIN}
    assert trajectory.info.get("segments", 1) == (1 if accumulates else 2)
    assert all(step.response_ids for step in trajectory.steps), "a new segment loses nothing"


def test_it_asks_for_boxes_when_it_is_wanted_to() -> None:
    agent = MathAgent(system_prompt=None)
    assert "\\boxed{}" in agent.chat_completions[0]["content"]
    assert "```python" in CompetitionCodingAgent(system_prompt=None).chat_completions[0]["content"]


def test_an_observation_without_a_question_is_refused() -> None:
    with pytest.raises(AgentError, match="text, messages"):
        MathAgent().update_from_env({"grid": "x"}, 0.0, False, {})


def result(number: int, *, passed: bool = False, **changes: Any) -> dict[str, Any]:
    return {"input": f"in {number}", "expected": "e", "actual": "a", "passed": passed, **changes}


def shown(agent: CompetitionCodingAgent, results: list[dict[str, Any]]) -> str:
    agent.update_from_env({"question": "Read in 1 and write e."}, 0.0, False, {})
    agent.update_from_model("x")
    agent.update_from_env({"test_results": results}, 0.0, False, {})
    return agent.chat_completions[-1]["content"]


def test_failed_tests_are_shown_as_many_as_allowed_and_passed_ones_never() -> None:
    said = shown(CompetitionCodingAgent(max_tests=2), [result(0, passed=True), *map(result, (1, 2, 3))])
    assert all(f"in {number}" in said for number in (1, 2))
    assert "in 0" not in said
    assert "in 3" not in said
    assert "Expected: e" in said
    assert "Actual: a" in said


def test_long_values_are_cut_and_say_how_much_is_missing() -> None:
    said = shown(CompetitionCodingAgent(), [result(1, error="x" * 1000)])
    assert "x" * MAX_SHOWN_CHARS + f"… ({1000 - MAX_SHOWN_CHARS} more characters)" in said


def test_hidden_tests_are_not_given_away() -> None:
    public_only = CompetitionCodingAgent(public_test_only=True)
    said = shown(public_only, [result(7), result(1)])
    assert "in 7" not in said
    assert "Input: in 1" in said
    public_only.reset()
    said = shown(public_only, [result(7)])
    assert "in 7" not in said
    assert "not shown" in said


def test_when_all_passed_it_is_congratulated() -> None:
    assert shown(CompetitionCodingAgent(), [result(1, passed=True)]) == PASSED


async def test_a_program_is_mended_after_it_was_shown_what_failed() -> None:
    def judge(task: dict[str, Any], answer: str) -> Grade:
        good = "return 2" in answer
        first = {} if good else {"first_failure": {"test": "f(0)", "expected": "2", "got": "1"}}
        return Grade(score=float(good), is_correct=good, reason="as told", metadata=first)

    client = ScriptedClient(["def f(x): return 1", "def f(x): return 2"])
    env = CodeEnv({"question": "f is always 2."}, reward_fn=judge)
    trajectory = await run_trajectory(CompetitionCodingAgent(), env, client)
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 2)
    assert "Input: f(0)\nExpected: 2\nActual: 1" in client.requests[1][-1]["content"]


async def test_with_the_published_reward_function_answers_are_judged_by_the_math_grader() -> None:
    pytest.importorskip("math_verify", reason="the `grading` extra is not installed")
    from rllm.rewards import math_reward_fn

    for said, reward in (("<think>7*6</think>So it is \\boxed{84/2}.", 1.0), ("\\boxed{41}", 0.0)):
        env = SingleTurnEnvironment.from_dict({"task": TASK, "reward_fn": math_reward_fn})
        trajectory = await run_trajectory(MathAgent(), env, ScriptedClient([said]))
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, reward)


async def test_a_program_is_really_run_and_the_test_that_it_failed_is_shown() -> None:
    from rllm.errors import RllmError
    from rllm.sandbox.backends import require_backend

    try:
        require_backend("bubblewrap")
    except RllmError as error:
        pytest.skip(str(error))
    tests = [{"args": [1], "expected": 2}, {"args": [4], "expected": 8}]
    task = {
        "question": "Write f(x), twice x.",
        "grader": "code",
        "grading": {"function": "f", "tests": tests},
    }
    client = ScriptedClient(
        ["```python\ndef f(x):\n    return x + 1\n```", "```python\ndef f(x):\n    return 2 * x\n```"]
    )
    trajectory = await run_trajectory(CompetitionCodingAgent(), CodeEnv.from_dict(task), client)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    feedback = client.requests[1][-1]["content"]
    assert "Expected: 8" in feedback
    assert "Actual: 5" in feedback


@pytest.mark.parametrize("kind", [MathAgent, CompetitionCodingAgent])
def test_where_the_prompt_opened_the_thought_one_that_is_not_ended_is_no_answer(kind: Any) -> None:
    agent = kind(thinks_first=True)
    for response, thought, action in (
        ("6 times 7 is 42", "6 times 7 is 42", ""),
        ("6 times 7</think>\n42", "6 times 7", "42"),
    ):
        agent.reset()
        agent.update_from_env({"question": "?"}, 0.0, False, {})
        assert agent.update_from_model(response).action == action
        assert agent.trajectory.steps[-1].thought == thought
