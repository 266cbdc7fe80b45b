"""Law: waiting for the model is never the episode's own time, and a model that hangs is never the policy's
fault. In all three engines."""

import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.traced import TracedEngine
from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError
from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode, Outcome, TerminationReason
from rllm.types.episode_clock import ClockEnd, EpisodeClock, EpisodeLimits, ModelPulse
from rllm.types.task import AgentConfig, Task

sys.path.insert(0, str(Path(__file__).parent))
from moved_loop import advance, hangs, on_moved_clock, takes
from small_workflows import TASKS, Asks, engine_of, episodes_of

LIMIT_S = 30.0


class Slow(BaseEnv):
    """One turn, which takes `work_s` of the clock."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.work_s = work_s

    async def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "go", {}

    async def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        await advance(self.work_s)
        return "", 1.0, True, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Slow":
        return Slow(info.get("work_s", 0.0))


async def agents(client: ScriptedClient, tmp_path: Path, agent_class: Any, **limits: Any) -> list[Episode]:
    work_s, wall_s = limits.pop("work_s", 0.0), limits.pop("wall_timeout_s", None)
    engine = AgentExecutionEngine(
        agent_class, Slow, rollout_engine=client, trajectory_timeout=wall_s, n_parallel_agents=1, **limits
    )
    return [each async for each in engine.run([{"task_id": f"t{n}", "work_s": work_s} for n in range(2)])]


async def workflows(client: ScriptedClient, tmp_path: Path, agent_class: Any, **limits: Any) -> list[Episode]:
    work_s = limits.pop("work_s", 0.0)

    async def work(task: Any) -> None:
        await advance(work_s)

    engine = engine_of(Asks, client, {"trouble": work}, raise_on_error=False, n_parallel_tasks=1, **limits)
    return await episodes_of(engine, TASKS[:2])


async def programs(client: ScriptedClient, tmp_path: Path, agent_class: Any, **limits: Any) -> list[Episode]:
    def solve(task: Task, config: AgentConfig) -> None:
        with openai.OpenAI(base_url=config.base_url, api_key="none", max_retries=0) as model:
            model.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])

    async with (
        Gateway(LocalPolicy(client, "m"), tmp_path / "ledger") as gateway,
        TracedEngine(
            solve, lambda task, episode: 1.0, gateway, model="m", n_parallel_tasks=1, **limits
        ) as engine,
    ):
        rows = [{"task_id": f"t{n}", "question": "go"} for n in range(2)]
        return [each async for each in engine.run(rows)]


ENGINES = pytest.mark.parametrize("play", [agents, workflows, programs])


@ENGINES
def test_a_model_that_takes_ten_times_the_limit_times_no_episode_out(
    play: Any, tmp_path: Path, agent_class: Any
) -> None:
    async def test() -> None:
        client = ScriptedClient(lambda messages: takes(10 * LIMIT_S))
        episodes = await play(client, tmp_path, agent_class, episode_timeout_s=LIMIT_S)
        assert [each.outcome for each in episodes] == [Outcome.SCORED] * 2
        assert TerminationReason.TIMEOUT not in {each.termination_reason for each in episodes}

    on_moved_clock(test())


@ENGINES
def test_a_model_that_hangs_fails_its_episodes_which_say_so_and_are_tried_once(
    play: Any, tmp_path: Path, agent_class: Any
) -> None:
    async def test() -> None:
        client = ScriptedClient(lambda messages: hangs(500.0))
        episodes = await play(client, tmp_path, agent_class, episode_timeout_s=LIMIT_S)
        assert [each.outcome for each in episodes] == [Outcome.INFRASTRUCTURE_FAILURE] * 2
        for episode in episodes:
            error = episode.info.get("error") or episode.trajectories[0].info["error"]
            assert (error["place"], error["type"]) == ("model", "InferenceError")
            assert "no call for 480 s" in error["message"]
            assert "--model-timeout" in error["message"]
            assert all(trajectory.reward is None for trajectory in episode.trajectories)
            assert episode.info["tries"] == 1

    on_moved_clock(test())


@ENGINES
def test_a_promise_of_wall_time_counts_the_model_too(play: Any, tmp_path: Path, agent_class: Any) -> None:
    async def test() -> None:
        client = ScriptedClient(lambda messages: hangs(LIMIT_S + 1.0))
        episodes = await play(client, tmp_path, agent_class, wall_timeout_s=LIMIT_S)
        assert {each.termination_reason for each in episodes} == {TerminationReason.TIMEOUT}
        assert Outcome.INFRASTRUCTURE_FAILURE not in {each.outcome for each in episodes}

    on_moved_clock(test())


@pytest.mark.parametrize("play", [agents, workflows])
def test_an_episode_that_works_for_longer_than_its_limit_is_cut_off(
    play: Any, tmp_path: Path, agent_class: Any
) -> None:
    async def test() -> None:
        client = ScriptedClient(lambda messages: "a")
        episodes = await play(
            client,
            tmp_path,
            agent_class,
            work_s=LIMIT_S + 1.0,
            episode_timeout_s=LIMIT_S,
            step_timeout_s=900.0,
        )
        assert [each.outcome for each in episodes] == [Outcome.TRUNCATED] * 2
        assert {each.termination_reason for each in episodes} == {TerminationReason.TIMEOUT}

    on_moved_clock(test())


def test_a_timeout_that_a_workflow_names_is_wall_time(tmp_path: Path) -> None:
    async def test() -> None:
        client = ScriptedClient(lambda messages: hangs(LIMIT_S + 1.0))
        engine = engine_of(Asks, client, {"timeout": LIMIT_S}, raise_on_error=False)
        (episode,) = await episodes_of(engine, TASKS[:1])
        assert (episode.outcome, episode.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)

    on_moved_clock(test())


# ---- the clock itself -------------------------------------------------------------------------------------


def clock_of(*, pulse: ModelPulse | None = None, **limits: float) -> tuple[EpisodeClock, list[str]]:
    clock, rings = EpisodeClock(EpisodeLimits(**limits), pulse), list[str]()
    clock.begin(lambda: rings.append(str(clock.end)))
    return clock, rings


def test_work_adds_up_across_calls_and_calls_may_overlap() -> None:
    async def test() -> None:
        clock, rings = clock_of(work_s=10.0)
        await advance(6.0)
        clock.open_call()
        await advance(100.0)
        clock.open_call()
        clock.close_call()
        await advance(100.0)
        clock.close_call()
        assert not clock.is_over()
        await advance(3.0)
        assert rings == []
        await advance(1.5)
        assert rings == ["work"]
        await advance(100.0)
        assert rings == ["work"]

    on_moved_clock(test())


def test_silence_is_of_the_model_and_not_of_one_call() -> None:
    async def test() -> None:
        pulse = ModelPulse()
        waiting, rings = clock_of(pulse=pulse, work_s=5.0, silence_s=20.0)
        answered, _ = clock_of(pulse=pulse, work_s=5.0, silence_s=20.0)
        waiting.open_call()
        for _ in range(5):
            answered.open_call()
            await advance(15.0)
            answered.note_answer()
            answered.close_call()
        assert rings == []
        await advance(21.0)
        assert rings == ["silence"]
        assert waiting.end is ClockEnd.SILENCE
        error = waiting.silence_error()
        assert error is not None
        assert error.is_final

    on_moved_clock(test())


def test_a_clock_that_was_stopped_never_rings() -> None:
    async def test() -> None:
        clock, rings = clock_of(work_s=1.0, wall_s=2.0, silence_s=3.0)
        clock.open_call()
        clock.stop()
        clock.close_call()
        await advance(100.0)
        assert rings == []

    on_moved_clock(test())


@pytest.mark.parametrize("name", ["work_s", "wall_s", "silence_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_a_limit_is_a_time(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        EpisodeLimits(**{name: value})
