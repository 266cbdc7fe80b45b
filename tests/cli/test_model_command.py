import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.models.builtin import END_OF_TURN

Rllm = Callable[..., Result]


def test_a_created_model_is_described(rllm: Rllm, tmp_path: Path) -> None:
    created = rllm("model", "create", "tiny", "--seed", "3", "--json")
    assert created.exit_code == 0
    described = json.loads(created.stdout)
    assert described == json.loads(rllm("model", "info", "tiny", "--json").stdout)
    assert described["architecture"] == "LlamaForCausalLM"
    assert described["parameters"] < 400_000
    assert described["served_by"] == "built-in decoder"
    assert described["incremental_template"] is True
    assert list(described["end_tokens"].values()) == [END_OF_TURN]
    shown = rllm("model", "info", "tiny").stdout
    for word in ("LlamaForCausalLM", f"{described['parameters']:,}", END_OF_TURN, "the built-in decoder"):
        assert word in shown


def test_a_larger_preset_is_larger(rllm: Rllm) -> None:
    tiny = json.loads(rllm("model", "create", "tiny", "--json").stdout)
    small = rllm("model", "create", "small", "--preset", "small")
    assert "rllm train frozenlake --set model.path=small" in small.stdout
    described = json.loads(rllm("model", "info", "small", "--json").stdout)
    assert described["parameters"] > tiny["parameters"]


def test_another_architecture_is_served_by_transformers(rllm: Rllm, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    rllm("model", "create", "tiny")
    GPT2LMHeadModel(
        GPT2Config(
            vocab_size=512, n_embd=32, n_layer=1, n_head=2, n_positions=128, bos_token_id=2, eos_token_id=2
        )
    ).save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "gpt2" / name).write_bytes((tmp_path / "tiny" / name).read_bytes())
    described = json.loads(rllm("model", "info", "gpt2", "--json").stdout)
    assert described["architecture"] == "GPT2LMHeadModel"
    assert (described["served_by"], described["context"]) == ("transformers", 128)
    assert "gpt2 is" in rllm("model", "info", "gpt2").stdout


def test_the_row_of_an_architecture_is_shown_and_one_that_is_refused_says_why(
    rllm: Rllm, tmp_path: Path
) -> None:
    from transformers import BertConfig, BertLMHeadModel, MambaConfig, MambaForCausalLM

    sizes: Any = {"vocab_size": 604, "hidden_size": 32, "num_hidden_layers": 2, "eos_token_id": 2}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path / "states")
    # With weights as small as the default's, later tokens change too little to be seen in one draw of fifty.
    bert = BertConfig(**sizes, num_attention_heads=2, initializer_range=0.5)
    BertLMHeadModel(bert).save_pretrained(tmp_path / "both-ways")
    rllm("model", "create", "tiny")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for model in ("states", "both-ways"):
            (tmp_path / model / name).write_bytes((tmp_path / "tiny" / name).read_bytes())
    shown = rllm("model", "info", "states")
    assert shown.exit_code == 0
    assert "row by row" in shown.stdout
    assert "mamba is" in shown.stdout
    refused = rllm("model", "info", "both-ways")
    assert refused.exit_code == 1
    assert "BertLMHeadModel" in " ".join(refused.stdout.split())
    described = json.loads(rllm("model", "info", "both-ways", "--json").stdout)
    assert (described["architecture"], described["served_by"]) == ("BertLMHeadModel", "")
    assert "later tokens" in described["refused"]


def test_the_model_of_a_run_is_its_trained_one(finished_run: Any, rllm: Rllm) -> None:
    described = json.loads(rllm("model", "info", finished_run.path, "--json").stdout)
    assert described["model"] == str(finished_run.path / "model")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("create", "full"), "is not an empty directory"),
        (("create", "new", "--preset", "huge"), "choose one of tiny, deep, small"),
        (("info", "full"), "neither a run nor a model directory"),
    ],
    ids=["full", "preset", "no model"],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(
    words: tuple[str, ...], message: str, rllm: Rllm, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    result = rllm("model", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.tex"]


def test_python_of_a_model_runs_only_for_who_asks_for_it(rllm: Rllm, tmp_path: Path) -> None:
    rllm("model", "create", "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    changed = {"model_type": "new", "auto_map": {"AutoConfig": "modeling_new.NewConfig"}}
    (tmp_path / "new" / "config.json").write_text(json.dumps({**config, **changed}))
    (tmp_path / "new" / "modeling_new.py").write_text("open('it-ran', 'w').close()\n")
    refused = rllm("model", "info", "new")
    assert refused.exit_code == 2
    assert "new/modeling_new.py" in refused.stderr
    assert not (tmp_path / "it-ran").exists()
    flag = next(word.rstrip(",") for word in refused.stderr.split() if word.startswith("--"))
    broken = rllm("model", "info", "new", flag)  # the file has no such class
    assert broken.exit_code == 2
    assert "NewConfig" in broken.stderr
    assert (tmp_path / "it-ran").exists()
