"""Each architecture is what the table of `rllm.models.architectures` says, held to transformers' modules."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rllm.algorithms.aggregation import token_weights
from rllm.algorithms.losses import PolicyLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.errors import ModelDirectoryError
from rllm.inference.local.client import LocalClient
from rllm.models.architectures import REFUSED, SERVED
from rllm.models.directory import LoadedModel, load_model, save_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.samples import trajectory_rows
from rllm.types import SamplingParams, Step, TrainingSample, Trajectory

sys.path.insert(0, str(Path(__file__).parent))
from architectures import tiny

Saved = Callable[..., tuple[Path, Any]]
FAST = ("gpt2", "olmo2", "phi3", "qwen3_moe", "deepseek_v3", "bloom", "mamba2", "lfm2", "minimax")
"""One of each kind of layer; the others are slow tests, because there are so many."""
STD = {"qwen3_next": 0.15}
"""Of weights: in float32 its states round otherwise in one pass than token by token, and larger weights make
that more than 1e-5."""


def parameters(names: Any) -> list[Any]:
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]


async def play(client: LocalClient, turns: list[str], order: int) -> Trajectory:
    messages: list[dict[str, Any]] = []
    steps: list[Step] = []
    async with client.session(("task", order)) as session:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            output = await session.respond(messages, SamplingParams(max_tokens=9, seed=order))
            steps.append(Step.from_model_output(output, messages, reward=1.0))
            messages = list(steps[-1].chat_completions)
    return Trajectory(name="agent", steps=steps)


async def several_turns_among_neighbours(client: LocalClient) -> list[TrainingSample]:
    """Two attempts at one task, which begin alike, beside a shorter one."""
    long = ["The answer is left or right?", "Then which number is it?"]
    together = await asyncio.gather(play(client, long, 0), play(client, long, 1), play(client, ["Up"], 2))
    played = [*together, await play(client, long, 3)]  # the last reads what the others left
    return [
        row
        for index, trajectory in enumerate(played)
        for row in trajectory_rows(trajectory, "task", index, 0, (1.0, -0.7, 0.3, -0.4)[index])
    ]


def logprobs_by_transformers(reference: Any, sample: TrainingSample) -> torch.Tensor:
    """[trainable tokens] by one forward pass of the whole row."""
    ids = torch.from_numpy(sample.token_ids_T.astype(np.int64))
    logprobs = reference(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    places = torch.from_numpy(np.flatnonzero(sample.trainable_T))
    return logprobs[places - 1, ids[places]]


def gap(reference: Any, sample: TrainingSample, logprobs_T: Any) -> float:
    with torch.no_grad():
        theirs = logprobs_by_transformers(reference, sample).numpy()
    return float(np.abs(theirs - np.asarray(logprobs_T)[sample.trainable_T.astype(bool)]).max())


def gradients_by_transformers(reference: Any, samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """By parameter, of the policy loss at ratio 1."""
    weights = token_weights(samples, PolicyLoss().aggregation)
    for sample, weights_T in zip(samples, weights, strict=True):
        is_trained = sample.trainable_T.astype(bool)
        factors = torch.from_numpy((weights_T * sample.advantages_T)[is_trained]).float()
        (-(logprobs_by_transformers(reference, sample) * factors).sum()).backward()
    return {name: each.grad for name, each in reference.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", parameters(SERVED))
async def test_an_architecture_is_sampled_trained_and_exported_as_transformers_computes_it(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    directory, reference = saved(tiny(name), STD.get(name, 0.2))
    reference.set_attn_implementation("eager")
    model: LoadedModel = load_model(directory)
    assert SERVED[name] == how(model)
    client = LocalClient(model, num_slots=4, max_context=120, lockstep=True)
    samples = await several_turns_among_neighbours(client)
    assert max(len(sample.token_ids_T) for sample in samples) > 30, "several windows long"
    for sample in samples:
        assert gap(reference, sample, sample.logprobs_T) <= 1e-5

    config = OptimizerConfig(max_grad_norm=1e9)
    backend = TorchBackend(model.model, publish=client.publish, config=config)
    for sample, scores in zip(samples, backend.score(samples), strict=True):
        assert gap(reference, sample, scores) <= 1e-5
    backend.update(samples, PolicyLoss(), 0.01)
    if SERVED[name] != "built-in decoder":  # whose matrices are joined; it has tests of its own
        ours = {key: each.grad for key, each in model.model.inner.named_parameters() if each.grad is not None}
        theirs = gradients_by_transformers(reference, samples)
        largest = max(float(each.abs().max()) for each in theirs.values())
        for key, each in theirs.items():
            torch.testing.assert_close(ours[key], each, atol=1e-5 * max(1.0, largest), rtol=1e-4)

    backend.publish_weights()
    save_model(model, tmp_path / "saved")
    reloaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", output_loading_info=True, attn_implementation="eager"
    )
    again, facts = reloaded
    assert not any(facts.values())
    updated = await several_turns_among_neighbours(client)
    await client.close()
    for sample in updated:
        assert gap(again.eval(), sample, sample.logprobs_T) <= 1e-5
    assert max(gap(reference, each, each.logprobs_T) for each in updated) > 1e-4, "the update is in it"


def how(model: LoadedModel) -> str:
    from rllm.models.decoder import Decoder

    if isinstance(model.model, Decoder):
        return "built-in decoder"
    return "row by row" if model.model.by_row else "attention handed in"


def test_the_page_shows_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "model_architectures.md").read_text()
    rows = [
        f"| `{name}` | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]} | {how} |" for name, how in SERVED.items()
    ]
    rows += [
        f"| `{name}` | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]} | refused: {reason} |"
        for name, reason in REFUSED.items()
    ]
    assert len(SERVED) >= 29
    assert [line for line in page.splitlines() if line.startswith("| `")] == rows


@pytest.mark.parametrize("name", parameters(REFUSED))
def test_an_architecture_is_refused_for_the_reason_in_the_table(name: str, saved: Saved) -> None:
    directory, _ = saved(tiny(name))
    with pytest.raises(ModelDirectoryError, match=REFUSED[name]):
        load_model(directory)
