"""The workflows that ship: what each asks, what it pays, how it ends."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.environments.base import BaseEnv
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import AgentError, ConfigError, InferenceError, RewardError
from rllm.inference import ScriptedAnswer, ScriptedClient
from rllm.types.episode import Episode, Outcome, Step, TerminationReason
from rllm.types.evaluation import EvalOutput
from rllm.types.messages import FinishReason, Message
from rllm.workflows import (
    CumulativeWorkflow,
    MultiTurnWorkflow,
    SimpleWorkflow,
    SingleTurnWorkflow,
    SolverJudgeWorkflow,
)

Play = Callable[..., Any]
TASK = {"question": "2+2?", "answer": "4"}
LAKE = {"desc": ["SFF", "FFF", "FFG"]}
ROUTE = ["Right", "Right", "Down", "Down"]


def exact(task: dict[str, Any], answer: str) -> float:
    return float(answer == task["answer"])


@dataclass
class RewardOutput:
    """As published reward functions return it."""

    reward: float
    is_correct: bool | None = None


# ---- SimpleWorkflow --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ({"question": "q?", "problem": "p?"}, "user:q?"),
        ({"problem": "p?"}, "user:p?"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            "system:s\0\nuser:u",
        ),
    ],
)
async def test_simple_asks_what_the_task_asks(play: Play, task: dict[str, Any], asked: str) -> None:
    client = ScriptedClient(["4"])
    episode = await play(SimpleWorkflow, client, task | {"answer": "4"}, reward_function=exact)
    assert client.tokenizer.decode(client.prompts[0]).replace("\n", "") == (asked + "assistant:").replace(
        "\0\n", ""
    )
    assert (episode.outcome, episode.termination_reason) == (Outcome.SCORED, TerminationReason.ENV_DONE)
    assert episode.trajectories[0].steps[0].action == "4"


async def test_simple_is_truncated_by_an_answer_that_was_cut_off(play: Play) -> None:
    cut = ScriptedAnswer(text="4", finish_reason=FinishReason.LENGTH)
    episode = await play(SimpleWorkflow, [cut], TASK, reward_function=exact)
    assert (episode.outcome, episode.trajectories[0].reward) == (Outcome.TRUNCATED, 1.0)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED


async def awaited(task: dict[str, Any], answer: str) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("function", "reward", "is_correct"),
    [
        (exact, 1.0, True),
        (awaited, 0.5, True),
        (lambda task, answer: False, 0.0, False),
        (lambda task, answer: (0.5, False), 0.5, False),
        (lambda task, answer: EvalOutput(reward=2.0, is_correct=True), 2.0, True),
        (lambda task, answer: RewardOutput(0.25), 0.25, True),
        (lambda task, answer: RewardOutput(0.25, is_correct=False), 0.25, False),
    ],
)
async def test_a_reward_function_may_say_it_in_many_ways(
    play: Play, function: Any, reward: float, is_correct: bool
) -> None:
    episode = await play(SimpleWorkflow, ["4"], TASK, reward_function=function)
    assert (episode.trajectories[0].reward, episode.is_correct) == (reward, is_correct)


async def test_a_reward_that_is_none_names_the_function(play: Play) -> None:
    def broken(task: dict[str, Any], answer: str) -> Any:
        return (
            {"nan": float("nan"), "none": None, "raise": 1}[task["how"]] if task["how"] != "raise" else 1 / 0
        )

    for how, words in [
        ("nan", "broken returned nan"),
        ("none", "broken returned None"),
        ("raise", "0:0 with Zero"),
    ]:
        with pytest.raises(RewardError, match=words):
            await play(SimpleWorkflow, ["4"], TASK | {"how": how}, reward_function=broken)


async def test_a_judge_that_is_away_is_an_infrastructure_failure(play: Play) -> None:
    def away(task: dict[str, Any], answer: str) -> float:
        raise InferenceError("the judge is away")

    episode = await play(SimpleWorkflow, lambda messages: "4", TASK, retry_limit=2, reward_function=away)
    assert (episode.outcome, episode.info["tries"]) == (Outcome.INFRASTRUCTURE_FAILURE, 2)


async def test_a_task_without_a_question_and_a_reward_function_without_arguments_are_named(
    play: Play,
) -> None:
    with pytest.raises(AgentError, match=r"fields x; .*question"):
        await play(SimpleWorkflow, ["4"], {"x": 1}, reward_function=exact)
    with pytest.raises(ConfigError, match="called with"):
        await play(SimpleWorkflow, ["4"], TASK, reward_function=lambda: 1.0)


# ---- SolverJudgeWorkflow ---------------------------------------------------------------------------------


def scripted_pair(solutions: Sequence[str], verdict: str) -> Callable[[Sequence[Message]], str]:
    left = iter(solutions)

    def script(messages: Sequence[Message]) -> str:
        return verdict if "Which solution is right?" in messages[0]["content"] else next(left)

    return script


@pytest.mark.parametrize(
    ("verdict", "judge_reward", "picked"),
    [
        ("<answer>2</answer>", 1.0, 1.0),
        ("I like <answer>1</answer> no: <answer> 2 </answer>", 1.0, 1.0),
        ("2", 1.0, 1.0),
        ("<answer>1</answer>", 0.0, 1.0),
        ("<answer>4</answer>", 0.0, 0.0),
        ("<answer>0</answer>", 0.0, 0.0),
        ("<answer>²</answer>", 0.0, 0.0),
        ("the second one, 2", 0.0, 0.0),
    ],
)
async def test_the_judge_is_paid_what_its_pick_is_worth(
    play: Play, verdict: str, judge_reward: float, picked: float
) -> None:
    script = scripted_pair(["<answer>5</answer>", "so <answer>4</answer>", "3"], verdict)
    episode = await play(SolverJudgeWorkflow, script, TASK, n_solutions=3, reward_function=exact)
    rewards = {
        name: [each.reward for each in episode.trajectories if each.name == name]
        for name in ("solver", "judge")
    }
    assert rewards == {"solver": [0.0, 1.0, 0.0], "judge": [judge_reward]}
    assert episode.is_correct is (judge_reward == 1.0)
    assert episode.metrics["judge_picked"] == picked
    assert episode.metrics["solver_acc"] == pytest.approx(1 / 3)
    assert episode.metrics["unclaimed_calls"] == 0.0
    assert all(step.response_ids for each in episode.trajectories for step in each.steps)


async def test_the_judge_reads_every_solution_by_its_number(play: Play) -> None:
    client = ScriptedClient(scripted_pair(["<answer>5</answer>", "4"], "2"))
    await play(SolverJudgeWorkflow, client, TASK, reward_function=exact)
    assert "Solution 1: 5\nSolution 2: 4\n" in client.tokenizer.decode(client.prompts[-1])


async def test_what_is_said_can_be_overridden(play: Play) -> None:
    class Short(SolverJudgeWorkflow):
        def solver_messages(self, task: dict[str, Any]) -> list[Message]:
            return [{"role": "user", "content": "S"}]

        def judge_messages(self, task: dict[str, Any], solutions: list[str]) -> list[Message]:
            return [{"role": "user", "content": "J" + "".join(solutions)}]

        def pick_in(self, answer: str, num_solutions: int) -> int | None:
            return "ab".find(answer)

    def script(messages: Sequence[Message]) -> str:
        return "b" if messages[0]["content"].startswith("user:J") else "4"

    episode = await play(Short, script, TASK, reward_function=exact)
    assert [each.output for each in episode.trajectories] == ["4", "4", "4"]
    with pytest.raises(ConfigError, match="`n_solutions` is 0"):
        await play(SolverJudgeWorkflow, script, TASK, n_solutions=0, reward_function=exact)


# ---- one agent in one environment ------------------------------------------------------------------------


async def test_multi_turn_plays_until_the_environment_is_done(play: Play) -> None:
    episode = await play(
        MultiTurnWorkflow, ScriptedClient(ROUTE), LAKE, agent_cls=FrozenLakeAgent, env_cls=FrozenLakeEnv
    )
    (trajectory,) = episode.trajectories
    assert (episode.outcome, episode.termination_reason) == (Outcome.SCORED, TerminationReason.ENV_DONE)
    assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 0.0, 1.0]
    assert (trajectory.reward, trajectory.name, episode.is_correct) == (1.0, "agent", True)
    for earlier, later in zip(trajectory.steps, trajectory.steps[1:], strict=False):
        whole = earlier.prompt_ids + earlier.response_ids
        assert later.prompt_ids[: len(whole)] == whole
    assert episode.metrics["unclaimed_calls"] == 0.0


@pytest.mark.parametrize(
    ("workflow", "args", "num_steps"),
    [(MultiTurnWorkflow, {"max_steps": 3}, 3), (SingleTurnWorkflow, {}, 1), (MultiTurnWorkflow, {}, 5)],
)
async def test_turns_are_counted(play: Play, workflow: Any, args: dict[str, Any], num_steps: int) -> None:
    args |= {"agent_cls": FrozenLakeAgent, "env_cls": FrozenLakeEnv}
    episode = await play(workflow, lambda messages: "Left", LAKE, **args)
    assert episode.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert (episode.outcome, len(episode.trajectories[0].steps)) == (Outcome.TRUNCATED, num_steps)


async def test_multi_turn_is_truncated_by_an_answer_that_was_cut_off(play: Play) -> None:
    cut = ScriptedAnswer(text="Right", finish_reason=FinishReason.LENGTH)
    episode = await play(MultiTurnWorkflow, [cut], LAKE, agent_cls=FrozenLakeAgent, env_cls=FrozenLakeEnv)
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert len(episode.trajectories[0].steps) == 1


async def test_rewards_of_steps_can_be_shaped_and_discounted(play: Play) -> None:
    async def steps(**args: Any) -> list[Step]:
        episode: Episode = await play(
            MultiTurnWorkflow,
            ScriptedClient(ROUTE),
            LAKE,
            agent_cls=FrozenLakeAgent,
            env_cls=FrozenLakeEnv,
            **args,
        )
        assert episode.trajectories[0].reward == 1.0  # what it was paid, whatever its steps are told
        return episode.trajectories[0].steps

    discounted = await steps(gamma=0.5)
    assert [step.mc_return for step in discounted] == [0.125, 0.25, 0.5, 1.0]
    assert [step.reward for step in discounted] == [0.0, 0.0, 0.0, 1.0]  # or turns would be paid twice
    assert [step.reward for step in await steps(reward_bonus_coeff=0.5)] == [0.0, 0.0, 0.0, 1.5]


async def test_the_turns_of_a_cumulative_workflow_share_one_budget(play: Play) -> None:
    client = ScriptedClient(lambda messages: "Left")
    args = {"agent_cls": FrozenLakeAgent, "env_cls": FrozenLakeEnv, "max_steps": 50}
    episode = await play(CumulativeWorkflow, client, LAKE, max_response_length=200, **args)
    limits = [sampling.max_tokens for sampling in client.samplings]
    first = len(client.prompts[0])
    assert limits == [200 + first - len(prompt) for prompt in client.prompts]
    assert episode.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    steps = episode.trajectories[0].steps
    assert len(steps[-1].prompt_ids) + len(steps[-1].response_ids) - first <= 200
    with pytest.raises(ConfigError, match="`max_response_length` is -1"):
        await play(CumulativeWorkflow, client, LAKE, max_response_length=-1, **args)


class Troubled(BaseEnv):
    """Raises at the place that the task names; counts who is open."""

    num_open = 0

    def __init__(self, trouble: str) -> None:
        self.trouble = trouble
        type(self).num_open += 1

    def _meet(self, place: str) -> None:
        if self.trouble == place:
            raise KeyError(place)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._meet("reset")
        return "?", {"seed": seed}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self._meet("step")
        return "?", 1.0, True, {}

    def close(self) -> None:
        type(self).num_open -= 1
        self._meet("close")

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Troubled":
        if info["trouble"] == "make":
            raise OSError("no room")
        return Troubled(info["trouble"])


class AsyncTroubled(Troubled):
    """The same, as those who talk to a server write it."""

    async def reset(self, seed: int | None = None) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(seed)

    async def step(self, action: Any) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(action)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        Troubled.num_open -= 1
        self._meet("close")

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "AsyncTroubled":
        if info["trouble"] == "make":
            raise OSError("no room")
        made = AsyncTroubled.__new__(AsyncTroubled)
        made.trouble = info["trouble"]
        Troubled.num_open += 1
        return made


@pytest.mark.parametrize("env_cls", [Troubled, AsyncTroubled])
@pytest.mark.parametrize("place", ["make", "reset", "step", "close", "nowhere"])
async def test_an_environment_that_raises_is_an_infrastructure_failure_and_closed(
    play: Play, place: str, env_cls: type[Troubled]
) -> None:
    args = {"agent_cls": FrozenLakeAgent, "env_cls": env_cls, "retry_limit": 2}
    episode = await play(MultiTurnWorkflow, lambda messages: "Left", {"trouble": place}, **args)
    assert Troubled.num_open == 0
    if place in ("nowhere", "close"):
        assert (episode.outcome, episode.trajectories[0].reward) == (Outcome.SCORED, 1.0)
        assert ("close_errors" in episode.info) == (place == "close")
        return
    assert (episode.outcome, episode.info["tries"]) == (Outcome.INFRASTRUCTURE_FAILURE, 2)
    if place != "make":
        assert f"{env_cls.__name__}.{place} failed with KeyError" in episode.info["error"]["message"]


async def test_classes_that_are_no_agent_or_environment_are_named(play: Play) -> None:
    with pytest.raises(AgentError, match=r"`env_cls` is <class 'dict'>; .*BaseEnv"):
        await play(MultiTurnWorkflow, ["x"], LAKE, agent_cls=FrozenLakeAgent, env_cls=dict)
    with pytest.raises(ConfigError, match="`max_steps` is 0"):
        await play(
            MultiTurnWorkflow, ["x"], LAKE, agent_cls=FrozenLakeAgent, env_cls=FrozenLakeEnv, max_steps=0
        )
