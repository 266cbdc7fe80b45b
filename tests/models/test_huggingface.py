import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from rllm.errors import ModelDirectoryError
from rllm.models.decoder import Attend
from rllm.models.directory import load_model, save_model
from rllm.models.huggingface import HuggingFaceDecoder

sys.path.insert(0, str(Path(__file__).parent))
from sizes import SIZE, TOKENS

Saved = Callable[[PreTrainedConfig], tuple[Path, Any]]

SERVED = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **TOKENS),
    "gpt_neox": GPTNeoXConfig(**SIZE),
    "gpt_neox tied": GPTNeoXConfig(**SIZE, tie_word_embeddings=True),
    "gemma": GemmaConfig(**SIZE, num_key_value_heads=1, head_dim=12),
    "granite": GraniteConfig(**SIZE, logits_scaling=0.3),
    "cohere": CohereConfig(**SIZE, logit_scale=4.0),
    "mixtral": MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
    "llama with scaled positions": LlamaConfig(
        **SIZE, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
}


@pytest.mark.parametrize("name", SERVED)
def test_any_architecture_gives_the_logits_of_its_own_forward_pass(
    name: str, saved: Saved, attend: Attend
) -> None:
    directory, reference = saved(SERVED[name])
    loaded = load_model(directory)
    ids = torch.randint(512, (100,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = loaded.model.logits(loaded.model.hidden(ids, torch.arange(100), attend))
        theirs = reference(ids.unsqueeze(0)).logits[0]
        kept = loaded.model.hidden(ids, torch.arange(100), attend, torch.tensor([3, 99]))
    assert isinstance(loaded.model, HuggingFaceDecoder)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded.model.logits(kept), theirs[[3, 99]], atol=1e-5, rtol=0)
    assert loaded.max_positions == 128
    assert loaded.num_parameters == reference.num_parameters()


def test_models_that_are_loaded_at_once_leave_transformers_as_it_was(saved: Saved) -> None:
    """It replaces methods of its classes for as long as it loads one."""
    directory, _ = saved(SERVED["gpt_neox tied"])
    before = (PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.nn.init.normal_)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            models = list(threads.map(load_model, [directory] * 12))
    finally:
        sys.setswitchinterval(interval_s)
        after = (PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.nn.init.normal_)
        PreTrainedModel.tie_weights, PreTrainedModel.init_weights, torch.nn.init.normal_ = before
    assert after == before
    for each in models:
        inner = each.model.inner
        assert inner.get_output_embeddings().weight is inner.get_input_embeddings().weight


@pytest.mark.parametrize("name", SERVED)
def test_what_is_saved_loads_here_and_in_transformers_as_the_same_model(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    directory, reference = saved(SERVED[name])
    save_model(load_model(directory), tmp_path / "again")
    theirs, found = AutoModelForCausalLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(found.values())
    expected = reference.state_dict()
    assert theirs.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in theirs.state_dict().items())
    ours = load_model(tmp_path / "again").model.inner.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in ours.items())


def test_weights_of_another_model_are_refused_with_the_names_that_do_not_fit(saved: Saved) -> None:
    directory, _ = saved(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **TOKENS))
    for change, complaint in (
        ('"n_layer": 3', "missing .*h.2"),
        ('"n_layer": 1', "unknown .*h.1"),
        ('"n_positions": 64', "misshapen .*wpe"),
    ):
        text = (directory / "config.json").read_text()
        key = change.split(":")[0]
        changed = "\n".join(
            f"  {change}," if line.strip().startswith(key) else line for line in text.splitlines()
        )
        (directory / "config.json").write_text(changed)
        with pytest.raises(ModelDirectoryError, match=f"{directory}.*{complaint}"):
            load_model(directory)
        (directory / "config.json").write_text(text)
