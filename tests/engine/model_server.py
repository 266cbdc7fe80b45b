"""A model server in a process of its own, to be killed: `python model_server.py PORT`, 0 for a free one.

It answers chat completions as vLLM does, with ids and log-probabilities. What it answers is `answer_to`, a
function of the conversation and the seed and of nothing else, so that others know what it must have said. It
imports the standard library alone, so that it is back soon.
"""

import asyncio
import hashlib
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

MOVES = ("Left", "Down", "Right", "Up")
LONGEST_THOUGHT_S = 0.05


def answer_to(messages: Sequence[dict[str, Any]], seed: int) -> tuple[str, list[int], list[float]]:
    """Text, ids and log-probabilities."""
    digest = hashlib.blake2b(json.dumps([list(messages), seed]).encode(), digest_size=8).digest()
    text = MOVES[digest[0] % len(MOVES)]
    ids = [*(ord(character) for character in text), 0]
    return text, ids, [-digest[1 + place] / 256 for place in range(len(ids))]


def reply_to(body: dict[str, Any]) -> dict[str, Any]:
    text, ids, logprobs = answer_to(body["messages"], body["seed"])
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
        "token_ids": ids,
        "logprobs": {"content": [{"token": "", "logprob": each} for each in logprobs]},
    }
    prompt_ids = [len(str(message["content"])) for message in body["messages"]]
    usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)}
    return {"id": "r", "choices": [choice], "prompt_token_ids": prompt_ids, "usage": usage}


class Connection(asyncio.Protocol):
    """HTTP as far as one client needs it: requests with a length, one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if not separator or len(rest) < length:
            return
        body, self._received = rest[:length], rest[length:]
        if head.startswith(b"GET"):
            self._send({"data": [{"id": "lake", "owned_by": "vllm", "max_model_len": 4096}]})
            return
        thought_s = random.random() * LONGEST_THOUGHT_S
        asyncio.get_running_loop().call_later(thought_s, self._send, reply_to(json.loads(body)))

    def _send(self, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(
        Connection, "127.0.0.1", port, backlog=4096, reuse_address=True
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
