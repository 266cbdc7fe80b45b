"""Law: every length, turn and time limit ends an episode by its own name, and no request is sent that cannot
fit."""

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.agents.conversation import ConversationAgent
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.base import BaseEnv
from rllm.inference.call_retries import CallPatience
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.budget import TokenBudget
from rllm.types.episode import Outcome, TerminationReason
from rllm.types.messages import ModelOutput, SamplingParams

Env = type[Any]
Agent = type[Any]


async def _end(
    env_class: Env, client: ScriptedClient, *, turns: int = 9, max_tokens: int = 100, **limits: Any
) -> tuple[str, str, list[int]]:
    """Outcome, reason and answer lengths of a rollout under a token budget."""
    trajectory = await run_trajectory(
        ConversationAgent(),
        lambda: env_class(turns=turns),
        client,
        limits=RolloutLimits(max_turns=20, budget=TokenBudget(**limits)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    assert trajectory.outcome is not None
    lengths = [len(step.response_ids) for step in trajectory.steps]
    return str(trajectory.outcome), str(trajectory.termination_reason), lengths


def _first_prompt(client: ScriptedClient) -> int:
    return len(client.renderer.render([{"role": "user", "content": " turn 0"}]))


def _says(text: str) -> ScriptedClient:
    return ScriptedClient(lambda messages: text)


async def test_a_first_prompt_that_is_too_long_is_never_sent(env_class: Env) -> None:
    client = _says("go")
    limit = _first_prompt(client)
    end = await _end(env_class, client, max_prompt_tokens=limit - 1)
    assert end == ("truncated", "max_prompt_length_exceeded", [])
    assert client.requests == []
    outcome, _, _ = await _end(env_class, client, max_prompt_tokens=limit)
    assert outcome == "scored"


async def test_with_every_prompt_limited_a_later_one_ends_the_episode_unsent(env_class: Env) -> None:
    client = _says("go")
    limit = _first_prompt(client)
    end = await _end(env_class, client, max_prompt_tokens=limit + 5, every_prompt=True)
    assert end == ("truncated", "max_prompt_length_exceeded", [3])
    assert len(client.requests) == 1


async def test_answers_and_observations_use_up_the_response_budget(env_class: Env) -> None:
    client = _says("go")
    _, _, whole = await _end(env_class, client, turns=3)
    assert whole == [3, 3, 3]
    # One turn takes the answer's 3 tokens and what the environment says.
    end = await _end(env_class, client, turns=9, max_response_tokens=20)
    assert end[:2] == ("truncated", "max_response_length_exceeded")
    assert 1 <= len(end[2]) < 9


async def test_an_answer_that_the_budget_cuts_off_is_on_record_and_nobody_acts_on_it(
    env_class: Env, world: Any
) -> None:
    client = _says("a long answer")
    end = await _end(env_class, client, max_response_tokens=5)
    assert end == ("truncated", "max_response_length_exceeded", [5])
    assert [env.actions for env in world.made] == [[]]
    assert [sampling.max_tokens for sampling in client.samplings] == [5]


async def test_an_answer_that_only_the_turn_limit_cuts_off_is_played(env_class: Env, world: Any) -> None:
    client = _says("a long answer")
    end = await _end(env_class, client, turns=2, max_tokens=4, max_response_tokens=1000)
    assert end == ("scored", "env_done", [4, 4])
    assert world.made[-1].actions == ["a lo", "a lo"]


async def test_the_model_length_is_checked_before_anything_is_sent(env_class: Env) -> None:
    client = _says("go")
    limit = _first_prompt(client)
    end = await _end(env_class, client, max_model_tokens=limit)
    assert end == ("truncated", "max_prompt_length_exceeded", [])
    assert client.requests == []


class Talk(BaseEnv):
    """Says something of another length every turn."""

    def __init__(self, turns: int) -> None:
        self.turns, self.turn = turns, 0

    def reset(self, seed: int | None = None) -> Any:
        return "hello", {}

    def step(self, action: Any) -> Any:
        self.turn += 1
        return "more" * self.turn, 1.0, self.turn >= self.turns, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Talk":
        return Talk(info["turns"])


@given(
    texts=st.lists(st.text("abc", max_size=12), min_size=1, max_size=5),
    most=st.integers(0, 60),
    model=st.integers(0, 120),
    tokens=st.integers(1, 20),
)
def test_no_request_ever_asks_for_more_than_the_budget_holds(
    texts: list[str], most: int, model: int, tokens: int
) -> None:
    client = ScriptedClient([*texts])
    sent: list[tuple[int, int]] = []
    session_class = type(client.session(("", 0)))

    class Watched(session_class):  # type: ignore[misc, valid-type]
        async def respond(self, messages: Any, sampling: SamplingParams) -> Any:
            sent.append((self.prompt_tokens(messages), sampling.max_tokens))
            return await super().respond(messages, sampling)

    client_class = type("Client", (ScriptedClient,), {"session": lambda self, order: Watched(self)})
    asyncio.run(
        run_trajectory(
            ConversationAgent(),
            lambda: Talk(len(texts)),
            client_class(client.script),
            limits=RolloutLimits(
                max_turns=9, budget=TokenBudget(max_response_tokens=most, max_model_tokens=model)
            ),
            sampling=SamplingParams(max_tokens=tokens),
        )
    )
    for prompt, asked in sent:
        assert 1 <= asked <= tokens
        assert not most or prompt - sent[0][0] + asked <= most
        assert not model or prompt + asked <= model


class NoIds:
    """A model that tells no ids, and how many tokens there were only afterwards."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def session(self, order: tuple[str, int]) -> "NoIds":
        return self

    async def respond(self, messages: Any, sampling: SamplingParams) -> Any:
        self.asked.append(sampling.max_tokens)
        usage = {"prompt_tokens": 10 * len(messages), "completion_tokens": 4}
        return ModelOutput(text="go", usage=usage)

    def prompt_tokens(self, messages: Any) -> int:
        return -1

    def close(self) -> None: ...


async def test_without_ids_the_budget_works_from_the_usage_of_the_answers(env_class: Env) -> None:
    client: Any = NoIds()
    end = await _end(env_class, client, max_response_tokens=30)
    assert end[:2] == ("truncated", "max_response_length_exceeded")
    assert client.asked == [30, 26, 6]


# ---- time -------------------------------------------------------------------------------------------------


async def _never() -> None:
    await asyncio.Event().wait()


async def test_a_call_that_takes_too_long_is_asked_again_and_then_the_model_has_failed(
    env_class: Env, agent_class: Agent
) -> None:
    slow = ScriptedAnswer(text="a", wait_for=_never)
    patience = CallPatience(retries=1, call_timeout_s=0.05, first_wait_s=0.0)
    limits = RolloutLimits(patience=patience)
    client = ScriptedClient([slow, "a", "b"])
    trajectory = await run_trajectory(agent_class(), lambda: env_class(), client, limits=limits)
    assert (trajectory.outcome, trajectory.info["call_retries"]) == (Outcome.SCORED, 1)
    client = ScriptedClient([slow, slow])
    trajectory = await run_trajectory(agent_class(), lambda: env_class(), client, limits=limits)
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert trajectory.info["error"]["message"] == "The model did not answer within 0.05 s."
    assert client.open_sessions == 0


async def test_an_episode_whose_time_is_up_says_what_it_waited_for(
    env_class: Env, agent_class: Agent
) -> None:
    client = ScriptedClient(["a", ScriptedAnswer(text="b", wait_for=_never)])
    trajectory = await run_trajectory(
        agent_class(), lambda: env_class(), client, limits=RolloutLimits(wall_timeout_s=1.0)
    )
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    assert "in turn 2" in trajectory.info["error"]["message"]


@pytest.fixture
def async_env(env_class: Env) -> Env:
    class AsyncEnv(env_class):  # type: ignore[misc, valid-type]
        """Lives in the event loop."""

        async def reset(self, seed: int | None = None) -> Any:
            await asyncio.sleep(0)
            return super().reset(seed)

        async def step(self, action: Any) -> Any:
            if self.trouble.get(f"step:{self.turn + 1}") == "hang":
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return super().step(action)

        async def close(self) -> None:
            await asyncio.sleep(0)
            super().close()

    return AsyncEnv


async def test_an_async_environment_runs_in_the_loop(async_env: Env, agent_class: Agent, world: Any) -> None:
    trajectory = await run_trajectory(agent_class(), lambda: async_env(turns=2), ScriptedClient(["a", "b"]))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
    (env,) = world.made
    assert env.num_closed == 1
    assert env.threads == {"rllm-environment", "MainThread"}  # it was made in a thread, where it may block


async def test_an_async_environment_that_hangs_is_given_up_too(
    async_env: Env, agent_class: Agent, world: Any
) -> None:
    trajectory = await run_trajectory(
        agent_class(),
        lambda: async_env(trouble={"step:1": "hang"}),
        ScriptedClient(["a"]),
        limits=RolloutLimits(step_timeout_s=0.05),
    )
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert trajectory.info["error"]["place"] == "environment"
    assert world.num_open == 0


# ---- the pool ---------------------------------------------------------------------------------------------


async def test_calls_that_block_get_threads_up_to_the_limit(world: Any) -> None:
    pool = EnvironmentPool(4)
    calls = [pool.call(world.release.wait, 20.0, timeout_s=30.0) for _ in range(6)]
    async with asyncio.timeout(20.0):
        while len(pool._busy) < 4:
            await asyncio.sleep(0.01)
    assert not any(call.done() for call in calls)
    world.release.set()
    assert await asyncio.gather(*calls) == [True] * 6
    assert len(pool._idle) + len(pool._busy) == 4
    pool.close()


async def test_calls_that_answer_at_once_share_one_thread() -> None:
    pool = EnvironmentPool(64)
    for _ in range(20):
        await asyncio.gather(*(pool.call(int, timeout_s=30.0) for _ in range(50)))
    assert len(pool._idle) + len(pool._busy) < 8
    pool.close()


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration()])
async def test_what_would_end_more_than_the_rollout_is_an_error_like_any_other(
    env_class: Env, agent_class: Agent, error: BaseException
) -> None:
    trajectory = await run_trajectory(
        agent_class(), lambda: env_class(trouble={"step:1": error}), ScriptedClient(["a"])
    )
    assert trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert repr(error) in trajectory.info["error"]["message"]


async def test_an_agent_that_calls_exit_ends_its_rollout_and_nothing_else(
    env_class: Env, agent_class: Agent
) -> None:
    leaving: Any = {"model:1": SystemExit(1)}
    trajectory = await run_trajectory(agent_class(leaving), lambda: env_class(), ScriptedClient(["a"]))
    assert trajectory.outcome is Outcome.POLICY_FAILURE


async def test_a_system_that_lets_no_thread_start_fails_the_call_and_not_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, num_refused = threading.Thread.start, 2

    def refuse(thread: threading.Thread) -> None:
        nonlocal num_refused
        if num_refused:
            num_refused -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool = EnvironmentPool(4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            await pool.call(len, "abc", timeout_s=5.0)
    assert await pool.call(len, "abc", timeout_s=5.0) == 3
    pool.close()


async def test_where_no_thread_can_take_the_place_of_a_stuck_one_what_waits_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, release = EnvironmentPool(1), threading.Event()
    stuck = pool.call(release.wait, 20.0, timeout_s=0.05)
    await asyncio.sleep(0)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    waiting = pool.call(len, "abc", timeout_s=5.0)
    with pytest.raises(TimeoutError):
        await stuck
    with pytest.raises(RuntimeError, match="new thread"):
        await waiting
    release.set()
    pool.close()
