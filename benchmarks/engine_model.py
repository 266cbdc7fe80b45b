"""The model server of `engine.py`: OpenAI's chat protocol, always the same answer, in a process of its own.

    POST /v1/chat/completions    "Right", 128 prompt ids, 2 completion ids with log-probabilities
    POST /hold {"hold_s": 0.5}   how long an answer takes from now on

It prints its port when it listens.
"""

import asyncio
import json
import resource
import sys

from aiohttp import web
from engine_probe import ANSWER

PROMPT_IDS = list(range(100, 228))
TOKENS = [{"token": text, "logprob": -0.1, "bytes": None, "top_logprobs": []} for text in (ANSWER, "")]
REPLY = json.dumps(
    {
        "id": "chatcmpl-constant",
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": "constant",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER},
                "logprobs": {"content": TOKENS},
                "finish_reason": "stop",
                "token_ids": [5, 6],
            }
        ],
        "usage": {"prompt_tokens": 128, "completion_tokens": 2, "total_tokens": 130},
        "prompt_token_ids": PROMPT_IDS,
    }
).encode()
MODELS = {"object": "list", "data": [{"id": "constant", "object": "model", "owned_by": "vllm"}]}


class Model:
    hold_s = 0.0

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        body = await http.read()
        if http.path == "/hold":
            self.hold_s = float(json.loads(body)["hold_s"])
            return web.json_response({})
        if not http.path.endswith("/chat/completions"):
            return web.json_response(MODELS)
        if self.hold_s:
            await asyncio.sleep(self.hold_s)
        return web.Response(body=REPLY, content_type="application/json")


async def serve() -> None:
    runner = web.ServerRunner(web.Server(Model().handle, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=16_384).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(serve())


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
