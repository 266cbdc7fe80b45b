"""Spans of workers for OpenTelemetry, by its conventions for generative AI.

    invoke_agent ID                a request, in the trace of its caller (W3C `traceparent`)
      └─ attempt N                 only where one was made: not for joined, replayed and refused requests
           ├─ chat MODEL           a model call, as the gateway captured it
           └─ invoke_agent OTHER   a worker that the workflow behind this one called

An attempt is the current span of its program: what a program traces by itself is below it. Spans hold names,
counts and error codes, never inputs, outputs or messages; those are in the worker's own record. Tokens are
those of the model calls alone, so that a sum over all spans counts each once.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-agent-spans/
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from rllm.contracts.contract import Contract
from rllm.errors import MissingExtraError
from rllm.errors.redaction import without_keys
from rllm.types.wire import CallRecord, CallStatus
from rllm.worker.attempt import (
    OWN_PROVIDER,
    AttemptResult,
    by_call,
    completion_tokens_of,
    prompt_tokens_of,
)
from rllm.worker.response import RunError, WorkerResponse
from rllm.worker.telemetry import AttemptSpan, RequestSpan, Telemetry, trace_id_of

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingExtraError("opentelemetry", "otel") from error

SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
_PORTS = {"http": 80, "https": 443}
"""The port that an address without one means: who names a server names its port."""


class OpenTelemetry(Telemetry):
    """Spans by any provider of OpenTelemetry's SDK."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("rllm.worker", schema_url=SCHEMA_URL)

    @classmethod
    def over_otlp(cls) -> "OpenTelemetry":
        """Sends by OTLP over HTTP, to where OpenTelemetry's own environment variables say
        (`OTEL_EXPORTER_OTLP_ENDPOINT`, by default http://localhost:4318; `OTEL_SERVICE_NAME`, …)."""
        resource = Resource({SERVICE_NAME: "rllm-worker"}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=Resource.create().merge(resource))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    @contextmanager
    def request(self, contract: Contract, trace: str) -> Iterator[RequestSpan]:
        parent = TraceContextTextMapPropagator().extract({"traceparent": trace}) if trace else None
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": OWN_PROVIDER,
            "gen_ai.agent.id": contract.id,
            "gen_ai.agent.name": contract.name or contract.id,
            "gen_ai.agent.version": contract.version,
            "gen_ai.output.type": "json",
        }
        if contract.binding.model:
            attributes["gen_ai.request.model"] = contract.binding.model
        with self._tracer.start_as_current_span(
            f"invoke_agent {contract.name or contract.id}",
            context=parent or None,
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            record_exception=False,  # of a caller who went away: no exception of the worker
        ) as span:
            own_id = f"{span.get_span_context().trace_id:032x}"
            name = trace_id_of(trace)
            if trace and name != own_id:
                span.set_attribute("rllm.trace", without_keys(name))
            yield _RequestSpan(span, own_id)

    @contextmanager
    def attempt(self, contract: Contract, number: int, run_id: str) -> Iterator[AttemptSpan]:
        with self._tracer.start_as_current_span(
            f"attempt {number}",
            attributes={"rllm.attempt": number, "gen_ai.agent.id": contract.id},
            record_exception=False,
        ) as span:
            yield _AttemptSpan(span, self._tracer, run_id)

    def close(self) -> None:
        self._provider.force_flush()
        self._provider.shutdown()


class _RequestSpan(RequestSpan):
    def __init__(self, span: Span, trace_id: str) -> None:
        super().__init__(trace_id)
        self._span = span

    def set_response(self, response: WorkerResponse) -> None:
        value = response.to_dict()
        observability = value["observability"]
        _set(
            self._span,
            {
                "gen_ai.conversation.id": value["run_id"],
                "rllm.status": value["status"],
                "rllm.attempt": observability["attempt"],
                "rllm.output_schema": observability["output_schema"],
            },
        )
        if value["error"] is not None:
            _fail(self._span, value["error"]["code"])


class _AttemptSpan(AttemptSpan):
    def __init__(self, span: Span, tracer: Tracer, run_id: str) -> None:
        self._span = span
        self._tracer = tracer
        self._run_id = run_id

    def set_result(self, result: AttemptResult, error: RunError | None) -> None:
        for choices in by_call(result.calls):
            self._add_call(choices, result.provider)
        if error is not None:
            _fail(self._span, str(error.code))

    def _add_call(self, choices: Sequence[CallRecord], provider: str) -> None:
        """A span in retrospect: the gateway took the times."""
        call = choices[0]
        # OpenTelemetry counts nanoseconds since 1970.
        started_ns = int(call.started_at * 1e9)
        operation = "text_completion" if call.prompt is not None else "chat"
        span = self._tracer.start_span(
            f"{operation} {call.model}", kind=SpanKind.CLIENT, start_time=started_ns
        )
        reasons = [each.finish_reason for each in choices if each.finish_reason]
        own = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": provider,
            "gen_ai.conversation.id": self._run_id,
            "gen_ai.response.finish_reasons": reasons or None,
        }
        _set(span, _call_attributes(call) | own)
        if call.status is not CallStatus.OK:
            facts = call.error or {}
            _fail(span, str(facts.get("code") or facts.get("status") or call.status))
        span.end(started_ns + int(call.latency_s * 1e9))


def _call_attributes(call: CallRecord) -> dict[str, Any]:
    server = urlsplit(call.upstream)
    sampling = call.sampling
    stop = sampling.get("stop")
    return {
        "gen_ai.request.model": call.model,
        "gen_ai.request.choice.count": sampling.get("n"),
        "gen_ai.request.stream": True if call.stream else None,
        "gen_ai.request.stop_sequences": [stop] if isinstance(stop, str) else stop,
        "gen_ai.request.frequency_penalty": sampling.get("frequency_penalty"),
        "gen_ai.request.presence_penalty": sampling.get("presence_penalty"),
        "gen_ai.request.top_k": sampling.get("top_k"),
        "gen_ai.response.time_to_first_chunk": call.first_token_s if call.stream else None,
        "gen_ai.request.temperature": call.temperature,
        "gen_ai.request.max_tokens": sampling.get("max_tokens"),
        "gen_ai.request.top_p": sampling.get("top_p"),
        "gen_ai.request.seed": sampling.get("seed"),
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": call.model,
        "gen_ai.usage.input_tokens": prompt_tokens_of(call),
        "gen_ai.usage.output_tokens": completion_tokens_of(call),
        "gen_ai.usage.cache_read.input_tokens": call.usage.get("cached_tokens"),
        "server.address": server.hostname,
        "server.port": server.port or _PORTS.get(server.scheme),
        "rllm.session": call.session,
    }


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if value is not None:
            span.set_attribute(name, without_keys(value) if isinstance(value, str) else value)


def _fail(span: Span, code: str) -> None:
    """Without the message: it may quote inputs or outputs."""
    span.set_attribute("error.type", without_keys(code))
    span.set_status(Status(StatusCode.ERROR))
