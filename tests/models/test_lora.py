"""An adapter is peft's, beside weights that nobody copies and nobody changes."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from rllm.config.lora import LoraConfig
from rllm.errors import ConfigError
from rllm.models.decoder import Attend, Decoder
from rllm.models.directory import LoadedModel, load_model, parameters_sha256, save_model
from rllm.models.lora import save_adapter, with_adapter

sys.path.insert(0, str(Path(__file__).parent))
from sizes import SIZE, TOKENS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""PeftModel asks transformers in its old words."""

Saved = Callable[[PreTrainedConfig], tuple[Path, Any]]

DENSE = {
    "llama": LlamaConfig(**SIZE, num_key_value_heads=4, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZE, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZE, num_key_value_heads=2, head_dim=12),
}
OTHERS = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **TOKENS),
    "gpt_neox": GPTNeoXConfig(**SIZE),
    "gemma": GemmaConfig(**SIZE, num_key_value_heads=1, head_dim=12),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZE,
        num_key_value_heads=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=4,
    ),
    "mixtral": MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4, sliding_window=None),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
IDS = torch.randint(512, (60,), generator=torch.Generator().manual_seed(1))


def _trained(loaded: LoadedModel) -> list[Tensor]:
    return [each for each in loaded.model.parameters() if each.requires_grad]


def _disturbed(loaded: LoadedModel, seed: int = 0) -> LoadedModel:
    """As training would: no part of the adapter is 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in _trained(loaded):
            each.copy_(torch.randn(each.shape, generator=generator) * 0.2)
    return loaded


@pytest.fixture(scope="session")
def logits(attend: Attend) -> Callable[[LoadedModel], Tensor]:
    @torch.no_grad()
    def of(loaded: LoadedModel) -> Tensor:
        hidden = loaded.model.hidden(IDS, torch.arange(len(IDS)), attend)
        return loaded.model.logits(hidden)

    return of


Logits = Callable[[LoadedModel], Tensor]


def _of_transformers(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS.unsqueeze(0)).logits[0]


@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_an_adapter_begins_as_nothing_and_then_peft_and_the_merged_model_say_the_same(
    name: str, saved: Saved, logits: Logits, tmp_path: Path
) -> None:
    directory, reference = saved((DENSE | OTHERS)[name])
    base = load_model(directory)
    before, sha256 = logits(base), parameters_sha256(base.model.state_dict_hf())
    loaded = with_adapter(base, LoraConfig(rank=3, alpha=5.0), seed=1)
    assert isinstance(loaded.model, Decoder) == (name in DENSE)
    torch.testing.assert_close(logits(loaded), before, atol=0, rtol=0)
    ours = logits(_disturbed(loaded))
    assert float((ours - before).abs().max()) > 0.1
    save_adapter(loaded, tmp_path / "adapter")
    theirs = _of_transformers(PeftModel.from_pretrained(reference, tmp_path / "adapter").eval())
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    save_model(loaded, tmp_path / "merged")
    torch.testing.assert_close(logits(load_model(tmp_path / "merged")), ours, atol=1e-5, rtol=1e-5)
    auto: Any = AutoModelForCausalLM
    merged, found = auto.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(found.values())
    torch.testing.assert_close(_of_transformers(merged.eval()), ours, atol=1e-5, rtol=1e-5)
    assert parameters_sha256(base.model.state_dict_hf()) == sha256
    torch.testing.assert_close(logits(base), before, atol=0, rtol=0)


@settings(max_examples=10, deadline=None)
@given(
    targets=st.sets(st.sampled_from(PROJECTIONS), min_size=1),
    rank=st.integers(1, 40),
    alpha=st.floats(0.5, 8.0),
    seed=st.integers(0, 2**32),
)
def test_any_choice_of_layers_is_what_the_merged_weights_compute(
    qwen: Path, logits: Logits, targets: set[str], rank: int, alpha: float, seed: int
) -> None:
    base = load_model(qwen)
    before = base.model.state_dict_hf()
    config = LoraConfig(rank=rank, alpha=alpha, targets=sorted(targets))
    loaded = _disturbed(with_adapter(base, config, seed), seed)
    merged = load_model(qwen)
    merged.model.load_hf(loaded.model.state_dict_hf())
    torch.testing.assert_close(logits(loaded), logits(merged), atol=1e-4, rtol=1e-4)
    moved = {
        name for name, each in loaded.model.state_dict_hf().items() if not torch.equal(each, before[name])
    }
    assert moved == {
        name for name in before if name.split(".")[-2:] in [[each, "weight"] for each in targets]
    }


@pytest.fixture(scope="session")
def qwen(saved: Saved) -> Path:
    return saved(DENSE["qwen2"])[0]


def test_gradients_reach_the_adapter_alone_and_all_of_it(qwen: Path, attend: Attend) -> None:
    base = load_model(qwen)
    loaded = _disturbed(with_adapter(base, LoraConfig(rank=2), seed=0))
    hidden = loaded.model.hidden(IDS, torch.arange(len(IDS)), attend, torch.tensor([3, 59]))
    loaded.model.logits(hidden).square().sum().backward()
    named = dict(loaded.model.named_parameters())
    assert {name for name, each in named.items() if each.requires_grad} == {
        f"adapter.model.layers.{layer}.{place}.lora_{part}.default.weight"
        for layer in (0, 1)
        for place in (
            *(f"self_attn.{name}" for name in PROJECTIONS[:4]),
            *(f"mlp.{name}" for name in PROJECTIONS[4:]),
        )
        for part in "AB"
    }
    for each in named.values():
        assert (each.grad is not None and bool(each.grad.any())) == each.requires_grad


@pytest.mark.parametrize("name", ["qwen3", "gemma"])
def test_layers_that_are_computed_again_give_an_adapter_the_same_gradients(
    name: str, saved: Saved, attend: Attend
) -> None:
    base = load_model(saved((DENSE | OTHERS)[name])[0])
    gradients: list[list[Tensor]] = []
    for again in (False, True):
        loaded = _disturbed(with_adapter(base, LoraConfig(rank=2), seed=0))
        if again:
            loaded.model.recompute_layers()
        loaded.model.logits(
            loaded.model.hidden(IDS, torch.arange(len(IDS)), attend)
        ).square().sum().backward()
        gradients.append([each.grad for each in _trained(loaded) if each.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == 28
    for kept, computed in zip(*gradients, strict=True):
        torch.testing.assert_close(computed, kept, rtol=1e-5, atol=1e-5)


def test_a_gradient_is_the_slope_of_the_loss(qwen: Path, attend: Attend) -> None:
    loaded = _disturbed(with_adapter(load_model(qwen, dtype=torch.float64), LoraConfig(rank=2), seed=0))
    loaded.model.to(torch.float64)
    ids = IDS[:7]

    def loss() -> Tensor:
        hidden = loaded.model.hidden(ids, torch.arange(7), attend)
        return loaded.model.logits(hidden).log_softmax(-1)[:, 5].sum()

    loss().backward()
    for parameter in _trained(loaded):
        assert parameter.grad is not None
        direction = parameter.grad / parameter.grad.norm()
        with torch.no_grad():
            parameter.add_(direction, alpha=1e-5)
            above = loss()
            parameter.add_(direction, alpha=-2e-5)
            slope = float(above - loss()) / 2e-5
            parameter.add_(direction, alpha=1e-5)
        assert slope == pytest.approx(float(parameter.grad.norm()), rel=1e-6)


def _num_elements(models: Iterable[Any]) -> int:
    """Of all parameters and buffers, those in the same memory counted once."""
    tensors = [each for model in models for each in (*model.parameters(), *model.buffers())]
    return sum({each.data_ptr(): each.numel() for each in tensors}.values())


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_adapters_share_one_base_and_know_nothing_of_each_other(
    name: str, saved: Saved, logits: Logits
) -> None:
    base = load_model(saved((DENSE | OTHERS)[name])[0])
    before, alone = logits(base), _num_elements([base.model])
    first, second = (_disturbed(with_adapter(base, LoraConfig(rank=2), seed=n), n) for n in (1, 2))
    sizes = [sum(each.numel() for each in _trained(loaded)) for loaded in (first, second)]
    assert _num_elements([base.model, first.model, second.model]) == alone + sum(sizes)
    assert first.num_parameters == base.num_parameters + sizes[0]
    expected = logits(first)
    _disturbed(second, 3)
    torch.testing.assert_close(logits(first), expected, atol=0, rtol=0)
    torch.testing.assert_close(logits(base), before, atol=0, rtol=0)
    assert float((logits(second) - expected).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_passes_of_several_adapters_at_the_same_time_do_not_meet(
    name: str, saved: Saved, logits: Logits
) -> None:
    base = load_model(saved((DENSE | OTHERS)[name])[0])
    models = [base, *(_disturbed(with_adapter(base, LoraConfig(rank=2), seed=n), n) for n in (1, 2, 3))]
    expected = [logits(loaded) for loaded in models]
    wrong: list[float] = []

    def ask(number: int) -> None:
        for _ in range(20):
            gap = float((logits(models[number]) - expected[number]).abs().max())
            if gap > 1e-5:
                wrong.append(gap)

    threads = [Thread(target=ask, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_adapter_begins_with_its_seed_and_not_with_what_torch_drew_before(qwen: Path) -> None:
    base = load_model(qwen)
    torch.manual_seed(1)
    first = _trained(with_adapter(base, LoraConfig(rank=2), seed=7))
    torch.manual_seed(2)
    again = _trained(with_adapter(base, LoraConfig(rank=2), seed=7))
    other = _trained(with_adapter(base, LoraConfig(rank=2), seed=8))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    limit = 1.0 / 32**0.5
    widest = [float(each.detach().abs().max()) for each in first if each.shape == (2, 32)]
    assert all(0.6 * limit < each <= limit for each in widest)


@pytest.mark.parametrize("name", ["qwen3", "gpt_neox"])
def test_beside_half_precision_weights_an_adapter_is_float32(
    name: str, saved: Saved, logits: Logits, tmp_path: Path
) -> None:
    base = load_model(saved((DENSE | OTHERS)[name])[0], dtype=torch.bfloat16)
    loaded = _disturbed(with_adapter(base, LoraConfig(rank=2, alpha=1.0), seed=0))
    assert {each.dtype for each in _trained(loaded)} == {torch.float32}
    ours = logits(loaded)
    assert ours.dtype == torch.bfloat16
    save_model(loaded, tmp_path / "merged")
    merged = logits(load_model(tmp_path / "merged", dtype=torch.bfloat16))
    assert float((ours - merged).abs().max()) < 0.1 * float(ours.abs().max())


@pytest.mark.parametrize(
    ("name", "targets", "known"),
    [
        ("llama", ["query"], "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
        ("llama", ["q_proj", "lm_head"], "down_proj"),
        ("gpt2", ["q_proj"], "c_attn, c_fc, c_proj"),
    ],
)
def test_a_layer_that_is_not_there_is_refused_with_the_names_of_those_that_are(
    saved: Saved, name: str, targets: list[str], known: str
) -> None:
    base = load_model(saved((DENSE | OTHERS)[name])[0])
    with pytest.raises(ConfigError, match=rf"`lora\.targets` has '{targets[-1]}', .*{known}"):
        with_adapter(base, LoraConfig(rank=2, targets=targets), seed=0)


def test_a_model_without_linear_layers_is_refused(qwen: Path) -> None:
    base = load_model(qwen)
    base.model = torch.nn.Module()
    base.model.inner = torch.nn.Embedding(4, 4)
    with pytest.raises(ConfigError, match=r"`lora\.rank` is 2, .*linear"):
        with_adapter(base, LoraConfig(rank=2), seed=0)
