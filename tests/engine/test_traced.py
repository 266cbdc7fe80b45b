"""Programs behind a gateway: what each attempt gets, and what becomes of what it did."""

import asyncio
import contextvars
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import AgentError, ConfigError, RewardError
from rllm.types.episode import Episode, Outcome, Step, TerminationEvent, TerminationReason, Trajectory
from rllm.types.evaluation import EvalOutput, Signal
from rllm.types.messages import SamplingParams
from rllm.types.task import AgentConfig, Task

sys.path.insert(0, str(Path(__file__).parent))
from fake_gateway import FakeGateway, Messages, engine_for, play, tasks


@pytest.mark.parametrize("way", ["sync", "async", "returned coroutine"])
async def test_a_program_that_returns_nothing_becomes_a_step_per_call(way: str) -> None:
    gateway = FakeGateway(lambda messages: f"answer to {messages[0]['content']}")

    def solve(task: Task, config: AgentConfig) -> None:
        for turn in range(2):
            gateway.ask(config, f"{task.instruction} {turn}")

    async def solve_async(task: Task, config: AgentConfig) -> None:
        solve(task, config)
        await asyncio.sleep(0)

    program = {"sync": solve, "async": solve_async, "returned coroutine": lambda *a: solve_async(*a)}[way]
    (episode,) = await play(engine_for(program, gateway), tasks(1))
    (trajectory,) = episode.trajectories
    assert trajectory.name == getattr(program, "__name__", "")
    assert [step.model_response for step in trajectory.steps] == [
        "answer to What is 0? 0",
        "answer to What is 0? 1",
    ]
    step = trajectory.steps[1]
    assert step.prompt_ids == [ord(letter) for letter in "What is 0? 1"]
    assert "".join(map(chr, step.response_ids)) == "answer to What is 0? 1"
    assert step.policy_version == 3
    assert step.chat_completions[-1] == {"role": "assistant", "content": "answer to What is 0? 1"}
    assert (episode.outcome, episode.termination_reason) == (Outcome.SCORED, TerminationReason.ENV_DONE)
    assert (trajectory.reward, episode.is_correct) == (0.5, True)
    assert (episode.metrics["calls"], episode.metrics["abandoned_threads"]) == (2, 0)
    assert episode.info["tries"] == 1


async def test_each_attempt_gets_its_own_task_session_seed_and_the_sampling_of_the_run() -> None:
    gateway = FakeGateway()
    seen: list[tuple[Task, AgentConfig]] = []

    def solve(task: Task, config: AgentConfig) -> None:
        task.metadata["mark"] = True
        seen.append((task, config))

    rows = [{"uid": "a", "problem": "P", "answer": 4}, Task(id="b", instruction="Q", metadata={"level": 2})]
    engine = engine_for(solve, gateway)
    sampling = SamplingParams(temperature=0.7, max_tokens=9)
    episodes = await play(engine, rows, group_size=2, purpose="train/0", sampling=sampling)
    assert [(episode.task_id, episode.rollout_idx) for episode in episodes] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert {(task.id, task.instruction) for task, _ in seen} == {("a", "P"), ("b", "Q")}
    assert (
        len({id(task.metadata) for task, _ in seen}) == len({config.session_uid for _, config in seen}) == 4
    )
    assert episodes[0].task == {"task_id": "a", "instruction": "P", "uid": "a", "problem": "P", "answer": 4}
    assert episodes[2].task == {"task_id": "b", "instruction": "Q", "level": 2}
    config = seen[0][1]
    assert config.sampling_params == {"temperature": 0.7, "top_p": 1.0, "max_tokens": 9}
    assert (config.model, config.is_validation) == ("m", False)
    assert config.base_url.endswith(f"/sessions/{config.session_uid}/v1")
    seeds = {session.seed for session in gateway.sessions.values()}
    again = FakeGateway()
    await play(engine_for(lambda task, config: None, again), rows, group_size=2, purpose="train/0")
    assert seeds == {session.seed for session in again.sessions.values()}
    assert len(seeds) == 4
    assert all(session.sampling == {} for session in again.sessions.values())


async def test_a_program_does_not_see_what_its_grader_compares_with() -> None:
    gateway = FakeGateway()
    seen: list[Task] = []
    judged: list[dict[str, Any]] = []

    def solve(task: Task, config: AgentConfig) -> None:
        seen.append(task)
        gateway.ask(config, "?")

    def score(task: dict[str, Any], episode: Episode) -> float:
        judged.append(task)
        return 1.0

    row = {"grader": "math", "grading": {"answer": "42"}, "oracle": "42", "subject": "sums"}
    await play(engine_for(solve, gateway, score), [Task("a", "6 * 7?", row)])
    assert seen[0].metadata == {"grader": "math", "subject": "sums"}
    assert judged[0]["grading"] == {"answer": "42"}
    await play(engine_for(solve, gateway, score), [Task("b", "6 * 7?", {"oracle": "a user's own column"})])
    assert seen[1].metadata == {"oracle": "a user's own column"}


async def test_a_program_may_keep_its_own_max_tokens_and_knows_when_it_is_measured() -> None:
    gateway = FakeGateway()
    seen: list[AgentConfig] = []
    engine = engine_for(lambda task, config: seen.append(config), gateway, sets_max_tokens=False)
    await play(engine, tasks(1), purpose="report/after", sampling=SamplingParams(temperature=0.0))
    (session,) = gateway.sessions.values()
    assert session.sampling == {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert seen[0].is_validation


async def test_sixty_four_blocking_programs_wait_at_the_same_time() -> None:
    together = threading.Barrier(64, timeout=20.0)  # breaks, and so fails, when fewer run at once

    def solve(task: Task, config: AgentConfig) -> None:
        together.wait()

    episodes = await play(engine_for(solve, FakeGateway()), tasks(64))
    assert {episode.outcome for episode in episodes} == {Outcome.SCORED}


async def test_a_limit_on_parallel_programs_holds_for_the_engine_and_the_program() -> None:
    running: list[int] = []
    most: list[int] = []

    class Careful:
        max_concurrent = 3

        async def arun(self, task: Task, config: AgentConfig) -> None:
            running.append(1)
            most.append(len(running))
            await asyncio.sleep(0.02)  # long enough for all that may run to have begun
            running.pop()

    await play(engine_for(Careful, FakeGateway()), tasks(30))
    assert max(most) == 3


async def test_an_async_program_that_blocks_does_not_hold_up_the_engines_loop(
    release: threading.Event,
) -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def solve(task: Task, config: AgentConfig) -> None:
        loop.call_soon_threadsafe(started.set)
        release.wait()

    engine = engine_for(solve, FakeGateway())
    playing = asyncio.create_task(play(engine, tasks(1)))
    async with asyncio.timeout(20.0):
        await started.wait()  # the loop of this test goes on, so a gateway in it could answer
        release.set()
        (episode,) = await playing
    assert episode.outcome is Outcome.SCORED


async def test_context_variables_reach_the_program() -> None:
    colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour")
    colour.set("green")
    seen: list[str] = []

    async def solve(task: Task, config: AgentConfig) -> None:
        seen.append(colour.get())

    await play(engine_for(solve, FakeGateway()), tasks(1))
    await play(engine_for(lambda task, config: seen.append(colour.get()), FakeGateway()), tasks(1))
    assert seen == ["green", "green"]


@pytest.mark.parametrize("value", ["text", 1.0, {"reward": 1}, ["steps"]])
async def test_anything_else_that_a_program_returns_ends_the_run_by_name(value: Any) -> None:
    def solve(task: Task, config: AgentConfig) -> Any:
        return value

    with pytest.raises(AgentError, match=r"solve returned .* \(a (str|float|dict|list)\); "):
        await play(engine_for(solve, FakeGateway()), tasks(3))


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (TerminationReason.MAX_TURNS_EXCEEDED, Outcome.TRUNCATED),
        (TerminationReason.ENV_DONE, Outcome.SCORED),
        (TerminationReason.ERROR, Outcome.POLICY_FAILURE),
    ],
)
@pytest.mark.parametrize("way", ["raised", "returned"])
async def test_a_program_may_say_how_it_ended(way: str, reason: TerminationReason, outcome: Outcome) -> None:
    gateway = FakeGateway()

    def solve(task: Task, config: AgentConfig) -> Episode:
        gateway.ask(config, "q")
        if way == "raised":
            raise TerminationEvent(reason)
        return Episode(termination_reason=reason)

    (episode,) = await play(engine_for(solve, gateway), tasks(1))
    assert episode.outcome is outcome
    assert episode.trajectories[0].outcome is outcome
    assert (episode.trajectories[0].reward is None) == (outcome is Outcome.POLICY_FAILURE)
    assert episode.is_correct == (outcome is Outcome.SCORED)
    assert 0.0 <= episode.metrics["program_s"] < 60.0


async def test_the_evaluator_gets_the_row_and_pays_where_nobody_did() -> None:
    gateway = FakeGateway()

    def solve(task: Task, config: AgentConfig) -> Episode:
        first, second = gateway.ask(config, "one"), gateway.ask(config, "two")
        return Episode(
            trajectories=[
                Trajectory(name="solver", steps=[Step(id=first.id, action="a")], reward=0.25),
                Trajectory(name="judge", steps=[Step(id=second.id)]),
                Trajectory(name="late", steps=[]),
            ],
            artifacts={"answer": 4},
        )

    async def score(task: dict[str, Any], episode: Episode) -> EvalOutput:
        assert task["answer"] == episode.artifacts["answer"]
        assert all(step.response_ids for each in episode.trajectories[:2] for step in each.steps)
        episode.trajectories[2].reward = -1.0
        return EvalOutput(1.0, True, [Signal("format", 0.5)], {"why": "equal"})

    (episode,) = await play(engine_for(solve, gateway, score), [{"task_id": "t", "answer": 4}])
    assert [list(each.timings) for each in episode.trajectories[1].steps] == [["model_s", "grader_s"]]
    assert [(each.name, each.reward) for each in episode.trajectories] == [
        ("solver", 0.25),
        ("judge", 1.0),
        ("late", -1.0),
    ]
    assert episode.trajectories[0].steps[0].action == "a"
    assert episode.trajectories[0].signals == {"format": 0.5}
    assert episode.metrics["format"] == 0.5
    assert episode.info["evaluation"] == {"why": "equal"}


@pytest.mark.parametrize("reward", [float("nan"), "1", None])
async def test_a_reward_on_a_trajectory_that_is_no_number_is_refused(reward: Any) -> None:
    def score(task: dict[str, Any], episode: Episode) -> float:
        episode.trajectories[0].reward = reward
        return float("nan") if reward is None else 1.0

    with pytest.raises(RewardError, match="score"):
        await play(engine_for(lambda task, config: None, FakeGateway(), score), tasks(1))


async def test_an_evaluator_that_raises_ends_the_run_with_its_line() -> None:
    def score(task: dict[str, Any], episode: Episode) -> float:
        return task["missing"]

    with pytest.raises(RewardError, match=r"score .*'t0' .*KeyError: 'missing' \([^()]*:\d+\)(\n|$)"):
        await play(engine_for(lambda task, config: None, FakeGateway(), score), tasks(1))


async def test_calls_without_ids_are_measured_but_not_trained_on() -> None:
    gateway = FakeGateway()
    gateway.no_ids_because = "start the server with --return-token-ids"
    program = lambda task, config: gateway.ask(config, "q") and None  # noqa: E731
    (episode,) = await play(engine_for(program, gateway), tasks(1))
    assert episode.outcome is Outcome.SCORED
    assert episode.trajectories[0].steps[0].info["no_ids_because"] == gateway.no_ids_because
    with pytest.raises(ConfigError, match="--return-token-ids"):
        await play(engine_for(program, gateway, requires_ids=True), tasks(1))


async def test_five_hundred_programs_with_failures_everywhere_are_counted_exactly() -> None:
    asked: dict[str, int] = {}

    def answer(messages: Messages) -> str | int:
        name = messages[0]["content"]
        asked[name] = asked.get(name, 0) + 1
        number = int(name[1:])
        return 503 if number % 7 == 0 and asked[name] <= number % 5 else "fine"

    gateway = FakeGateway(answer)

    async def solve(task: Task, config: AgentConfig) -> None:
        await asyncio.sleep(0)
        gateway.ask(config, task.id)
        if int(task.id[1:]) % 11 == 0:
            raise ValueError("a bug for some")

    engine = engine_for(solve, gateway, n_parallel_tasks=64)
    episodes = await play(engine, tasks(500))
    lost = {f"t{n}" for n in range(0, 500, 7) if n % 5 >= 3}
    bugs = {f"t{n}" for n in range(0, 500, 11)} - lost
    by_outcome = {
        outcome: {episode.task_id for episode in episodes if episode.outcome is outcome}
        for outcome in Outcome
    }
    assert by_outcome[Outcome.INFRASTRUCTURE_FAILURE] == lost
    assert by_outcome[Outcome.POLICY_FAILURE] == bugs
    assert engine.counts.by_outcome[Outcome.SCORED] == 500 - len(lost) - len(bugs)
    assert engine.counts.in_flight == 0
    assert engine.counts.retries == sum(min(2, n % 5) for n in range(0, 500, 7))


def test_what_cannot_be_run_is_refused_when_the_engine_is_made() -> None:
    def solve(task: Task, config: AgentConfig) -> None: ...

    for options, named in (
        ({"n_parallel_tasks": 0}, "`n_parallel_tasks` is 0"),
        ({"retry_limit": 0}, "`retry_limit` is 0"),
        ({"episode_timeout_s": 0.0}, "`episode_timeout_s` is 0"),
        ({"evaluator_timeout_s": float("inf")}, "`evaluator_timeout_s` is inf"),
    ):
        with pytest.raises(ConfigError, match=named):
            engine_for(solve, FakeGateway(), **options)


async def test_two_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="same `task_id`"):
        await play(engine_for(lambda task, config: None, FakeGateway()), [{"id": "t"}, {"id": "t"}])


async def test_whoever_looks_on_sees_which_programs_run_and_what_they_wait_for() -> None:
    gateway, seen = FakeGateway(), list[str]()

    async def solve(task: Task, config: AgentConfig) -> None:
        gateway.ask(config, "hello")
        seen.extend(f"{each.episode.task_id} {each.waits_for}" for each in engine.live())

    def judge(task: dict[str, Any], episode: Episode) -> float:
        seen.extend(f"{each.episode.task_id} {each.waits_for}" for each in engine.live())
        return 1.0

    engine = engine_for(solve, gateway, judge)
    await play(engine, tasks(1))
    assert seen == ["t0 its program, solve", "t0 its evaluator, judge"]
    assert engine.live() == []
