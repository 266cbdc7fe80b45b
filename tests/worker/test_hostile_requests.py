"""Requests of strangers: numbers that nothing holds, texts that are none, inputs whose check has no end."""

import asyncio
import io
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import worker_files as files

from rllm.contracts import Contract, Schema, read_contract
from rllm.worker.admission import Admission
from rllm.worker.host import WorkerHost
from rllm.worker.http import WorkerServer


def contract_with(folder: Path, task: str, *, run_id: str = '{"type": "string"}', **limits: Any) -> Contract:
    """The contract of these tests, with other schemas of `task`, in the input, and of `run_id`."""
    path = files.write_worker(folder, **limits)
    text = path.read_text().replace('"task": {"type": "string"}', f'"task": {task}')
    path.write_text(
        text.replace('{"type": "string", "minLength": 1}', run_id).replace(
            '"run_id": {"type": "string"}', f'"run_id": {run_id}'
        )
    )
    return read_contract(path)


def one(task: Any, config: Any) -> dict[str, Any]:
    return {"length": 1}


async def test_feedback_that_no_database_holds_is_refused_and_any_finite_score_is_kept(
    tmp_path: Path,
) -> None:
    contract = read_contract(files.write_worker(tmp_path))
    async with WorkerHost([contract], tmp_path / "runs") as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host, token=None)
        await server.start()
        try:
            runs = f"{server.url}/workers/measure/runs"
            async with http.post(runs, json={"inputs": {"run_id": "a", "task": "x"}}) as reply:
                assert reply.status == 200
            for body, status in (
                (f'{{"score": {"9" * 400}}}', 400),
                ('{"score": NaN}', 400),
                ('{"score": -1e400}', 400),
                ('{"label": "\\ud800"}', 400),
                (f'{{"label": "{"x" * (1 << 20)}"}}', 413),
                (f'{{"score": {10**20}}}', 201),
            ):
                async with http.post(f"{runs}/a/feedback", data=io.BytesIO(body.encode())) as reply:
                    assert reply.status == status, body
            async with http.post(
                runs, data='{"inputs": {"run_id": "b", "task": "x"}, "constraints": []}'
            ) as reply:
                assert reply.status == 400
            run = await host.workers["measure"].find("a")
            assert run is not None
            assert host.workers["measure"].store.feedback(run.id) == {"score": 1e20}
        finally:
            await server.close()


async def test_a_key_that_is_a_number_comes_back_as_one(tmp_path: Path) -> None:
    contract = contract_with(tmp_path, "true", run_id='{"type": "integer"}')
    async with files.runtime_of(contract, one, tmp_path) as worker:
        assert (await worker.run({"run_id": 7, "task": 1})).outputs == {
            "run_id": 7,
            "status": "ok",
            "length": 1,
        }
        pointed = (await worker.run({"run_id": 7.0, "task": 1})).to_dict()
    assert (pointed["status"], pointed["error"]["path"]) == ("invalid_request", "$.run_id")


async def test_a_number_too_large_to_be_checked_breaks_the_schema(tmp_path: Path) -> None:
    contract = contract_with(tmp_path, '{"multipleOf": 0.5}')
    async with files.runtime_of(contract, one, tmp_path) as worker:
        response = await worker.run({"run_id": "a", "task": 10**400})
    assert (response.status, response.code) == ("invalid_request", "schema")


async def test_patterns_are_those_of_the_standard_and_hold_nobody_up(tmp_path: Path) -> None:
    """Each would take Python's `re` longer than the test may: 2 to the power of 40 steps."""
    long, many = "a" * 40 + "!", "^(a+)+$"
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schemas = {
        "text": {"pattern": many},
        "names": {
            "patternProperties": {many: {"type": "string"}},
            "additionalProperties": {"type": "integer"},
        },
        "within": {"$ref": "#"},
        "digits": {"pattern": r"^\d$"},
        "letters": {"pattern": r"^\p{Lu}\u0041(?<rest>.)$"},
    }
    whole = {"$schema": dialect, "type": "object", "properties": schemas, "maxProperties": 1}
    schema = Schema(whole)
    for value, path in (
        ({"text": long}, "$.text"),
        ({"text": "aaa"}, ""),
        ({"names": {long: 1}}, ""),
        ({"names": {long: "one"}}, f"$.names.{long}"),
        ({"names": {"aaa": 1}}, "$.names.aaa"),
        ({"within": {"text": long}}, "$.within.text"),
        ({"text": "aaa\n"}, "$.text"),
        ({"digits": "\u0663"}, "$.digits"),
        ({"letters": "\u00c4A\U0001f600"}, ""),
        ({"letters": "\u00c4A\ud800"}, ""),
        ({"letters": "\ud800A."}, "$.letters"),
    ):
        violation = schema.first_violation(value)
        assert (violation.path if violation else "") == path, value
    contract = contract_with(tmp_path, f'{{"pattern": "{many}"}}')
    async with files.runtime_of(contract, one, tmp_path) as worker:
        response = await worker.run({"run_id": "a", "task": long})
    assert (response.status, response.code) == ("invalid_request", "schema")


async def test_a_check_that_takes_for_ever_ends_with_the_runs_time_and_holds_nobody_up(
    tmp_path: Path,
) -> None:
    """20,000 objects that must differ are compared two by two."""
    contract = contract_with(tmp_path, '{"uniqueItems": true}', timeout_s=0.3)
    rows = [{"number": number} for number in range(20_000)]
    async with files.runtime_of(contract, one, tmp_path) as worker:
        long = asyncio.create_task(worker.run({"run_id": "long", "task": rows}))
        while not worker.is_under_way("long"):
            await asyncio.sleep(0)
        short = await worker.run({"run_id": "short", "task": []}, timeout_s=60)
        response = await long
        assert await worker.find("long") is None, "no attempt was used"
    assert short.to_dict()["run_id"] == "short"
    assert (response.status, response.code) == ("retryable_error", "timeout")


async def test_a_result_that_takes_for_ever_to_check_is_an_attempt_whose_time_was_up(tmp_path: Path) -> None:
    path = files.write_worker(tmp_path, timeout_s=1, attempts=1)
    path.write_text(
        path.read_text().replace('"length": {"type": "integer"}', '"length": {"uniqueItems": true}')
    )
    rows = [{"number": number} for number in range(20_000)]
    async with files.runtime_of(
        read_contract(path), lambda task, config: {"length": rows}, tmp_path
    ) as worker:
        response = (await worker.run({"run_id": "a", "task": "x"})).to_dict()
    assert (response["error"]["code"], response["error"]["cause"]) == ("attempts_exhausted", "timeout")


async def test_room_that_comes_as_a_waiter_gives_up_goes_to_the_next() -> None:
    room = Admission(max_parallel=1)
    soon = asyncio.get_running_loop().time() + 60.0

    async def take(leave: asyncio.Event) -> None:
        async with room.place(soon):
            await leave.wait()

    leave = asyncio.Event()
    async with room.place(soon):
        first, second = (asyncio.create_task(take(leave)) for _ in range(2))
        while room.num_waiting < 2:
            await asyncio.sleep(0)
    first.cancel()  # in the same turn of the loop in which it would have got the room
    leave.set()
    async with asyncio.timeout(30):
        await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (room.num_running, room.num_waiting) == (0, 0)


async def test_a_key_of_another_type_takes_no_name_from_anybody(tmp_path: Path) -> None:
    """The number 1 breaks the schema, and the text "1" is somebody else's; or the other way round."""
    keys: tuple[Any, ...] = (1, "1")
    for kind, wrong, right in (("string", *keys), ("integer", *reversed(keys))):
        (folder := tmp_path / kind).mkdir()
        contract = contract_with(folder, "true", run_id=f'{{"type": "{kind}"}}')
        async with files.runtime_of(contract, one, folder) as worker:
            refused = await worker.run({"run_id": wrong, "task": "x"})
            assert (refused.status, refused.code) == ("invalid_request", "schema")
            assert (await worker.run({"run_id": right, "task": "x"})).is_ok


async def test_corrected_outputs_need_not_repeat_what_the_runtime_fills_in(tmp_path: Path) -> None:
    async with files.runtime(tmp_path, one) as worker:
        assert (await worker.run({"run_id": "a", "task": "x"})).is_ok
        assert not await worker.add_feedback("a", {"outputs": {"length": 2}})
        run = await worker.find("a")
        assert run is not None
        whole = {"outputs": {"length": 2, "run_id": "a", "status": "ok"}}
        assert worker.store.feedback(run.id) == whole
        assert not await worker.add_feedback("a", whole)
        for outputs, word in (
            ({"length": "2"}, "$.length"),
            ({"length": 2, "run_id": "b"}, "`run_id`"),
            ({}, "'length' is a required property"),
        ):
            assert word in await worker.add_feedback("a", {"outputs": outputs})
        assert worker.store.feedback(run.id) == whole


async def test_silent_connections_and_slow_heads_are_closed_and_honest_callers_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.worker.http.HEAD_TIMEOUT_S", 0.2)
    contract = read_contract(files.write_worker(tmp_path))
    async with WorkerHost([contract], tmp_path / "runs") as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host, token=None)
        await server.start()
        try:
            silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(20)]
            slow = await asyncio.open_connection("127.0.0.1", server.port)
            slow[1].write(b"GET /health HTTP/1.1\r\nHost: ")
            async with http.get(f"{server.url}/health") as reply:
                assert reply.status == 200
            answers = await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in silent)), 30)
            assert answers == [b""] * 20
            assert b" 408 " in await asyncio.wait_for(slow[0].read(), 30)
            for _, writer in [*silent, slow]:
                writer.close()
        finally:
            await server.close()
