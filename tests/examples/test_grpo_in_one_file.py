"""The recipe is the trainer's own algorithm: for the same settings it ends with the same parameters."""

import asyncio
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.environments.frozenlake import FrozenLakeEnv, demonstration, lake_tasks
from rllm.models.directory import load_model
from rllm.trainer.agent_trainer import AgentTrainer

ROOT = Path(__file__).parents[2]
TASKS = lake_tasks("train", 40, size=[3, 4], p=0.7)


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = spec_from_file_location("grpo_in_one_file", ROOT / "recipes" / "grpo_in_one_file.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained(recipe: ModuleType, output: Path, *settings: str) -> Path:
    """The run that `AgentTrainer` makes of these settings."""
    trainer = AgentTrainer(
        ["seed=3", "threads=1", "evaluation.num_tasks=4", "evaluation.every_steps=0", *settings],
        TASKS,
        TASKS[:4],
        agent_class=FrozenLakeAgent,
        agent_args=recipe.AGENT_ARGS,
        env_class=FrozenLakeEnv,
        demonstrate=lambda task, noise, rng: demonstration(task, noise=noise, rng=rng),
        output=output,
    )
    return trainer.train().model_path


def test_it_ends_with_the_parameters_of_the_trainer(recipe: ModuleType, tmp_path: Path) -> None:
    warm = (
        "warm_start.steps=4",
        "warm_start.episodes_per_step=24",
        "warm_start.learning_rate=1e-2",
        "warm_start.noise=0.2",
    )
    imitator = trained(recipe, tmp_path / "imitator", "steps=0", *warm)
    settings = recipe.Settings(seed=3, steps=2, tasks_per_step=6, micro_batch_tokens=700)
    of_trainer = load_model(
        trained(
            recipe,
            tmp_path / "trainer",
            f"model.path={imitator}",
            "warm_start.steps=0",
            f"steps={settings.steps}",
            f"rollout.tasks_per_step={settings.tasks_per_step}",
            f"rollout.max_turns={settings.max_turns}",
            f"optimizer.micro_batch_tokens={settings.micro_batch_tokens}",
            "optimizer.schedule=constant",
        )
    ).model
    loaded = load_model(imitator)
    first = {name: each.clone() for name, each in loaded.model.named_parameters()}
    asyncio.run(recipe.train(loaded, TASKS, settings))
    theirs = dict(of_trainer.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
        assert not torch.equal(parameter, first[name]), f"{name} was not trained"


def test_it_can_be_read_in_one_go_and_leans_on_nothing_of_the_trainer() -> None:
    text = (ROOT / "recipes" / "grpo_in_one_file.py").read_text()
    assert len(text.splitlines()) <= 250
    assert "rllm.trainer" not in text.split('"""')[2], "the docstring alone speaks of it"
