"""Runs the rollout of an example in the engine that evaluates and trains, against a gateway that listens.

    evaluate_rollout.py examples/NAME/agent.py GATEWAY_URL ──► one line of JSON per episode

The Python that has the framework need not have torch: sessions are made and read over HTTP.
"""

import asyncio
import json
import sys
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rllm.engine.traced import TracedEngine
from rllm.types.call_budget import CallBudget
from rllm.types.messages import SamplingParams
from rllm.types.wire import CallRecord

TASKS = Path(__file__).resolve().parents[2] / "examples" / "stock.jsonl"


@dataclass
class RemoteSession:
    id: str
    base_url: str

    def traces(self) -> list[CallRecord]:
        return [CallRecord.from_dict(each) for each in _asked(self.base_url.removesuffix("/v1") + "/traces")]

    async def close(self) -> None:
        """It may stay open: nobody calls it again."""


@dataclass(frozen=True)
class RemoteSessions:
    """Implements `rllm.engine.traced.SessionSource` for a gateway in another process."""

    url: str

    def open_session(
        self,
        session: str,
        *,
        seed: int | None = None,
        sampling: dict[str, Any] | None = None,
        budget: CallBudget | None = None,
    ) -> RemoteSession:
        limits = asdict(budget or CallBudget())
        wanted = {"session_id": session, "seed": seed, "sampling": sampling or {}, "budget": limits}
        return RemoteSession(session, _asked(f"{self.url}/sessions", wanted)["base_url"])


def _asked(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data)) as answer:
        return json.load(answer)


async def main(example: str, url: str) -> None:
    tasks = [json.loads(line) for line in TASKS.read_text().splitlines()]
    async with TracedEngine(
        f"{example}:solve",
        f"{example}:score",
        RemoteSessions(url),
        model="tiny-0",
        n_parallel_tasks=2,
        retry_limit=1,
    ) as engine:
        async for episode in engine.run(
            tasks, group_size=2, purpose="validation", sampling=SamplingParams(max_tokens=300)
        ):
            print(json.dumps(episode.to_dict(), default=str))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
