"""The OpenAPI 3.1 document that the gateway publishes at /openapi.json: what to ask, and how errors look."""

from functools import cache
from typing import Any

from rllm.types.call_budget import CallBudget

_JSON = "application/json"
_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}
_LIST: dict[str, Any] = {"type": "array"}

_CONVERSATION: dict[str, Any] = {"type": "array", "minItems": 1, "items": _OBJECT}
_CALLS = {
    "/v1/chat/completions": ("A chat completion.", ["messages"], {"messages": _CONVERSATION}, "OpenAIError"),
    "/v1/completions": (
        "A completion of text or token ids.",
        ["prompt"],
        {"prompt": {"type": ["string", "array"]}},
        "OpenAIError",
    ),
    "/v1/responses": (
        "A response.",
        ["input"],
        {"input": {"type": ["string", "array"]}},
        "OpenAIError",
    ),
    "/v1/messages": (
        "A message, as Anthropic clients ask for it.",
        ["messages", "max_tokens"],
        {"messages": _CONVERSATION, "max_tokens": {"type": "integer", "minimum": 1}},
        "AnthropicError",
    ),
}
_STATUSES = {
    400: "The request is wrong; the error names the field.",
    401: "No token, or a wrong one.",
    403: "The token opens another session.",
    404: "There is no such path, model or session.",
    405: "The path does not have this method.",
    408: "The body did not arrive in time.",
    409: "The session exists with other settings.",
    410: "The session is closed.",
    413: "The body is too large, also once it is unpacked.",
    415: "The body's encoding is neither gzip nor deflate.",
    429: "The policy has too much to do; `Retry-After` says when to try again.",
    500: "A bug in the gateway.",
    502: "The upstream failed, or its answer broke off.",
    503: "The policy, the disk or the gateway cannot serve now.",
}


@cache
def openapi_document() -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for path, (summary, required_fields, fields, error) in _CALLS.items():
        body = {"type": "object", "required": required_fields, "properties": {**_call_fields(), **fields}}
        paths |= _with_sessions(path, "post", _call(path, summary, body, error))
    paths |= _with_sessions(
        "/v1/messages/count_tokens",
        "post",
        _call(
            "/v1/messages/count_tokens",
            "How many tokens a conversation has.",
            {"type": "object", "required": ["messages"], "properties": {"messages": _CONVERSATION}},
            "AnthropicError",
            streams=False,
        ),
    )
    paths |= _with_sessions("/v1/models", "get", _operation("models", "The models that are served.", 200))
    model = _operation("model", "One model.", 200)
    paths |= _with_sessions("/v1/models/{model}", "get", model | {"parameters": [_in_path("model")]})
    kept_response = _operation("response", "A response that was answered before.", 200)
    paths |= _with_sessions(
        "/v1/responses/{response}", "get", kept_response | {"parameters": [_in_path("response")]}
    )
    paths |= _session_paths()
    paths |= _published_paths()
    paths |= {
        "/health": {
            "get": _open_to_all("health", "Whether calls can be answered, and how it goes.", (200, 503))
        },
        "/openapi.json": {"get": _open_to_all("openapi", "This document.", (200,))},
        "/metrics": {
            "get": _operation("metrics", "Counts in the text format of Prometheus.", 200, "text/plain")
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "rLLM gateway",
            "version": "1",
            "description": "Instead of sending the token in a header, put /k/TOKEN before any path.",
        },
        "paths": paths,
        "security": [{"bearer": []}, {"api_key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": _schemas(),
        },
    }


def _session_paths() -> dict[str, Any]:
    session = [_in_path("session")]
    create_session = {
        "type": "object",
        "properties": {
            "session_id": {"type": "string", "minLength": 1, "maxLength": 512},
            "seed": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
            "sampling": {"$ref": "#/components/schemas/Sampling"},
            "budget": {"$ref": "#/components/schemas/Budget"},
            "metadata": _OBJECT,
        },
        "additionalProperties": False,
    }
    listing = _operation("list_sessions", "A page of sessions by name.", 200)
    listing["parameters"] = [
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000}},
        {"name": "after", "in": "query", "schema": _TEXT},
    ]
    creating = _operation("create_session", "Create a session with settings of its own.", 200)
    creating["requestBody"] = {"content": {_JSON: {"schema": create_session}}}
    traces = _operation("traces", "What was captured: one object a choice, oldest first.", 200)
    traces["responses"]["200"]["content"][_JSON]["schema"] = {
        "type": "array",
        "items": {"$ref": "#/components/schemas/CallRecord"},
    }
    return {
        "/sessions": {"get": listing, "post": creating},
        "/sessions/{session}": {
            "get": _operation("session", "What a session was created with.", 200) | {"parameters": session},
            "delete": _operation("delete_session", "Forget a session and its calls.", 200)
            | {"parameters": session},
        },
        "/sessions/{session}/traces": {"get": traces | {"parameters": session}},
    }


def _published_paths() -> dict[str, Any]:
    """Routes of the published gateway."""
    names = {"type": "array", "minItems": 1, "maxItems": 1000, "items": _TEXT}
    query = {"session_ids": names, "since": {"type": "number"}, "limit": {"type": "integer", "minimum": 1}}
    worker = {"url": _TEXT, "model_name": _TEXT, "weight": {"type": "number"}, "api_path": _TEXT}
    version = {"weight_version": {"type": "integer", "minimum": 0}}
    trace = _operation("trace", "One call, in the published form.", 200)
    removal = _operation("remove_worker", "Send no further calls to a server.", 200)
    return {
        "/traces/{trace}": {"get": trace | {"parameters": [_in_path("trace")]}},
        "/traces/query": {
            "post": _post_operation("query_traces", "Calls of several sessions.", query, "session_ids")
        },
        "/sessions/batch_delete": {
            "post": _post_operation(
                "delete_sessions", "Forget several sessions.", {"session_ids": names}, "session_ids"
            )
        },
        "/health/workers": {"get": _open_to_all("worker_health", "The servers that answer.", (200,))},
        "/admin/workers": {
            "get": _operation("workers", "The servers that answer.", 200),
            "post": _post_operation("add_worker", "Send calls to one more server.", worker, "url"),
        },
        "/admin/workers/{worker}": {"delete": removal | {"parameters": [_in_path("worker")]}},
        "/admin/weight_version": {
            "get": _operation("weight_version", "The policy version of answers from now on.", 200),
            "post": _post_operation(
                "set_weight_version", "Say it, for servers that do not.", version, "weight_version"
            ),
        },
        "/admin/flush": {"post": _operation("flush", "Returns when everything is on disk.", 200)},
        "/admin/reload": {"post": _operation("reload", "Ask the servers anew what they are.", 200)},
    }


def _post_operation(name: str, summary: str, fields: dict[str, Any], required_field: str) -> dict[str, Any]:
    """An operation with a JSON body."""
    schema = {"type": "object", "required": [required_field], "properties": fields}
    body = {"required": True, "content": {_JSON: {"schema": schema}}}
    return _operation(name, summary, 200) | {"requestBody": body}


def _call_fields() -> dict[str, Any]:
    """The fields that all protocols share; each knows more, and fields that are not known are let through."""
    return {
        "model": _TEXT,
        "stream": {"type": ["boolean", "null"]},
        "session_id": {"type": "string", "minLength": 1, "maxLength": 512},
    }


def _call(
    path: str, summary: str, body: dict[str, Any], error: str, *, streams: bool = True
) -> dict[str, Any]:
    operation = _operation(path.removeprefix("/v1/").replace("/", "_"), summary, 200, error=error)
    operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _TEXT}
    return operation


def _operation(
    name: str, summary: str, status: int, media_type: str = _JSON, error: str = "OpenAIError"
) -> dict[str, Any]:
    failure = {"content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{error}"}}}}
    answer = {"schema": _TEXT if media_type == "text/plain" else _OBJECT}
    return {
        "operationId": name,
        "summary": summary,
        "responses": {
            str(status): {"description": "The answer.", "content": {media_type: answer}},
            **{str(each): {"description": text, **failure} for each, text in _STATUSES.items()},
        },
    }


def _open_to_all(name: str, summary: str, statuses: tuple[int, ...]) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "security": [],
        "responses": {
            str(each): {"description": "The answer.", "content": {_JSON: {"schema": _OBJECT}}}
            for each in statuses
        },
    }


def _with_sessions(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    within = operation | {
        "operationId": f"session_{operation['operationId']}",
        "parameters": [*operation.get("parameters", ()), _in_path("session")],
    }
    return {path: {method: operation}, f"/sessions/{{session}}{path}": {method: within}}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _schemas() -> dict[str, Any]:
    nullable = {"type": ["string", "null"]}
    numbers = {"type": "array", "items": {"type": "number"}}
    ids = {"type": "array", "items": {"type": "integer"}}
    error_fields = {"message": _TEXT, "type": _TEXT, "code": nullable, "param": nullable}
    record: dict[str, Any] = dict.fromkeys(("id", "session", "dialect", "model", "finish_reason"), _TEXT)
    record |= dict.fromkeys(("prompt_ids", "completion_ids", "policy_versions"), ids)
    record |= {
        "choice": {"type": "integer"},
        "stop_sequence": nullable,
        "temperature": {"type": ["number", "null"]},
        "has_cut_thought": {"type": "boolean"},
        "unparsed_markup": {"type": "boolean"},
        "mixed_versions": {"type": "boolean"},
        "status": {"enum": ["ok", "partial", "error"]},
        "logprobs": numbers,
        "token_logprobs": _LIST,
        "logprob_meaning": {"enum": ["raw", "temperature", "truncated", "unknown"]},
        "messages": _LIST,
        "tools": _LIST,
        "sampling": _OBJECT,
        "response": _OBJECT,
        "error": {"type": ["object", "null"]},
    }
    return {
        "OpenAIError": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {"type": "object", "required": ["message", "type"], "properties": error_fields}
            },
        },
        "AnthropicError": {
            "type": "object",
            "required": ["type", "error"],
            "properties": {
                "type": {"const": "error"},
                "error": {"type": "object", "required": ["message", "type"], "properties": error_fields},
            },
        },
        "Budget": {
            "type": "object",
            "properties": {
                name: {"type": "integer" if name in ("turns", "tokens") else "number", "minimum": 0}
                for name in CallBudget.__dataclass_fields__
            },
            "additionalProperties": False,
        },
        "Sampling": {
            "type": "object",
            "properties": {
                "temperature": {"type": "number", "minimum": 0},
                "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                "top_k": {"type": "integer", "minimum": 0},
                "max_tokens": {"type": "integer", "minimum": 1},
            },
            "additionalProperties": False,
        },
        "CallRecord": {"type": "object", "required": sorted(record), "properties": record},
    }
