"""Readers of moves: the whole answer is the move, in any case of letters; a move within a sentence is none.

"up" ──► direction ──► "Up"          "2 3" ──► cell ──► (1, 2)          "7" ──► number ──► 7
"""

import re

from rllm.environments.games.game import InvalidMove

STEP_OF = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""(rows, columns) that each direction goes."""
_CELL = re.compile(r"([0-9]{1,3})(?: *, *| +)([0-9]{1,3})")
_NUMBER = re.compile(r"[0-9]{1,9}")


def direction(move: str) -> str:
    """Up, Down, Left or Right. Raises InvalidMove for anything else."""
    return one_of(move, STEP_OF)


def one_of(move: str, words: "dict[str, tuple[int, int]] | tuple[str, ...]") -> str:
    """The one of `words` that the move is."""
    for word in words:
        if move.lower() == word.lower():
            return word
    raise InvalidMove(f"{short_repr(move)} is not one of {', '.join(words)}.")


def cell(move: str, num_rows: int, num_columns: int) -> tuple[int, int]:
    """(row, column), counted from 0, of a move such as "2 3" or "2,3", which counts from 1."""
    match = _CELL.fullmatch(move)
    if match is None:
        raise InvalidMove(f"{short_repr(move)} is not a row and a column, such as 1 2.")
    row, column = int(match[1]) - 1, int(match[2]) - 1
    if not (0 <= row < num_rows and 0 <= column < num_columns):
        raise InvalidMove(
            f"{short_repr(move)} is not on the board of {num_rows} rows and {num_columns} columns."
        )
    return row, column


def number(move: str, low: int, high: int) -> int:
    """A whole number from `low` to `high`."""
    if _NUMBER.fullmatch(move) is None or not low <= int(move) <= high:
        raise InvalidMove(f"{short_repr(move)} is not a whole number from {low} to {high}.")
    return int(move)


def short_repr(move: str) -> str:
    """The move as a message quotes it."""
    return f'"{move[:40]}{"…" if len(move) > 40 else ""}"'
