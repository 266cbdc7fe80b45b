import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rllm.errors import ModelDirectoryError
from rllm.models.directory import (
    copy_model_directory,
    load_model,
    save_model,
    write_index,
    write_part,
)

Break = Callable[[Path], object]


def _without(name: str) -> Break:
    return lambda directory: (directory / name).unlink()


def _written(name: str, text: str) -> Break:
    return lambda directory: (directory / name).write_text(text)


def _edited(name: str, **changes: Any) -> Break:
    """`None` takes a key away."""

    def edit(directory: Path) -> None:
        fields = {**json.loads((directory / name).read_text()), **changes}
        (directory / name).write_text(
            json.dumps({key: value for key, value in fields.items() if value is not None})
        )

    return edit


def _both(*breaks: Break) -> Break:
    return lambda directory: [each(directory) for each in breaks]


def _cut(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def _retensored(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def edit(directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        change(weights)
        save_file(weights, directory / "model.safetensors")

    return edit


BROKEN: dict[str, tuple[Break, str]] = {
    "no config": (_without("config.json"), "no config.json"),
    "config is no JSON": (_written("config.json", "{"), r"config\.json is not valid JSON"),
    "config is a list": (_written("config.json", "[]"), r"config\.json holds a JSON list"),
    "config is a number": (_written("config.json", "5"), r"config\.json holds a JSON int"),
    "config lacks a number": (
        _edited("config.json", vocab_size=None),
        r"config\.json has no key 'vocab_size'",
    ),
    "unknown architecture": (_edited("config.json", model_type="nobody"), r"config\.json cannot be used"),
    "no architecture": (_edited("config.json", model_type=None), r"config\.json cannot be used"),
    "no tokenizer": (_without("tokenizer.json"), r"no tokenizer \(tokenizer\.json"),
    "tokenizer settings are no JSON": (
        _written("tokenizer_config.json", "{"),
        r"tokenizer_config\.json is not valid JSON",
    ),
    "no weights": (_without("model.safetensors"), r"no weights \(\*\.safetensors\)"),
    "weights are junk": (_written("model.safetensors", "junk"), r"model\.safetensors cannot be read"),
    "weights are empty": (_written("model.safetensors", ""), r"model\.safetensors cannot be read"),
    "weights are cut off": (_cut, r"model\.safetensors cannot be read"),
    "a tensor is missing": (
        _retensored(lambda weights: weights.pop("model.norm.weight")),
        r"missing \['model\.norm\.weight'\]",
    ),
    "a tensor too many": (
        _retensored(lambda weights: weights.update({"model.extra": torch.zeros(1)})),
        r"unknown \['model\.extra'\]",
    ),
    "a tensor of another shape": (
        _retensored(lambda weights: weights.update({"model.norm.weight": torch.zeros(7)})),
        r"`model\.norm\.weight` has shape \[7\]",
    ),
    "config means other weights": (
        _edited("config.json", vocab_size=100),
        r"shape \[604, 32\] but config\.json",
    ),
    "no end token": (
        _both(_edited("config.json", eos_token_id=None), _edited("tokenizer_config.json", eos_token=None)),
        "names no end token",
    ),
    "generation settings are no JSON": (
        _written("generation_config.json", "{"),
        r"generation_config\.json is not",
    ),
    "a shard is missing": (
        _written(
            "model.safetensors.index.json", '{"weight_map": {"model.norm.weight": "part-1.safetensors"}}'
        ),
        r"lacks part-1\.safetensors, which model\.safetensors\.index\.json names",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_directory_is_refused_with_the_file_that_is_wrong(kind: str, copied: Path) -> None:
    break_it, complaint = BROKEN[kind]
    break_it(copied)
    with pytest.raises(ModelDirectoryError, match=complaint) as caught:
        load_model(copied)
    assert str(copied) in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("what", ["nothing", "file"])
def test_what_is_no_directory_is_refused(tmp_path: Path, what: str) -> None:
    if what == "file":
        (tmp_path / "model").write_text("x")
    with pytest.raises(ModelDirectoryError, match="no model"):
        load_model(tmp_path / "model")


def test_what_is_saved_is_what_is_loaded(builtin: Path, tmp_path: Path) -> None:
    loaded = load_model(builtin)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    save_model(loaded, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    named, expected = again.model.state_dict_hf(), loaded.model.state_dict_hf()
    assert named.keys() == expected.keys()
    assert all(torch.equal(named[name], expected[name]) for name in named)
    assert again.config == loaded.config
    assert again.end_token_ids == loaded.end_token_ids
    assert again.tokenizer.encode("Up 12") == loaded.tokenizer.encode("Up 12")
    theirs, found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values())
    assert torch.equal(theirs.model.norm.weight, loaded.model.norm)


@pytest.mark.parametrize("num_parts", [2, 30])
def test_a_model_in_several_files_is_loaded_as_one(builtin: Path, tmp_path: Path, num_parts: int) -> None:
    loaded = load_model(builtin)

    def write(directory: Path, weights: dict[str, torch.Tensor]) -> None:
        for number in range(num_parts):
            write_part(directory, weights, number, num_parts)
        write_index(directory, weights, num_parts)

    save_model(loaded, tmp_path / "saved", write)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == num_parts
    expected, named = (each.model.state_dict_hf() for each in (loaded, load_model(tmp_path / "saved")))
    assert all(torch.equal(named[name], expected[name]) for name in expected)
    theirs, found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(found.values())
    assert torch.equal(theirs.model.norm.weight, loaded.model.norm)


def test_saving_replaces_the_model_that_was_there(builtin: Path, tmp_path: Path) -> None:
    loaded = load_model(builtin)
    save_model(loaded, tmp_path / "saved")
    (tmp_path / "saved" / "leftover.txt").write_text("old")
    with torch.no_grad():
        loaded.model.norm.fill_(2.0)
    save_model(loaded, tmp_path / "saved")
    assert load_model(tmp_path / "saved").model.norm.tolist() == [2.0] * 32
    assert not (tmp_path / "saved" / "leftover.txt").exists()


def test_saved_weights_keep_the_precision_that_they_were_trained_in(copied: Path, tmp_path: Path) -> None:
    _edited("config.json", dtype="bfloat16", torch_dtype="bfloat16")(copied)
    loaded = load_model(copied)
    save_model(loaded, tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert theirs.dtype == torch.float32
    assert torch.equal(theirs.model.norm.weight, loaded.model.norm)


def test_everything_that_makes_up_a_tokenizer_is_saved_with_the_model(copied: Path, tmp_path: Path) -> None:
    template = json.loads((copied / "tokenizer_config.json").read_text())["chat_template"]
    _edited("tokenizer_config.json", chat_template=None)(copied)
    (copied / "chat_template.jinja").write_text(template)
    (copied / "tokenizer.model").write_bytes(b"\xff\x00binary")
    (copied / "notes.bin").write_bytes(b"\xff")
    save_model(load_model(copied), tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "manifest.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    }
    assert (tmp_path / "saved" / "tokenizer.model").read_bytes() == b"\xff\x00binary"
    load_model(tmp_path / "saved")


def test_weights_in_several_files_are_read_as_their_index_says(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    names = sorted(weights)
    parts = {"part-1.safetensors": names[::2], "part-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, copied / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    (copied / "model.safetensors").unlink()
    (copied / "old.safetensors").write_text("junk that the index does not name")
    read = load_model(copied).model.state_dict_hf()
    assert all(torch.equal(read[name], weights[name]) for name in names)


def test_a_second_copy_of_the_weights_in_another_form_is_not_read(copied: Path) -> None:
    save_file({"tok_embeddings.weight": torch.zeros(3)}, copied / "consolidated.safetensors")
    load_model(copied)


def test_end_tokens_are_those_of_the_model_its_tokenizer_and_its_generation_settings(copied: Path) -> None:
    (own,) = load_model(copied).end_token_ids
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [77, own]}))
    _edited("config.json", eos_token_id=66)(copied)
    assert load_model(copied).end_token_ids == (own, 66, 77)


def test_a_copied_directory_is_the_same_model(builtin: Path, tmp_path: Path) -> None:
    copy_model_directory(builtin, tmp_path / "copy")
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == {
        path.name: path.read_bytes() for path in builtin.iterdir()
    }
