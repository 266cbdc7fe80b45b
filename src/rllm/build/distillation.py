"""Runs that learn from a teacher: their defaults, and a run on prompts alone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.build.agent_player import AgentPlayer
from rllm.build.runs import ConfigSource, RunDatasets, RunOptions, agent_run
from rllm.config.distill import PROMPTS, TEACHER
from rllm.config.loader import load_config
from rllm.environments.prompts import PromptEnv, prompt_tasks
from rllm.trainer.distill import DistillationRun
from rllm.trainer.run import TrainingRun
from rllm.types.task import Task

DISTILL_DEFAULTS: dict[str, Any] = {
    "algorithm": {"estimator": TEACHER},
    "warm_start": {"steps": 0, "noise": 0.0},
    "rollout": {"temperature": 1.0, "final_temperature": 0.0},
}
"""Where a distillation differs from the defaults of `TrainConfig`, and from a benchmark's configuration."""
PROMPT_DEFAULTS: dict[str, Any] = {
    "task": {"environment": PROMPTS, "agent": "conversation"},
    "inference": {"max_context": 1024},
    "rollout": {"max_turns": 1, "max_tokens_per_turn": 256, "group_size": 1},
}
"""The same for prompts."""


def prompt_run(
    config: ConfigSource,
    datasets: RunDatasets,
    options: RunOptions,
    *,
    agent_class: type[BaseAgent] = ConversationAgent,
    agent_args: Mapping[str, Any] | None = None,
) -> TrainingRun:
    """A run on prompts that nobody pays for; `datasets`: see `prompt_datasets`."""
    return agent_run(
        load_config(config, base=over(DISTILL_DEFAULTS, PROMPT_DEFAULTS)),
        prompt_datasets(datasets),
        AgentPlayer(agent_class=agent_class, env_class=PromptEnv, agent_args=dict(agent_args or {})),
        replace(options, make=partial(DistillationRun, has_rewards=False)),
    )


def prompt_datasets(datasets: RunDatasets) -> RunDatasets:
    """Rows with `messages` or with text in `prompt`, as tasks of `PromptEnv`."""
    heldout = datasets.heldout
    return replace(
        datasets,
        train=prompt_tasks(_plain(datasets.train), dataset="`train_dataset`"),
        heldout=None if heldout is None else prompt_tasks(_plain(heldout), dataset="`val_dataset`"),
    )


def over(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """The nested mapping `base`, with the values of `update` in place of its own."""
    result = dict(base)
    for key, value in update.items():
        old = result.get(key)
        result[key] = over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _plain(rows: Sequence[Task | Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{**row.to_row(), "prompt": row.instruction} if isinstance(row, Task) else row for row in rows]
