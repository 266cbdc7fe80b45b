"""A worker learns from its service: serve, collect, train, evaluate, promote, while it goes on serving.

    python circle.py DIRECTORY

The built-in model has never seen a word: it sends messages anywhere. People who answer them say where they
should have gone; a model learns from that, and takes over only if messages that nobody learned from say that
it is better.
"""

import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).parent
WORDS = {
    "billing": ("invoice", "refund"),
    "account": ("password", "login"),
    "parcel": ("courier", "delivery"),
    "repair": ("screen", "battery"),
}
FRAMES = (
    *("{} wrong", "where is {}", "check {}", "{} again", "about {}", "no {}"),
    *("help, {}", "my {}", "{} please", "old {}", "bad {}", "new {}"),
)
ENDS = ("", "!", "?", " now", " today", " thanks")
NUM_LEARNED, NUM_COMPARED, NUM_AFTER = 300, 100, 100
SFT = ("epochs=8", "batch_size=16", "optimizer.learning_rate=3e-3", "optimizer.warmup_steps=10")


def messages(seed: int) -> list[tuple[str, str]]:
    """All messages, each once, in an order of the seed's: (text, the team that can help)."""
    pairs = [
        (frame.format(word) + end, team)
        for team, words in WORDS.items()
        for word in words
        for frame in FRAMES
        for end in ENDS
    ]
    return random.Random(seed).sample(pairs, len(pairs))


def rllm(*words: str | Path) -> dict[str, Any]:
    """What the command prints as JSON."""
    command = [sys.executable, "-m", "rllm", *map(str, words), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.returncode)  # it has said why
    return json.loads(done.stdout)


class Service:
    """A running `rllm worker serve`."""

    def __init__(self, contract: Path, runs: Path) -> None:
        command = [sys.executable, "-m", "rllm", "worker", "serve", str(contract)]
        options = ["--directory", str(runs), "--port", "0", "--json"]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        facts = json.loads(self.process.stdout.readline())
        self.url, self.token = facts["url"], facts["token"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()

    async def serve(self, batch: list[tuple[str, str]], name: str, *, teach: bool = False) -> float:
        """Share of messages that went to the right team. `teach` says of each where it should have gone."""
        room = asyncio.Semaphore(16)
        headers = {"Authorization": f"Bearer {self.token}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def one(number: int, text: str, team: str) -> bool:
                run = f"{name}-{number}"
                async with room:
                    body = {"inputs": {"run_id": run, "text": text}}
                    async with http.post(f"{self.url}/workers/route/runs", json=body) as reply:
                        answer = await reply.json()
                        assert reply.status == 200, answer
                    if teach:
                        feedback = {
                            "outputs": {"team": team},
                            "score": float(answer["outputs"]["team"] == team),
                        }
                        url = f"{self.url}/workers/route/runs/{run}/feedback"
                        async with http.post(url, json=feedback) as reply:
                            assert reply.status == 201, await reply.text()
                return answer["outputs"]["team"] == team

            right = await asyncio.gather(*(one(number, *each) for number, each in enumerate(batch)))
        return sum(right) / len(right)


async def circle(folder: Path, *, seed: int = 0, sft: tuple[str, ...] = SFT) -> dict[str, Any]:
    """Success in service before and after, and the verdict of the promotion."""
    started_s = time.perf_counter()
    folder.mkdir(parents=True)
    contract = Path(shutil.copy(HERE / "route.worker.md", folder))
    drawn = iter(messages(seed))
    learned, compared, unseen = (
        [next(drawn) for _ in range(count)] for count in (NUM_LEARNED, NUM_COMPARED, NUM_AFTER)
    )
    rows = [{"inputs": {"run_id": "-", "text": text}, "outputs": {"team": team}} for text, team in compared]
    (folder / "compared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    service = Service(contract, folder / "served")
    try:
        before = await service.serve(learned, "before", teach=True)
        print(f"served {len(learned)} messages, {before:.0%} to the right team", flush=True)
        kept = rllm("dataset", "from-runs", folder / "served", "--out", folder / "rows.jsonl")
        print(f"{kept['rows']} of them are rows to learn from", flush=True)
        settings = [word for assignment in sft for word in ("--set", assignment)]
        better = folder / "better"
        rllm("sft", folder / "rows.jsonl", "--model", "builtin:tiny", "--output", better, *settings)
        print(f"trained on them; {time.perf_counter() - started_s:.0f} s so far", flush=True)
        verdict = await asyncio.to_thread(
            rllm,
            *("worker", "promote", contract, better, "--if-better", folder / "compared.jsonl"),
            *("--server", service.url, "--token", service.token),
        )
        after = await service.serve(unseen, "after")
    finally:
        service.stop()
    print(f"promoted: {verdict['promoted']}; now {after:.0%} go to the right team")
    return {"before": before, "after": after, **verdict, "seconds": time.perf_counter() - started_s}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(circle(Path(sys.argv[1])))))
