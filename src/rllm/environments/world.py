"""The parts of a world by name: an environment, its tasks, and an expert."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput
from rllm.types.messages import Message

Turns = Sequence[tuple[Any, str | Message]]
"""(observation, answer) turn by turn; an answer is text, or an assistant message that makes calls."""
Expert = Callable[[dict[str, Any], float, np.random.Generator], Turns]
"""(task, noise, generator) -> what it would have said."""
Baselines = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Sequence[float]]]
"""tasks -> name of a simple policy -> its expected return on each of them."""
RANDOM, OPTIMUM = "random", "optimum"
"""Names that all baselines have: any legal answer, and the best that can be expected. The others are
policies that look at nothing, such as one answer for all tasks."""


_NAMES = ("task_id", "id", "uid")


def task_content(task: Mapping[str, Any]) -> str:
    """All of a task but its name; of one that has nothing else, its name."""
    content = {name: task[name] for name in task if name not in _NAMES}
    return json.dumps(content or dict(task), sort_keys=True, default=str)


def _one_kind(task: Mapping[str, Any]) -> str:
    return ""


@dataclass(kw_only=True, slots=True, frozen=True)
class World:
    """An environment with its tasks and its expert."""

    env_class: type[BaseEnv]
    tasks: Callable[..., list[dict[str, Any]]]
    """(split, count, *, start, **task arguments) -> tasks: the same for the same arguments, other ones in
    other splits."""
    demonstrate: Callable[..., Turns] | None = None
    """(task, *, noise, rng, **expert_args) -> (observation, answer) turn by turn; it succeeds without
    noise."""
    draws: bool = False
    """Whether task number n is the same however many are asked for, and takes long enough to make that it is
    made when it is played."""
    skipped: Callable[..., dict[str, str]] | None = None
    """(split, **task arguments) -> name and reason of each task that cannot be played here, so that `tasks`
    leaves it out; None where all can."""
    expert_args: tuple[str, ...] = ()
    """The arguments that its expert takes."""
    expert_waits: bool = False
    """Whether its expert waits for another process, such as a browser: then several demonstrate at once."""
    identity: Callable[[Mapping[str, Any]], str] = task_content
    """The question of a task, up to what changes nothing (a board's symmetry, the order of numbers): two
    tasks with one identity are one instance, and splits share none."""
    identity_draws: bool = False
    """Whether `identity` has to draw the instance first, because a task holds only its number."""
    kind: Callable[[Mapping[str, Any]], str] = _one_kind
    """Which kind of instance a task is, such as `sums` or `differences`; success is reported by kind too."""
    evaluator: Callable[[Mapping[str, Any], Episode], EvalOutput] | None = None
    """(task, episode) -> what a program is paid that works on the task by itself instead of playing in the
    environment; None where nobody could tell."""
    baselines: Baselines | None = None
    """The scores of policies without skill, and of the best one, on given tasks; None where nobody knows."""

    def expert(self, arguments: Mapping[str, Any]) -> Expert | None:
        """The expert, told `arguments`; None where nobody knows how.

        Raises ConfigError for an argument that the expert does not know.
        """
        for name in arguments:
            if name not in self.expert_args:
                raise ConfigError(
                    f"There is no `warm_start.expert_args.{name}`; the expert of this world knows "
                    f"{', '.join(self.expert_args) or 'none'}."
                )
        return None if self.demonstrate is None else partial(_observation, self.demonstrate, dict(arguments))


def _observation(
    demonstrate: Callable[..., Turns],
    arguments: dict[str, Any],
    task: dict[str, Any],
    noise: float,
    rng: np.random.Generator,
) -> Turns:
    return demonstrate(task, noise=noise, rng=rng, **arguments)
