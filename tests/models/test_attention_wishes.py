"""Windows, capped scores and sinks: sampler, trainer and saved models agree with transformers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from rllm.algorithms.losses import PolicyLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.inference.local.client import LocalClient
from rllm.models.batching_attention import PackedAttention
from rllm.models.decoder import Decoder
from rllm.models.directory import load_model, save_model
from rllm.models.huggingface import HuggingFaceDecoder
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.samples import trajectory_rows
from rllm.types import SamplingParams, Step, TrainingSample, Trajectory

sys.path.insert(0, str(Path(__file__).parent))
from sizes import SIZE

Saved = Callable[[PreTrainedConfig], tuple[Path, Any]]
WORDS: dict[str, Any] = {**SIZE, "vocab_size": 604, "num_key_value_heads": 2}
WINDOWED = {
    "mistral": MistralConfig(**WORDS, sliding_window=7),
    "qwen2": Qwen2Config(**WORDS, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "gemma2": Gemma2Config(
        **WORDS, head_dim=8, sliding_window=6, attn_logit_softcapping=1.5, final_logit_softcapping=3.0
    ),
    "gemma3_text": Gemma3TextConfig(
        **WORDS, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss": GptOssConfig(
        **WORDS,
        head_dim=8,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
}


async def _play(client: LocalClient, turns: list[str], order: int) -> Trajectory:
    messages: list[dict[str, Any]] = []
    steps: list[Step] = []
    async with client.session(("task", order)) as session:
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            output = await session.respond(messages, SamplingParams(max_tokens=9, seed=order))
            steps.append(Step.from_model_output(output, messages, reward=1.0))
            messages = list(steps[-1].chat_completions)
    return Trajectory(name="agent", steps=steps)


@torch.no_grad()
def _gap(reference: Any, sample: TrainingSample, logprobs_T: Any) -> float:
    ids = torch.from_numpy(sample.token_ids_T.astype(np.int64))
    theirs = reference(ids[None]).logits[0].log_softmax(-1)
    places = np.flatnonzero(sample.trainable_T)
    assert len(places) >= 9
    return max(abs(float(theirs[place - 1, ids[place]]) - float(logprobs_T[place])) for place in places)


@pytest.mark.parametrize("name", WINDOWED)
async def test_sampler_trainer_and_export_see_what_transformers_sees(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    directory, reference = saved(WINDOWED[name])
    model = load_model(directory)
    assert isinstance(model.model, HuggingFaceDecoder)
    client = LocalClient(model, num_slots=4, max_context=120)
    long = ["The answer is left or right?", "Then which number is it?"]
    trajectories = [await _play(client, long, order) for order in range(2)]  # the second reads a kept prefix
    trajectories.append(await _play(client, ["Up"], 2))
    samples: list[TrainingSample] = []
    for index, trajectory in enumerate(trajectories):
        samples += trajectory_rows(trajectory, "task", index // 2, 0, 1.0)
    assert max(len(sample.token_ids_T) for sample in samples) > 30, "several windows long"
    for sample in samples:
        assert _gap(reference, sample, sample.logprobs_T) <= 1e-5
    for share_prefixes in (True, False):
        backend = TorchBackend(
            model.model, publish=client.publish, config=OptimizerConfig(), share_prefixes=share_prefixes
        )
        for sample, scores in zip(samples, backend.score(samples), strict=True):
            assert _gap(reference, sample, scores) <= 1e-5
    backend.update(samples, PolicyLoss(), 0.01)
    backend.publish_weights()
    save_model(model, tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    again = await _play(client, long, 5)
    await client.close()
    (sample,) = trajectory_rows(again, "task", 0, 0, 1.0)
    assert _gap(theirs, sample, sample.logprobs_T) <= 1e-5
    assert _gap(reference, sample, sample.logprobs_T) > 1e-4, "the update changed what is saved"


def test_gradients_through_windows_are_those_of_transformers(saved: Saved) -> None:
    """One row, so that its gradient is that of the mean negative log-probability of its tokens."""
    directory, reference = saved(WINDOWED["mistral"])
    loaded = load_model(directory)
    ids = torch.randint(3, 600, (40,), generator=torch.Generator().manual_seed(1))
    paths = [np.arange(15), np.arange(40)]
    attention = PackedAttention(paths, [15, 25], [np.arange(15), np.arange(25)], torch.device("cpu"))
    logits = loaded.model.logits(loaded.model.hidden(ids, torch.arange(40), attention))
    for each in (logits, reference(ids[None]).logits[0]):
        torch.nn.functional.cross_entropy(each[:-1], ids[1:]).backward()
    ours = dict(loaded.model.inner.named_parameters())
    for key, parameter in reference.named_parameters():
        torch.testing.assert_close(ours[key].grad, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", WINDOWED)
def test_rows_of_a_tree_have_the_gradient_of_the_rows_apart(name: str, saved: Saved) -> None:
    """The short run begins where no window of the long one beside it reaches."""
    directory, _ = saved(WINDOWED[name])
    model = load_model(directory).model
    trunk = list(range(100, 137))
    rows = [[*trunk[:17], *range(300, 330)], trunk, [*trunk[:31], 50, 51, 52]]
    samples = [
        TrainingSample(
            token_ids_T=np.array(ids),
            policy_versions_T=np.where(np.arange(len(ids)) > 10, 0, -1),
            logprobs_T=np.where(np.arange(len(ids)) > 10, -6.0, 0.0).astype(np.float32),
            advantages_T=np.where(np.arange(len(ids)) > 10, (-1.0) ** number, 0.0).astype(np.float32),
            group_key=("task", "agent"),
            order_key=("task", number, 0, 0),
        )
        for number, ids in enumerate(rows)
    ]
    grads: list[list[torch.Tensor]] = []
    for share_prefixes in (True, False):
        backend = TorchBackend(
            model,
            publish=lambda version: None,
            config=OptimizerConfig(max_grad_norm=1e12),
            share_prefixes=share_prefixes,
        )
        backend.update(samples, PolicyLoss(), 0.0)
        grads.append([each.grad.clone() for each in model.parameters() if each.grad is not None])
    for tree, apart in zip(*grads, strict=True):
        torch.testing.assert_close(tree, apart, atol=1e-6, rtol=1e-4)


def test_a_window_as_long_as_the_context_is_full_attention_on_the_built_in_decoder(saved: Saved) -> None:
    directory, _ = saved(MistralConfig(**WORDS, sliding_window=128))
    assert isinstance(load_model(directory).model, Decoder)
