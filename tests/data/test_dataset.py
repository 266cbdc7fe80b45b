from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.data import Dataset
from rllm.errors import ConfigError

ROWS = [{"question": f"q{number}", "answer": number} for number in range(10)]


def test_a_dataset_is_a_sequence_of_its_rows() -> None:
    dataset = Dataset(ROWS, "mine", "test")
    assert len(dataset) == 10
    assert list(dataset) == dataset.get_data() == ROWS
    assert dataset[-1] == ROWS[-1]
    assert list(dataset[2:4]) == ROWS[2:4]
    assert dataset[2:4].split == "test"
    assert dataset.columns == ["question", "answer"]


def test_repeating_puts_copies_side_by_side() -> None:
    repeated = Dataset(ROWS[:2]).repeat(3)
    assert [row["answer"] for row in repeated] == [0, 0, 0, 1, 1, 1]
    repeated[0]["answer"] = 7
    assert repeated[1]["answer"] == 0
    with pytest.raises(ConfigError, match="`n` is 0"):
        Dataset(ROWS).repeat(0)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_shuffling_keeps_every_row_and_follows_the_seed(seed: int, count: int) -> None:
    rows = [{"n": number} for number in range(count)]
    dataset = Dataset(rows)
    shuffled = [row["n"] for row in dataset.shuffle(seed)]
    assert Counter(shuffled) == Counter(range(count))
    assert shuffled == [row["n"] for row in dataset.shuffle(seed)]
    assert list(dataset) == rows


@given(st.floats(0.05, 0.95), st.integers(2, 60))
def test_a_dataset_cut_in_two_shares_no_row(share: float, count: int) -> None:
    train, test = Dataset([{"n": number} for number in range(count)]).train_test(share, seed=3)
    numbers = [row["n"] for row in train] + [row["n"] for row in test]
    assert sorted(numbers) == list(range(count))
    assert len(test) == round(share * count)


def test_mapping_and_filtering_leave_the_rows_as_they_were() -> None:
    dataset = Dataset(ROWS)
    doubled = dataset.map(lambda row: {**row, "answer": 2 * row["answer"]})
    assert [row["answer"] for row in doubled] == [2 * number for number in range(10)]
    assert len(dataset.filter(lambda row: row["answer"] > 7)) == 2
    assert list(dataset) == ROWS


def test_a_row_that_is_no_dict_is_named() -> None:
    rows: list[Any] = [{"a": 1}, "text"]
    with pytest.raises(ConfigError, match=r"mine.* 1 .*'text'.*str"):
        Dataset(rows, "mine")


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "jsonl.gz", "tsv"])
def test_a_dataset_goes_through_a_file(tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    rows = [{"question": 'a "b", c\nd', "answer": "1"}, {"question": "ü – 中", "answer": "2"}]
    path = Dataset(rows).save(tmp_path / f"rows.{ending}")
    loaded = Dataset.load_data(path)
    assert list(loaded) == rows
    assert loaded.name == "rows"
    assert loaded.get_data_path() == str(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
