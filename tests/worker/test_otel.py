"""Spans of workers by OpenTelemetry's own SDK: kept in memory, and sent over HTTP to a collector."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import worker_files as files
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, server_attributes
from opentelemetry.trace import SpanKind

from rllm.contracts import read_contract
from rllm.errors.redaction import hide_key
from rllm.worker.host import WorkerHost
from rllm.worker.metrics import prometheus_text
from rllm.worker.otel import OpenTelemetry

CONVENTIONS = {
    value
    for module in (gen_ai_attributes, error_attributes, server_attributes)
    for value in vars(module).values()
    if isinstance(value, str)
}
REQUIRED = {
    *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "server.port"),
    *("gen_ai.request.choice.count", "gen_ai.request.stop_sequences", "server.address"),
    *("gen_ai.usage.input_tokens", "gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.output_tokens"),
}
"""Of a model call, where they apply: the conventions' `Required`, `Conditionally Required` and tokens."""
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
FLOW = """
from rllm import Episode, Workflow


class Chain(Workflow):
    workers = {"measure": "measure.worker.md"}

    async def run(self, task, uid, **kwargs):
        messages = [{"role": "user", "content": "secret words"}]
        await self.rollout_engine.get_model_response(messages, max_tokens=4)
        step = await self.worker("measure", {"task": task["task"]})
        return Episode(artifacts={"output": {"length": step.outputs["length"]}})
"""


@asynccontextmanager
async def host(*paths: Path) -> AsyncIterator[tuple[WorkerHost, InMemorySpanExporter]]:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    contracts = [read_contract(path) for path in paths]
    async with WorkerHost(contracts, paths[0].parent / "runs", telemetry=OpenTelemetry(provider)) as opened:
        yield opened, memory


def tree(spans: tuple[ReadableSpan, ...]) -> list[Any]:
    """Names, each followed by those within it, in the order in which they began."""

    def below(parent: int | None) -> list[Any]:
        children = [each for each in spans if (each.parent.span_id if each.parent else None) == parent]
        children.sort(key=lambda each: each.start_time or 0)
        return [
            part for each in children if each.context for part in (each.name, below(each.context.span_id))
        ]

    return below(None)


async def test_a_run_is_a_tree_of_agents_attempts_and_model_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow that asks a real model and calls a worker of its own."""
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    (tmp_path / "flow.py").write_text(FLOW)
    text = files.write_worker(tmp_path).read_text().replace("id: measure", "id: chain")
    binding = 'workflow: "flow.py:Chain", model: "builtin:tiny", prompt_price: 2, completion_price: 4'
    chain = tmp_path / "chain.worker.md"
    chain.write_text(text.replace('program: "program.py:solve"', binding))
    async with host(chain) as (opened, memory):
        worker = opened.workers["chain"]
        response = await worker.run({"run_id": "a", "task": "four"})
        again = await worker.run({"run_id": "a", "task": "four"})
        assert again.body == response.body
        spans = memory.get_finished_spans()
    observed = response.to_dict()["observability"]
    attempt = ["chat builtin:tiny", [], "invoke_agent measure", ["attempt 1", []]]
    assert tree(spans) == ["invoke_agent chain", ["attempt 1", attempt], "invoke_agent chain", []]
    by_name = {each.name: each for each in spans}
    call = next(each for name, each in by_name.items() if name.startswith("chat "))
    assert call.attributes is not None
    assert call.attributes["gen_ai.usage.input_tokens"] == observed["prompt_tokens"] > 0
    assert call.attributes["gen_ai.usage.output_tokens"] == observed["completion_tokens"] > 0
    assert call.attributes["gen_ai.provider.name"] == "rllm"
    assert (call.end_time or 0) > (call.start_time or 0)
    price = 2 * observed["prompt_tokens"] + 4 * observed["completion_tokens"]
    assert observed["cost"] == pytest.approx(price / 1e6)
    for span in spans:
        assert span.context is not None
        names = {name for name in span.attributes or {} if not name.startswith("rllm.")}
        assert names <= CONVENTIONS
        assert "secret" not in span.to_json()
        assert "four" not in span.to_json()
    first = next(each for each in spans if each.name == "invoke_agent chain")
    assert first.context is not None
    assert f"{first.context.trace_id:032x}" == observed["trace_id"]


async def test_a_caller_s_trace_goes_on_and_errors_have_their_code(tmp_path: Path) -> None:
    path = files.write_worker(tmp_path, attempts=2)
    hide_key("a-key-of-somebody-else")
    (tmp_path / "program.py").write_text(
        "def solve(task, config):\n    raise ValueError('no a-key-of-somebody-else')\n"
    )
    async with host(path) as (opened, memory):
        worker = opened.workers["measure"]
        answers = [
            await worker.run({"run_id": "a", "task": "x"}, trace=TRACEPARENT),
            await worker.run({"run_id": "a", "task": "x"}, trace=TRACEPARENT),
            await worker.run({"run_id": "a", "task": "y"}, trace="my own name"),
            await worker.run({"run_id": 3}),
        ]
        spans = memory.get_finished_spans()
    assert [each.to_dict()["observability"]["trace_id"] for each in answers[:2]] == [TRACE_ID] * 2
    requests = [each for each in spans if each.name == "invoke_agent measure"]
    codes = ["program", "attempts_exhausted", "idempotency_conflict", "schema"]
    assert [(each.attributes or {})["error.type"] for each in requests] == codes
    assert [each.parent is not None for each in requests] == [True, True, False, False]
    assert requests[0].parent is not None
    assert f"{requests[0].parent.span_id:016x}" == SPAN_ID
    assert (requests[2].attributes or {})["rllm.trace"] == "my own name"
    attempts = [each for each in spans if each.name.startswith("attempt")]
    assert [each.name for each in attempts] == ["attempt 1", "attempt 2"]
    assert all((each.attributes or {})["error.type"] == "program" for each in attempts)
    assert not any("a-key-of-somebody-else" in each.to_json() for each in spans)


ASKING = """
import json, urllib.request


def solve(task, config):
    body = {"model": config.model, "n": 2, "stop": "x", "messages": [{"role": "user", "content": "hi"}]}
    url = f"{config.base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return {"length": len(json.load(reply)["choices"])}
"""


async def test_a_call_of_a_server_s_model_has_what_the_server_counted_and_once(tmp_path: Path) -> None:
    """Two choices are two records in the ledger, each with the usage of both."""

    async def chat(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "hi"}
        choices = [{"index": each, "message": message, "finish_reason": "stop"} for each in range(2)]
        usage = {
            "prompt_tokens": 300,
            "completion_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 100},
        }
        return web.json_response({"id": "1", "model": "m", "choices": choices, "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    model = web.AppRunner(app)
    await model.setup()
    await web.TCPSite(model, "127.0.0.1", 0).start()
    port = model.addresses[0][1]
    path = files.write_worker(tmp_path)
    (tmp_path / "program.py").write_text(ASKING)
    place = f"model: 'openai:m', base_url: 'http://127.0.0.1:{port}/v1', prompt_price: 2, completion_price: 4"
    path.write_text(path.read_text().replace('solve"', f'solve", {place}'))
    async with host(path) as (opened, memory):
        response = await opened.workers["measure"].run({"run_id": "a", "task": "x"})
        text = prometheus_text(opened.workers.values())
        spans = memory.get_finished_spans()
    await model.cleanup()
    observed = response.to_dict()["observability"]
    assert (observed["model_calls"], observed["prompt_tokens"], observed["completion_tokens"]) == (1, 300, 20)
    assert observed["cost"] == pytest.approx((2 * 300 + 4 * 20) / 1e6)
    assert 'rllm_worker_tokens_total{worker="measure",kind="prompt"} 300' in text
    (call,) = [dict(each.attributes or {}) for each in spans if each.kind is SpanKind.CLIENT]
    request = next(dict(each.attributes or {}) for each in spans if each.name == "invoke_agent measure")
    assert call["gen_ai.conversation.id"] == request["gen_ai.conversation.id"] == "a"
    assert call["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert {name: value for name, value in call.items() if name in REQUIRED} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.cache_read.input_tokens": 100,
        "gen_ai.usage.output_tokens": 20,
        "server.address": "127.0.0.1",
        "server.port": port,
    }


async def test_the_command_sends_spans_to_a_collector(tmp_path: Path) -> None:
    """Real OTLP over real HTTP, from a process of its own, to the address in the environment."""
    received: list[ExportTraceServiceRequest] = []

    async def collect(request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest()
        body = await request.read()
        message.ParseFromString(body)
        received.append(message)
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        words = ("worker", "stdio", str(files.write_worker(tmp_path)), "--otel", "--record")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rllm", *words, str(tmp_path / "runs")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
                "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            },
        )
        request = {"inputs": {"run_id": "a", "task": "four"}, "trace": TRACEPARENT}
        answer, _ = await process.communicate(json.dumps(request).encode() + b"\n")
    finally:
        await runner.cleanup()
    assert json.loads(answer)["observability"]["trace_id"] == TRACE_ID
    resources = [each for message in received for each in message.resource_spans]
    facts = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert facts["service.name"] == "rllm-worker"
    assert facts["deployment.environment.name"] == "test"
    spans = [span for each in resources for scope in each.scope_spans for span in scope.spans]
    assert {each.name for each in spans} == {"invoke_agent measure", "attempt 1"}
    assert {each.trace_id.hex() for each in spans} == {TRACE_ID}
