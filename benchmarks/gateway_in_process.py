"""The gateway in front of a policy in its own process, which answers nobody before a number of calls is open.

    python gateway_in_process.py LEDGER TOKEN HOLD_ALL

A part of `gateway.py`: it stands for the built-in engine where only the open requests matter, and prints a
line of JSON when it listens.
"""

import asyncio
import json
import resource
import sys
from pathlib import Path
from typing import Any

import uvloop
from gateway_upstream import COMPLETION_IDS, LONGEST_HOLD_S, PROMPT_IDS, TOKENS, USAGE

from rllm.gateway.server import Gateway
from rllm.types.wire import Answer, CallRequest, Choice, Emit, PolicySession, completion_id, unix_time


class HeldPolicy:
    """Implements `Policy`."""

    def __init__(self, hold_all: int) -> None:
        self.hold_all = hold_all
        self.num_open = 0
        self.all_there = asyncio.Event()

    async def answer(self, request: CallRequest, session: PolicySession, emit: Emit | None = None) -> Answer:
        self.num_open += 1
        if self.num_open >= self.hold_all:
            self.all_there.set()
        await asyncio.wait_for(self.all_there.wait(), LONGEST_HOLD_S)
        choice = Choice(
            text="".join(token["token"] for token in TOKENS),
            prompt_ids=PROMPT_IDS,
            completion_ids=COMPLETION_IDS,
            logprobs=[token["logprob"] for token in TOKENS],
            policy_versions=[0] * len(TOKENS),
        )
        return Answer(
            id=completion_id(request.dialect),
            model="scripted",
            created=unix_time(),
            choices=[choice],
            usage={name: USAGE[name] for name in ("prompt_tokens", "completion_tokens")},
        )

    async def count_tokens(self, request: CallRequest) -> int:
        return len(PROMPT_IDS)

    def models(self) -> list[str]:
        return ["scripted"]

    def health(self) -> dict[str, Any]:
        return {"healthy": True, "queued": 0, "in_flight": self.num_open, "policy_versions": [0]}

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""


async def serve(ledger: Path, token: str, hold_all: int) -> None:
    async with Gateway(HeldPolicy(hold_all), ledger, token=token) as gateway:
        print(json.dumps({"url": gateway.url}), flush=True)
        await asyncio.Event().wait()


def main() -> None:
    if len(sys.argv) != 4:
        print("gateway_in_process.py is a part of gateway.py, which starts it.")
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
