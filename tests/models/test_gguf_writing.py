"""GGUF files that are written are read alike by transformers and by this package, tokenizer included."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gguf_files import PROMPT, random_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.errors import ConfigError
from rllm.models.directory import load_model
from rllm.models.gguf.reading import GgufFile, import_gguf
from rllm.models.gguf.tokenizer import TokenKind, tokenizer_files
from rllm.models.gguf.tokenizer_settings import tokenizer_settings
from rllm.models.gguf.writing import Precision, export_gguf

FAMILIES = ("llama", "llama3", "qwen2", "qwen3", "gemma3")
PRE = {"llama": "smollm", "llama3": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "gemma3": "gpt-2"}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory of each family, with random weights."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        architecture = "llama" if family == "llama3" else family
        source = write_gguf(root / f"{family}.gguf", random_model(family), architecture, pre=PRE[family])
        import_gguf(source, root / family)
    return {family: root / family for family in FAMILIES}


def greedy_ids(model: Any, ids: list[int], num_tokens: int = 24) -> list[int]:
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def as_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_and_read_again_answers_alike(
    family: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    export_gguf(directories[family], tmp_path / "model.gguf")
    import_gguf(tmp_path / "model.gguf", tmp_path / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert as_json(tmp_path / "back" / name) == as_json(directories[family] / name), name
    before, after = (
        {name: tensor.half() for name, tensor in load_file(path / "model.safetensors").items()}
        for path in (directories[family], tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    ids = AutoTokenizer.from_pretrained(tmp_path / "back").encode(PROMPT)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (directories[family], tmp_path / "back")]
    assert greedy_ids(models[0], ids) == greedy_ids(models[1], ids)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])  # it takes no head size of Qwen3, no llama3
def test_transformers_reads_the_same_weights(
    family: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    export_gguf(directories[family], tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    ours = load_file(directories[family] / "model.safetensors")
    assert all(torch.allclose(theirs[name], ours[name], atol=1e-3) for name in ours)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_eight_bits_keep_the_weights_within_a_hundredth(
    family: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    export_gguf(directories[family], tmp_path / "model.gguf", Precision.Q8_0)
    assert "Q8_0" in GgufFile(tmp_path / "model.gguf").quantizations
    import_gguf(tmp_path / "model.gguf", tmp_path / "back")
    before, after = (
        load_file(path / "model.safetensors") for path in (directories[family], tmp_path / "back")
    )
    assert all(float((before[name] - after[name]).abs().max()) < 0.01 for name in before)


def test_ids_without_a_token_are_written_as_unused_ones(directories: dict[str, Path], tmp_path: Path) -> None:
    weights = load_file(directories["qwen3"] / "model.safetensors")
    name = "model.embed_tokens.weight"
    rows = len(weights[name])
    for path in directories["qwen3"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(
        {**weights, name: torch.cat([weights[name], weights[name][:5]])}, tmp_path / "model.safetensors"
    )
    config = as_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": rows + 5}))
    export_gguf(tmp_path, tmp_path / "model.gguf")
    fields = GgufFile(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"][-1] == f"[PAD{rows + 4}]"
    import_gguf(tmp_path / "model.gguf", tmp_path / "back")
    assert as_json(tmp_path / "back" / "tokenizer.json") == as_json(directories["qwen3"] / "tokenizer.json")
    assert load_model(tmp_path / "back").model.vocab_size == rows + 5


@pytest.mark.parametrize(
    ("family", "name", "value", "message"),
    [
        ("qwen2", "use_sliding_window", True, "use_sliding_window"),
        ("llama", "hidden_act", "gelu", "hidden_act"),
        ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "yarn"),
        ("gemma3", "query_pre_attn_scalar", 100, "query_pre_attn_scalar"),
        ("gemma3", "layer_types", ["full_attention"] * 7, "layer_types"),
        ("qwen3", "model_type", "mamba", "mamba.*gemma3_text"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(
    family: str, name: str, value: Any, message: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    for path in directories[family].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**as_json(tmp_path / "config.json"), name: value}))
    with pytest.raises(ConfigError, match=message):
        export_gguf(tmp_path, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_number_beyond_f16_is_refused_and_leaves_no_file(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    for path in directories["llama"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e6
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*65,504"):
        export_gguf(tmp_path, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_tokenizer_without_a_name_in_gguf_is_refused(tmp_path: Path) -> None:
    from rllm.models.builtin import create_model

    create_model(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"tokenizer\.json.*smollm"):
        export_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf")


@pytest.mark.parametrize("has_prefix", [False, True])
def test_a_tokenizer_of_sentencepiece_comes_back_as_it_was(has_prefix: bool, tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", "  ", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["\u2581", "a", "b", "c", "ab", "\u2581ab", "abc", "\u2581c"]
    kinds = [TokenKind.CONTROL] * 3 + [TokenKind.USER_DEFINED] + [TokenKind.BYTE] * 256
    merge_scores = {"ab": -1.0, "\u2581ab": -2.0, "abc": -3.0, "\u2581c": -4.0}
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + letters,
        "tokenizer.ggml.token_type": [*kinds, *[TokenKind.NORMAL] * len(letters)],
        "tokenizer.ggml.scores": [0.0] * len(pieces) + [merge_scores.get(text, -9.0) for text in letters],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    files = tokenizer_files(fields, max_positions=64)
    document, settings = (json.loads(files[name]) for name in ("tokenizer.json", "tokenizer_config.json"))
    again = tokenizer_settings(document, settings, vocab_size=len(pieces + letters), end_token_ids=[2])
    assert tokenizer_files(again, max_positions=64) == files
    assert again["tokenizer.ggml.add_bos_token"] is True
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("ab abc \u00e9", add_special_tokens=False)
    texts = [(pieces + letters)[token] for token in ids]
    first = "\u2581ab" if has_prefix else "ab"
    assert texts == [first, "\u2581ab", "c", "\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab abc \u00e9"
    assert tokenizer.encode("ab")[0] == 1
