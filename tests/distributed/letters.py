"""A run of the letter game as one of several ranks, which may end badly.

python letters.py RUN CHANGES [FATE RANK PURPOSE]     CHANGES: JSON, on top of the game's settings
FATE   what becomes of RANK as it is to play the episodes of PURPOSE, such as train/1:
       die (kill -9), hang, fail (an error); RANK may be `all`. With PURPOSE update/N it does so inside the
       update of policy version N, with step/N as the optimizer moves the weights.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.engine.split import SplitEngine
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.replay import replay

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
import letter_game  # pyright: ignore[reportMissingImports]

TRAINED: dict[str, Any] = {
    "steps": 3,
    "warm_start": {"steps": 5, "episodes_per_step": 16},
    "rollout": {"max_tokens_per_turn": 20, "tasks_per_step": 3},
    "checkpoint": {"every_steps": 1},
}
"""A model that learned something before: an untrained one writes until it is cut off, and has no gradient."""


def play(run: Path, changes: dict[str, Any]) -> None:
    letter_game.make_trainer(run, letter_game.merged(TRAINED, changes)).train()


def replay_again(run: str) -> None:
    """Raises ValueError where the run does not come out again."""
    torch.set_num_threads(1)
    result = replay(letter_game.make_trainer(Path(run), TRAINED).run)
    if not result.is_identical:
        raise ValueError(f"{result.differences[:3]} {result.recorded_sha256} {result.replayed_sha256}")


def end_badly(fate: str, rank: str, purpose: str) -> None:
    if rank not in ("all", os.environ["RANK"]):
        return
    place, _, number = purpose.partition("/")
    if place in ("update", "step"):
        end_badly_in_update(fate, "_inputs" if place == "update" else "_step", int(number))
        return
    engine: Any = SplitEngine if os.environ["WORLD_SIZE"] != "1" else AgentExecutionEngine
    played = engine.run

    async def run(self: Any, tasks: Any, **options: Any) -> Any:
        if options.get("purpose") == purpose:
            if fate == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fate == "hang":
                await asyncio.sleep(1_000)
            raise ValueError("the dice fell off the table")
        async for episode in played(self, tasks, **options):
            yield episode

    engine.run = run


def end_badly_in_update(fate: str, where: str, policy_version: int) -> None:
    learner: Any = TorchBackend
    method = getattr(learner, where)

    def of_batch(self: Any, *arguments: Any) -> Any:
        if self.policy_version == policy_version:
            if fate == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1_000)
        return method(self, *arguments)

    setattr(learner, where, of_batch)


def main(run: str, changes: str = "{}", *fate: str) -> None:
    torch.set_num_threads(1)
    if fate:
        end_badly(*fate)
    play(Path(run), json.loads(changes))


if __name__ == "__main__":
    main(*sys.argv[1:])
