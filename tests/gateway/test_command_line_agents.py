"""What Claude Code 2.1.197 and Codex 0.169.0 sent when they were run against a gateway, sent again.

    HEAD /sessions/s ─► POST /sessions/s/v1/messages?beta=true ─► tool ─► the same with its result
    POST /v1/responses, session-id: … ─► tool ─► the same with its result

The shapes are those of their requests (docs/frameworks.md says how to run them); the long texts and most of
their tools are left out.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.gateway.upstream import UpstreamPolicy
from rllm.inference.scripted import ScriptedClient
from rllm.types.messages import Message
from rllm.types.wire import CallRecord, CallStatus, Dialect

SAID_FIRST = "Let me look."
ANSWER = "The file holds 42."
DIRECT, BEHIND = "direct", "behind another gateway"
CODEX_SESSION = "01a2019f-e00c-7303-afff-8b47029fe6e3"


# ---- Claude Code -------------------------------------------------------------------------------------------

CLAUDE_HEADERS = {
    "Accept": "application/json",
    "Authorization": "Bearer any",
    "User-Agent": "claude-cli/2.1.197 (external, sdk-cli)",
    "X-Claude-Code-Session-Id": "60b60747-fd61-457e-a418-a36225cee2a6",
    "X-Stainless-Retry-Count": "0",
    "anthropic-beta": "claude-code-20250219,context-management-2025-06-27,mid-conversation-system-2026-04-07",
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "Accept-Encoding": "gzip, deflate, br, zstd",
}
MARK = {"cache_control": {"type": "ephemeral"}}


def claude_tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties)[:1],
        "additionalProperties": False,
    }
    return {"name": name, "description": f"The tool {name}.", "input_schema": schema}


CLAUDE_TOOLS = [
    claude_tool(
        "Agent",
        description={"type": "string"},
        prompt={"type": "string"},
        subagent_type={"type": "string"},
        isolation={"enum": ["worktree"], "type": "string"},
    ),
    claude_tool(
        "Bash", command={"type": "string"}, timeout={"type": "number"}, description={"type": "string"}
    ),
]


def claude_asks(question: str, *then: dict[str, Any], number: str = "b58") -> dict[str, Any]:
    """The body of a turn; `then` is what was said since the question."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cc_entrypoint=sdk-cli;"
    return {
        "model": "scripted",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-22.\n"},
                    {"type": "text", "text": question},
                ],
            },
            {"role": "system", "content": "Available agent types for the Agent tool:\n- claude: all tasks"},
            *then,
        ],
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": "You are a Claude agent.", **MARK},
            {"type": "text", "text": "\nYou are an interactive agent.", **MARK},
        ],
        "tools": CLAUDE_TOOLS,
        "metadata": {"user_id": '{"device_id":"85d2","account_uuid":"","session_id":"60b60747"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def claude_results(said: dict[str, Any], *results: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its own turn as it says it again, and what its tools returned; the last block is marked."""
    calls = [block for block in said["content"] if block["type"] == "tool_use"]
    returned = [
        {"tool_use_id": call["id"], "type": "tool_result", "content": result, "is_error": False}
        for call, result in zip(calls, results, strict=True)
    ]
    returned[-1] |= MARK
    return {"role": "assistant", "content": said["content"]}, {"role": "user", "content": returned}


async def claude_hears(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """One turn: the message that its SDK puts together from the events."""
    async with http.post(f"{url}/v1/messages?beta=true", json=body, headers=CLAUDE_HEADERS) as reply:
        assert reply.status == 200, await reply.text()
        events = await events_of(reply)
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            blocks[-1]["input"] = (blocks[-1]["input"] or "") + event["delta"]["partial_json"]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    return {"content": blocks, "stop_reason": events[-2]["delta"]["stop_reason"]}


# ---- Codex -------------------------------------------------------------------------------------------------

CODEX_HEADERS = {
    "x-codex-beta-features": "remote_compaction_v2",
    "x-codex-window-id": f"{CODEX_SESSION}:0",
    "x-client-request-id": CODEX_SESSION,
    "session-id": CODEX_SESSION,
    "thread-id": CODEX_SESSION,
    "Accept": "text/event-stream",
    "Authorization": "Bearer any",
    "originator": "codex_exec",
}


def codex_function(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {
        "type": "function",
        "name": name,
        "description": f"The tool {name}.",
        "strict": False,
        "parameters": schema | ({"required": list(required)} if required else {}),
    }


CODEX_TOOLS = [
    codex_function("exec_command", "cmd", cmd={"type": "string"}, yield_time_ms={"type": "number"}),
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for spawning and managing sub-agents.",
        "tools": [codex_function("spawn_agent", message={"type": "string"})],
    },
    {"type": "web_search", "external_web_access": True},
]


def codex_asks(question: str, *then: dict[str, Any]) -> dict[str, Any]:
    def message(role: str, text: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": f"msg_{role}",
            "role": role,
            "content": [{"type": "input_text", "text": text}],
        }

    return {
        "model": "scripted",
        "input": [
            message("developer", "You are a coding agent running in the Codex CLI."),
            message("developer", "<skills_instructions>\n## Skills"),
            message("user", "<environment_context>\n  <shell>bash</shell>"),
            message("user", question),
            *then,
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": CODEX_SESSION,
        "client_metadata": {"session_id": CODEX_SESSION, "x-codex-window-id": f"{CODEX_SESSION}:0"},
    }


async def codex_hears(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of one turn, which it takes from the events as they are done."""
    async with http.post(f"{url}/v1/responses", json=body, headers=CODEX_HEADERS) as reply:
        assert reply.status == 200, await reply.text()
        events = await events_of(reply)
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


# ---- the server --------------------------------------------------------------------------------------------


async def events_of(reply: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    lines = (await reply.text()).splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def looks_then_answers(messages: Sequence[Message]) -> str:
    prompt = str(messages[0]["content"])
    if "\ntool:" in prompt:
        return ANSWER
    if "two helpers" in prompt:
        helpers = [call("Agent", description=f"look {n}", prompt=f"Look, helper {n}.") for n in (1, 2)]
        return "\n".join(helpers)
    if "spawn" in prompt.rpartition("user:")[2]:
        return call("multi_agent_v1__spawn_agent", message="Look.")
    tool = call("Bash", command="cat note.txt") if '"Bash"' in prompt else call("exec_command", cmd="cat")
    return f"{SAID_FIRST}\n{tool}"


@pytest.fixture(params=[DIRECT, BEHIND])
async def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Gateway]:
    """In front of the model itself, as `rllm serve model` is, or of such a server."""
    model = LocalPolicy(ScriptedClient(looks_then_answers), "scripted")
    async with Gateway(model, tmp_path / "model", token=None, grace_s=1.0) as served:
        if request.param == DIRECT:
            yield served
            return
        async with Gateway(
            UpstreamPolicy([f"{served.url}/v1"]), tmp_path / "calls", token=None, grace_s=1.0
        ) as front:
            yield front


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as http:
        yield http


def require_one_row(records: list[CallRecord], dialect: Dialect) -> None:
    """Each call begins with every id of the one before, all with log-probabilities."""
    for record in records:
        assert (record.status, record.dialect, record.stream) == (CallStatus.OK, dialect, True)
        assert len(record.completion_ids) == len(record.logprobs) == len(record.policy_versions) > 0
        assert (record.conversation, record.segment) == (records[0].conversation, 0)
    for earlier, later in pairwise(records):
        seen = earlier.prompt_ids + earlier.completion_ids
        assert later.prompt_ids[: len(seen)] == seen


# ---- what they do ------------------------------------------------------------------------------------------


async def test_claude_code_runs_its_tool_and_answers_in_one_row_of_tokens(gateway: Gateway) -> None:
    url = f"{gateway.url}/sessions/claude"
    async with client() as http:
        async with http.head(url, headers=CLAUDE_HEADERS) as probe:
            assert probe.status == 200
        first = await claude_hears(http, url, claude_asks("What number is in note.txt?"))
        assert first["stop_reason"] == "tool_use"
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        assert first["content"][1]["input"] == {"command": "cat note.txt"}
        history = claude_results(first, "42")
        last = await claude_hears(
            http, url, claude_asks("What number is in note.txt?", *history, number="c77")
        )
    assert (last["stop_reason"], last["content"]) == ("end_turn", [{"type": "text", "text": ANSWER}])
    records = gateway.ledger.traces("claude")
    assert len(records) == 2
    require_one_row(records, Dialect.MESSAGES)
    assert [message["role"] for message in records[1].messages] == [
        "system",
        "user",
        "system",
        "assistant",
        "tool",
    ]


async def test_sub_agents_of_claude_code_are_conversations_of_their_own(gateway: Gateway) -> None:
    """They share a session, and their calls come between those of the agent that sent them."""
    url = f"{gateway.url}/sessions/claude"
    async with client() as http:
        sends = await claude_hears(http, url, claude_asks("Ask two helpers."))
        prompts = [block["input"]["prompt"] for block in sends["content"]]
        looks = [await claude_hears(http, url, claude_asks(prompt)) for prompt in prompts]
        for prompt, look in reversed(list(zip(prompts, looks, strict=True))):
            await claude_hears(http, url, claude_asks(prompt, *claude_results(look, "42")))
        await claude_hears(http, url, claude_asks("Ask two helpers.", *claude_results(sends, "42", "42")))
    by_conversation: dict[int, list[CallRecord]] = {}
    for record in gateway.ledger.traces("claude"):
        by_conversation.setdefault(record.conversation, []).append(record)
    assert len(by_conversation) == 3
    for records in by_conversation.values():
        assert len(records) == 2
        require_one_row(records, Dialect.MESSAGES)


async def test_tokens_are_counted_for_claude_code(gateway: Gateway) -> None:
    """`/context` asks for each part of its prompt; the tools come without a conversation to speak of."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "foo"}], "tools": CLAUDE_TOOLS}
    async with (
        client() as http,
        http.post(
            f"{gateway.url}/sessions/claude/v1/messages/count_tokens?beta=true",
            json=body,
            headers=CLAUDE_HEADERS,
        ) as reply,
    ):
        told = await reply.json()
        if reply.status != 200:  # a server behind a gateway need not count
            assert (reply.status, told["type"]) == (400, "error")
        else:
            assert told["input_tokens"] > 100
    assert gateway.ledger.traces("claude") == []


async def test_codex_runs_its_tool_and_answers_in_one_row_of_tokens(gateway: Gateway) -> None:
    """Its session is the one that it names in a header."""
    async with client() as http:
        said, called = await codex_hears(http, gateway.url, codex_asks("What number is in note.txt?"))
        assert said["content"][0]["text"] == SAID_FIRST
        assert (called["name"], json.loads(called["arguments"])) == ("exec_command", {"cmd": "cat"})
        result = {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": called["call_id"],
            "output": "Process exited with code 0\nOutput:\n42\n",
        }
        (answer,) = await codex_hears(
            http, gateway.url, codex_asks("What number is in note.txt?", said, called, result)
        )
    assert answer["content"][0]["text"] == ANSWER
    records = gateway.ledger.traces(CODEX_SESSION)
    assert len(records) == 2
    require_one_row(records, Dialect.RESPONSES)


async def test_codex_finds_the_tool_of_a_namespace_that_was_called(gateway: Gateway) -> None:
    async with client() as http:
        (called,) = await codex_hears(http, gateway.url, codex_asks("Please spawn somebody."))
        assert (called["namespace"], called["name"]) == ("multi_agent_v1", "spawn_agent")
        result = {"type": "function_call_output", "call_id": called["call_id"], "output": "{}"}
        await codex_hears(http, gateway.url, codex_asks("Please spawn somebody.", called, result))
    require_one_row(gateway.ledger.traces(CODEX_SESSION), Dialect.RESPONSES)


async def test_a_prompt_that_does_not_fit_is_refused_in_the_words_that_they_look_for(tmp_path: Path) -> None:
    """Claude Code says that the prompt is too long, Codex that it ran out of room: neither tries again."""
    small = ScriptedClient(looks_then_answers)
    small.max_context = 64
    async with (
        Gateway(LocalPolicy(small, "small"), tmp_path, token=None, grace_s=1.0) as gateway,
        client() as http,
    ):
        async with http.post(f"{gateway.url}/v1/messages?beta=true", json=claude_asks("Hi")) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["type"] == "invalid_request_error"
        async with http.post(f"{gateway.url}/v1/responses", json=codex_asks("Hi")) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["code"] == "context_length_exceeded"
