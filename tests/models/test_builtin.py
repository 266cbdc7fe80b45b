from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.errors import ConfigError
from rllm.models.builtin import END_OF_TURN, PRESETS, create_model
from rllm.models.directory import load_model


def test_transformers_loads_the_built_in_model_and_its_tokenizer(builtin: Path) -> None:
    model, found = AutoModelForCausalLM.from_pretrained(builtin, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(builtin)
    assert not any(found.values())
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END_OF_TURN)
    messages = [{"role": "user", "content": "SFFH"}]
    said = tokenizer.apply_chat_template(messages, tokenize=False)
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"SFFH{END_OF_TURN}" in said
    assert asked.startswith(said)
    assert "assistant" in asked.removeprefix(said)


def test_ours_and_transformers_tokenizer_give_the_same_ids(builtin: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(builtin), load_model(builtin).tokenizer
    text = f"SFFH Reach the goal, 42!{END_OF_TURN}\nünïcödé \t"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_one_seed_is_one_model_down_to_the_byte(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        create_model(tmp_path / name, "tiny", seed=seed)
    files = {name: sorted((tmp_path / name).iterdir()) for name in "abc"}
    assert [path.read_bytes() for path in files["a"]] == [path.read_bytes() for path in files["b"]]
    weights = {name: load_model(tmp_path / name).model.embed.weight for name in "ac"}
    assert not torch.equal(weights["a"], weights["c"])


def sizes() -> list[Any]:
    """The largest takes seconds and half a gigabyte."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in ("20m", "100m"))) for name in PRESETS]


@pytest.mark.parametrize(
    ("preset", "num_parameters"), [("0.2m", 0.2e6), ("1m", 1e6), ("5m", 5e6), ("20m", 20e6), ("100m", 100e6)]
)
def test_a_size_in_a_name_is_the_number_of_parameters(preset: str, num_parameters: float) -> None:
    size = PRESETS[preset]
    layer = 4 * size.hidden_size**2 + 3 * size.hidden_size * size.intermediate_size + 2 * size.hidden_size
    count = (size.vocab_size + 1) * size.hidden_size + size.num_layers * layer
    assert count == pytest.approx(num_parameters, rel=0.05)


@pytest.mark.parametrize("preset", sizes())
def test_every_preset_can_be_created_and_loaded(tmp_path: Path, preset: str) -> None:
    create_model(tmp_path / "model", preset)
    loaded = load_model(tmp_path / "model")
    assert loaded.max_positions == PRESETS[preset].max_positions
    assert loaded.num_layers == PRESETS[preset].num_layers
    assert loaded.end_token_ids == (loaded.tokenizer.end_token_id,)


def test_a_directory_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="empty"):
        create_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(ConfigError, match=r"model .*empty"):
        create_model(tmp_path / "model")


def test_an_empty_directory_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    create_model(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


def test_an_unknown_preset_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`huge` .*tiny, deep, small"):
        create_model(tmp_path / "model", "huge")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("seed", [-1, 2**63, 10**30])
def test_a_seed_that_no_generator_takes_is_refused_and_nothing_is_written(tmp_path: Path, seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"`seed` is {seed}; .* 0 .* 2\*\*63"):
        create_model(tmp_path / "model", "tiny", seed)
    assert not (tmp_path / "model").exists()
