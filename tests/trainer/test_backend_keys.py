"""No key of `[optimizer]` or `[model]` is ignored: changing it changes what the backend does, or it is
refused."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.algorithms.losses import ImitationLoss
from rllm.config.loader import load_config
from rllm.config.optimizer import SCHEDULES, OptimizerConfig
from rllm.config.schema import ModelConfig
from rllm.errors import ConfigError, NumericsError
from rllm.trainer.backends.base import refuse_unsupported
from rllm.trainer.backends.named import published_output
from rllm.trainer.backends.torch import SUPPORTS
from rllm.trainer.schedules import learning_rate, learning_rate_at
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]

PUBLISHED = {"trainer": {"project_name": "my math", "experiment_name": "grpo/8"}}


@pytest.mark.parametrize(
    ("config", "directory"),
    [
        ({"rllm": PUBLISHED}, "runs/my_math-grpo_8"),
        (PUBLISHED, "runs/my_math-grpo_8"),
        ({"trainer": {"project_name": "math"}}, "runs/math-default"),
        ({"trainer": {"experiment_name": "grpo"}}, "runs/latest"),
        ({}, "runs/latest"),
        ("math", "runs/latest"),
    ],
)
def test_a_published_configuration_names_its_run_directory(config: Any, directory: str) -> None:
    assert published_output(config) == Path(directory)


CHANGES: dict[str, Any] = {
    "name": "muon",
    "muon_dtype": "float32",
    "learning_rate": 2e-3,
    "schedule": "cosine",
    "warmup_steps": 3,
    "final_lr_fraction": 0.5,
    "beta1": 0.5,
    "beta2": 0.5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.1,
    "max_norm_factor": 2.0,
    "on_bad_update": "skip",
    "micro_batch_tokens": 60,
    "gradient_checkpointing": True,
    "logits_mb": 0.0032,
}


def test_the_torch_backend_honours_every_key() -> None:
    keys = {f"optimizer.{each.name}" for each in fields(OptimizerConfig)}
    assert keys | {f"model.{each.name}" for each in fields(ModelConfig)} == SUPPORTS
    assert set(CHANGES) == {each.name for each in fields(OptimizerConfig)}


@pytest.mark.parametrize("key", sorted(CHANGES))
def test_changing_a_key_changes_what_is_executed(
    decoder: Make, backend: Make, batch: list[TrainingSample], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    def executed(config: OptimizerConfig) -> Any:
        model = decoder(2)
        passes: list[int] = []
        hidden, logits = model.hidden, model.logits
        model.hidden = lambda *a: (passes.append(len(a[0])), hidden(*a))[1]
        model.logits = lambda states: (passes.append(len(states)), logits(states))[1]
        learner = backend(model, config=config)
        caplog.clear()
        outcome = "went on"
        for step in range(7):
            loss = _Scaled(scale=1e4 if step == 6 else 1.0)
            try:
                learner.update(batch, loss, learning_rate_at(config, step, 10))
            except ArithmeticError:
                outcome = "stopped"
        weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        return weights.tolist(), passes, model.recomputes, len(caplog.records), outcome

    # A limit on the norm is what `on_bad_update` is about, so there has to be one.
    base = OptimizerConfig(
        learning_rate=1e-3,
        warmup_steps=0,
        micro_batch_tokens=16_384,
        logits_mb=512.0,
        max_norm_factor=20.0 if key == "on_bad_update" else 0.0,
    )
    if key == "on_bad_update":
        with pytest.raises(NumericsError, match="running norm"):
            executed(base)
        assert executed(replace(base, on_bad_update="skip"))[3] == 1
        return
    if key == "max_norm_factor":
        with pytest.raises(NumericsError, match="running norm"):
            executed(replace(base, max_norm_factor=2.0))
        return
    if key == "muon_dtype":  # adamw has none
        base = replace(base, name="muon", muon_dtype="bfloat16")
    with caplog.at_level(logging.WARNING):
        assert executed(base) != executed(replace(base, **{key: CHANGES[key]}))


@dataclass(kw_only=True, slots=True, frozen=True)
class _Scaled(ImitationLoss):
    scale: float

    def terms(self, tokens: Any) -> torch.Tensor:
        return -self.scale * tokens.new_M


def test_a_key_that_a_backend_does_not_know_is_refused_unless_it_is_left_alone() -> None:
    few = SUPPORTS - {"optimizer.gradient_checkpointing", "model.dtype"}
    refuse_unsupported("optimizer", OptimizerConfig(), few, "tinker")
    with pytest.raises(ConfigError, match=r"`optimizer.gradient_checkpointing` is True.*tinker.*False"):
        refuse_unsupported("optimizer", OptimizerConfig(gradient_checkpointing=True), few, "tinker")
    with pytest.raises(ConfigError, match=r"`model.dtype` is 'bfloat16'"):
        refuse_unsupported("model", ModelConfig(dtype="bfloat16"), few, "tinker")


@pytest.mark.parametrize(
    "changes",
    [{"schedule": "step"}, {"on_bad_update": "ignore"}, {"logits_mb": -1.0}, {"name": "sgd"}],
    ids=str,
)
def test_a_value_that_means_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{next(iter(changes))}"):
        load_config({"optimizer": changes})


def test_a_type_of_weights_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`model.dtype` is 'float16'"):
        load_config({"model": {"dtype": "float16"}})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_warms_up_in_a_line_and_ends_where_it_says(schedule: str) -> None:
    optimizer = {"learning_rate": 2.0, "warmup_steps": 4, "final_lr_fraction": 0.25, "schedule": schedule}
    config = load_config({"steps": 21, "optimizer": optimizer})
    rates = [learning_rate(config, step) for step in range(21)]
    assert rates[:4] == pytest.approx([0.4, 0.8, 1.2, 1.6])
    middle = {"constant": 2.0, "linear": 1.25, "cosine": 1.25}[schedule]
    assert rates[10] == pytest.approx(middle)
    assert rates[-1] == pytest.approx(2.0 if schedule == "constant" else 0.5)
    assert all(later <= earlier for earlier, later in pairwise(rates[4:]))
    if schedule == "cosine":
        assert rates[5] > 2.0 * (1 - 0.75 * 5 / 20)  # above the line in the first half
    assert learning_rate(config, 20, peak=1.0) == pytest.approx(rates[-1] / 2)
