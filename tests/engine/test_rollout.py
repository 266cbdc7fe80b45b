import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.rollout import RolloutKey, RolloutLimits, run_trajectory
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import AgentError, ConfigError, InferenceError, RewardError
from rllm.inference.scripted import END_ID, ScriptedAnswer, ScriptedClient
from rllm.types.draws import draw_seed
from rllm.types.episode import Action, Outcome, Step, TerminationEvent, TerminationReason
from rllm.types.messages import FinishReason, SamplingParams
from rllm.types.task import EpisodeId

LAKE = ["SF", "HG"]


async def test_a_trajectory_ends_when_the_environment_is_done() -> None:
    client = ScriptedClient(["Right", "Down"])
    trajectory = await run_trajectory(FrozenLakeAgent(), FrozenLakeEnv(LAKE), client)
    assert trajectory.termination_reason is TerminationReason.ENV_DONE
    assert trajectory.outcome is Outcome.SCORED
    assert [step.reward for step in trajectory.steps] == [0.0, 1.0]
    assert [step.done for step in trajectory.steps] == [False, True]
    assert trajectory.reward == 1.0
    assert client.open_sessions == 0


async def test_a_hole_is_an_end_too_and_pays_nothing() -> None:
    trajectory = await run_trajectory(FrozenLakeAgent(), FrozenLakeEnv(LAKE), ScriptedClient(["Down"]))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 0.0)


async def test_each_step_carries_what_the_model_read_and_wrote_and_who_wrote_it() -> None:
    client = ScriptedClient(["Right", "Down"], policy_version=7)
    trajectory = await run_trajectory(FrozenLakeAgent(), FrozenLakeEnv(LAKE), client)
    first, second = trajectory.steps
    assert first.prompt_ids == client.renderer.render(client.requests[0])
    assert first.response_ids == [*client.tokenizer.encode("Right"), END_ID]
    assert (
        second.prompt_ids[: len(first.prompt_ids + first.response_ids)]
        == first.prompt_ids + first.response_ids
    )
    assert second.prompt_ids == client.renderer.render(client.requests[1])
    assert second.policy_versions == [7] * len("Down\0")
    assert second.policy_version == 7
    assert second.timings.keys() == {"model_s", "env_s"}
    assert second.chat_completions[:-1] == client.requests[1]
    assert trajectory.is_cumulative()


async def test_the_turn_limit_truncates_and_keeps_what_was_earned() -> None:
    trajectory = await run_trajectory(
        FrozenLakeAgent(),
        FrozenLakeEnv(LAKE),
        ScriptedClient(["Left", "Left", "Left"]),
        limits=RolloutLimits(max_turns=2),
    )
    assert trajectory.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert (trajectory.outcome, trajectory.reward, len(trajectory.steps)) == (Outcome.TRUNCATED, 0.0, 2)


async def test_an_environment_that_truncates_is_not_an_environment_that_ends() -> None:
    trajectory = await run_trajectory(
        FrozenLakeAgent(), FrozenLakeEnv(LAKE, max_steps=2), ScriptedClient(["Left", "Left"])
    )
    assert trajectory.termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert trajectory.outcome is Outcome.TRUNCATED


async def test_a_full_context_truncates_before_anything_is_sent() -> None:
    client = ScriptedClient(["Right", "Down"])
    prompt = client.renderer.render(FrozenLakeAgent().chat_completions)
    client.max_context = len(prompt) + 20
    trajectory = await run_trajectory(FrozenLakeAgent(), FrozenLakeEnv(LAKE), client)
    assert trajectory.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert (trajectory.outcome, len(trajectory.steps), trajectory.reward) == (Outcome.TRUNCATED, 1, 0.0)
    assert trajectory.info["error"]["type"] == "ContextLengthError"


Env = type[Any]
Agent = type[Any]


@pytest.mark.parametrize("place", ["make", "reset", "step:1", "step:2"])
async def test_an_environment_that_raises_is_an_infrastructure_failure_without_a_reward(
    env_class: Env, agent_class: Agent, world: Any, place: str
) -> None:
    client = ScriptedClient(["a", "b"])
    trajectory = await run_trajectory(
        agent_class(), lambda: env_class(trouble={place: KeyError("lost")}), client
    )
    assert trajectory.termination_reason is TerminationReason.ERROR
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert trajectory.info["error"]["type"] == "KeyError"
    assert "lost" in trajectory.info["error"]["message"]
    assert "conftest" in trajectory.info["error"]["traceback"]
    assert client.open_sessions == 0
    assert [env.num_closed for env in world.made] == ([0] if place == "make" else [1])


@pytest.mark.parametrize("place", ["reset", "step:1"])
async def test_an_environment_that_hangs_is_given_up_after_its_time_limit(
    env_class: Env, agent_class: Agent, world: Any, place: str
) -> None:
    client = ScriptedClient(["a", "b"])
    trajectory = await run_trajectory(
        agent_class(),
        lambda: env_class(trouble={place: "hang"}),
        client,
        limits=RolloutLimits(step_timeout_s=0.05),
    )
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert "0.05 s" in trajectory.info["error"]["message"]
    assert (client.open_sessions, world.num_open) == (0, 0)


async def test_an_environment_that_is_ready_only_after_it_was_given_up_is_closed_all_the_same(
    env_class: Env, agent_class: Agent, world: Any, settled: Callable[..., Any]
) -> None:
    trajectory = await run_trajectory(
        agent_class(),
        lambda: env_class(trouble={"make": "hang"}),
        ScriptedClient(["a"]),
        limits=RolloutLimits(step_timeout_s=0.05),
    )
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    (env,) = world.made
    assert env.num_closed == 0
    world.release.set()
    await settled(lambda: env.num_closed == 1)


async def test_an_episode_that_takes_too_long_is_truncated(
    env_class: Env, agent_class: Agent, world: Any
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    client = ScriptedClient(["a", ScriptedAnswer(text="b", wait_for=never)])
    trajectory = await run_trajectory(
        agent_class(), lambda: env_class(), client, limits=RolloutLimits(wall_timeout_s=0.2)
    )
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED, 0.0)
    assert (client.open_sessions, world.num_open) == (0, 0)


@pytest.mark.parametrize(
    "hook", ["env:1", "env:2", "messages:1", "messages:2", "model:1", "model:2", "model_after:1"]
)
async def test_an_agent_that_raises_is_a_policy_failure_wherever_it_does(
    env_class: Env, agent_class: Agent, world: Any, hook: str
) -> None:
    client = ScriptedClient(["a", "b"])
    trajectory = await run_trajectory(
        agent_class({hook: ZeroDivisionError("oops")}), lambda: env_class(), client
    )
    assert trajectory.termination_reason is TerminationReason.ERROR
    assert (trajectory.outcome, trajectory.reward) == (Outcome.POLICY_FAILURE, None)
    assert trajectory.info["error"]["type"] == "ZeroDivisionError"
    assert (client.open_sessions, world.num_open) == (0, 0)


@pytest.mark.parametrize("hook", ["env:1", "env:2", "messages:2", "model:2", "model_after:2"])
async def test_an_agent_may_end_the_rollout_with_a_reason_from_anywhere(
    env_class: Env, agent_class: Agent, hook: str
) -> None:
    event = TerminationEvent(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
    trajectory = await run_trajectory(
        agent_class({hook: event}), lambda: env_class(), ScriptedClient(["a", "b"])
    )
    assert trajectory.termination_reason is TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED, 0.0)


@pytest.mark.parametrize("hook", ["model:2", "model_after:2"])
@pytest.mark.parametrize("error", [TerminationEvent(), ValueError("unreadable")])
async def test_what_was_sampled_is_on_record_even_when_the_agent_stumbles_over_it(
    env_class: Env, agent_class: Agent, hook: str, error: Exception
) -> None:
    trajectory = await run_trajectory(
        agent_class({hook: error}), lambda: env_class(), ScriptedClient(["a", "bc"])
    )
    assert [len(step.response_ids) for step in trajectory.steps] == [2, 3]
    assert trajectory.steps[1].logprobs == [0.0] * 3
    assert trajectory.steps[1].model_response == "bc"


@pytest.mark.parametrize("error", [InferenceError("the server died"), OSError("connection reset")])
async def test_a_model_that_fails_is_an_infrastructure_failure(
    env_class: Env, agent_class: Agent, world: Any, error: Exception
) -> None:
    client = ScriptedClient(["a", error])
    trajectory = await run_trajectory(agent_class(), lambda: env_class(), client)
    assert trajectory.termination_reason is TerminationReason.ERROR
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert (client.open_sessions, world.num_open) == (0, 0)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
async def test_half_an_answer_is_not_an_answer(
    env_class: Env, agent_class: Agent, reason: FinishReason
) -> None:
    client = ScriptedClient([ScriptedAnswer(text="a", finish_reason=reason)])
    trajectory = await run_trajectory(agent_class(), lambda: env_class(), client)
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert trajectory.steps == []


async def test_an_answer_cut_off_by_its_length_is_played_as_it_is(env_class: Env, agent_class: Agent) -> None:
    cut = ScriptedAnswer(text="a", token_ids=[98], finish_reason=FinishReason.LENGTH)
    trajectory = await run_trajectory(agent_class(), lambda: env_class(), ScriptedClient([cut, "b"]))
    assert trajectory.outcome is Outcome.SCORED
    assert trajectory.steps[0].response_ids == [98]
    assert trajectory.steps[1].prompt_ids[len(trajectory.steps[0].prompt_ids)] == 98


@pytest.mark.parametrize(
    ("trouble", "error", "named"),
    [
        ({"answer:1": ("o", None, False, {})}, RewardError, "Env.step"),
        ({"answer:1": ("o", float("nan"), False, {})}, RewardError, "nan"),
        ({"answer:1": ("o", 1.0)}, AgentError, "Env.step returned"),
        ({"step:1": ConfigError("no such map")}, ConfigError, "no such map"),
        ({"make": ConfigError("no such key")}, ConfigError, "no such key"),
    ],
)
async def test_a_broken_contract_fails_the_rollout_with_its_cause_and_place(
    env_class: Env,
    agent_class: Agent,
    world: Any,
    trouble: dict[str, Any],
    error: type[Exception],
    named: str,
) -> None:
    client = ScriptedClient(["a", "b"])
    trajectory = await run_trajectory(agent_class(), lambda: env_class(trouble=trouble), client)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    record = trajectory.info["error"]
    assert (record["type"], record["place"]) == (error.__name__, "environment")
    assert named in record["message"]
    assert client.open_sessions == 0
    assert [env.num_closed for env in world.made] == ([0] if "make" in trouble else [1])


@pytest.mark.parametrize("extra", [-1, 1])
async def test_an_agent_must_append_one_step_for_each_answer(
    env_class: Env, agent_class: Agent, extra: int
) -> None:
    class Miscounting(agent_class):  # type: ignore[misc, valid-type]
        def update_from_model(self, response: str, **kwargs: Any) -> Action:
            action = super().update_from_model(response)
            if extra > 0:
                self.trajectory.steps.append(Step())
            else:
                self.trajectory.steps.pop()
            return action

    trajectory = await run_trajectory(Miscounting(), lambda: env_class(), ScriptedClient(["a"]))
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert trajectory.info["error"]["place"] == "agent"
    assert f"Miscounting.update_from_model added {1 + extra} steps" in trajectory.info["error"]["message"]


async def test_a_reward_that_an_agent_wrote_into_an_earlier_step_is_checked(
    env_class: Env, agent_class: Agent
) -> None:
    class Generous(agent_class):  # type: ignore[misc, valid-type]
        def update_from_env(
            self, observation: Any, reward: float, done: bool, info: Any, **kwargs: Any
        ) -> None:
            super().update_from_env(observation, reward, done, info)
            if done:
                self.trajectory.steps[0].reward = "much"

    trajectory = await run_trajectory(Generous(), lambda: env_class(), ScriptedClient(["a", "b"]))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert "'much' (a str)" in trajectory.info["error"]["message"]


async def test_closing_badly_spoils_no_result(env_class: Env, agent_class: Agent) -> None:
    trajectory = await run_trajectory(
        agent_class(), lambda: env_class(trouble={"close": OSError("busy")}), ScriptedClient(["a", "b"])
    )
    assert trajectory.outcome is Outcome.SCORED
    assert "busy" in trajectory.info["close_error"]


async def test_a_cancelled_rollout_closes_environment_and_session(
    env_class: Env, agent_class: Agent, world: Any, settled: Callable[..., Any]
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    client = ScriptedClient([ScriptedAnswer(text="a", wait_for=never)])
    running = asyncio.create_task(run_trajectory(agent_class(), lambda: env_class(), client))
    await settled(lambda: bool(client.requests))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (client.open_sessions, world.num_open, len(world.made)) == (0, 0, 1)


async def test_a_rollout_cancelled_while_it_closes_closes_all_the_same(
    env_class: Env, agent_class: Agent, world: Any, settled: Callable[..., Any]
) -> None:
    started = threading.Event()

    class SlowToClose(env_class):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            started.set()
            world.release.wait()
            super().close()

    running = asyncio.create_task(
        run_trajectory(agent_class(), lambda: SlowToClose(), ScriptedClient(["a", "b"]))
    )
    await settled(started.is_set)
    running.cancel()
    await asyncio.sleep(0)
    world.release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert world.num_open == 0


async def test_only_who_is_cancelled_is_in_a_hurry_with_an_environment_that_closes_slowly(
    env_class: Env, agent_class: Agent, world: Any, settled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.engine.rollout.HURRY_S", 0.0)
    closes = threading.Event()

    class SlowToClose(env_class):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            closes.set()
            super().close()

    playing = asyncio.create_task(
        run_trajectory(
            agent_class(), lambda: SlowToClose(trouble={"close": "hang"}), ScriptedClient(["a", "b"])
        )
    )
    await settled(closes.is_set)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not playing.done()
    world.release.set()
    assert "close_error" not in (await playing).info


async def test_environments_live_in_worker_threads_and_never_on_the_loop(
    env_class: Env, agent_class: Agent, world: Any
) -> None:
    await run_trajectory(agent_class(), lambda: env_class(), ScriptedClient(["a", "b"]))
    assert world.made[0].threads == {"rllm-environment"}
    assert threading.current_thread().name not in world.made[0].threads


async def test_every_draw_follows_from_seed_purpose_task_attempt_and_turn(
    env_class: Env, agent_class: Agent, world: Any
) -> None:
    async def seeds(key: RolloutKey) -> list[int]:
        client = ScriptedClient(["a", "b"])
        await run_trajectory(agent_class(), lambda: env_class(), client, key=key)
        return [world.made[-1].seed, *(sampling.seed for sampling in client.samplings)]

    def key(seed: int = 0, purpose: str = "train/0", task: str = "t", attempt: int = 0) -> RolloutKey:
        return RolloutKey(seed=seed, purpose=purpose, episode=EpisodeId(task_id=task, attempt=attempt))

    first = await seeds(key())
    assert await seeds(key()) == first
    assert len(set(first)) == 3
    others = [key(seed=1), key(purpose="train/1"), key(task="u"), key(attempt=1)]
    for other in others:
        assert not set(await seeds(other)) & set(first)
    assert first[0] == draw_seed(0, "train/0", "t", 0, 0, "environment") % 2**31  # NumPy takes 32 bits


async def test_a_rollout_alone_is_played_as_the_first_of_an_engine_that_chose_nothing(
    env_class: Env, agent_class: Agent, world: Any
) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(lambda _: "a"))
    (episode,) = [each async for each in engine.run([{"task_id": "t"}])]
    key = RolloutKey(episode=episode.episode_id)
    await run_trajectory(agent_class(), lambda: env_class(), ScriptedClient(lambda _: "a"), key=key)
    in_engine, alone = [(env.idx, env.seed) for env in world.made]
    assert alone == in_engine
    assert alone[0] == 0


async def test_an_agent_learns_of_the_beginning_and_then_of_every_move(
    env_class: Env, agent_class: Agent
) -> None:
    events: list[tuple[Any, ...]] = []

    class Noting(agent_class):  # type: ignore[misc, valid-type]
        def update_from_env(
            self, observation: Any, reward: float, done: bool, info: Any, **more: Any
        ) -> None:
            events.append((observation, reward, done, info))
            super().update_from_env(observation, reward, done, info)

    await run_trajectory(Noting(), lambda: env_class(name="lake"), ScriptedClient(["a", "b"]))
    assert events == [
        ("lake turn 0", 0.0, False, {}),
        ("lake turn 1", 0.0, False, {}),
        ("lake turn 2", 1.0, True, {}),
    ]


async def test_sampling_parameters_reach_the_model_with_a_seed_of_their_own_each_turn(
    env_class: Env, agent_class: Agent
) -> None:
    client = ScriptedClient(["a", "b"])
    wanted = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_tokens=3, stop_token_ids=(9,))
    await run_trajectory(agent_class(), lambda: env_class(), client, sampling=wanted)
    assert len({sampling.seed for sampling in client.samplings} - {None}) == 2
    for sampling in client.samplings:
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 5)
        assert (sampling.max_tokens, sampling.stop_token_ids) == (3, (9,))


async def test_an_agent_that_rewrites_its_history_is_noticed(env_class: Env, agent_class: Agent) -> None:
    class Forgetful(agent_class):  # type: ignore[misc, valid-type]
        def update_from_env(self, *args: Any, **kwargs: Any) -> None:
            self._messages.clear()
            super().update_from_env(*args, **kwargs)

    trajectory = await run_trajectory(Forgetful(), lambda: env_class(), ScriptedClient(["a", "b"]))
    assert trajectory.info["segments"] == 2
    assert trajectory.info["segment_reason"] == "history_rewritten"
