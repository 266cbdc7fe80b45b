"""An embedding may have more rows than the tokenizer has tokens; ids that no token has are never sampled."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from rllm.algorithms.losses import PolicyLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.models.unused_rows import UNUSED_LOGIT, mask_unused_rows
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.messages import SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample

NUM_UNUSED = 40
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SIZE = TinyModel(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, max_positions=128)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that prefers ids without a token; of the built-in decoder's kind, and of transformers'."""
    directory = tmp_path_factory.mktemp("padded") / request.param
    create_model(directory, SIZE, seed=0)
    num_tokens = len(HuggingFaceTokenizer(directory).vocabulary())
    name = "model.embed_tokens.weight"
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=num_tokens, n_embd=32, n_layer=1, n_head=2, n_positions=128)
        own = directory.with_name("own")
        AutoModelForCausalLM.from_config(config).save_pretrained(own)
        for file in TOKENIZER_FILES:
            shutil.copy(directory / file, own / file)
        directory, name = own, "transformer.wte.weight"
    weights = load_file(directory / "model.safetensors")
    draw = torch.Generator().manual_seed(1)
    unused = torch.randn(NUM_UNUSED, weights[name].shape[1], generator=draw) * 4
    weights[name] = torch.cat((weights[name], unused))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"vocab_size": num_tokens + NUM_UNUSED, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def model(padded: Path) -> LoadedModel:
    return load_model(padded)


async def _sampled(model: LoadedModel, **sampling: Any) -> TrainingSample:
    """A row of a prompt and an answer of the built-in engine."""
    client = LocalClient(model, num_slots=2, max_context=128)
    prompt = model.tokenizer.encode("SFFH")
    output = await client.generate_ids(prompt, SamplingParams(max_tokens=60, seed=5, **sampling))
    ids = [*prompt, *output.completion_ids]
    if not {"top_k", "top_p"} & set(sampling):
        scored = await client.score(ids, len(prompt), sampling.get("temperature", 1.0))
        assert scored == pytest.approx(output.logprobs, abs=1e-4)
    await client.close()
    num_prompt = len(prompt)
    return TrainingSample(
        token_ids_T=np.array(ids),
        policy_versions_T=np.array([NOT_SAMPLED] * num_prompt + output.policy_versions),
        logprobs_T=np.array([0.0] * num_prompt + output.logprobs, dtype=np.float32),
        advantages_T=np.array([0.0] * num_prompt + [1.0] * len(output.logprobs), dtype=np.float32),
        group_key=("task", ""),
        order_key=("task", 0, 0, 0),
        temperature=sampling.get("temperature", 1.0),
    )


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.7}, {"top_p": 0.9}, {"top_k": 50}], ids=str)
async def test_an_id_without_a_token_is_never_sampled(model: LoadedModel, sampling: dict[str, Any]) -> None:
    row = await _sampled(model, **sampling)
    assert set(row.token_ids_T.tolist()) <= set(model.tokenizer.vocabulary())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("logits_mb", [256.0, 0.05], ids=["whole", "chunks"])
async def test_trainer_and_sampler_agree_and_unused_rows_learn_nothing(
    model: LoadedModel, temperature: float, logits_mb: float
) -> None:
    row = await _sampled(model, temperature=temperature)
    backend = TorchBackend(
        model.model, publish=lambda version: None, config=OptimizerConfig(logits_mb=logits_mb)
    )
    trained_T = row.trainable_T
    assert backend.score([row])[0][trained_T] == pytest.approx(row.logprobs_T[trained_T], abs=1e-4)
    before = model.model.output_weight.detach().clone()
    metrics = backend.update([row], PolicyLoss(entropy_coef=0.01), 1e-2)
    after = model.model.output_weight.detach()
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["entropy"])
    num_tokens = len(before) - NUM_UNUSED
    assert not torch.equal(after[:num_tokens], before[:num_tokens])
    assert torch.equal(after[num_tokens:], before[num_tokens:])


def test_a_hole_in_the_vocabulary_is_masked_like_padding(model: LoadedModel) -> None:
    states = torch.randn(3, model.config.get("hidden_size") or model.config["n_embd"])
    num_rows, hole = model.vocab_size, 7
    mask_unused_rows(model.model, set(range(num_rows)) - {hole})
    logits = model.model.logits(states)
    assert (logits[:, hole] == UNUSED_LOGIT).all()
    assert (logits[:, [hole - 1, hole + 1]] > UNUSED_LOGIT).all()


def test_the_tokenizer_names_the_ids_for_servers_that_sample_elsewhere(padded: Path, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(padded)
    num_tokens = len(tokenizer.vocabulary())
    assert tokenizer.unused_ids == tuple(range(num_tokens, num_tokens + NUM_UNUSED))
    for file in TOKENIZER_FILES:
        shutil.copy(padded / file, tmp_path / file)
    assert HuggingFaceTokenizer(tmp_path).unused_ids == ()
