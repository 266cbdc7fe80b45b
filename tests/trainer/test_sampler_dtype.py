"""A sampler that computes in bfloat16 beside a trainer in float32 (`inference.dtype`)."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rllm.algorithms.losses import ImitationLoss
from rllm.config.loader import load_config
from rllm.errors import CanaryError, ConfigError
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import Canary
from rllm.trainer.machine import machines_of
from rllm.trainer.policies import create_initial_models, load_initial_models, sampler_models
from rllm.types.sample import TrainingSample

HALF: dict[str, Any] = {"inference": {"dtype": "bfloat16"}}
ADAPTER: dict[str, Any] = {**HALF, "lora": {"rank": 4}, "optimizer": {"learning_rate": 0.01}}
WEIGHTS = Path("model") / "model.safetensors"


def _trained(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]


@pytest.mark.parametrize("changes", [HALF, ADAPTER], ids=["weights", "adapter"])
def test_a_run_samples_in_bfloat16_trains_in_float32_and_shows_how_far_the_two_are_apart(
    letters: ModuleType, tmp_path: Path, changes: dict[str, Any]
) -> None:
    letters.make_trainer(tmp_path / "run", changes).train()
    lines = _trained(tmp_path / "run")
    divergences = [line["sampler_kl"] for line in lines if "sampler_kl" in line]
    assert divergences
    assert 0.0 < max(divergences) < 0.01
    assert max(line["logprob_gap_first"] for line in lines if "logprob_gap_first" in line) > 1e-4
    (machine,) = machines_of(RunDirectory.read(tmp_path / "run"))
    assert (machine.dtype, machine.sampler_dtype) == ("float32", "bfloat16")
    assert {tensor.dtype for tensor in load_file(tmp_path / "run" / WEIGHTS).values()} == {torch.float32}


def test_a_sampler_in_the_trainers_type_diverges_by_rounding_alone(finished: Path) -> None:
    assert max(line["sampler_kl"] for line in _trained(finished) if "sampler_kl" in line) < 1e-8


def test_killed_in_the_middle_of_a_save_it_ends_with_the_same_weights(ask: Any, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    events = ask(whole, changes=HALF)["events"]
    place = next(number for number, event in enumerate(events, start=1) if "step-000006.tmp" in event)
    assert ask(killed, changes=HALF, die_at_event=place)["signal"] == 9
    assert ask(killed, changes=HALF)["signal"] == 0
    assert (whole / WEIGHTS).read_bytes() == (killed / WEIGHTS).read_bytes()


def test_publishing_casts_the_weights_and_the_learner_keeps_its_own(
    batch: list[TrainingSample], decoder: Any
) -> None:
    model = decoder()
    sampled = deepcopy(model).to(torch.bfloat16).requires_grad_(False)
    published: list[int] = []

    def publish(version: int, write: Any = None) -> None:
        published.append(version)
        write()

    backend = TorchBackend(model, publish=publish, sampled_model=sampled)
    assert backend.model is model
    assert backend.is_half
    backend.update(batch, ImitationLoss(), 1e-2)
    backend.publish_weights()
    assert published == [1]
    for (name, own), theirs in zip(model.named_parameters(), sampled.parameters(), strict=True):
        assert own.dtype == torch.float32, name
        assert torch.equal(own.to(torch.bfloat16), theirs), name


def test_adapters_to_one_model_share_one_cast_of_it_and_stay_in_float32(
    letters: ModuleType, tmp_path: Path
) -> None:
    config = letters.make_pair_trainer(tmp_path / "run", ADAPTER).run.config
    create_initial_models(config, tmp_path / "run")
    models = load_initial_models(config, tmp_path / "run")
    samplers = sampler_models(config, models)
    solver, judge = (samplers[name].model for name in ("solver", "judge"))
    assert solver.embed.weight is judge.embed.weight
    assert solver.embed.weight.dtype == torch.bfloat16
    trained = [name for name, each in models["solver"].model.named_parameters() if each.requires_grad]
    own, theirs = dict(solver.named_parameters()), dict(judge.named_parameters())
    assert trained
    assert all(own[name].dtype == torch.float32 and own[name] is not theirs[name] for name in trained)


def test_a_loss_without_a_ratio_gets_the_correction_of_asynchronous_runs() -> None:
    settled = load_config({"algorithm": {"loss": "policy_gradient"}, **HALF}).algorithm
    assert (settled.old_logprobs, settled.correction, settled.correction_level) == (
        "trainer",
        "truncate",
        "token",
    )
    assert load_config(HALF).algorithm.correction == "none", "ppo's own ratio makes up for it"
    assert load_config({"algorithm": {"loss": "policy_gradient"}}).algorithm.correction == "none"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cluster": {"kind": "ray", "workers": 1}}, "cluster.kind"),
        ({"lora": {"rank": 4, "base_dtype": "nf4"}}, "lora.base_dtype"),
        (
            {"inference": {"engine": "vllm", "lockstep": False, "servers": ["http://127.0.0.1:1/v1"]}},
            "inference.engine",
        ),
        ({"inference": {"dtype": "float16"}}, "float32"),
    ],
    ids=["cluster", "nf4", "servers", "unknown"],
)
def test_what_cannot_cast_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    inference = {**HALF["inference"], **changes.get("inference", {})}
    with pytest.raises(ConfigError, match=named):
        load_config({**changes, "inference": inference})


class _Apart:
    """A trainer whose scores are those of a sampler, but for `gaps`."""

    policy_version, is_half = 1, True

    def __init__(self, gaps: list[float]) -> None:
        self.gaps = np.array(gaps)

    def score(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        scores_T = np.zeros(samples[0].num_tokens, dtype=np.float32)
        scores_T[samples[0].trainable_T] = self.gaps - 1.0
        return [scores_T]


class _Sampler:
    async def score(self, ids: list[int], start: int, temperature: float = 1.0) -> list[float]:
        return [-1.0] * (len(ids) - start)


async def test_one_unlikely_token_may_be_far_apart_in_bfloat16_and_a_whole_row_may_not(
    sample: Callable[..., TrainingSample],
) -> None:
    row, few_far = sample("pp" + "s" * 20), [0.9] + [0.01] * 19
    assert (await Canary().check(_Apart(few_far), _Sampler(), [row]))["canary_gap"] > 0.8
    with pytest.raises(CanaryError, match="mean"):
        await Canary().check(_Apart([0.3] * 20), _Sampler(), [row])
    canary = Canary()
    await canary.check(_Apart([0.0] * 20), _Sampler(), [row])
    await canary.check(_Apart([0.1] * 20), _Sampler(), [row])  # a step that rounds to nothing
    with pytest.raises(CanaryError, match="no effect"):
        await canary.check(_Apart([0.4] + [0.1] * 19), _Sampler(), [row])
