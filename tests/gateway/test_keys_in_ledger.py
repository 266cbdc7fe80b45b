"""Whatever a record holds a key in, and in however many pieces it came, the ledger never has it."""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rllm.errors import redaction
from rllm.errors.redaction import hide_key
from rllm.gateway.dialects.chat import ChatReader
from rllm.gateway.ledger import Ledger
from rllm.gateway.server.call_records import Circumstances, records_of
from rllm.gateway.server.sessions import Session
from rllm.types.wire import CallRecord, CallRequest, CallStatus, Dialect

PIECE = 12
LETTERS = string.ascii_letters + string.digits


@pytest.fixture(autouse=True)
def no_keys_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_keys", {})


def a_key(draw: random.Random) -> str:
    """Of the kinds that there are, and with what JSON has to escape."""
    key = "".join(
        draw.choices(LETTERS + draw.choice(["", "-_", "/+=", ".~", '"\\', "é"]), k=draw.randint(16, 64))
    )
    return draw.choice(["", "sk-live-", "hf_"]) + key


def pieces_of(key: str) -> set[str]:
    return {key[start : start + PIECE] for start in range(len(key) - PIECE + 1)}


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from texts_of(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)


def require_without(keys: list[str], directory: Path, session: str) -> list[CallRecord]:
    with Ledger.open(directory, read_only=True) as ledger:
        records = ledger.traces(session)
    for record in records:
        for text in texts_of(orjson.loads(json.dumps(record.to_dict()))):
            for key in keys:
                assert not any(piece in text for piece in pieces_of(key)), (key, text)
    return records


def with_key(draw: random.Random, key: str) -> str:
    """The key in a text; what stands before or behind it may be taken for a part of it."""
    around = ["", " ", "x" * 5, '"', "\\n", "\x1b[0m", key[:3], "日本"]
    return draw.choice(around) + key + draw.choice(around)


def a_record(draw: random.Random, number: int, key: str, earlier: list[dict[str, Any]]) -> CallRecord:
    """Of a conversation, with the key in one of its places."""
    place = draw.randrange(12)
    text = with_key(draw, key)

    def at(here: int) -> str:
        return text if place == here else f"nothing {number}"

    arguments = json.dumps({"header": at(3)})
    call = {"id": "c", "type": "function", "function": {"name": "get", "arguments": arguments}}
    content: Any = [{"type": "text", "text": at(1)}, {"type": "image_url", "image_url": {"url": at(2)}}]
    return CallRecord(
        id=f"chatcmpl-{number}",
        session="s",
        status=CallStatus.OK,
        messages=[*earlier, {"role": "user", "content": at(0)}, {"role": "user", "content": content}],
        tools=[{"type": "function", "function": {"name": "get", "description": at(4), "parameters": {}}}],
        prompt=at(5) if draw.random() < 0.2 else None,
        sampling={"stop": [at(6)], "response_schema": {at(7) if place == 7 else "a": 2**70 * (place == 8)}},
        response={"role": "assistant", "content": at(9), "tool_calls": [call]},
        error={"status": 400, "message": at(10)},
        token_logprobs=[{"token_id": 1, "text": at(11), "logprob": -0.5, "top": [[1, at(11), -0.5]]}],
        prompt_ids=[1, 2, 3],
        completion_ids=[4],
        logprobs=[-0.5],
        policy_versions=[0],
    )


async def test_a_key_anywhere_in_a_record_does_not_reach_the_ledger(tmp_path: Path) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        keys = [a_key(draw) for _ in range(draw.randint(1, 3))]
        for key in keys:
            hide_key(key)
        directory = tmp_path / str(seed)
        with Ledger.open(directory) as ledger:
            earlier: list[dict[str, Any]] = []
            for number in range(
                6
            ):  # those that begin as the one before does are stored as what is new in them
                record = a_record(draw, number, draw.choice(keys), earlier)
                await ledger.append([record])
                earlier = [*record.messages, record.response]
        assert len(require_without(keys, directory, "s")) == 6


async def test_a_key_that_is_cut_anywhere_in_a_stream_does_not_reach_the_ledger(tmp_path: Path) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        key = a_key(draw)
        hide_key(key)
        request = CallRequest(dialect=Dialect.CHAT, body={}, stream=True, model="m")
        reader = ChatReader(request)
        for field in ("content", "reasoning_content", "arguments"):
            text, start = f"before {with_key(draw, key)} behind", 0
            while start < len(text):
                size = draw.choice([1, 2, 5, 11, 12, 30])
                delta: dict[str, Any] = {field: text[start : start + size]}
                if field == "arguments":
                    function = {"name": "f" * (start == 0), "arguments": delta["arguments"]}
                    delta = {"tool_calls": [{"index": 0, "function": function}]}
                reader.feed("", orjson.dumps({"id": "a", "choices": [{"index": 0, "delta": delta}]}))
                start += size
        reader.feed("", b"[DONE]")
        directory = tmp_path / str(seed)
        with Ledger.open(directory) as ledger:
            around = Circumstances(session=Session("s", ledger, 0), retry_key="", started_at=0.0)
            await ledger.append(records_of(request, reader.answer(), around))
        (record,) = require_without([key], directory, "s")
        assert "[key]" in record.response["content"]
        assert "[key]" in record.response["reasoning_content"]
        assert "[key]" in record.response["tool_calls"][0]["function"]["arguments"]


async def test_a_key_in_parts_in_several_fields_is_hidden_where_a_part_is_of_use(tmp_path: Path) -> None:
    key = "sk-live-3f9Ac72Qe51Zk08Wb64Tn37"
    hide_key(key)
    with Ledger.open(tmp_path) as ledger:
        messages = [{"role": "user", "content": key[:14]}, {"role": "user", "content": key[14:]}]
        await ledger.append([CallRecord(id="c", session="s", messages=messages)])
    (record,) = require_without([key], tmp_path, "s")
    assert [message["content"] for message in record.messages] == ["[key]", "[key]"]


async def test_nothing_goes_on_from_what_was_not_searched_for_a_key_that_is_known_now(tmp_path: Path) -> None:
    key = "sk-live-3f9Ac72Qe51Zk08Wb64Tn37"
    said = [{"role": "user", "content": f"it is {key}, {'and more ' * 100}"}]
    with Ledger.open(tmp_path) as ledger:
        await ledger.append([CallRecord(id="before", session="s", messages=said)])
        hide_key(key)
        await ledger.append([CallRecord(id="after", session="s", messages=[*said, *said])])
        before, after = ledger.traces("s")
    assert key in before.messages[0]["content"]
    assert key not in repr(after.to_dict())


async def test_what_holds_no_key_is_kept_as_it_is(tmp_path: Path) -> None:
    hide_key("sk-live-3f9Ac72Qe51Zk08Wb64Tn37")
    texts = [
        "sk-live-3f9 is too short to be of use",
        "\x1b[31mred\x1b[0m",
        "\ud800 and \u00e9",
        "\\u0073k-live",
    ]
    records = [
        CallRecord(id=f"c{number}", session="s", messages=[{"role": "user", "content": text}])
        for number, text in enumerate(texts)
    ]
    records[0].sampling = {"seed": 2**80}
    with Ledger.open(tmp_path) as ledger:
        for record in records:
            await ledger.append([record])
        assert ledger.traces("s") == records
