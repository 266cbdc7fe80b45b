"""A run of TRL's GRPOTrainer with the tasks, the model and the budget of one of ours.

    TrainConfig ──► settings ──► trl_learning_side.py, in .venv-trl ──► completions ──┐
                                        ▲                                             ▼
                                        └────────── rewards of our environment ◄──────┘

Single-turn tasks alone: TRL asks once and is answered once.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from train_step import trl_python

from rllm.algorithms.task_sampler import TaskSampler
from rllm.build.training import DrawnTasks
from rllm.config.schema import TrainConfig
from rllm.environments.world import World
from rllm.eval.tasks import world_of
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.trainer.schedules import learning_rate


def train_with_trl(config: TrainConfig, output: Path) -> dict[str, Any]:
    """Leaves a model in `output`; returns what was spent and the share of right answers in each batch.

    Raises RuntimeError where TRL reads other tokens than we do, or ends early.
    """
    world = world_of(config.task.environment)
    tasks = tasks_in_order(config, world)
    questions = [[{"role": "user", "content": world.env_class.from_dict(task).reset()[0]}] for task in tasks]
    renderer = ChatRenderer(HuggingFaceTokenizer(Path(config.model.path)))
    prompts = [renderer.tokenizer.apply_template(each, add_generation_prompt=True) for each in questions]
    return play_trl(
        settings_of(config, prompts, output),
        renderer.render(questions[0]),
        lambda row, text: reward_of(world, tasks[row], text),
    )


def play_trl(
    settings: dict[str, Any], first_prompt: Sequence[int], reward: Callable[[int, str], float]
) -> dict[str, Any]:
    """Leave a model in `settings["output"]`, and return `wall`, `cpu` and `curve`, the mean reward of each
    batch. `first_prompt`: token ids of the first prompt; `reward`: of a row and its answer.

    Raises RuntimeError where TRL reads other tokens than we do, or ends early.
    """
    output = Path(settings["output"])
    output.mkdir(parents=True, exist_ok=True)
    curve: list[float] = []
    with (
        (output / "trl.log").open("w") as log,
        subprocess.Popen(
            [trl_python(), Path(__file__).with_name("trl_learning_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _say(process.stdin, settings)
            for message in _heard(process.stdout):
                if "prompt" in message:
                    _require_same_prompt(message["prompt"], first_prompt)
                elif "wall" in message:
                    return {**message, "curve": curve}
                else:
                    rewards = [reward(row, text) for row, text in message["grade"]]
                    curve.append(round(float(np.mean(rewards)), 4))
                    _say(process.stdin, rewards)
        finally:
            process.stdin.close()
            if process.poll() is None and len(curve) < settings["steps"]:
                process.terminate()
    raise RuntimeError(
        f"TRL's process ended with exit code {process.returncode}; {output / 'trl.log'} says why."
    )


def tasks_in_order(config: TrainConfig, world: World) -> list[dict[str, Any]]:
    """Those that our run plays, step by step."""
    arguments = {**config.task.environment_args, **config.task.train_args}
    tasks = DrawnTasks(world, config.task.num_train_tasks, arguments)
    sampler = TaskSampler(tasks if world.draws else tasks.whole(), seed=config.seed, purpose="tasks")
    return sampler.batch(0, config.steps * config.rollout.tasks_per_step)


def settings_of(config: TrainConfig, prompts: Sequence[str], output: Path) -> dict[str, Any]:
    """What the other side is told."""
    rollout, optimizer = config.rollout, config.optimizer
    return {
        "model": config.model.path,
        "output": str(output),
        "seed": config.seed,
        "threads": config.threads,
        "prompts": prompts,
        "steps": config.steps,
        "tasks_per_step": rollout.tasks_per_step,
        "group_size": rollout.group_size,
        "completion": rollout.max_tokens_per_turn,
        "temperature": rollout.temperature,
        "updates_per_step": config.algorithm.updates_per_step,
        "clip_high": config.algorithm.clip_high,
        "learning_rates": [
            learning_rate(config, step)
            for step in range(config.steps)
            for _ in range(config.algorithm.updates_per_step)
        ],
        "beta2": optimizer.beta2,
        "max_grad_norm": optimizer.max_grad_norm,
    }


def reward_of(world: World, task: dict[str, Any], text: str) -> float:
    """What our environment pays for an answer."""
    env = world.env_class.from_dict(task)
    env.reset()
    return float(env.step(text)[1])


def _require_same_prompt(theirs: list[int], ours: Sequence[int]) -> None:
    if theirs != list(ours):
        raise RuntimeError(f"TRL reads the tokens {theirs} where we read {list(ours)}: that is another task.")


def _say(stream: IO[str], value: Any) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def _heard(stream: IO[str]) -> Iterator[Any]:
    for line in stream:
        yield json.loads(line)
