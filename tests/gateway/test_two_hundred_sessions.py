"""Many programs at once, in every protocol, streamed and not, with tools: nothing lost, doubled, mixed."""

import json
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.gateway.upstream import UpstreamPolicy
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.messages import Message

sys.path.insert(0, str(Path(__file__).parent))
import keyed_programs as programs
import keyed_upstream as keyed


def clients_of(gateway: Gateway) -> Any:
    return programs.Clients(gateway.url, gateway.token)


# ---- in front of a server ----------------------------------------------------------------------------------


@asynccontextmanager
async def in_front_of_a_server(directory: Path) -> AsyncIterator[Gateway]:
    async with (
        keyed.KeyedUpstream() as upstream,
        Gateway(UpstreamPolicy([upstream.url]), directory, grace_s=1.0) as gateway,
    ):
        yield gateway
        assert set(upstream.asked.values()) == {1}


async def test_twenty_sessions_at_once_are_recorded_exactly_as_the_server_answered(tmp_path: Path) -> None:
    async with in_front_of_a_server(tmp_path) as gateway:
        await programs.run_all(clients_of(gateway), 20, 4, keyed.said, programs.as_the_server_said)


@pytest.mark.slow
async def test_two_hundred_sessions_at_once_are_recorded_exactly_as_the_server_answered(
    tmp_path: Path,
) -> None:
    async with in_front_of_a_server(tmp_path) as gateway:
        await programs.run_all(clients_of(gateway), 200, 20, keyed.said, programs.as_the_server_said)


# ---- in front of the engine in this process ----------------------------------------------------------------


class Engine:
    """What the built-in engine would say: the script's text with its calls in markup, a token a character."""

    def __init__(self) -> None:
        self.client = ScriptedClient(self._answer)
        self.written: dict[str, list[str]] = defaultdict(list)
        """By key: what was sampled."""

    def _answer(self, messages: Sequence[Message]) -> ScriptedAnswer:
        prompt = messages[0]["content"]
        key = prompt.rsplit("key=", 1)[1].split(" ", 1)[0]
        text = self.text_of(key)
        self.written[key].append(text)
        return ScriptedAnswer(text=text, logprobs=logprobs_of(text))

    def text_of(self, key: str) -> str:
        answer = keyed.said(key)
        calls = [
            json.dumps({"name": name, "arguments": json.loads(arguments)}, ensure_ascii=False)
            for name, arguments in programs.calls_in(answer)
        ]
        return "\n".join([*([answer.text] if answer.text else []), *(_markup(call) for call in calls)])

    def check(self, record: dict[str, Any], call: Any) -> None:
        text = self.text_of(call.key)
        assert self.written[call.key] == [text]
        assert record["completion_ids"] == [*self.client.tokenizer.encode(text), 0]
        assert record["logprobs"] == logprobs_of(text)
        prompt = self.client.tokenizer.decode(record["prompt_ids"])
        program = call.key.split("/")[0]
        keys = [part.split(" ", 1)[0] for part in prompt.split("key=")[1:]]
        assert keys == [f"{program}/{turn}" for turn in range(len(keys))], "its own turns, all, in order"
        assert keys[-1] == call.key
        # What was sampled before stands in the prompt as it was sampled.
        for earlier in keys[:-1]:
            assert self.text_of(earlier) in prompt


def _markup(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


def logprobs_of(text: str) -> list[float]:
    return [-((ord(character) % 50) + 1) / 64 for character in text] + [-0.25]


async def run_on_the_engine(directory: Path, num_sessions: int, calls: int) -> None:
    engine = Engine()
    async with Gateway(LocalPolicy(engine.client, "scripted"), directory, grace_s=1.0) as gateway:
        await programs.run_all(
            clients_of(gateway), num_sessions, calls, keyed.said, engine.check, may_have_more=False
        )


async def test_twenty_sessions_at_once_are_recorded_exactly_as_the_engine_sampled(tmp_path: Path) -> None:
    await run_on_the_engine(tmp_path, 20, 4)


@pytest.mark.slow
async def test_two_hundred_sessions_at_once_are_recorded_exactly_as_the_engine_sampled(
    tmp_path: Path,
) -> None:
    await run_on_the_engine(tmp_path, 200, 20)
