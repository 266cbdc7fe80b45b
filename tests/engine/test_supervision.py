import asyncio
import re
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rllm.engine import supervision
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.attempt_state import LiveRollout
from rllm.engine.attempts import EpisodeCounts
from rllm.engine.supervision import LoopWatchdog, ProgressWatchdog, _in_callback
from rllm.errors import ConfigError, StallError
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.episode import Outcome

Env = type[Any]
Agent = type[Any]


class Clock:
    """Shows what it was set to."""

    def __init__(self) -> None:
        self.now_s = self.start_s = 86_400.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now_s


async def _later(clock: Clock, happened: Callable[[], bool]) -> None:
    """Hours pass until it has happened."""
    while not happened():
        clock.now_s += 3600.0
        await asyncio.sleep(0.01)


async def _never() -> None:
    await asyncio.Event().wait()


async def _play(engine: AgentExecutionEngine, tasks: list[dict[str, Any]]) -> None:
    async with aclosing(engine.run(tasks)) as episodes:
        async for _ in episodes:
            pass


# ---- the loop ---------------------------------------------------------------------------------------------


async def test_code_that_blocks_the_loop_is_named_once_by_file_and_line() -> None:
    told: list[tuple[str, float]] = []
    known = threading.Event()

    def note(place: str, limit_s: float) -> None:
        told.append((place, limit_s))
        known.set()

    with LoopWatchdog(limit_s=0.1, on_blocked=note):
        for event, limit_s in ((known, 20.0), (threading.Event(), 0.3)):
            event.wait(limit_s)  # blocks the loop: until that has been noticed, and for long again
            await asyncio.sleep(0.05)
    ((place, limit_s),) = told
    assert limit_s == 0.1
    assert __file__ in place
    assert "test_code_that_blocks_the_loop" in place


async def test_each_place_that_blocks_is_named_one_after_the_other() -> None:
    places: list[str] = []
    known = threading.Event()

    def note(place: str, limit_s: float) -> None:
        places.append(place)
        known.set()

    def first() -> None:
        known.wait(20.0)

    def second() -> None:
        known.wait(20.0)

    with LoopWatchdog(limit_s=0.1, on_blocked=note):
        for block in (first, second):
            known.clear()
            block()
            await asyncio.sleep(0.15)
    assert [place.rpartition(" ")[2] for place in places] == ["first", "second"]


async def test_a_busy_loop_of_short_callbacks_and_an_idle_one_are_no_places() -> None:
    told: list[str] = []
    with LoopWatchdog(limit_s=0.1, on_blocked=lambda place, limit_s: told.append(place)):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
    assert told == []


async def test_the_engine_warns_of_an_agent_that_blocks(
    agent_class: Agent, env_class: Env, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = {**(LoopWatchdog.__init__.__kwdefaults__ or {}), "limit_s": 0.1}
    monkeypatch.setattr(LoopWatchdog.__init__, "__kwdefaults__", impatient)

    class Blocking(agent_class):  # type: ignore[misc, valid-type]
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            end = time.monotonic() + 20.0
            while not caplog.records and time.monotonic() < end:
                time.sleep(0.01)
            return super().update_from_model(response)

    engine = AgentExecutionEngine(Blocking, env_class, rollout_engine=ScriptedClient(["a", "b"]))
    await _play(engine, [{"task_id": "t"}])
    (record,) = caplog.records
    assert "update_from_model" in record.getMessage()
    assert f"{__file__}:" in record.getMessage()
    assert engine.counts.by_outcome[Outcome.SCORED] == 1


# ---- progress ---------------------------------------------------------------------------------------------


async def test_what_is_live_is_told_with_age_turn_and_what_it_waits_for(
    agent_class: Agent, env_class: Env, settled: Any
) -> None:
    client = ScriptedClient(["a", ScriptedAnswer(text="b", wait_for=_never)])
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, n_parallel_agents=2)
    running = asyncio.create_task(_play(engine, [{"task_id": f"t{index}"} for index in range(3)]))
    await settled(lambda: [each.turn for each in engine.live()] == [2, 2])
    oldest, other = engine.live()
    assert {oldest.episode.task_id, other.episode.task_id} == {"t0", "t1"}
    assert oldest.age_s >= other.age_s >= 0.0
    assert oldest.waits_for == "model"
    assert engine.counts.in_flight == 3
    running.cancel()
    await asyncio.wait({running})
    assert engine.live() == []


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def test_a_stall_saves_reports_and_ends_with_the_name_of_the_culprit(
    agent_class: Agent, env_class: Env, world: Any, tmp_path: Path, clock: Clock, settled: Any
) -> None:
    client = ScriptedClient(lambda messages: "go")
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client, step_timeout_s=60.0)
    saved: list[str] = []
    threads: list[threading.Thread] = []
    report = tmp_path / "stall.txt"

    def save() -> None:
        saved.append("checkpoint")
        threads.append(threading.current_thread())

    async def guarded() -> None:
        async with ProgressWatchdog(
            engine,
            limit_s=600.0,
            on_stall=save,
            report_path=report,
            clock=clock,
            check_every_s=0.01,
        ):
            await _play(engine, [{"task_id": "good"}, {"task_id": "bad", "trouble": {1: {"step:2": "hang"}}}])

    running = asyncio.create_task(guarded())
    await settled(lambda: engine.counts.settled == 1 and engine.live()[0].turn == 2)
    async with asyncio.timeout(20.0):
        await _later(clock, lambda: bool(saved))
        world.release.set()
        with pytest.raises(StallError) as stall:
            await running
    assert threads == [threading.current_thread()], "the loop reacts, so it is the loop that saves"
    message = str(stall.value)
    match = re.search(r"No rollout has moved for (\d+) s: 1 episodes are in flight", message)
    assert match is not None
    assert 600 <= int(match[1]) <= clock.now_s - clock.start_s
    assert "bad:0" in message
    assert "in turn 2, waits for environment.step" in message
    assert "conftest.py" in message, "the line at which the environment hangs"
    assert saved == ["checkpoint"]
    text = report.read_text()
    assert "Thread rllm-environment" in text
    assert "Task " in text
    assert "_meet" in text
    assert (client.open_sessions, world.num_open) == (0, 0)


async def test_a_model_that_never_answers_is_a_stall_too(
    agent_class: Agent, env_class: Env, clock: Clock, settled: Any
) -> None:
    client = ScriptedClient([ScriptedAnswer(text="a", wait_for=_never)])
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client)

    async def guarded() -> None:
        async with ProgressWatchdog(engine, limit_s=10.0, clock=clock, check_every_s=0.01):
            await _play(engine, [{"task_id": "t"}])

    running = asyncio.create_task(guarded())
    await settled(lambda: bool(client.requests))
    async with asyncio.timeout(20.0):
        await _later(clock, running.done)
        with pytest.raises(StallError, match="waits for model"):
            await running


async def test_progress_and_idleness_are_no_stall(agent_class: Agent, env_class: Env, clock: Clock) -> None:
    engine = AgentExecutionEngine(
        agent_class, env_class, rollout_engine=ScriptedClient(lambda messages: "go")
    )
    async with ProgressWatchdog(engine, limit_s=10.0, clock=clock, check_every_s=0.005):
        for _ in range(5):
            await _play(engine, [{"task_id": "t"}])
            clock.now_s += 100.0
            looked = clock.num_reads + 3  # the watchdog has looked at the clock again
            while clock.num_reads < looked:
                await asyncio.sleep(0.001)
    assert engine.counts.by_outcome[Outcome.SCORED] == 5


async def test_a_loop_that_hangs_in_python_code_is_interrupted(
    agent_class: Agent, env_class: Env, clock: Clock
) -> None:
    class Spinning(agent_class):  # type: ignore[misc, valid-type]
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            clock.now_s += 11.0
            end = time.monotonic() + 20.0
            while time.monotonic() < end:
                pass
            return super().update_from_model(response)

    saved: list[str] = []
    engine = AgentExecutionEngine(Spinning, env_class, rollout_engine=ScriptedClient(["a", "b"]))
    watchdog = ProgressWatchdog(
        engine,
        limit_s=10.0,
        on_stall=lambda: saved.append(threading.current_thread().name),
        clock=clock,
        check_every_s=0.01,
        grace_s=0.2,
    )
    started = time.monotonic()
    with pytest.raises(StallError, match="t:0"):
        async with watchdog:
            await _play(engine, [{"task_id": "t"}])
    assert saved == ["rllm-progress-watchdog"]
    assert time.monotonic() - started < 15.0


async def test_what_fails_while_saving_does_not_hide_the_stall(
    agent_class: Agent, env_class: Env, clock: Clock, settled: Any
) -> None:
    def full() -> None:
        raise OSError("no space left")

    client = ScriptedClient([ScriptedAnswer(text="a", wait_for=_never)])
    engine = AgentExecutionEngine(agent_class, env_class, rollout_engine=client)

    async def guarded() -> None:
        async with ProgressWatchdog(engine, limit_s=1.0, on_stall=full, clock=clock, check_every_s=0.01):
            await _play(engine, [{"task_id": "t"}])

    running = asyncio.create_task(guarded())
    await settled(lambda: bool(client.requests))
    async with asyncio.timeout(20.0):
        await _later(clock, running.done)
        with pytest.raises(StallError) as stall:
            await running
    assert any("no space left" in note for note in stall.value.__notes__)


async def test_a_report_that_cannot_be_written_does_not_hide_the_stall(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "gone" / "stall.txt"

    async def stand_still() -> None:
        async with ProgressWatchdog(
            Moving(), limit_s=5.0, report_path=path, clock=clock, check_every_s=0.001
        ):
            await _later_reads(clock, 1)
            clock.now_s += 5.0
            await asyncio.Event().wait()

    async with asyncio.timeout(20.0):
        with pytest.raises(StallError) as stall:
            await stand_still()
    assert any(str(path) in note for note in stall.value.__notes__)


@pytest.mark.parametrize("kind", [LoopWatchdog, ProgressWatchdog])
def test_a_limit_of_nothing_is_refused(kind: Any) -> None:
    arguments = () if kind is LoopWatchdog else (None,)
    with pytest.raises(ConfigError, match="`limit_s`"):
        kind(*arguments, limit_s=0.0)


class Moving:
    """An engine with one episode in flight that takes a turn whenever it is told to."""

    def __init__(self) -> None:
        self.counts = EpisodeCounts(in_flight=1)

    def live(self) -> list[LiveRollout]:
        return []


async def test_an_engine_that_moves_is_let_play_for_longer_than_the_limit() -> None:
    engine, clock = Moving(), Clock()
    async with ProgressWatchdog(engine, limit_s=5.0, clock=clock, check_every_s=0.001):
        for _ in range(8):
            engine.counts.turns += 1
            reads = clock.num_reads
            await _later_reads(clock, reads + 2)
            clock.now_s += 1.0


async def _later_reads(clock: Clock, num_reads: int) -> None:
    while clock.num_reads < num_reads:
        await asyncio.sleep(0.001)


async def test_a_watchdog_ends_with_what_it_watches(settled: Callable[[Callable[[], bool]], Any]) -> None:
    def thread_of(kind: str) -> threading.Thread:
        (thread,) = [each for each in threading.enumerate() if each.name == f"rllm-{kind}-watchdog"]
        return thread

    watchdog = LoopWatchdog(limit_s=0.02)
    with watchdog as entered:
        assert entered is watchdog
        of_loop = thread_of("loop")
    progress = ProgressWatchdog(Moving(), limit_s=5.0, clock=Clock(), check_every_s=0.001)
    async with progress as entered_too:
        assert entered_too is progress
        of_progress = thread_of("progress")
    assert (of_loop.daemon, of_progress.daemon) == (True, True)
    await settled(lambda: not of_loop.is_alive() and not of_progress.is_alive())


async def test_a_stall_that_ends_as_it_is_noticed_is_none() -> None:
    saves: list[str] = []
    watchdog = ProgressWatchdog(
        Moving(), limit_s=5.0, on_stall=lambda: saves.append("saved"), clock=Clock(), grace_s=0.05
    )
    async with watchdog:
        pass
    await asyncio.to_thread(watchdog._report_stall, 5.0)
    assert saves == []


async def test_whoever_cancels_what_a_watchdog_guards_has_cancelled_it() -> None:
    cancellations: list[int] = []
    begun = asyncio.Event()

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            async with ProgressWatchdog(Moving(), limit_s=5.0, clock=Clock()):
                begun.set()
                await asyncio.Event().wait()
        finally:
            cancellations.append(task.cancelling())

    task = asyncio.create_task(guarded())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})
    assert (task.cancelled(), cancellations) == (True, [1])


def test_what_the_loop_runs_are_the_frames_below_its_own() -> None:
    def frames(*names: str) -> Any:
        return [SimpleNamespace(f_code=SimpleNamespace(co_name=name)) for name in names]

    for names, inner in (
        (("main", "run_until_complete", "run_forever", "_run_once", "_run", "mine"), ["_run", "mine"]),
        (("main", "run_forever", "_run_once", "select"), []),
        (("main", "mine"), ["main", "mine"]),
        ((), []),
    ):
        assert [each.f_code.co_name for each in _in_callback(frames(*names))] == inner, names


async def test_a_report_shows_so_many_tasks_and_how_many_more_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, may_end = asyncio.get_running_loop(), asyncio.Event()
    waiting = [asyncio.create_task(may_end.wait(), name=f"waits {number}") for number in range(3)]
    await asyncio.sleep(0)
    num_tasks = len(asyncio.all_tasks())
    for most, num_more in ((num_tasks, 0), (num_tasks - 1, 1), (1, num_tasks - 1)):
        monkeypatch.setattr(supervision, "_MOST_TASKS", most)
        report = supervision._report([], loop)
        assert report.count("\nTask ") == min(most, num_tasks)
        assert (f" {num_more} more" in report) == (num_more > 0)
        assert (" more tasks" in report) == (num_more > 0)
        assert f"Thread {threading.current_thread().name}:" in report
    may_end.set()
    await asyncio.gather(*waiting)


async def test_whoever_catches_a_stall_goes_on_as_a_task_that_nobody_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task, clock = asyncio.current_task(), Clock()
    assert task is not None

    async def stand_still() -> None:
        async with ProgressWatchdog(Moving(), limit_s=5.0, clock=clock, check_every_s=0.001):
            await _later_reads(clock, 1)
            clock.now_s += 5.0
            await asyncio.Event().wait()

    async with asyncio.timeout(20.0):
        with pytest.raises(StallError, match="for 5 s"):
            await stand_still()
    assert task.cancelling() == 0
    assert "in stand_still" in caplog.text, "the report is in the log, wherever else it is"
