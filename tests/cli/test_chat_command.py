"""`rllm chat`: a conversation in the terminal, here and against a server."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rllm.build.chatting import ChatSettings, LiveChat, opened_chat
from rllm.build.program_player import gateway_before
from rllm.build.providers import ModelPlace
from rllm.errors import ConfigError, RequestRefused
from rllm.gateway.local import LocalPolicy
from rllm.inference.local.client import LocalClient
from rllm.inference.scripted import ScriptedClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.types.wire import Choice, Dialect, Piece

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat") / "tiny"
    create_model(directory, "tiny", 0)
    return directory


async def _said(chat: LiveChat, text: str) -> tuple[list[Any], str]:
    """The turns that follow what a person says, and the text that came in pieces."""
    pieces: list[str] = []

    async def hear(piece: Piece) -> None:
        pieces.append(piece.text)

    async with aclosing(chat.say(text, hear)) as turns:
        return [turn async for turn in turns], "".join(pieces)


def _chat(client: Any, **settings: Any) -> LiveChat:
    return LiveChat(LocalPolicy(client, "m"), Dialect.CHAT, "", ChatSettings(**settings))


async def test_calls_are_made_and_the_model_goes_on_with_their_outputs() -> None:
    chat = _chat(ScriptedClient([CALL, "It is 42."]), system="Be brief.", tools=("calculator",))
    turns, text = await _said(chat, "What is 6 * 7?")
    call, output, answer = turns
    assert isinstance(call, Choice)
    assert [each.name for each in call.tool_calls] == ["calculator"]
    assert output["content"] == "42"
    assert (answer.text, text.endswith("It is 42.")) == ("It is 42.", True)
    assert [message["role"] for message in chat.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]


async def test_an_answer_that_fails_leaves_the_conversation_as_it_was(model: Path) -> None:
    client = LocalClient(load_model(model), num_slots=2, max_context=64)
    chat = _chat(client, max_tokens=4, seed=1)
    await _said(chat, "hello")
    before = list(chat.messages)
    with pytest.raises(RequestRefused, match="context"):
        await _said(chat, "long " * 200)
    assert chat.messages == before
    turns, _ = await _said(chat, "again")
    assert len(turns[0].completion_ids) <= 4
    await client.close()


@asynccontextmanager
async def _served(model: Path, directory: Path) -> AsyncIterator[ModelPlace]:
    client = LocalClient(load_model(model), num_slots=4, max_context=128)
    async with gateway_before(LocalPolicy(client, "tiny"), directory / "ledger") as gateway:
        yield ModelPlace(name="tiny", base_url=gateway.open_session("chat").base_url, api_key="any")
    await client.close()


async def test_a_server_answers_in_pieces_and_shows_probabilities(model: Path, tmp_path: Path) -> None:
    settings = ChatSettings(max_tokens=6, seed=3, top_logprobs=2)
    async with _served(model, tmp_path) as place, opened_chat(place, settings) as chat:
        (answer,), text = await _said(chat, "hello")
    assert answer.text == text
    assert len(answer.token_logprobs) == 6
    assert all(len(token.top) >= 2 for token in answer.token_logprobs)


async def test_what_a_server_decides_is_refused(tmp_path: Path) -> None:
    place = ModelPlace(name="m", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="--dtype is bfloat16"):
        async with opened_chat(place, ChatSettings(dtype="bfloat16")):
            raise AssertionError("it is refused before anything is asked")


def _piped(model: Path, lines: str, *flags: str) -> subprocess.CompletedProcess[str]:
    words = [
        sys.executable,
        "-m",
        "rllm",
        "chat",
        "--model",
        str(model),
        "--max-tokens",
        "5",
        "--seed",
        "1",
    ]
    return subprocess.run([*words, *flags], input=lines, capture_output=True, text=True, check=False)


def test_lines_of_a_pipe_are_answered_one_by_one(model: Path) -> None:
    ended = _piped(model, "hello\n\nmore\n/reset\nhello\n/quit\nnever read\n", "--json", "--logprobs", "2")
    assert ended.returncode == 0, ended.stderr
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == 3
    assert answers[0] == answers[2], "after /reset the same seed draws the same answer"
    assert all(len(token["top"]) == 2 for token in answers[0]["logprobs"])
    shown = _piped(model, "hello\n", "--logprobs", "2")
    assert "probability" in shown.stdout
    assert "--max-tokens" in shown.stderr
