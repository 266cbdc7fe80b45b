"""What a client of the Messages protocol sends in these tests: a question, tools, and requests."""

from typing import Any

import pytest

from rllm.errors import RequestRefused
from rllm.gateway.dialects.messages import MessagesDialect
from rllm.types.wire import CallRequest

WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
QUESTION = {"role": "user", "content": "Hi"}
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
HELLO: dict[str, Any] = {"model": "m", "max_tokens": 64, "messages": [QUESTION]}


def parsed(**fields: Any) -> CallRequest:
    return MessagesDialect().parse(HELLO | fields)


def refusal(**fields: Any) -> RequestRefused:
    """How a request with these fields is refused; the test fails where it is not."""
    with pytest.raises(RequestRefused) as caught:
        parsed(**fields)
    assert 400 <= caught.value.status < 500
    return caught.value
