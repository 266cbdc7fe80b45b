"""What the tests of all dialects share: a server that answers as it was told, answers in pieces, any JSON."""

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import orjson
from aiohttp import web
from hypothesis import strategies as st

from rllm.errors import RequestRefused
from rllm.types.wire import Answer, CallRequest, Choice, Piece, ToolCallPiece, WireToolCall


class DialectServer:
    """A server of one dialect, in a thread of its own."""

    def __init__(self, dialect: Any, path: str, answer_id: str) -> None:
        self.dialect = dialect
        self.answer = Answer(id=answer_id, model="m", created=1)
        self.pieces: list[Piece] = []
        self.fails: RequestRefused | None = None
        """Instead of an answer, or in the middle of a streamed one."""
        self.requests: list[CallRequest] = []
        self.url = ""
        """Without its path."""
        self._path, self._answer_id = path, answer_id
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def says(self, *choices: Choice, pieces: list[Piece] | None = None, **fields: Any) -> None:
        self.answer = Answer(id=self._answer_id, model="m", created=1, choices=list(choices), **fields)
        self.pieces = pieces if pieces is not None else [p for choice in choices for p in pieces_of(choice)]
        self.fails = None

    def reset(self) -> None:
        self.says(Choice(text="Hello"))
        self.requests.clear()

    def __enter__(self) -> "DialectServer":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_post(self._path, self._handle)
        app.router.add_post(f"{self._path}/count_tokens", self._count)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _count(self, incoming: web.Request) -> web.Response:
        request = self.dialect.parse_count(orjson.loads(await incoming.read()))
        return web.json_response({"input_tokens": sum(len(str(m["content"])) for m in request.messages)})

    async def _handle(self, incoming: web.Request) -> web.StreamResponse:
        try:
            request = self.dialect.parse(orjson.loads(await incoming.read()))
            self.requests.append(request)
            if self.fails is not None and not request.stream:
                raise self.fails
        except RequestRefused as error:
            return web.json_response(self.dialect.error(error), status=error.status)
        if not request.stream:
            return web.Response(
                body=orjson.dumps(self.dialect.reply(request, self.answer)), content_type="application/json"
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(incoming)
        for part in stream_of(self.dialect, request, self.answer, self.pieces, self.fails):
            await response.write(part)
        return response


def stream_of(
    dialect: Any,
    request: CallRequest,
    answer: Answer,
    pieces: list[Piece],
    fails: RequestRefused | None = None,
) -> Iterator[bytes]:
    writer = dialect.stream(request, answer.id, answer.model, answer.created)
    yield writer.begin()
    for piece in pieces:
        if sent := writer.piece(piece):
            yield sent
    yield writer.failed(fails) if fails is not None else writer.end(answer)


def pieces_of(choice: Choice, size: int = 3) -> list[Piece]:
    def cut(text: str) -> list[str]:
        return [text[start : start + size] for start in range(0, len(text), size)]

    pieces = [Piece(reasoning=part) for part in cut(choice.reasoning)]
    pieces += [Piece(text=part) for part in cut(choice.text)]
    for index, call in enumerate(choice.tool_calls):
        pieces.append(Piece(tool_call=ToolCallPiece(index=index, id=call.id, name=call.name)))
        pieces += [
            Piece(tool_call=ToolCallPiece(index=index, arguments=part)) for part in cut(call.arguments)
        ]
    return pieces


def calls(*arguments: str) -> list[WireToolCall]:
    """Of the tool `weather`."""
    return [
        WireToolCall(id=f"call_{place}", name="weather", arguments=text)
        for place, text in enumerate(arguments)
    ]


def events_of(parts: Iterator[bytes]) -> list[dict[str, Any]]:
    """The data of a stream whose events are named by their type."""
    blocks = b"".join(parts).decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


words = st.text(st.characters(codec="utf-8"), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside of `value`."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


def with_one_change(good: Any) -> st.SearchStrategy[Any]:
    """`good` with one thing in it left out, or replaced by any JSON."""

    def change(place: tuple[Any, ...], value: Any, removed: bool) -> Any:
        body = copy.deepcopy(good)
        *path, last = place
        holder = body
        for key in path:
            holder = holder[key]
        if removed:
            del holder[last]
        else:
            holder[last] = value
        return body

    values = any_json | st.sampled_from([{}, [], "", [[]], [{}], {"type": []}])
    return st.builds(change, st.sampled_from(list(places(good))), values, st.booleans())
