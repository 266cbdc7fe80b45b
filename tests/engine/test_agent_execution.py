import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.agent_execution import AgentExecutionEngine, EpisodeCounts
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.errors import AgentError, ConfigError, CountError, InferenceError, RewardError
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.episode import Episode, Outcome, TerminationReason
from rllm.types.messages import SamplingParams
from rllm.types.task import Task

Env = type[Any]
Agent = type[Any]
INFRASTRUCTURE = {"step:2": OSError("gone")}


def _always(messages: Sequence[dict[str, Any]]) -> str:
    return "go"


def _tasks(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"task_id": f"t{index}", **more} for index in range(count)]


async def _all(engine: AgentExecutionEngine, tasks: list[dict[str, Any]], **how: Any) -> list[Episode]:
    async with aclosing(engine.run(tasks, **how)) as episodes:
        return [episode async for episode in episodes]


def _told(episode: Episode) -> Any:
    """What an episode says, without ids and clocks."""
    (trajectory,) = episode.trajectories
    steps = [
        (step.prompt_ids, step.response_ids, step.logprobs, step.reward, step.done, step.chat_completions)
        for step in trajectory.steps
    ]
    return episode.id, episode.outcome, episode.termination_reason, trajectory.reward, steps


async def test_tasks_of_programs_are_played_as_their_rows(agent_class: Agent, env_class: Env) -> None:
    client = ScriptedClient(lambda messages: "go")
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client)
    tasks = [Task(id=f"task-{turns}", metadata={"turns": turns}) for turns in (1, 2)]
    episodes = sorted([each async for each in engine.run(tasks)], key=lambda each: each.task_id)
    assert [each.task_id for each in episodes] == ["task-1", "task-2"]
    assert [len(each.trajectories[0].steps) for each in episodes] == [1, 2]


async def test_tasks_of_a_generator_are_all_played(agent_class: Agent, env_class: Env) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(_always))
    episodes = [each async for each in engine.run((task for task in _tasks(3)), group_size=2)]
    assert len(episodes) == engine.counts.submitted == 6
    trajectories = await engine.execute_tasks(task for task in _tasks(3))
    assert [each.task["task_id"] for each in trajectories] == ["t0", "t1", "t2"]


async def test_environments_are_numbered_by_their_place_among_those_that_play_at_once(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    client = ScriptedClient(_always)
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, n_parallel_agents=3)
    await _all(engine, _tasks(3), group_size=2)
    assert {env.idx for env in world.made} == {0, 1, 2}


async def test_each_task_is_attempted_group_size_times(agent_class: Agent, env_class: Env) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(_always))
    episodes = await _all(engine, _tasks(3), group_size=4)
    assert sorted(episode.id for episode in episodes) == sorted(
        f"t{task}:{attempt}" for task in range(3) for attempt in range(4)
    )
    assert {episode.outcome for episode in episodes} == {Outcome.SCORED}
    assert all(episode.is_correct and episode.reward == 1.0 for episode in episodes)
    assert engine.counts.by_outcome[Outcome.SCORED] == engine.counts.submitted == 12
    assert engine.counts.turns == 12 * 2, "every answer counts"


@pytest.mark.parametrize(
    ("reward", "info", "is_correct"),
    [
        (0.0, {}, False),
        (0.1, {}, True),
        (-1.0, {}, False),
        (1.0, {"is_correct": False}, False),
        (0.0, {"is_correct": True}, True),
    ],
)
async def test_an_attempt_is_right_as_its_grade_says_and_without_one_by_a_reward_above_zero(
    agent_class: Agent, env_class: Env, reward: float, info: dict[str, Any], is_correct: bool
) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(_always))
    trouble = {1: {"answer:1": ("over", reward, True, info)}}
    (episode,) = await _all(engine, _tasks(1, turns=1, trouble=trouble))
    assert (episode.is_correct, episode.reward) == (is_correct, reward)


def test_unless_it_is_set_128_agents_play_in_parallel(agent_class: Agent, env_class: Env) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(_always))
    assert engine.num_parallel == 128


async def test_lake_rollouts_come_back_in_the_order_of_their_tasks() -> None:
    client = ScriptedClient(["Right", "Down"])
    engine = AgentExecutionEngine(FrozenLakeAgent, FrozenLakeEnv, rollout_engine=client, max_steps=4)
    tasks = [{"desc": ["SF", "HG"]}, {"desc": ["SH", "FG"]}, {"desc": ["SF", "FG"]}]
    trajectories = await engine.execute_tasks(tasks)
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0, 1.0]
    assert [trajectory.task for trajectory in trajectories] == tasks
    streamed = [each async for each in engine.trajectory_generator(tasks, group_size=2)]
    assert len(streamed) == 6
    assert client.open_sessions == 0


async def test_truncated_trajectories_are_masked_out_only_where_that_is_asked_for(
    agent_class: Agent, env_class: Env
) -> None:
    for overlong_filter in (False, True):
        engine = AgentExecutionEngine(
            agent_class,
            env_class,
            rollout_engine=ScriptedClient(_always),
            max_steps=2,
            overlong_filter=overlong_filter,
        )
        tasks = [{"task_id": "ends", "turns": 2}, {"task_id": "is cut", "turns": 3}]
        episodes = {each.task_id: each for each in await _all(engine, tasks)}
        assert episodes["is cut"].outcome is Outcome.TRUNCATED
        masked_out = {name: each.trajectories[0].info.get("masked_out") for name, each in episodes.items()}
        assert masked_out == {"ends": None, "is cut": "max_turns_exceeded" if overlong_filter else None}


async def test_returns_are_discounted_sums_of_the_rewards_to_come(agent_class: Agent, env_class: Env) -> None:
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=ScriptedClient(_always), gamma=0.5, max_steps=5
    )
    (episode,) = await _all(engine, _tasks(1, turns=3))
    assert [step.mc_return for step in episode.trajectories[0].steps] == [0.25, 0.5, 1.0]


async def test_an_infrastructure_failure_is_tried_again_and_leaves_no_trace_in_the_episode(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    def engine() -> AgentExecutionEngine:
        client = ScriptedClient(["a", "b"])
        return AgentExecutionEngine(agent_class, env_class, rollout_engine=client, seed=3, retry_wait_s=0.0)

    (calm,) = await _all(engine(), [{"task_id": "t"}])
    troubled = engine()
    later_tries = {2: INFRASTRUCTURE, 3: {"reset": OSError("not yet")}}  # the first was the calm one
    (episode,) = await _all(troubled, [{"task_id": "t", "trouble": later_tries}])
    assert episode.info["tries"] == 3
    assert troubled.counts.retries == 2
    assert troubled.counts.by_outcome[Outcome.SCORED] == troubled.counts.submitted == 1
    assert _told(episode) == _told(calm)
    calm_env, env_that_failed, _, last_env = world.made
    assert calm_env.seed == env_that_failed.seed == last_env.seed
    assert world.num_open == 0


async def test_a_failure_that_stays_is_counted_and_has_no_reward(agent_class: Agent, env_class: Env) -> None:
    client = ScriptedClient(_always)
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=client, retry_limit=2, retry_wait_s=0.0
    )
    task = {"task_id": "t", "trouble": {1: INFRASTRUCTURE, 2: INFRASTRUCTURE}}
    (episode,) = await _all(engine, [task])
    assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert episode.trajectories[0].reward is None
    assert not episode.is_correct
    assert episode.info["tries"] == 2
    assert client.open_sessions == 0


@pytest.mark.parametrize(
    ("agent_args", "env_task", "outcome"),
    [
        ({"trouble": {"model:1": ValueError("unreadable")}}, {}, Outcome.POLICY_FAILURE),
        ({}, {"turns": 99}, Outcome.TRUNCATED),
    ],
)
async def test_what_the_policy_did_is_never_tried_again(
    agent_class: Agent, env_class: Env, agent_args: dict[str, Any], env_task: dict[str, Any], outcome: Outcome
) -> None:
    engine = AgentExecutionEngine(
        agent_class, env_class, agent_args, rollout_engine=ScriptedClient(_always), retry_limit=3
    )
    (episode,) = await _all(engine, _tasks(1, **env_task))
    assert (episode.outcome, episode.info["tries"], engine.counts.retries) == (outcome, 1, 0)


async def test_a_model_call_that_fails_is_asked_again_with_the_same_key_and_the_attempt_goes_on(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    died = InferenceError("died")
    client = ScriptedClient(["a", died, died, "b"])
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, retry_wait_s=0.0)
    (episode,) = await _all(engine, _tasks(1))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.SCORED, 1)
    assert [len(messages) for messages in client.requests] == [1, 3, 3, 3]
    _, *second_turn = client.samplings
    assert second_turn == [second_turn[0]] * 3
    assert (engine.counts.call_retries, engine.counts.retries) == (2, 0)
    assert episode.trajectories[0].info["call_retries"] == 2
    assert len(world.made) == 1


async def test_one_layer_retries_so_a_dead_model_is_asked_no_more_than_it_may_be(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    def dead(messages: Sequence[dict[str, Any]]) -> InferenceError:
        return InferenceError("died")

    client = ScriptedClient(dead)
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=client, api_retries=2, retry_limit=5, retry_wait_s=0.0
    )
    (episode,) = await _all(engine, _tasks(1))
    assert (episode.outcome, episode.info["tries"]) == (Outcome.INFRASTRUCTURE_FAILURE, 1)
    assert episode.trajectories[0].info["error"]["place"] == "model"
    assert (len(client.requests), len(world.made), client.open_sessions) == (3, 1, 0)


async def test_five_hundred_episodes_with_a_third_of_failures_are_counted_exactly(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    rng = random.Random(7)
    places = ["make", "reset", "step:1", "step:2"]
    failures = {f"t{index}": 0 for index in range(500)}
    tasks = []
    for task_id in failures:
        while failures[task_id] < 3 and rng.random() < 0.3:
            failures[task_id] += 1
        trouble = {
            number: {rng.choice(places): OSError("flaky")} for number in range(1, failures[task_id] + 1)
        }
        tasks.append({"task_id": task_id, "trouble": trouble, "turns": rng.randint(2, 4)})
    client = ScriptedClient(_always)
    engine = AgentExecutionEngine(
        agent_class,
        env_class,
        rollout_engine=client,
        n_parallel_agents=64,
        retry_limit=3,
        retry_wait_s=0.0,
    )
    episodes: list[Episode] = []
    async with aclosing(engine.run(tasks)) as running:
        async for episode in running:
            episodes.append(episode)
            counts = engine.counts
            assert sum(counts.by_outcome.values()) == len(episodes)
            assert counts.in_flight == 500 - len(episodes)
            assert client.open_sessions <= 2 * 64
    assert {episode.task_id for episode in episodes} == set(failures)
    lost = [episode for episode in episodes if episode.outcome is Outcome.INFRASTRUCTURE_FAILURE]
    assert {episode.task_id for episode in lost} == {name for name, count in failures.items() if count == 3}
    assert all(episode.info["tries"] == min(3, 1 + failures[episode.task_id]) for episode in episodes)
    assert engine.counts.retries == sum(min(2, count) for count in failures.values())
    assert engine.counts.by_outcome == {
        **dict.fromkeys(Outcome, 0),
        Outcome.SCORED: 500 - len(lost),
        Outcome.INFRASTRUCTURE_FAILURE: len(lost),
    }
    assert 0 < len(lost) < 60
    # One that could not even be made has nothing to close.
    assert world.num_open == sum("make" in env.trouble for env in world.made)
    assert client.open_sessions == 0


def test_counts_that_do_not_add_up_name_both_sides() -> None:
    counts = EpisodeCounts(submitted=5, in_flight=1)
    counts.by_outcome[Outcome.SCORED] = 3
    with pytest.raises(CountError, match=r"5 .*submitted.* 3 .*settled.*scored 3, .* 1 in flight"):
        counts.check()
    counts.by_outcome[Outcome.CANCELLED] = 1
    counts.check()


async def test_an_episode_that_appears_from_nowhere_stops_the_run(agent_class: Agent, env_class: Env) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(_always))

    async def tampering() -> None:
        async with aclosing(engine.run(_tasks(4))) as episodes:
            async for _ in episodes:
                engine.counts.by_outcome[Outcome.SCORED] += 1

    with pytest.raises(CountError):
        await tampering()
    with pytest.raises(CountError):
        engine.counts.check()


async def test_breaking_out_cancels_and_closes_what_is_in_flight(
    agent_class: Agent, env_class: Env, world: Any, settled: Callable[..., Any]
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    quick, slow = ScriptedClient(_always), ScriptedClient([ScriptedAnswer(text="a", wait_for=never)])

    class Mixed(ScriptedClient):
        def session(self, order: tuple[str, int]) -> Any:
            return (quick if order[0] == "t0" else slow).session(order)

    client = Mixed([])
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, n_parallel_agents=8)
    threads_before = threading.active_count()
    async with aclosing(engine.run(_tasks(20))) as episodes:
        async for episode in episodes:
            assert episode.task_id == "t0"
            break
    counts = engine.counts
    assert (counts.submitted, counts.in_flight) == (20, 0)
    assert (counts.by_outcome[Outcome.SCORED], counts.by_outcome[Outcome.CANCELLED]) == (1, 19)
    assert (quick.open_sessions, slow.open_sessions) == (0, 0)
    await settled(lambda: world.num_open == 0)
    await settled(lambda: threading.active_count() <= threads_before)


async def test_what_ends_a_run_leaves_nothing_open(
    agent_class: Agent, env_class: Env, world: Any, settled: Callable[..., Any]
) -> None:
    client = ScriptedClient(_always)
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=client, n_parallel_agents=4, max_failed_fraction=0.0
    )
    for trouble, error in [
        ({"answer:1": ("o", None, False, {})}, RewardError),
        ({"answer:2": "nonsense"}, AgentError),
        ({"make": ConfigError("no such key")}, ConfigError),
    ]:
        tasks = _tasks(12)
        tasks[5] = {"task_id": f"bad {error.__name__}", "trouble": {1: trouble}}
        async with asyncio.timeout(20.0):
            with pytest.raises(error):
                await _all(engine, tasks)
        assert engine.counts.in_flight == 0
        assert client.open_sessions == 0
        # An environment that a thread was just about to make is closed by that thread, a moment later.
        await settled(lambda: world.num_open == ("make" in trouble))  # noqa: B023


async def test_two_rollouts_share_nothing(agent_class: Agent, env_class: Env, world: Any) -> None:
    agents: list[Any] = []

    class Remembered(agent_class):  # type: ignore[misc, valid-type]
        def __init__(self, marks: list[str]) -> None:
            super().__init__()
            agents.append(self)

    def name_of(messages: Sequence[dict[str, Any]]) -> str:
        return str(messages[0]["content"]).split()[0]

    engine = AgentExecutionEngine(
        Remembered, env_class, {"marks": []}, rollout_engine=ScriptedClient(name_of), n_parallel_agents=50
    )
    episodes = await _all(engine, _tasks(50), group_size=2)
    assert len({id(agent) for agent in agents}) == len(world.made) == 100
    for env in world.made:
        assert env.actions == [env.name] * 2
    for episode in episodes:
        for step in episode.trajectories[0].steps:
            said = {message["content"].split()[0] for message in step.chat_completions}
            assert said == {episode.task_id}
        episode.task["mark"] = True
        assert "mark" not in episode.trajectories[0].task
    lists = [id(episode.trajectories[0].steps) for episode in episodes]
    assert len(set(lists)) == 100


async def test_a_blocking_environment_does_not_block_the_loop(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=ScriptedClient(_always), n_parallel_agents=8, max_workers=2
    )
    tasks = _tasks(8)
    tasks[0]["trouble"] = {1: {"step:1": "hang"}}
    finished: list[str] = []
    async with asyncio.timeout(20.0), aclosing(engine.run(tasks)) as episodes:
        async for episode in episodes:
            finished.append(episode.task_id)
            if len(finished) == 7:  # all the others, on the one worker that is left
                assert "t0" not in finished
                world.release.set()
    assert finished[-1] == "t0"


async def test_stuck_workers_are_replaced_so_that_the_rest_is_played(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    engine = AgentExecutionEngine(
        agent_class,
        env_class,
        rollout_engine=ScriptedClient(_always),
        n_parallel_agents=4,
        max_workers=1,
        step_timeout_s=0.5,
        retry_limit=1,
    )
    tasks = _tasks(8)
    for task in tasks[:3]:
        task["trouble"] = {1: {"reset": "hang"}}
    async with asyncio.timeout(20.0):
        episodes = await _all(engine, tasks)
    outcomes = {episode.task_id: episode.outcome for episode in episodes}
    assert [outcomes[f"t{index}"] for index in range(8)] == [
        *[Outcome.INFRASTRUCTURE_FAILURE] * 3,
        *[Outcome.SCORED] * 5,
    ]
    assert world.num_open == 0


async def test_a_worker_stuck_in_an_episode_that_ran_out_of_time_is_replaced_too(
    agent_class: Agent, env_class: Env, world: Any
) -> None:
    engine = AgentExecutionEngine(
        agent_class,
        env_class,
        rollout_engine=ScriptedClient(_always),
        n_parallel_agents=1,
        max_workers=1,
        step_timeout_s=0.1,
        trajectory_timeout=0.05,
    )
    tasks = _tasks(2)
    tasks[0]["trouble"] = {1: {"reset": "hang"}}
    async with asyncio.timeout(20.0):
        first, second = await _all(engine, tasks)
    assert (first.outcome, first.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)
    assert second.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
    assert world.num_open == 0


async def test_an_environment_that_is_not_thread_safe_is_stepped_by_one_thread_at_a_time(
    agent_class: Agent, env_class: Env
) -> None:
    class Alone(env_class):  # type: ignore[misc, valid-type]
        @staticmethod
        def is_multithread_safe() -> bool:
            return False

    client = ScriptedClient(_always)
    assert AgentExecutionEngine(agent_class, Alone, rollout_engine=client, max_workers=8).env_workers == 1
    assert AgentExecutionEngine(agent_class, env_class, rollout_engine=client, max_workers=8).env_workers == 8


async def test_two_tasks_of_one_name_would_be_compared_and_are_refused(
    agent_class: Agent, env_class: Env
) -> None:
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient(_always))
    with pytest.raises(ConfigError, match="same `task_id`"):
        await _all(engine, [{"task_id": "t"}, {"task_id": "t"}])
    assert await _all(engine, []) == []


@pytest.mark.parametrize("name", ["n_parallel_agents", "max_steps", "retry_limit"])
def test_a_limit_below_one_is_refused_by_name(agent_class: Agent, env_class: Env, name: str) -> None:
    limits: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"`{name}` is 0"):
        AgentExecutionEngine(agent_class, env_class, rollout_engine=ScriptedClient([]), **limits)


def test_classes_of_the_wrong_kind_are_refused(agent_class: Agent, env_class: Env) -> None:
    client = ScriptedClient([])
    with pytest.raises(AgentError, match="agent_class is"):
        AgentExecutionEngine(env_class, env_class, rollout_engine=client)  # type: ignore[arg-type]
    with pytest.raises(AgentError, match="env_class is"):
        AgentExecutionEngine(agent_class, agent_class, rollout_engine=client)  # type: ignore[arg-type]


def test_sampling_parameters_may_be_a_mapping(agent_class: Agent, env_class: Env) -> None:
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=ScriptedClient([]), sampling_params={"max_tokens": 3}
    )
    assert engine.sampling == SamplingParams(max_tokens=3)
