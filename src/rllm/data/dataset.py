"""A data set: a sequence of rows with a name and a split.

Dataset(rows) ──select, split, shuffle, map, repeat──► another Dataset; none of them changes the rows it had
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from rllm.data.rows import read_rows, write_rows
from rllm.errors import ConfigError
from rllm.types.html import html_table

SHOWN_ROWS, SHOWN_CHARS = 5, 200
"""In a notebook."""


class Dataset(Sequence[dict[str, Any]]):
    """Rows in order. Slicing and every method give a new Dataset that shares the rows."""

    def __init__(
        self,
        data: Iterable[Mapping[str, Any]],
        name: str | None = None,
        split: str | None = None,
        *,
        path: Path | None = None,
    ) -> None:
        self.name = name
        self.split = split
        """The part of the data set; `Dataset.train_test` cuts one in two."""
        self._path = path
        self._rows = [_require_row(row, number, name) for number, row in enumerate(data)]

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> "Dataset": ...
    def __getitem__(self, index: int | slice) -> "dict[str, Any] | Dataset":
        return self._with(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Dataset({self.name or 'unnamed'}, split={self.split}, {len(self)} rows)"

    def _repr_html_(self) -> str:
        """In a notebook: its first rows, long values cut."""
        names = self.columns
        rows = [[str(row.get(name, ""))[:SHOWN_CHARS] for name in names] for row in self._rows[:SHOWN_ROWS]]
        return html_table(names, rows, repr(self))

    @property
    def columns(self) -> list[str]:
        """Every field that some row has, in the order they turn up."""
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def get_data(self) -> list[dict[str, Any]]:
        """The rows as a list."""
        return list(self._rows)

    def repeat(self, n: int) -> "Dataset":
        """Each row `n` times, copies side by side."""
        if n < 1:
            raise ConfigError(f"`n` is {n}; a data set is repeated once or more.")
        return self._with(dict(row) for row in self._rows for _ in range(n))

    def shuffle(self, seed: int | None = 0) -> "Dataset":
        """The rows in another order, the same for the same seed."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.select(int(index) for index in order)

    def select(self, indices: Iterable[int]) -> "Dataset":
        """The rows at `indices`, in that order."""
        return self._with(self._rows[index] for index in indices)

    def train_test(self, test_share: float, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """Two data sets without a common row: (train, test). Which row goes where follows from the seed."""
        if not 0.0 < test_share < 1.0:
            raise ConfigError(f"`test_share` is {test_share}; choose a share between 0 and 1.")
        order = [int(index) for index in np.random.default_rng(seed).permutation(len(self))]
        held_out = set(order[: round(test_share * len(self))])
        train = self.select(index for index in range(len(self)) if index not in held_out)
        test = self.select(sorted(held_out))
        train.split, test.split = "train", "test"
        return train, test

    def map(self, function: Callable[[dict[str, Any]], Mapping[str, Any]]) -> "Dataset":
        """`function` of a copy of each row."""
        return self._with(function(dict(row)) for row in self._rows)

    def filter(self, keep: Callable[[dict[str, Any]], bool]) -> "Dataset":
        """The rows that `keep` says True to."""
        return self._with(row for row in self._rows if keep(row))

    def get_data_path(self) -> str | None:
        """The file that it was loaded from; None for one that was made in memory."""
        return None if self._path is None else str(self._path)

    def save(self, path: str | Path) -> Path:
        """Write the rows as .jsonl, .json, .csv or .parquet."""
        write_rows(Path(path), self._rows)
        return Path(path)

    @classmethod
    def load_data(cls, path: str | Path) -> "Dataset":
        """The rows of a file: JSONL, JSON, CSV or Parquet."""
        path = Path(path)
        return cls(read_rows(path), name=path.name.partition(".")[0], path=path)

    def _with(self, rows: Iterable[Mapping[str, Any]]) -> "Dataset":
        return Dataset(rows, self.name, self.split)


def _require_row(row: Any, number: int, name: str | None) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigError(
            f"{name or 'The data set'}: row {number} is {row!r:.80} (a {type(row).__name__}); rows are dicts."
        )
    return row if isinstance(row, dict) else dict(row)
