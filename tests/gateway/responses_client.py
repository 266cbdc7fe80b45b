"""What a client of the Responses protocol sends in these tests: tools, and requests made of them."""

from typing import Any

import pytest

from rllm.errors import RequestRefused
from rllm.gateway.dialects.responses import ResponsesDialect
from rllm.types.wire import CallRequest

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
FILES = {
    "type": "namespace",
    "name": "mcp__files",
    "description": "Files",
    "tools": [
        {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False},
        {"type": "custom", "name": "patch"},
    ],
}
WEB_SEARCH = {"type": "web_search"}


def parsed(**fields: Any) -> CallRequest:
    return ResponsesDialect().parse({"model": "m", "input": "Hi"} | fields)


def refusal(**fields: Any) -> RequestRefused:
    """How a request with these fields is refused; the test fails where it is not."""
    with pytest.raises(RequestRefused) as caught:
        parsed(**fields)
    assert 400 <= caught.value.status < 500
    return caught.value
