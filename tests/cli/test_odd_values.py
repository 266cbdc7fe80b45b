"""Values that are unusual and right, or wrong and named: colons in paths, keys in URLs, columns, seeds."""

import datetime
import decimal
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Rllm = Callable[..., Result]


@pytest.mark.parametrize("words", [["train", "frozenlake"], ["sft", "chats.jsonl"]])
def test_a_model_directory_may_have_a_colon_in_its_name(rllm: Rllm, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "A", "completion": "B"}\n' * 20)
    assert rllm("model", "create", "step:10").exit_code == 0
    done = rllm(*words, "--model", "step:10", "--dry-run")
    assert done.exit_code == 0, done.output
    assert rllm("train", "frozenlake", "--model", "step:11", "--dry-run").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "frozenlake", "--model", "m", "--base-url"],
        ["eval", "frozenlake", "--model", "builtin:tiny", "--judge-model", "j", "--judge-base-url"],
        ["distill", "frozenlake", "--teacher"],
        ["model", "test", "m", "--base-url"],
        ["serve", "gateway", "--upstream"],
    ],
)
def test_a_url_with_a_key_in_it_is_refused_and_kept_nowhere(
    rllm: Rllm, tmp_path: Path, words: list[str]
) -> None:
    done = rllm(*words, "http://127.0.0.1:9/v1?api_key=S3CRET-S3CRET")
    assert done.exit_code == 2, done.output
    assert "query" in done.output
    assert "S3CRET" not in done.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"S3CRET" in path.read_bytes()]


def test_columns_of_parquet_are_kept_or_named(rllm: Rllm, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"question": ["a", "b"], "answer": ["1", "2"]}
    prices = [decimal.Decimal("1.50"), decimal.Decimal("2.25")]
    days = [datetime.date(2026, 11, 29)] * 2
    parquet.write_table(arrow.table({**table, "price": prices, "day": days}), tmp_path / "good.parquet")
    assert rllm("dataset", "register", "good", "good.parquet").exit_code == 0
    assert rllm("dataset", "export", "good", "rows.jsonl").exit_code == 0
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert (first["price"], first["day"]) == ("1.50", "2026-11-29")
    parquet.write_table(arrow.table({**table, "score": [1.0, float("nan")]}), tmp_path / "bad.parquet")
    done = rllm("dataset", "register", "bad", "bad.parquet")
    assert done.exit_code == 2
    assert "Row 1: column `score`" in done.output


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_is_held_to_both_bounds_at_once(rllm: Rllm, tmp_path: Path, seed: int) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "A", "completion": "B"}\n' * 20)
    for words in (["train", "frozenlake"], ["sft", "chats.jsonl"]):
        done = rllm(*words, "--seed", seed, "--dry-run")
        assert done.exit_code == 2
        assert re.search(rf"`seed` is {seed}; .* 0 .* 2\*\*63", done.output)
    done = rllm("eval", "frozenlake", "--model", "builtin:tiny", "--seed", seed)
    assert done.exit_code == 2
    assert "0<=x<=9223372036854775807" in done.output
