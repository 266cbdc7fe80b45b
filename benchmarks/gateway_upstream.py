"""The upstream of `gateway.py`: answers like an engine does, from memory, in a process of its own.

    POST /v1/chat/completions                  10 kB: 256 prompt ids, 64 completion ids with log-probabilities
      "stream": true                            the same in 35 events
    POST /control {"hold_s": 2, "hold_all": 0}   how long an answer takes; 0 is at once

With `hold_all: N` nobody is answered before N requests are open, then all are. It prints its port when it
listens. Its argument is the number of alternatives of each token: 0 is what engines send whom nobody asks for
them, as the gateway does not.
"""

import asyncio
import json
import resource
import sys
from typing import Any

from aiohttp import web

NUM_PROMPT_IDS, NUM_COMPLETION_IDS = 256, 64
LONGEST_HOLD_S = 300.0
"""Whoever waits for others is answered then, even when they do not come."""
TOKENS_PER_EVENT = 2
"""64 tokens in 32 events; with role, finish reason and usage there are 35."""


def token_logprob(place: int, alternatives: int = 0) -> dict[str, Any]:
    def one(token: int) -> dict[str, Any]:
        text = f" word{token}"
        return {"token": text, "logprob": -0.3 - token / 1024, "bytes": list(text.encode())}

    token = 100 + place
    return one(token) | {"top_logprobs": [one(token + 300 * other) for other in range(alternatives)]}


TOKENS = [token_logprob(place) for place in range(NUM_COMPLETION_IDS)]
PROMPT_IDS = [1000 + 7 * place for place in range(NUM_PROMPT_IDS)]
COMPLETION_IDS = [100 + place for place in range(NUM_COMPLETION_IDS)]
USAGE = {
    "prompt_tokens": NUM_PROMPT_IDS,
    "completion_tokens": NUM_COMPLETION_IDS,
    "total_tokens": NUM_PROMPT_IDS + NUM_COMPLETION_IDS,
}
_ID = "chatcmpl-NUMBER"


def whole_answer(tokens: list[dict[str, Any]]) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "".join(token["token"] for token in tokens)},
        "logprobs": {"content": tokens},
        "finish_reason": "stop",
        "token_ids": COMPLETION_IDS,
    }
    answer = {
        "id": _ID,
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": "scripted",
        "choices": [choice],
        "usage": USAGE,
        "prompt_token_ids": PROMPT_IDS,
    }
    return json.dumps(answer).encode()


def events(tokens: list[dict[str, Any]]) -> list[bytes]:
    shared = {"id": _ID, "object": "chat.completion.chunk", "created": 1_760_000_000, "model": "scripted"}

    def event(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return shared | {"choices": [choice], "usage": None}

    said = [event({"role": "assistant", "content": ""}) | {"prompt_token_ids": PROMPT_IDS}]
    for start in range(0, NUM_COMPLETION_IDS, TOKENS_PER_EVENT):
        part = slice(start, start + TOKENS_PER_EVENT)
        text = "".join(token["token"] for token in tokens[part])
        said.append(
            event({"content": text}, logprobs={"content": tokens[part]}, token_ids=COMPLETION_IDS[part])
        )
    said.append(event({}, finish_reason="stop"))
    said.append(shared | {"choices": [], "usage": USAGE})
    return [b"data: " + json.dumps(each).encode() + b"\n\n" for each in said]


class Upstream:
    def __init__(self, alternatives: int) -> None:
        self.hold_s = 0.0
        self.hold_all = 0
        self.num_open = self.num_asked = 0
        self.all_there = asyncio.Event()
        tokens = [token_logprob(place, alternatives) for place in range(NUM_COMPLETION_IDS)]
        self.answer = whole_answer(tokens)
        self.events = events(tokens)

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await http.read()
        if http.path == "/control":
            return self.control(json.loads(body))
        if not http.path.endswith("/chat/completions"):
            return web.json_response({"object": "list", "data": [{"id": "scripted", "owned_by": "vllm"}]})
        self.num_asked += 1
        self.num_open += 1
        try:
            if self.hold_all:
                if self.num_open >= self.hold_all:
                    self.all_there.set()
                await asyncio.wait_for(self.all_there.wait(), LONGEST_HOLD_S)
            # The same text in every way in which a JSON writer may put it.
            is_stream = b'"stream":true' in body or b'"stream": true' in body
            return await (self.stream(http) if is_stream else self.whole())
        finally:
            self.num_open -= 1

    def control(self, wanted: dict[str, float]) -> web.Response:
        self.hold_s, self.hold_all = wanted.get("hold_s", 0.0), int(wanted.get("hold_all", 0))
        self.all_there.clear()
        return web.json_response({"open": self.num_open})

    async def whole(self) -> web.Response:
        number = b"%06d" % self.num_asked
        if self.hold_s:
            await asyncio.sleep(self.hold_s)
        return web.Response(body=self.answer.replace(b"NUMBER", number, 1), content_type="application/json")

    async def stream(self, http: web.BaseRequest) -> web.StreamResponse:
        number = b"%06d" % self.num_asked
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        pause_s = self.hold_s / len(self.events)
        for event in self.events:
            # Without a pause, too, each event is a packet of its own, as it is behind an engine.
            await asyncio.sleep(pause_s)
            await response.write(event.replace(b"NUMBER", number, 1))
        await response.write_eof(b"data: [DONE]\n\n")
        return response


async def serve(alternatives: int) -> None:
    runner = web.ServerRunner(web.Server(Upstream(alternatives).handle, access_log=None))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=16_384)
    await site.start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    alternatives = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        import uvloop

        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    except ModuleNotFoundError:
        runner = asyncio.Runner()
    with runner:
        runner.run(serve(alternatives))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
