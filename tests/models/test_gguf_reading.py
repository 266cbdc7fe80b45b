"""GGUF files become model directories that compute what transformers computed before they were written."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_files import CONFIGS, PROMPT, random_model, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.errors import ModelDirectoryError
from rllm.models.directory import load_model
from rllm.models.gguf import reading
from rllm.models.gguf.reading import import_gguf


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_each_family_computes_what_it_did(family: str, tmp_path: Path) -> None:
    reference = random_model(family)
    path = write_gguf(
        tmp_path / "model.gguf", reference, family.removesuffix("3") if family == "llama3" else family
    )
    import_gguf(path, tmp_path / "model")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "model").encode(PROMPT)])
    with torch.no_grad():
        expected = reference(ids).logits
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert torch.allclose(read(ids).logits, expected, atol=1e-5)
    loaded = load_model(tmp_path / "model")
    assert loaded.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert loaded.end_token_ids == (0,)


def test_the_tokenizer_is_read_whole(tmp_path: Path) -> None:
    import_gguf(write_gguf(tmp_path / "model.gguf", random_model("qwen3"), "qwen3"), tmp_path / "model")
    tokenizer = load_model(tmp_path / "model").tokenizer
    ids = tokenizer.encode(PROMPT)
    texts = [tokenizer.token_text(token) for token in ids]
    assert "".join(texts) == PROMPT
    assert texts[0] == "the"
    assert " the" in texts
    assert "<tool>" in texts
    assert "12" not in texts  # qwen2 splits digits, so no merge of them is reached
    assert tokenizer.apply_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == (
        "user: Hi<|end|>assistant: "
    )


def test_a_large_model_is_written_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_FILE_BYTES", 20_000)
    reference = random_model("qwen2")
    import_gguf(write_gguf(tmp_path / "model.gguf", reference, "qwen2"), tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert load_model(tmp_path / "model").num_parameters == reference.num_parameters()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"no gguf"), r"model\.gguf cannot be read as GGUF"),
        (lambda path: path.write_bytes(path.read_bytes()[:3000]), r"model\.gguf cannot be read as GGUF"),
        (lambda path: path.unlink(), r"model\.gguf cannot be read as GGUF"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, damage: Any, message: str) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_model("qwen2"), "qwen2")
    damage(path)
    with pytest.raises(ModelDirectoryError, match=message):
        import_gguf(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_is_not_known_is_refused_with_the_choices(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", random_model("qwen2"), "qwen2", pre="qwen9")
    with pytest.raises(ModelDirectoryError, match=r"a\.gguf.*'qwen9'.*qwen2"):
        import_gguf(path, tmp_path / "model")
    path = write_gguf(tmp_path / "b.gguf", random_model("qwen2"), "granite")
    with pytest.raises(ModelDirectoryError, match=r"b\.gguf.*'granite'.*gemma3"):
        import_gguf(path, tmp_path / "model")
