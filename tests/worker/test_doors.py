"""One contract through every door: HTTP, MCP, the command, Python. The answers are the same run's."""

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
import mcp
import pytest
import worker_files as files
from click.testing import CliRunner, Result
from mcp.client.stdio import StdioServerParameters, stdio_client
from yarl import URL

from rllm.cli.main import rllm as front_door
from rllm.contracts import Binding, read_contract
from rllm.data import DatasetRegistry
from rllm.worker import Worker
from rllm.worker.host import WorkerHost
from rllm.worker.http import WorkerServer
from rllm.worker.store import Run


def rllm(*words: str | Path, stdin: str = "") -> Result:
    return CliRunner().invoke(
        front_door, [str(word) for word in words], prog_name="rllm", catch_exceptions=False, input=stdin
    )


def inputs(run_id: str = "a", task: str = "four") -> dict[str, Any]:
    return {"run_id": run_id, "task": task}


async def test_a_run_that_ends_while_it_is_looked_up_is_not_told_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKER_SLEEP_S", "0.2")
    contract = read_contract(files.write_worker(tmp_path))
    async with WorkerHost([contract], tmp_path / "runs") as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host, token=None)
        await server.start()
        worker = host.workers["measure"]
        find = worker.find
        runs = f"{server.url}/workers/measure/runs"
        running = asyncio.ensure_future(http.post(runs, json={"inputs": inputs()}))

        async def find_before_the_end(key: str) -> Run | None:
            run = await find(key)
            (await running).release()
            return run

        try:
            while not worker.is_under_way("a"):
                await asyncio.sleep(0.01)
            monkeypatch.setattr(worker, "find", find_before_the_end)
            async with http.get(f"{runs}/a") as reply:
                body = await reply.json()
            assert body.get("state") in ("running", None), body
        finally:
            await server.close()


async def test_over_http_statuses_are_those_of_the_contract(tmp_path: Path) -> None:
    contract = read_contract(files.write_worker(tmp_path))
    async with WorkerHost([contract], tmp_path / "runs") as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host)
        await server.start()
        try:
            http.headers["Authorization"] = f"Bearer {server.token}"
            runs = f"{server.url}/workers/measure/runs"

            async def post(body: Any) -> tuple[int, dict[str, Any]]:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                async with http.post(runs, data=data) as reply:
                    return reply.status, await reply.json()

            status, first = await post({"inputs": inputs()})
            assert (status, first["outputs"]) == (200, {"run_id": "a", "status": "ok", "length": 4})
            async with http.get(f"{runs}/a") as reply:
                assert (reply.status, await reply.json()) == (200, first)
            assert (await post({"inputs": inputs(task="other")}))[0] == 409
            status, refused = await post({"inputs": {"run_id": "b"}})
            assert (status, refused["status"]) == (422, "invalid_request")
            for body, word in (
                (b"{", "no JSON"),
                (b"[]", "no object"),
                ({}, "no `inputs`"),
                ({"inputs": inputs("c"), "input": 1}, "'input'"),
                ({"inputs": inputs("c"), "version": "2.0.0"}, "1.0.0"),
                ({"inputs": inputs("c"), "worker_id": "x"}, "measure"),
                ({"inputs": inputs("c"), "trace": 3}, "trace"),
                ({"inputs": inputs("c"), "trace": "\ud800"}, "surrogate"),
                ({"inputs": inputs("c"), "constraints": {"max_attempts": 9}}, "timeout_seconds"),
                ({"inputs": inputs("c"), "constraints": {"timeout_seconds": 0}}, "above 0"),
            ):
                status, refused = await post(body)
                assert status == 400
                assert word in refused["error"]["message"]
            async with http.get(f"{runs}/c") as reply:
                assert reply.status == 404
            async with http.post(f"{server.url}/workers/none/runs", json={"inputs": {}}) as reply:
                assert reply.status == 404
            async with http.get(f"{server.url}/metrics") as reply:
                metrics = await reply.text()
            assert 'rllm_worker_requests_total{worker="measure",status="ok"} 1\n' in metrics
            async with http.get(f"{server.url}/openapi.json") as reply:
                page = await reply.json()
            operation = page["paths"]["/workers/measure/runs"]["post"]
            body_schema = operation["requestBody"]["content"]["application/json"]["schema"]
            assert body_schema["properties"]["inputs"] == {"$ref": "#/components/schemas/measure.input"}
            assert page["components"]["schemas"]["measure.input"] == contract.input_schema.document
            for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
                async with http.post(runs, json={"inputs": inputs("d")}, headers=headers) as reply:
                    assert reply.status == 401
            async with http.get(f"{server.url}/health", headers={"Authorization": ""}) as reply:
                assert reply.status == 200
        finally:
            await server.close()


async def test_an_mcp_client_calls_a_worker_as_a_tool(tmp_path: Path) -> None:
    contract = files.write_worker(tmp_path)
    command = ["-m", "rllm", "worker", "mcp", str(contract), "--directory", str(tmp_path / "runs")]
    parameters = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    async with mcp.Client(stdio_client(parameters)) as client:
        [tool] = (await client.list_tools()).tools
        good = await client.call_tool("measure", inputs())
        again = await client.call_tool("measure", inputs())
        conflict = await client.call_tool("measure", inputs(task="other"))
    assert tool.name == "measure"
    assert tool.description == "Say how long a task is."
    assert tool.input_schema == read_contract(contract).input_schema.document
    assert good.structured_content == {"run_id": "a", "status": "ok", "length": 4}
    assert not good.is_error
    assert again.content == good.content
    assert conflict.is_error
    assert (tmp_path / "calls.txt").read_text().count("\n") == 1


def test_the_command_and_python_share_their_runs(tmp_path: Path) -> None:
    contract, runs = files.write_worker(tmp_path), tmp_path / "runs"
    words = ("worker", "run", contract, "--directory", runs, "--json", "--input")
    first = rllm(*words, json.dumps(inputs()))
    assert first.exit_code == 0
    (tmp_path / "request.json").write_text(json.dumps(inputs()))
    assert rllm(*words, tmp_path / "request.json").stdout == first.stdout
    assert Worker.load(contract, directory=runs).run(inputs()).to_dict() == json.loads(first.stdout)
    bad = rllm(*words, json.dumps({"run_id": "b"}))
    assert (bad.exit_code, json.loads(bad.stdout)["status"]) == (1, "invalid_request")
    listed = json.loads(rllm("worker", "runs", runs, "--json").stdout)["runs"]
    assert [(row["key"], row["status"]) for row in listed] == [("b", "invalid_request"), ("a", "ok")]
    assert (tmp_path / "calls.txt").read_text().count("\n") == 1


def test_a_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    contract, runs, answers = files.write_worker(tmp_path), tmp_path / "runs", tmp_path / "answers.jsonl"
    rows = [json.dumps(inputs(f"{number}", "x" * number)) for number in range(20)]
    (tmp_path / "half.jsonl").write_text("\n".join(rows[:10]))
    assert rllm("worker", "batch", contract, tmp_path / "half.jsonl", "--directory", runs).exit_code == 0
    whole = rllm(
        "worker", "batch", contract, "-", "--directory", runs, "--out", answers, stdin="\n".join(rows)
    )
    assert whole.exit_code == 0
    lengths = [json.loads(line)["outputs"]["length"] for line in answers.read_text().splitlines()]
    assert lengths == list(range(20))
    assert (tmp_path / "calls.txt").read_text().count("\n") == 20


def test_rows_without_names_are_named_by_what_they_hold_and_what_is_no_row_is_refused(tmp_path: Path) -> None:
    contract, options = files.write_worker(tmp_path), ("--directory", tmp_path / "runs")
    for _ in range(2):
        stdin = '{"task": "one"}\n{"task": "three"}\n{"task": "one"}\n7\n[1]\n'
        result = rllm("worker", "batch", contract, "-", *options, stdin=stdin)
        assert result.exit_code == 1
        answers = [json.loads(line) for line in result.stdout.splitlines()]
        lengths = [answer["outputs"] and answer["outputs"]["length"] for answer in answers]
        assert lengths == [3, 5, 3, None, None]
        assert [answer["status"] for answer in answers[3:]] == ["invalid_request"] * 2
    assert (tmp_path / "calls.txt").read_text().count("\n") == 2


def test_init_writes_a_contract_that_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "n": 1, "m": 2}\n{"text": null, "n": 2}\n')
    assert rllm("worker", "init", "plain", "--json").exit_code == 0
    assert rllm("worker", "init", "of-rows", "--rows", "rows.jsonl").exit_code == 0
    contract = read_contract(Path("of-rows.worker.md"))
    assert contract.input_schema.properties["text"] == {"type": ["null", "string"]}
    assert contract.input_schema.properties["n"] == {"type": "integer"}
    assert contract.input_schema.required == ["run_id", "text", "n"], "a row without `m` fits"
    listed = json.loads(rllm("worker", "list", "--json").stdout)["workers"]
    assert {row["id"] for row in listed} == {"plain", "of-rows"}
    assert rllm("worker", "validate", "plain.worker.md", "of-rows.worker.md").exit_code == 0
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    DatasetRegistry.register_dataset("texts", [{"text": "a", "status": "done"}], "train")
    assert rllm("worker", "init", "of-name", "--rows", "texts").exit_code == 0
    assert set(read_contract(Path("of-name.worker.md")).input_schema.properties) == {
        "run_id",
        "text",
        "status",
    }
    for options, word in (
        (("--rows", "txets"), "no data set `txets`"),
        (("--rows", "none.jsonl"), "none.jsonl"),
        (("--rows", "texts", "--output", "status"), "rename it"),
    ):
        refused = rllm("worker", "init", "other", *options)
        assert (refused.exit_code, word in " ".join(refused.stderr.split())) == (2, True)


TYPED_PROGRAM = """
from typing import TypedDict


class Length(TypedDict):
    run_id: str
    length: int


def solve(task, config) -> Length:
    '''Say how long a text is.

    In characters.
    '''
    return {"run_id": task.metadata["run_id"], "length": len(task.metadata["text"])}
"""


def test_init_of_a_program_and_rows_is_ready_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    Path("program.py").write_text(TYPED_PROGRAM)
    Path("there").mkdir()
    Path("rows.jsonl").write_text('{"text": "a", "length": 1}\n')
    words = ("--rows", "rows.jsonl", "--out", "there/typed.worker.md")
    made = rllm("worker", "init", "typed", "--program", "program.py:solve", "--output", "length", *words)
    assert made.exit_code == 0
    contract = read_contract(Path("there/typed.worker.md"))
    assert contract.binding.program == "../program.py:solve"
    assert contract.purpose == "Say how long a text is."
    assert set(contract.input_schema.properties) == {"run_id", "text"}
    assert contract.output_schema.properties["length"] == {"type": "integer"}
    ran = rllm(
        "worker", "run", "there/typed.worker.md", "--json", "--input", '{"run_id": "1", "text": "four"}'
    )
    assert json.loads(ran.stdout)["outputs"] == {"run_id": "1", "status": "ok", "length": 4}
    for options, word in (
        (("--agent", "math"), "an agent asks a model"),
        (("--program", "program.py:nobody"), "nobody"),
        (("--output", "length"), "give the rows"),
        (("--rows", "rows.jsonl", "--output", "lenght"), "no column `lenght`"),
    ):
        refused = rllm("worker", "init", "other", *options)
        assert refused.exit_code == 2
        assert word in " ".join(refused.stderr.split())
    rllm("worker", "init", "by-type", "--program", "program.py:solve")
    assert read_contract(Path("by-type.worker.md")).output_schema.properties["length"] == {"type": "integer"}


def test_a_model_alone_answers_under_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sampling by an untrained model: only the grammar makes its answer fit."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    worker = Worker.load(files.write_worker(tmp_path), model="builtin:tiny", directory=tmp_path / "runs")
    by_model = Worker(
        dataclasses.replace(worker.contract, binding=Binding(model="builtin:tiny")), worker.directory
    )
    response = by_model.run(inputs())
    assert response.is_ok
    assert isinstance((response.outputs or {})["length"], int)
    seen = response.to_dict()["observability"]
    assert (seen["model_calls"], seen["output_schema"]) == (1, "enforced")
    assert seen["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"program": "nothing.py:solve"}, "nothing.py"),
        ({"program": "program.py:nobody"}, "nobody"),
        ({"program": "program.py"}, "does not say which"),
    ],
)
def test_a_binding_that_leads_nowhere_is_refused_before_any_run(
    tmp_path: Path, changes: dict[str, str], word: str
) -> None:
    contract = files.write_worker(tmp_path, **changes)
    assert rllm("worker", "validate", contract).exit_code == 0
    result = rllm(
        "worker", "run", contract, "--directory", tmp_path / "runs", "--input", json.dumps(inputs())
    )
    assert result.exit_code == 2
    assert word in result.stderr


async def test_odd_texts_come_back_as_they_went_or_are_refused(tmp_path: Path) -> None:
    """Half a surrogate pair, a slash in a key, control characters, and a number as key, over HTTP."""
    text = files.write_worker(tmp_path).read_text()
    by_number = text.replace("id: measure", "id: numbered").replace(
        '"run_id": {"type": "string", "minLength": 1}', '"run_id": {"type": "integer"}'
    )
    (tmp_path / "numbered.worker.md").write_text(
        by_number.replace('"run_id": {"type": "string"}, "status"', '"status"').replace(
            '["run_id", "status", "length"]', '["status", "length"]'
        )
    )
    contracts = [read_contract(tmp_path / f"{name}.worker.md") for name in ("measure", "numbered")]
    async with WorkerHost(contracts, tmp_path / "runs") as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host, token=None)
        await server.start()
        try:
            runs = f"{server.url}/workers/measure/runs"

            async def post(url: str, body: str) -> tuple[int, Any]:
                async with http.post(url, data=body) as reply:
                    return reply.status, await reply.json()

            status, answer = await post(runs, '{"inputs": {"run_id": "\\ud800", "task": "a"}}')
            assert (status, answer["status"]) == (422, "invalid_request")
            assert "surrogate" in answer["error"]["message"]
            status, answer = await post(runs, '{"inputs": {"run_id": "half", "task": "\\ud800\\u0000"}}')
            assert (status, answer["outputs"]["length"]) == (200, 2)
            status, answer = await post(runs, '{"inputs": {"run_id": "a/b c?\\u202e", "task": "abc"}}')
            assert (status, answer["run_id"]) == (200, "a/b c?\u202e")
            async with http.get(URL(f"{runs}/a%2Fb%20c%3F%E2%80%AE", encoded=True)) as reply:
                assert (reply.status, await reply.json()) == (200, answer)
            numbered = f"{server.url}/workers/numbered/runs"
            assert (await post(numbered, '{"inputs": {"run_id": 7, "task": "abc"}}'))[0] == 200
            async with http.get(f"{numbered}/7") as reply:
                assert reply.status == 200
            long_trace = json.dumps({"inputs": inputs("t"), "trace": "x" * 10_000})
            assert (await post(runs, long_trace))[0] == 400
        finally:
            await server.close()


async def test_a_worker_runs_where_a_loop_runs_already(tmp_path: Path) -> None:
    """As in a notebook."""
    worker = Worker.load(files.write_worker(tmp_path), directory=tmp_path / "runs")
    assert worker.run(inputs()).is_ok


def test_lines_of_requests_are_lines_of_answers(tmp_path: Path) -> None:
    contract = files.write_worker(tmp_path)
    lines = [
        json.dumps({"id": 1, "inputs": inputs("a")}),
        json.dumps({"id": 2, "inputs": inputs("a", "other")}),
        json.dumps({"id": 3, "inputs": {"run_id": "b"}}),
        json.dumps({"id": 4, "inputs": inputs("c"), "worker_id": "none"}),
        json.dumps({"id": 5, "input": 1}),
        *("", "{", "[]", "3"),
        json.dumps({"id": {"any": "value"}, "inputs": inputs("d")}),
    ]
    result = rllm(
        "worker",
        "stdio",
        contract,
        "--directory",
        tmp_path / "runs",
        stdin="".join(f"{each}\n" for each in lines),
    )
    assert result.exit_code == 0
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 9, "a line for every line that is not blank"
    by_id = {json.dumps(each["id"]): each for each in answers if "id" in each}
    statuses = {name: each["status"] for name, each in by_id.items()}
    assert statuses["3"] == statuses["4"] == statuses["5"] == "invalid_request"
    assert sorted([statuses["1"], statuses["2"]]) == ["invalid_request", "ok"], "one key, two inputs"
    assert by_id['{"any": "value"}']["outputs"]["length"] == 4
    assert "there are measure" in by_id["4"]["error"]["message"]


async def test_progress_is_sent_while_a_run_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of two attempts and the answer; a client that goes away ends nothing."""
    program = PROGRAM_THAT_FAILS_ONCE.replace("FOLDER", repr(str(tmp_path)))
    contract = read_contract(files.write_worker(tmp_path))
    (tmp_path / "program.py").write_text(program)
    async with WorkerHost([contract], tmp_path / "runs") as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host, token=None)
        await server.start()
        try:
            runs = f"{server.url}/workers/measure/runs"
            posting = asyncio.create_task(post_json(http, runs, {"inputs": inputs()}))
            headers = {"Accept": "text/event-stream"}
            while not host.workers["measure"].is_under_way("a"):
                await asyncio.sleep(0.005)
            gone = await http.get(f"{runs}/a", headers=headers)
            gone.close()
            async with http.get(f"{runs}/a", headers=headers) as reply:
                assert reply.content_type == "text/event-stream"
                (tmp_path / "go").touch()
                text = await reply.text()
            answer = await posting
            events = [each.split("\n") for each in text.strip().split("\n\n")]
            assert [each[0] for each in events][-3:] == [
                "event: attempt",
                "event: attempt_ended",
                "event: answer",
            ]
            assert json.loads(events[-1][1].removeprefix("data: ")) == answer
            async with http.get(f"{runs}/a", headers=headers) as reply:
                assert (await reply.text()).startswith("event: answer\n"), "a run that has ended"
            async with http.get(f"{runs}/none", headers=headers) as reply:
                assert reply.status == 404
            assert not host.workers["measure"]._watchers
        finally:
            await server.close()


async def post_json(http: aiohttp.ClientSession, url: str, body: Any) -> Any:
    async with http.post(url, json=body) as reply:
        return await reply.json()


PROGRAM_THAT_FAILS_ONCE = """
import asyncio
from pathlib import Path

calls = []

async def solve(task, config):
    calls.append(task.id)
    while not Path(FOLDER, "go").exists():
        await asyncio.sleep(0.01)
    return {"length": len(task.metadata["task"])} if len(calls) > 1 else {"length": "four"}
"""
