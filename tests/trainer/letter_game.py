"""A world that is trained in within a second, and a process that trains in it until it is killed.

    python letter_game.py: one JSON request a line in, one JSON answer a line out
    {"run": DIR}                                train, or resume, to the end     {"signal": 0, "events": […]}
    {"run": DIR, "die_at_line": ["train", 2]}   kill -9 when that line is logged               {"signal": 9}
    {"run": DIR, "die_at_event": 57}            kill -9 at the 57th time that a file of the run is touched
    {"run": DIR, "interrupt_at_line": …}        Ctrl-C when that line is logged                  {"signal": 2}
    {"run": DIR, "interrupt_at_answer": 40}     Ctrl-C when the model has answered 40 times
    {"run": DIR, "game": "pair"}                two solvers and a judge, each role with a model of its own

Each request is served by a forked child, so that torch is imported once. An audit hook counts what is opened,
renamed, made and removed below the run directory, halves of checkpoints included.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rllm.agents.base import BaseAgent
from rllm.environments.base import BaseEnv
from rllm.tracking.base import Metric
from rllm.trainer.agent_trainer import AgentTrainer
from rllm.types.episode import Action, Episode, Step, Trajectory
from rllm.workflows.workflow import Workflow

SETTINGS: dict[str, Any] = {
    "seed": 5,
    "steps": 4,
    "threads": 1,
    "inference": {"num_slots": 8, "max_context": 128},
    "rollout": {
        "tasks_per_step": 2,
        "group_size": 3,
        "max_turns": 2,
        "max_tokens_per_turn": 3,
        "num_parallel": 8,
        "env_workers": 2,
    },
    "warm_start": {"steps": 4, "episodes_per_step": 4},
    "evaluation": {"num_tasks": 4, "every_steps": 2, "every_num_tasks": 2},
    "checkpoint": {"every_steps": 2, "keep": 2},
}
TASKS = [{"task_id": f"say-{letter}", "letter": letter} for letter in "ABCDEFGH"]


class LetterEnv(BaseEnv):
    """Two turns. The last answer pays by its first letter, in quarters, so that attempts differ by chance."""

    def __init__(self, letter: str) -> None:
        self.letter = letter
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return f"{self.letter} 1", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.turn += 1
        over = self.turn == 2
        return f"{self.letter} 2", (ord(action[0]) % 5) / 4 if over and action else 0.0, over, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "LetterEnv":
        return LetterEnv(info["letter"])


class LetterAgent(BaseAgent):
    """Passes on what it is shown and what it is told."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._trajectory = Trajectory()

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return self._messages

    @property
    def trajectory(self) -> Trajectory:
        return self._trajectory

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        if not done:
            self._messages.append({"role": "user", "content": observation})

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self._messages.append({"role": "assistant", "content": response})
        self._trajectory.steps.append(
            Step(chat_completions=list(self._messages), model_response=response, action=response)
        )
        return Action(response)


def demonstrate(task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    letter = task["letter"]
    return [
        (f"{letter} {turn}", "ABCDEFGH"[rng.integers(8)] if rng.random() < noise else letter)
        for turn in (1, 2)
    ]


class PairWorkflow(Workflow):
    """Two solvers at a time, then a judge who reads both; each is paid by the first letter that it says."""

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        said = await asyncio.gather(*(self.say("solver", f"{task['letter']} {turn}") for turn in (1, 2)))
        judged = await self.say("judge", " ".join(str(each.output)[:1] for each in said))
        return Episode(id=uid, task=task, trajectories=[*said, judged], is_correct=judged.reward == 1.0)

    async def say(self, role: str, question: str) -> Trajectory:
        messages = [{"role": "user", "content": question}]
        output = await self.rollout_engine.get_model_response(messages, role=role)
        reward = (ord(output.text[0]) % 5) / 4 if output.text else 0.0
        step = Step.from_model_output(output, messages, reward=reward)
        return Trajectory(name=role, steps=[step], reward=reward, output=output.text)


def demonstrate_pair(
    task: dict[str, Any], noise: float, rng: np.random.Generator
) -> list[tuple[str, list[tuple[list[dict[str, Any]], str]]]]:
    letter = task["letter"]
    asked = [("solver", f"{letter} 1"), ("solver", f"{letter} 2"), ("judge", f"{letter} {letter}")]
    return [
        (role, [([{"role": "user", "content": question}], "ABCDEFGH"[rng.integers(8)])])
        for role, question in asked
    ]


PAIR: dict[str, Any] = {
    "policies": {"solver": {"path": "builtin:tiny"}, "judge": {"path": "builtin:tiny"}},
    "inference": {"lockstep": False},
    "algorithm": {"old_logprobs": "trainer"},
}
"""Settings of the pair on top of those of the game."""


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections and keys of `changes` on top of those of `settings`; None takes a section away."""
    both = {key: merged(value, {}) if isinstance(value, dict) else value for key, value in settings.items()}
    for key, value in changes.items():
        both[key] = merged(both.get(key, {}), value) if isinstance(value, dict) else value
    return {key: value for key, value in both.items() if value is not None}


def make_pair_trainer(run: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> AgentTrainer:
    """A trainer of the pair; `changes` are sections or keys on top of its settings."""
    settings = merged(SETTINGS, PAIR)
    del settings["rollout"]["max_turns"]
    return AgentTrainer(
        **{
            "config": merged(settings, changes or {}),
            "train_dataset": TASKS,
            "val_dataset": TASKS[:4],
            "workflow_class": PairWorkflow,
            "demonstrate": demonstrate_pair,
            "output": run,
            **more,
        }
    )


def make_trainer(run: Path, changes: Mapping[str, Any] | None = None, **more: Any) -> AgentTrainer:
    """A trainer of the letter game; `changes` are sections or keys on top of SETTINGS."""
    config = merged(SETTINGS, changes or {})
    return AgentTrainer(
        **{
            "config": config,
            "train_dataset": TASKS,
            "val_dataset": TASKS[:4],
            "agent_class": LetterAgent,
            "env_class": LetterEnv,
            "demonstrate": demonstrate,
            "output": run,
            **more,
        }
    )


class EndAtLine:
    """A tracker that ends the process as a line arrives: it is on record, and in no checkpoint yet."""

    def __init__(self, place: tuple[str, int], how: signal.Signals) -> None:
        self._place = place
        self._how = how

    def advance(self, done: int, total: int) -> None:
        pass

    def begin(self, phase: str) -> None:
        pass

    def log(self, step: int, phase: str, metrics: Mapping[str, Metric]) -> None:
        if (phase, step) == self._place:
            os.kill(os.getpid(), self._how)

    def close(self) -> None:
        """Nothing to close."""


class FileEvents:
    """Notes what is done to the files of a run, and may end the process at the n-th time."""

    WATCHED = frozenset(
        {
            "open",
            "os.rename",
            "os.mkdir",
            "os.remove",
            "os.rmdir",
            "os.truncate",
            "shutil.rmtree",
            "sqlite3.connect",
        }
    )

    def __init__(self, run: Path, last: int | None) -> None:
        self.seen: list[str] = []
        self._below, self._last = str(run), last

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.WATCHED and arguments and self._below in str(arguments[0]):
            self.seen.append(f"{event} {arguments[0]}")
            if len(self.seen) == self._last:
                os.kill(os.getpid(), signal.SIGKILL)


def _serve(request: dict[str, Any]) -> None:
    """In the child: train, and tell what was done to files."""
    run = Path(request["run"])
    events = FileEvents(run, request.get("die_at_event"))
    tracker = None
    for fate, how in (("die_at_line", signal.SIGKILL), ("interrupt_at_line", signal.SIGINT)):
        if fate in request:
            tracker = EndAtLine(tuple(request[fate]), how)
    if "interrupt_at_answer" in request:
        _interrupt_at(request["interrupt_at_answer"])
    make = make_pair_trainer if request.get("game") == "pair" else make_trainer
    trainer = make(run, request.get("changes"), tracker=tracker)
    sys.addaudithook(events)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print(json.dumps({"signal": int(signal.SIGINT)}), flush=True)
    else:
        print(json.dumps({"signal": 0, "events": events.seen}), flush=True)


def _interrupt_at(number: int) -> None:
    """Ctrl-C as the model has answered for the n-th time."""
    from rllm.inference.local.client import LocalSession

    answered, run = itertools.count(1), LocalSession.run

    async def run_and_count(self: LocalSession, *args: Any, **kwargs: Any) -> Any:
        request = await run(self, *args, **kwargs)
        if next(answered) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return request

    LocalSession.run = run_and_count


def main() -> None:
    # Imported before the first fork: children then have them for nothing.
    from matplotlib import backends, figure, font_manager, ticker  # noqa: F401
    from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast  # noqa: F401

    import rllm.inference.local.client
    import rllm.models.builtin
    import rllm.trainer.loop  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                _serve(json.loads(line))
                os._exit(0)
            except BaseException:  # noqa: BLE001  a child must never go on as its parent
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"signal": status & 0x7F, "code": status >> 8}), flush=True)


if __name__ == "__main__":
    main()
