"""`rllm model import`, `rllm model export` and `--model FILE.gguf`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

pytest.importorskip("gguf")

Rllm = Callable[..., Result]


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.gguf_files import random_model, write_gguf

    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", random_model("qwen3"), "qwen3")


def test_a_file_goes_through_a_directory_and_back(rllm: Rllm, gguf_file: Path, tmp_path: Path) -> None:
    done = rllm("model", "import", gguf_file, "small", "--json")
    assert json.loads(done.stdout)["family"] == "qwen3"
    done = rllm("model", "export", "small", "--gguf", "again.gguf")
    assert done.exit_code == 0, done.output
    assert "f16" in done.stdout
    assert "llama-server -m again.gguf" in done.stdout
    done = rllm("model", "export", "small", "--gguf", "eight.gguf", "--precision", "q8_0", "--json")
    assert json.loads(done.stdout)["bytes"] < (tmp_path / "again.gguf").stat().st_size
    first, again = (
        json.loads(rllm("model", "info", path, "--json").stdout) for path in ("small", "again.gguf")
    )
    assert {**first, "model": ""} == {**again, "model": ""}


def test_a_file_is_a_model_for_commands_and_is_read_once(
    rllm: Rllm, gguf_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = rllm("eval", "frozenlake", "--model", gguf_file, "--num-tasks", "1", "--sampling", "max_tokens=2")
    assert done.exit_code == 0, done.output
    assert f"Reading {gguf_file}" in caplog.text
    caplog.clear()
    assert rllm("train", "frozenlake", "--model", gguf_file, "--dry-run").exit_code == 0
    assert "Reading" not in caplog.text
    assert len(list((tmp_path / "home" / "models" / "gguf").glob("small-*"))) == 1


def test_what_cannot_be_read_or_written_is_refused(rllm: Rllm, gguf_file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, message in (
        (["model", "info", "broken.gguf"], "broken.gguf"),
        (["model", "import", "absent.gguf", "small"], "absent.gguf is no file"),
        (["model", "import", gguf_file, "full"], "full is not empty"),
        (["model", "export", "builtin:tiny", "--gguf", "tiny.gguf"], "tokenizer.json"),
        (["model", "export", gguf_file, "--gguf", "a.gguf", "--precision", "q4_0"], "q8_0"),
    ):
        done = rllm(*words)
        assert done.exit_code == 2, words
        assert message in done.output
    assert not (tmp_path / "tiny.gguf").exists()
