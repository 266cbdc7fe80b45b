"""Contracts as an OpenAPI 3.1 document: one path a worker, with its own schemas as components.

contract's schema, its references from its own root ──► components/schemas/ID.input, references from there
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from rllm.contracts.contract import Contract, RunStatus
from rllm.contracts.references import DATA_KEYWORDS, NAMING_KEYWORDS, subschemas

_STATUSES = {
    "200": "ok",
    "409": "the key was used with another input",
    "422": "invalid_request",
    "429": "no room in time; no attempt was used",
    "502": "invalid_output",
    "503": "retryable_error",
    "504": "retryable_error: time was up",
}


def openapi(contracts: list[Contract]) -> dict[str, Any]:
    """The document of a server of these workers."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for contract in contracts:
        for side, schema in (("input", contract.input_schema), ("output", contract.output_schema)):
            name = f"{contract.id}.{side}"
            schemas[name] = component(schema.document, f"#/components/schemas/{name}")
        paths[f"/workers/{contract.id}/runs"] = {"post": _operation(contract)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Workers", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def component(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema as it stands at `place` of another document: its references lead there."""
    # Anchors become pointers: in one document two schemas may have an anchor of the same name.
    anchors = {
        part[keyword]: quote(pointer, safe="/~$")
        for pointer, part in subschemas(schema)
        for keyword in ("$anchor", "$dynamicAnchor")
        if keyword in part
    }
    copy = _copy_at(schema, place, anchors)
    for name in ("$schema", "$id"):
        copy.pop(name, None)
    return copy


def _operation(contract: Contract) -> dict[str, Any]:
    request = {
        "type": "object",
        "additionalProperties": False,
        "required": ["inputs"],
        "properties": {
            "worker_id": {"const": contract.id},
            "version": {"const": contract.version},
            "trace": {"type": "string"},
            "inputs": {"$ref": f"#/components/schemas/{contract.id}.input"},
            "constraints": {
                "type": "object",
                "properties": {"timeout_seconds": {"type": "number", "exclusiveMinimum": 0}},
            },
        },
    }
    answer = {
        "type": "object",
        "required": ["worker_id", "version", "status", "outputs", "error", "observability", "artifacts"],
        "properties": {
            "status": {"enum": [str(each) for each in RunStatus]},
            "outputs": {"anyOf": [{"$ref": f"#/components/schemas/{contract.id}.output"}, {"type": "null"}]},
        },
    }
    content = {"application/json": {"schema": answer}}
    return {
        "operationId": contract.id,
        "summary": contract.purpose,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            status: {"description": text, "content": content} for status, text in _STATUSES.items()
        },
    }


def _copy_at(value: Any, place: str, anchors: Mapping[str, str]) -> Any:
    """A schema, or a list of them, with references that begin at `place`."""
    if isinstance(value, list):
        return [_copy_at(each, place, anchors) for each in value]
    if not isinstance(value, Mapping):
        return value
    copy: dict[str, Any] = {}
    for name, each in value.items():
        if name in DATA_KEYWORDS:
            copy[name] = each
        elif name in NAMING_KEYWORDS and isinstance(each, Mapping):
            copy[name] = {key: _copy_at(schema, place, anchors) for key, schema in each.items()}
        elif name in ("$ref", "$dynamicRef") and isinstance(each, str):
            target = each.removeprefix("#")
            copy["$ref"] = place + (target if not target or target[0] == "/" else anchors[target])
        elif name not in ("$anchor", "$dynamicAnchor"):
            copy[name] = _copy_at(each, place, anchors)
    return copy
