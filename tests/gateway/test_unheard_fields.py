"""A field that changes the answer is honoured or refused by name, in every protocol, and never ignored."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import RequestRefused
from rllm.gateway.dialects.registry import DIALECTS, UPSTREAMS
from rllm.gateway.local import LocalPolicy
from rllm.inference.scripted import ScriptedClient
from rllm.types.wire import CallRequest, Dialect

sys.path.insert(0, str(Path(__file__).parent))
from fake_upstream import Session

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"messages": MESSAGES},
    Dialect.COMPLETIONS: {"prompt": "hi"},
    Dialect.RESPONSES: {"input": "hi"},
    Dialect.MESSAGES: {"messages": MESSAGES, "max_tokens": 8},
}
USAGE_ALL_ALONG = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CLEAR_TOOLS = {"edits": [{"type": "clear_tool_uses_20250919"}]}
CLEAR_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

UNHEARD = [
    (Dialect.CHAT, {"regex": "[ab]"}, "regex"),
    (Dialect.CHAT, {"best_of": 3}, "best_of"),
    (Dialect.CHAT, {"documents": [{"title": "x", "text": "y"}]}, "documents"),
    (Dialect.CHAT, USAGE_ALL_ALONG, "stream_options.continuous_usage_stats"),
    (Dialect.COMPLETIONS, {"ebnf": "root ::= 'a'"}, "ebnf"),
    (Dialect.COMPLETIONS, USAGE_ALL_ALONG, "stream_options.continuous_usage_stats"),
    (Dialect.RESPONSES, {"truncation": "auto"}, "truncation"),
    (Dialect.RESPONSES, {"context_management": [{"type": "compaction"}]}, "context_management"),
    (Dialect.RESPONSES, {"chat_template_kwargs": {"text": "x" * 3_000}}, "chat_template_kwargs"),
    (Dialect.MESSAGES, {"context_management": CLEAR_TOOLS}, "context_management"),
    (Dialect.MESSAGES, {"chat_template": "{{ messages }}"}, "chat_template"),
]
IDLE = [
    (Dialect.CHAT, {"stream_options": {"include_usage": False, "continuous_usage_stats": False}}),
    (Dialect.CHAT, {"reasoning_effort": "low", "verbosity": "high", "best_of": 1, "unknown": {"a": 1}}),
    (Dialect.COMPLETIONS, {"spaces_between_special_tokens": True, "unknown": 7}),
    (Dialect.RESPONSES, {"truncation": "disabled", "reasoning": {"effort": "low"}, "max_tool_calls": 3}),
    (Dialect.RESPONSES, {"truncation": None, "context_management": []}),
    (Dialect.MESSAGES, {"context_management": CLEAR_THOUGHTS, "mcp_servers": []}),
    (Dialect.MESSAGES, {"context_management": {}}),
]


def parsed(dialect: Dialect, fields: dict[str, Any]) -> CallRequest:
    return DIALECTS[dialect].parse(BODIES[dialect] | fields)


async def test_the_engine_in_this_process_refuses_what_it_cannot_honour(subtests: pytest.Subtests) -> None:
    for dialect, fields, param in UNHEARD:
        with subtests.test(dialect=dialect, fields=fields, param=param):
            policy = LocalPolicy(ScriptedClient(["never said"]), "scripted")
            with pytest.raises(RequestRefused, match=f"`{param}` is .*") as caught:
                await policy.answer(parsed(dialect, fields), Session())
            assert (caught.value.status, caught.value.param) == (400, param)


async def test_fields_that_ask_for_nothing_and_unknown_ones_are_let_through(
    subtests: pytest.Subtests,
) -> None:
    for dialect, fields in IDLE:
        with subtests.test(dialect=dialect, fields=fields):
            policy = LocalPolicy(ScriptedClient(["fine"]), "scripted")
            answer = await policy.answer(parsed(dialect, fields), Session())
            assert answer.choices[0].text == "fine"


def test_the_mend_of_truncation_is_named() -> None:
    request = parsed(Dialect.RESPONSES, {"truncation": "auto"})
    with pytest.raises(RequestRefused, match='Send "disabled"'):
        UPSTREAMS[Dialect.CHAT].body(request, capture=frozenset())


def test_an_upstream_of_the_same_protocol_is_told_and_decides(subtests: pytest.Subtests) -> None:
    for dialect, fields, param in UNHEARD:
        with subtests.test(dialect=dialect, fields=fields, param=param):
            body = UPSTREAMS[dialect].body(parsed(dialect, fields), capture=frozenset())
            assert {name: body[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("dialect", "upstream", "fields"),
    [
        (Dialect.CHAT, Dialect.MESSAGES, USAGE_ALL_ALONG),
        (Dialect.CHAT, Dialect.MESSAGES, {"regex": "[ab]"}),
        (Dialect.RESPONSES, Dialect.MESSAGES, {"truncation": "auto"}),
        (Dialect.RESPONSES, Dialect.CHAT, {"context_management": [{"type": "compaction"}]}),
        (Dialect.MESSAGES, Dialect.CHAT, {"context_management": CLEAR_TOOLS}),
    ],
)
def test_what_another_protocol_cannot_say_is_refused(
    dialect: Dialect, upstream: Dialect, fields: dict[str, Any]
) -> None:
    with pytest.raises(RequestRefused) as caught:
        UPSTREAMS[upstream].body(parsed(dialect, fields), capture=frozenset())
    assert caught.value.status == 400


@pytest.mark.parametrize("dialect", [Dialect.RESPONSES, Dialect.MESSAGES])
def test_what_a_template_is_told_reaches_a_chat_upstream_from_every_protocol(dialect: Dialect) -> None:
    fields = {"chat_template_kwargs": {"enable_thinking": False}}
    body = UPSTREAMS[Dialect.CHAT].body(parsed(dialect, fields), capture=frozenset())
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
