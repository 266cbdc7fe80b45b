"""Real training runs of one process for `simulate_cluster.py`: processor's seconds of a step, by thread.

    shapes of steps ──► AgentTrainer on each ──► seconds of sampler, learner and all else, least of steps

Seconds are those of the processor: others may use the machine. The model answers until its limit, because
random weights seldom end an answer, so how many tokens there are is known beforehand.
"""

import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_events import Work
from train_step import EchoAgent, HashEnv, Setting, tasks_of

from rllm.models.builtin import create_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.trainer import AgentTrainer

ENGINE = "rllm-local-engine"
WARMUP, STEPS = 1, 2


@dataclass(slots=True)
class ThreadTimes:
    """A tracker that notes the processor's seconds of each step."""

    steps: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    _before: dict[str, float] = field(default_factory=dict[str, float])

    def advance(self, done: int, total: int) -> None: ...

    def begin(self, phase: str) -> None: ...

    def close(self) -> None: ...

    def log(self, step: int, phase: str, metrics: Mapping[str, float | int | str]) -> None:
        if phase != "train":
            return
        now = seconds_of_threads()
        if self._before:
            self.steps.append({name: now[name] - self._before[name] for name in now})
        self._before = now


def seconds_of_threads() -> dict[str, float]:
    """Of the processor: the sampler's thread, the learner's, and all others."""
    named = {"sampler": 0.0, "learner": 0.0}
    for thread in threading.enumerate():
        kind = "sampler" if thread.name == ENGINE else "learner" if "learner" in thread.name else ""
        if kind and thread.ident is not None:
            named[kind] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return {**named, "other": time.process_time() - sum(named.values())}


def measure(work: Work) -> dict[str, float]:
    """Seconds of a step of this shape: of each thread the least of the steps, because others only add."""
    setting = Setting(
        name="step",
        prompt=work.prompt_tokens,
        completion=work.turn_tokens,
        tasks_per_step=work.num_tasks,
        group_size=work.group_size,
        target=0.0,
    )
    times, num_steps = ThreadTimes(), WARMUP + STEPS
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        create_model(model, "tiny")
        renderer = ChatRenderer(HuggingFaceTokenizer(model))
        tasks = tasks_of(setting, setting.tasks_per_step * num_steps, renderer)
        AgentTrainer(
            config_of(work, model, num_steps),
            tasks,
            tasks[:1],
            agent_class=EchoAgent,
            env_class=HashEnv,
            output=Path(scratch) / "run",
            tracker=times,
        ).train()
    return {name: min(each[name] for each in times.steps) for name in ("sampler", "learner", "other")}


def config_of(work: Work, model: Path, num_steps: int) -> dict[str, Any]:
    return {
        "steps": num_steps,
        "threads": 1,
        "model": {"path": str(model)},
        "inference": {
            "num_slots": work.num_episodes,
            "max_context": work.prompt_tokens + work.turn_tokens,
        },
        "rollout": {
            "tasks_per_step": work.num_tasks,
            "group_size": work.group_size,
            "max_turns": 1,
            "max_tokens_per_turn": work.turn_tokens,
        },
        "algorithm": {"updates_per_step": 1},
        "optimizer": {"learning_rate": 1e-6},
        "warm_start": {"steps": 0},
        "evaluation": {"num_tasks": 1, "every_steps": 0},
        "checkpoint": {"every_steps": 10 * num_steps},
    }
