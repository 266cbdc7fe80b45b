import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.data.rows import jsonl_bytes, read_rows, rows_in, write_rows
from rllm.errors import ConfigError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.binary(max_size=20),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(min_size=1), VALUES, max_size=4), min_size=1, max_size=4))
def test_every_row_survives_json_lines(rows: list[dict[str, Any]]) -> None:
    if any(row.keys() == {"$bytes"} for row in rows):
        return
    assert rows_in(jsonl_bytes(rows), "rows.jsonl") == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', "a.jsonl:2 is not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "a.jsonl:2 holds a list"),
        ("a.json", "[1, 2]", "a.json: row 0 holds a int"),
        ("a.json", '[{"a": 1}', "a.json is not valid JSON"),
        ("a.csv", "a,b\n1\n", "a.csv: row 0 has fewer fields"),
        ("a.csv", "a,b\n1,2,3\n", "a.csv: row 0 has more fields"),
        ("a.csv", "a,b,a\n1,2,3\n", "a.csv has 2 columns `a`"),
        ("a.json", '[{"a": "\\ud800"}]', r"a.json.*\\ud800"),
        ("a.jsonl", '{"a": "\\ud83d\\ude00"}\n{"a": "\\ude00"}', r"a.jsonl:2.*\\ude00"),
        ("a.csv", "a,b\n", "a.csv has no rows"),
        ("a.jsonl", '{"a": 1}\n{"a": 1, "b": {"c": 2, "c": 3}}', "a.jsonl:2 is not .* 2 values of `c`"),
        ("a.json", '[{"a": 1, "a": 2}]', "a.json is not .* 2 values of `a`"),
        ("a.jsonl", '{"a": NaN}', "a.jsonl:1 is not .*NaN"),
        ("a.json", '[{"a": -Infinity}]', "a.json is not .*Infinity"),
        ("a.json", '[{"a": 1e999}]', "a.json is not .*1e999"),
        ("a.jsonl", '{"a": 1}\n{"a": {"$bytes": "no base64"}}', "a.jsonl:2 has bytes"),
        ("a.json", '[{"a": {"$bytes": 5}}]', "a.json: row 0 has bytes"),
        ("a.txt", "x", "a.txt ends with none of"),
        ("a.jsonl.gz", "plain", "a.jsonl.gz is no gzip file"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(path)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no"):
        read_rows(tmp_path / "gone.csv")


def test_json_lines_under_a_json_name_are_read() -> None:
    assert rows_in(b'{"a": 1}\n{"a": 2}\n', "BFCL.json") == [{"a": 1}, {"a": 2}]


def test_what_json_cannot_hold_is_named_by_its_row() -> None:
    with pytest.raises(ConfigError, match="Row 1"):
        jsonl_bytes([{"a": 1}, {"a": float("nan")}])


def test_parquet_gives_back_lists_objects_and_bytes(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = [{"id": 1, "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "image": {"bytes": b"\x89PNG"}}]
    write_rows(tmp_path / "rows.parquet", rows)
    assert read_rows(tmp_path / "rows.parquet") == rows
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows
    assert json.loads((tmp_path / "rows.jsonl").read_text())["image"]["bytes"] == {"$bytes": "iVBORw=="}


def test_a_file_that_is_no_parquet_is_named() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match=r"a\.parquet.*Parquet"):
        rows_in(b"PAR1 not really", "a.parquet")


def test_arrow_files_of_both_kinds_are_read_and_not_written(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"n": [1, 2]})
    for make in (arrow.ipc.new_stream, arrow.ipc.new_file):
        sink = arrow.BufferOutputStream()
        with make(sink, table.schema) as writer:
            writer.write_table(table)
        assert rows_in(sink.getvalue().to_pybytes(), "data.arrow") == [{"n": 1}, {"n": 2}]
    with pytest.raises(ConfigError, match=r"x\.arrow.*Arrow"):
        rows_in(b"nothing of the kind", "x.arrow")
    with pytest.raises(ConfigError, match="not written"):
        write_rows(tmp_path / "rows.arrow", [{"n": 1}])
