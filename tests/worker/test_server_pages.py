"""What a server of workers says of itself: its OpenAPI page, whether it is ready; feedback by name."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import worker_files as files
from aiohttp import web
from openapi_spec_validator import OpenAPIV31SpecValidator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

from rllm.contracts import Binding, Contract, read_contract
from rllm.worker.host import WorkerHost
from rllm.worker.http import WorkerServer


@asynccontextmanager
async def served(
    contracts: list[Contract], runs: Path
) -> AsyncIterator[tuple[WorkerHost, str, aiohttp.ClientSession]]:
    async with WorkerHost(contracts, runs) as host, aiohttp.ClientSession() as http:
        server = WorkerServer(host)
        http.headers["Authorization"] = f"Bearer {server.token}"
        await server.start()
        try:
            yield host, server.url, http
        finally:
            await server.close()


async def status_and_json(call: Any) -> tuple[int, Any]:
    async with call as reply:
        return reply.status, await reply.json()


async def test_the_openapi_page_is_one_and_its_references_lead_somewhere(tmp_path: Path) -> None:
    """By the validator of the OpenAPI project; with `$defs`, anchors and names that look like keywords."""
    text = files.write_worker(tmp_path).read_text()
    referring = text.replace(
        '"task": {"type": "string"}}}',
        '"task": {"$ref": "#/$defs/a~1b"}, "$ref": {"$ref": "#here"}, "tree": {"$ref": "#"}},'
        ' "$defs": {"a/b": {"type": "string"},'
        ' "named": {"$anchor": "here", "const": {"$ref": "#/no/where"}}}}',
    )
    (tmp_path / "referring.worker.md").write_text(referring.replace("id: measure", "id: referring"))
    contracts = [read_contract(tmp_path / f"{name}.worker.md") for name in ("measure", "referring")]
    async with served(contracts, tmp_path / "runs") as (_, url, http):
        _, page = await status_and_json(http.get(f"{url}/openapi.json"))
    OpenAPIV31SpecValidator(page).validate()
    schemas = page["components"]["schemas"]
    posts = [path["post"]["requestBody"]["content"]["application/json"] for path in page["paths"].values()]
    inputs = [post["schema"]["properties"]["inputs"] for post in posts]
    properties = schemas["referring.input"]["properties"]
    references = [each["$ref"] for each in (*properties.values(), *inputs) if "$ref" in each]
    resolver = Registry[Any]().resolver_with_root(DRAFT202012.create_resource(page))
    for each in references:
        assert each.startswith("#/components/schemas/")
        resolver.lookup(each)
    assert len(references) == 5
    assert resolver.lookup(properties["task"]["$ref"]).contents == {"type": "string"}
    assert schemas["referring.input"]["$defs"]["named"] == {"const": {"$ref": "#/no/where"}}
    assert schemas["measure.output"] == contracts[0].output_schema.document


async def test_a_server_that_cannot_keep_runs_lives_and_is_not_ready(tmp_path: Path) -> None:
    """The database has the size that it may have, as on a full disk."""
    contract = read_contract(files.write_worker(tmp_path))
    async with served([contract], tmp_path / "runs") as (_, url, http):
        http.headers.pop("Authorization")
        ready = {"status": "ready", "store": "writable", "models": {"measure": "reachable"}}
        assert await status_and_json(http.get(f"{url}/ready")) == (200, ready)
    async with served([contract], tmp_path / "full") as (host, url, http):
        await host.workers["measure"].disk.call(
            lambda: host.workers["measure"].store._database.execute("PRAGMA max_page_count=1").fetchall()
        )
        http.headers.pop("Authorization")
        status, report = await status_and_json(http.get(f"{url}/ready"))
        assert (status, report["status"], report["store"]) == (503, "not_ready", "refuses writes")
        assert (await status_and_json(http.get(f"{url}/health")))[0] == 200


async def test_a_server_whose_model_has_gone_is_not_ready(tmp_path: Path) -> None:
    """A model on another server, which answers and then ends."""

    async def chat(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": '{"length": 4}'}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return web.json_response({"id": "1", "model": "m", "choices": choices, "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    model = web.AppRunner(app)
    await model.setup()
    site = web.TCPSite(model, "127.0.0.1", 0)
    await site.start()
    port = model.addresses[0][1]
    contract = read_contract(files.write_worker(tmp_path, timeout_s=2))
    contract = replace(contract, binding=Binding(model="openai:m", base_url=f"http://127.0.0.1:{port}/v1"))
    async with served([contract], tmp_path / "runs") as (_, url, http):
        runs = f"{url}/workers/measure/runs"
        first = {"inputs": {"run_id": "a", "task": "four"}}
        assert (await status_and_json(http.post(runs, json=first)))[0] == 200
        assert (await status_and_json(http.get(f"{url}/ready")))[0] == 200
        await model.cleanup()
        second = {"inputs": {"run_id": "b", "task": "four"}, "constraints": {"timeout_seconds": 0.5}}
        assert (await status_and_json(http.post(runs, json=second)))[0] in (503, 504)
        status, report = await status_and_json(http.get(f"{url}/ready"))
    assert (status, report["models"]) == (503, {"measure": "unreachable"})


async def test_feedback_finds_a_run_by_its_name_alone(tmp_path: Path) -> None:
    paths = [files.write_worker(tmp_path, id=name) for name in ("measure", "other")]
    async with served([read_contract(path) for path in paths], tmp_path / "runs") as (host, url, http):
        for worker, key in (("measure", "a"), ("measure", "both"), ("other", "both")):
            body = {"inputs": {"run_id": key, "task": "four"}}
            assert (await status_and_json(http.post(f"{url}/workers/{worker}/runs", json=body)))[0] == 200
        score = {"score": 1}
        assert (await status_and_json(http.post(f"{url}/runs/a/feedback", json=score)))[0] == 201
        status, refused = await status_and_json(http.post(f"{url}/runs/both/feedback", json=score))
        assert (status, "/workers/other/runs/both/feedback" in refused["error"]["message"]) == (409, True)
        assert (await status_and_json(http.post(f"{url}/runs/none/feedback", json=score)))[0] == 404
        status, refused = await status_and_json(http.post(f"{url}/runs/a/feedback", json={"stars": 5}))
        assert (status, "score" in refused["error"]["message"]) == (400, True)
        run = await host.workers["measure"].find("a")
        assert run is not None
        assert host.workers["measure"].store.feedback(run.id) == {"score": 1.0}


def test_schemas_that_no_value_could_be_checked_by_are_refused(tmp_path: Path) -> None:
    good = '"task": {"type": "string"}}}'
    deep = '{"items": ' * 10_000 + "{}" + "}" * 10_000
    for schema, word in (
        ('"task": {"$ref": "#/$defs/none"}}}', "leads to nothing"),
        ('"task": {"$ref": "#none"}}}', "leads to nothing"),
        ('"task": {"$ref": "file:///etc/passwd"}}}', "refers to itself alone"),
        ('"task": {"$id": "urn:x"}}}', "only the whole schema"),
        ('"task": {"type": "string"}}, "$ref": "#"}', "without end"),
        (f'"task": {deep}}}}}', "nested too deep|recursion"),
        (f'"task": {deep[: 10 * 400]}{{}}{"}" * 402}', "nested too deep"),
    ):
        path = files.write_worker(tmp_path)
        text = path.read_text()
        assert text.count(good) == 1
        path.write_text(text.replace(good, schema))
        with pytest.raises(Exception, match=word) as raised:
            read_contract(path)
        assert type(raised.value).__name__ == "ContractError", schema


async def test_inputs_of_megabytes_are_answered_soon_and_leave_room_for_others(tmp_path: Path) -> None:
    """A long list of wrong values, and one nested deeper than any check goes."""
    path = files.write_worker(tmp_path)
    text = path.read_text().replace(
        '"task": {"type": "string"}}}', '"task": {"type": "array", "items": {"$ref": "#/properties/task"}}}}'
    )
    path.write_text(text)
    async with served([read_contract(path)], tmp_path / "runs") as (_, url, http):
        runs = f"{url}/workers/measure/runs"
        wrong = json.dumps({"inputs": {"run_id": "a", "task": [1] * 700_000}})
        deep = '{"inputs": {"run_id": "b", "task": ' + "[" * 400 + "]" * 400 + "}}"
        endless = '{"inputs": {"run_id": "c", "task": ' + "[" * 100_000 + "]" * 100_000 + "}}"
        async with asyncio.timeout(60):
            for body, status, word in (
                (wrong, 422, "task[0]"),
                (deep, 422, "too deep"),
                (endless, 400, "no JSON"),
            ):
                answer = await status_and_json(http.post(runs, data=io.BytesIO(body.encode())))
                assert answer[0] == status
                assert word in answer[1]["error"]["message"]
