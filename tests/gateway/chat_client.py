"""What a client of chat completions sends in these tests: a greeting, a tool, and requests made of them."""

from typing import Any

from rllm.gateway.dialects.chat import ChatDialect
from rllm.types.wire import CallRequest

EVERYTHING = frozenset({"logprobs", "token_ids", "usage"})
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def parsed(**fields: Any) -> CallRequest:
    return ChatDialect().parse(HELLO | fields)
