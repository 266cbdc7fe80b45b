"""A worker's runtime: statuses, keys, attempts, time and room, with real programs and a real store."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_files import HeldProgram, runtime

from rllm.contracts import RunStatus
from rllm.errors import InferenceError, RunInUseError
from rllm.worker.admission import Admission
from rllm.worker.disk import StoreThread
from rllm.worker.store import Run, RunStore, canonical_json, digest_of


def length(task: Any, config: Any) -> dict[str, Any]:
    return {"length": len(task.metadata["task"])}


def request(run_id: str = "a", task: str = "four") -> dict[str, Any]:
    return {"run_id": run_id, "task": task}


def test_a_caller_whose_loop_is_closed_holds_up_no_other(tmp_path: Path) -> None:
    disk, go_on = StoreThread(RunStore(tmp_path)), threading.Event()

    async def outcome_of(work: Callable[[], Any], limit_s: float) -> Any:
        return await asyncio.wait_for(disk.call(work), limit_s)

    with pytest.raises(TimeoutError):
        asyncio.run(outcome_of(go_on.wait, 0.05))
    go_on.set()
    assert asyncio.run(outcome_of(lambda: "kept", 10)) == "kept"
    disk.close()


async def test_an_answer_has_the_agents_part_and_the_runtimes(tmp_path: Path) -> None:
    async with runtime(tmp_path, length) as worker:
        response = await worker.run(request(), trace="trace-1")
    value = response.to_dict()
    assert response.status is RunStatus.OK
    assert value["outputs"] == {"run_id": "a", "status": "ok", "length": 4}
    assert value["error"] is None
    assert value["observability"]["attempt"] == 1
    assert value["observability"]["trace_id"] == "trace-1"


async def test_a_final_answer_is_the_same_bytes_for_ever(tmp_path: Path) -> None:
    calls: list[str] = []

    def counting(task: Any, config: Any) -> dict[str, Any]:
        calls.append(task.id)
        return length(task, config)

    async with runtime(tmp_path, counting) as worker:
        first = await worker.run(request())
        again = await worker.run(dict(reversed(request().items())))  # equal inputs in another order
    async with runtime(tmp_path, counting) as worker:
        later = await worker.run(request())
    assert first.body == again.body == later.body
    assert len(calls) == 1


async def test_the_same_key_with_another_input_is_a_conflict(tmp_path: Path) -> None:
    held = HeldProgram()
    async with runtime(tmp_path, held.solve) as worker:
        under_way = asyncio.create_task(worker.run(request()))
        await asyncio.to_thread(held.began.wait)
        during = await worker.run(request(task="other"))
        held.go_on.set()
        assert (await under_way).is_ok
        after = await worker.run(request(task="other"))
    for response in (during, after):
        assert response.status is RunStatus.INVALID_REQUEST
        assert response.http_status == 409


async def test_calls_with_one_key_at_the_same_time_are_one_run(tmp_path: Path) -> None:
    calls: list[str] = []

    async def slow(task: Any, config: Any) -> dict[str, Any]:
        calls.append(task.id)
        await asyncio.sleep(0.05)
        return length(task, config)

    async with runtime(tmp_path, slow) as worker:
        responses = await asyncio.gather(*(worker.run(request(f"{number % 4}")) for number in range(64)))
        assert worker.counts["joined"] == 60
    assert len(calls) == 4
    assert len({response.body for response in responses}) == 4
    assert all(response.is_ok for response in responses)


async def test_what_raises_is_retryable_until_no_attempt_is_left(tmp_path: Path) -> None:
    def raising(task: Any, config: Any) -> None:
        raise ValueError("boom")

    async with runtime(tmp_path, raising, attempts=3) as worker:
        responses = [await worker.run(request()) for _ in range(5)]
    assert [response.code for response in responses] == ["program", "program", *["attempts_exhausted"] * 3]
    assert [response.to_dict()["observability"]["attempt"] for response in responses] == [1, 2, 3, 3, 3]
    assert {response.status for response in responses} == {RunStatus.RETRYABLE_ERROR}
    assert responses[2].body == responses[3].body == responses[4].body


async def test_a_result_that_breaks_the_schema_is_tried_again_within_the_run(tmp_path: Path) -> None:
    results: list[Any] = [{"length": "four"}, "no json", {"length": 4}]

    def improving(task: Any, config: Any) -> Any:
        return results.pop(0)

    async with runtime(tmp_path, improving, attempts=3) as worker:
        response = await worker.run(request())
        attempts = worker.store.attempts((await worker.find("a")).id)  # type: ignore[union-attr]
    assert response.is_ok
    assert response.to_dict()["observability"]["attempt"] == 3
    assert [each["status"] for each in attempts] == ["invalid_output", "invalid_output", "ok"]
    assert "length" in attempts[0]["result"]
    assert "$.length" in attempts[0]["error"]


@pytest.mark.parametrize(
    "result", [None, 3, "text", [], {"length": 1.5}, {"length": float("nan")}, {"length": 1, "more": 2},
               {"length": 1, "run_id": "other"}, {"length": 1, "status": "retryable_error"}, {"length": {1}}]
)  # fmt: skip
async def test_a_result_that_never_fits_is_invalid_output_with_all_attempts_used(
    tmp_path: Path, result: Any
) -> None:
    async with runtime(tmp_path, lambda task, config: result, attempts=2) as worker:
        response = await worker.run(request())
        again = await worker.run(request())
        assert worker.counts["attempts"] == 2
    assert response.status is RunStatus.INVALID_OUTPUT
    assert response.outputs is None
    assert again.body == response.body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
INPUTS = JSON | st.fixed_dictionaries({"run_id": JSON, "task": JSON}, optional={"more": JSON})


@given(inputs=st.lists(INPUTS, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_input_reaches_the_program_that_its_schema_refuses(
    tmp_path_factory: pytest.TempPathFactory, inputs: list[Any]
) -> None:
    """The oracle reads the contract by hand: exactly two texts, the first of them not empty."""
    seen: list[Any] = []

    def recording(task: Any, config: Any) -> dict[str, Any]:
        seen.append(task.metadata)
        return length(task, config)

    async def all_of(folder: Path) -> list[Any]:
        async with runtime(folder, recording) as worker:
            return [await worker.run(each) for each in inputs]

    responses = asyncio.run(all_of(tmp_path_factory.mktemp("fuzz")))
    keys: dict[str, Any] = {}
    for each, response in zip(inputs, responses, strict=True):
        fits = (
            isinstance(each, dict)
            and set(each) == {"run_id", "task"}
            and all(isinstance(value, str) for value in each.values())
            and 0 < len(each["run_id"]) <= 512
        )
        if fits and keys.setdefault(each["run_id"], each) == each:
            assert response.is_ok
        else:
            assert response.status is RunStatus.INVALID_REQUEST
            if isinstance(each, dict) and isinstance(each.get("run_id"), str):
                keys.setdefault(each["run_id"], each)
    assert all(set(each) == {"run_id", "task"} for each in seen)
    assert len(seen) == len({each["run_id"] for each in seen})


async def test_time_is_the_whole_runs(tmp_path: Path) -> None:
    async def never(task: Any, config: Any) -> None:
        await asyncio.sleep(3600)

    async with runtime(tmp_path, never, timeout_s=0.2, attempts=2) as worker:
        first = await worker.run(request())
        second = await worker.run(request())
        shorter = await worker.run(request("b"), timeout_s=0.05)
    assert (first.status, first.code) == (RunStatus.RETRYABLE_ERROR, "timeout")
    assert second.code == "attempts_exhausted"
    assert second.to_dict()["error"]["cause"] == "timeout"
    assert shorter.to_dict()["observability"]["duration_ms"] < 200


async def test_a_model_that_fails_is_told_from_a_program_that_does(tmp_path: Path) -> None:
    def failing(task: Any, config: Any) -> None:
        raise InferenceError("the server is gone")

    async with runtime(tmp_path, failing) as worker:
        assert (await worker.run(request())).code == "model"


async def test_who_cannot_finish_in_time_is_refused_without_an_attempt(tmp_path: Path) -> None:
    held = HeldProgram()
    room = Admission(max_parallel=2, max_queue=1, mean_duration_s=0.01)
    async with runtime(tmp_path, held.solve, room=room) as worker:
        calls = [asyncio.create_task(worker.run(request(f"{number}"))) for number in range(3)]
        while not (room.num_running == 2 and room.num_waiting == 1):
            await asyncio.sleep(0.005)
        full = await worker.run(request("full"))
        room.max_queue, room.mean_duration_s = 8, 1e6
        too_slow = await worker.run(request("slow"))
        room.mean_duration_s = 12  # a wait of 12 s and 12 s of its own are more than 20
        too_late = await worker.run(request("late"))
        room.mean_duration_s = 9
        calls.append(asyncio.create_task(worker.run(request("soon"))))
        attempts = worker.counts["attempts"]
        held.go_on.set()
        assert all(response.is_ok for response in await asyncio.gather(*calls))
        assert await worker.find("full") is None
        assert (await worker.run(request("full"))).to_dict()["observability"]["attempt"] == 1
    for response in (full, too_slow, too_late):
        assert (response.status, response.code, response.http_status) == (
            "retryable_error",
            "overloaded",
            429,
        )
        assert response.retry_after_s is not None
    assert attempts == 2


async def test_the_time_of_a_row_of_a_batch_begins_when_its_turn_has_come(tmp_path: Path) -> None:
    """All at once, most would be refused: by what is known of the worker a run takes for ever."""
    room = Admission(max_parallel=2, mean_duration_s=1e6)
    run_ids: list[str] = []
    async with runtime(tmp_path, length, room=room) as worker:
        rows = [request(f"{number}") for number in range(10)]
        answers = await worker.run_all(
            rows, num_callers=2, on_answer=lambda answer: run_ids.append(answer.to_dict()["run_id"])
        )
    assert all(answer.is_ok for answer in answers)
    assert [answer.to_dict()["run_id"] for answer in answers] == [row["run_id"] for row in rows]
    assert sorted(run_ids) == sorted(row["run_id"] for row in rows)


async def test_a_cancelled_run_used_its_attempt_and_goes_on(tmp_path: Path) -> None:
    held = HeldProgram()
    async with runtime(tmp_path, held.solve) as worker:
        caller = asyncio.create_task(worker.run(request()))
        await asyncio.to_thread(held.began.wait)
        assert await worker.cancel("a")
        assert (await caller).code == "cancelled"
        assert not await worker.cancel("a")
        held.go_on.set()
        response = await worker.run(request())
        assert worker.admission.num_running == 0
    assert response.to_dict()["observability"]["attempt"] == 2


async def test_a_caller_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    held = HeldProgram()
    async with runtime(tmp_path, held.solve) as worker:
        caller = asyncio.create_task(worker.run(request()))
        await asyncio.to_thread(held.began.wait)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        joining = asyncio.create_task(worker.run(request()))
        held.go_on.set()
        response = await joining
    assert response.is_ok
    assert response.to_dict()["observability"]["attempt"] == 1


async def test_an_attempt_that_a_crash_cut_off_counts(tmp_path: Path) -> None:
    """The store as a killed process leaves it: attempts begun, nothing ended."""
    async with runtime(tmp_path, length, attempts=2) as worker:
        for key, num_attempts in (("one", 1), ("two", 2)):
            text = canonical_json(request(key))
            run = Run(worker="measure", key=key, id=key, digest=digest_of(text), attempts=0)
            for number in range(num_attempts):
                worker.store.start_attempt(run, text, f"session-{number}")
    async with runtime(tmp_path, length, attempts=2) as worker:
        goes_on = await worker.run(request("one"))
        exhausted = await worker.run(request("two"))
        assert worker.counts["attempts"] == 1
    assert goes_on.to_dict()["observability"]["attempt"] == 2
    assert (exhausted.status, exhausted.code) == ("retryable_error", "attempts_exhausted")


async def test_one_process_writes_a_directory(tmp_path: Path) -> None:
    async with runtime(tmp_path, length):
        with pytest.raises(RunInUseError, match="rllm worker serve"):
            RunStore(tmp_path / "runs")
    RunStore(tmp_path / "runs").close()
