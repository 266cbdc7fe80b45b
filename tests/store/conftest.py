import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rllm.types.episode import Action, Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import Message, ModelOutput


def _conversation(task_id: str, attempt: int, num_steps: int) -> Episode:
    """A chat of `num_steps` answers of 30 tokens, each prompt all that came before and 20 more tokens."""
    rng = random.Random(f"{task_id} {attempt}")
    messages: list[Message] = [{"role": "user", "content": "SFFF FHFH FFFH HFFG"}]
    prompt_ids = [rng.randrange(2000) for _ in range(100)]
    steps: list[Step] = []
    for index in range(num_steps):
        response_ids = [rng.randrange(2000) for _ in range(30)]
        text = " ".join(rng.choice(["go", "right", "down", "left"]) for _ in range(12))
        messages = [*messages, {"role": "assistant", "content": text}]
        step = Step(
            chat_completions=messages,
            model_response=text,
            action=Action("Right"),
            reward=float(index),
            timings={"model_s": rng.random(), "env_s": rng.random()},
            info={"index": index},
        )
        step.record_output(
            ModelOutput(
                text=text,
                content=text,
                prompt_ids=prompt_ids,
                completion_ids=response_ids,
                logprobs=[float(np.float32(-rng.random())) for _ in response_ids],
                policy_versions=[3] * 30,
                usage={"prompt_tokens": len(prompt_ids), "completion_tokens": 30},
                latency_s=rng.random(),
            )
        )
        steps.append(step)
        messages = [*messages, {"role": "user", "content": f"observation {index}"}]
        prompt_ids = prompt_ids + response_ids + [rng.randrange(2000) for _ in range(20)]
    return Episode(
        task={"seed": rng.randrange(1000)},
        task_id=task_id,
        rollout_idx=attempt,
        trajectories=[Trajectory(steps=steps, reward=1.0, outcome=Outcome.SCORED)],
        outcome=Outcome.SCORED,
        is_correct=True,
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"started_at": 1.5, "duration_s": 2.5},
    )


@pytest.fixture
def conversation() -> Callable[..., Episode]:
    def make(task_id: str = "lake-1", attempt: int = 0, num_steps: int = 3) -> Episode:
        return _conversation(task_id, attempt, num_steps)

    return make


Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start Python on a program text, with pipes; whatever still runs at the end is killed."""
    children: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()
