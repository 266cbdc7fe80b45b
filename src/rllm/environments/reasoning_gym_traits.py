"""Traits of single data sets of reasoning-gym beside a question and an answer.

question and its metadata ──► identity: what is asked, up to what changes nothing
                          ──► kind: 90 degrees, 180 degrees
                          ──► answers out of habit: the matrix upside down, the brothers for the sisters

A habit reads the question and does not do quite what it says. So whoever has it writes answers in the right
form. Those that are never right but by accident are for experts to fall into; the others show how far one
comes who leaves a part of the question unread.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Entry = Mapping[str, Any]
"""As reasoning-gym hands it out: question, answer, metadata."""
_NAME = re.compile(r"\b(?!(?:How|The|They|These|All|She)\b)[A-Z][a-z]+")


@dataclass(kw_only=True, slots=True, frozen=True)
class Traits:
    """Traits of one data set."""

    identity: Callable[[Entry], Any]
    """Plain JSON, equal for two questions that are one instance."""
    kind: Callable[[Entry], str]
    habits: Mapping[str, Callable[[Entry], str]]
    """Name of a bad habit -> the answer that it gives."""


def _rotate(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """By 90 degrees, clockwise."""
    return [list(row) for row in zip(*matrix[::-1], strict=True)]


def _rotations(entry: Entry) -> list[list[list[int]]]:
    """The matrix, and what it is after one, two and three times 90 degrees."""
    rotations = [[list(row) for row in entry["metadata"]["matrix"]]]
    for _ in range(3):
        rotations.append(_rotate(rotations[-1]))
    return rotations


def _as_rows(matrix: Sequence[Sequence[int]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in matrix)


def _upside_down(entry: Entry) -> str:
    """The question itself, turned by half a turn more."""
    return _as_rows(_rotations(entry)[(entry["metadata"]["num_rotations"] + 2) % 4])


def _angle(entry: Entry) -> str:
    metadata = entry["metadata"]
    return f"{metadata['n']} × {metadata['n']}, {metadata['num_rotations'] % 4 * 90}°"


def _without_names(entry: Entry) -> str:
    return _NAME.sub("_", entry["question"])


def _one_more(entry: Entry, group: str) -> str:
    """Than there are of the first group that `group` finds."""
    match = re.search(rf"(\d+) {group}", entry["question"])
    assert match is not None, "every question of aiw counts both"
    return str(int(match[1]) + 1)


def _relation(entry: Entry) -> str:
    match = re.search(r"\d+ (\w+)", entry["question"])
    assert match is not None, "every question of aiw counts"
    return f"{entry['metadata']['task_type']}, {match[1]} first"


TRAITS: Mapping[str, Traits] = {
    "aiw": Traits(
        identity=_without_names,
        kind=_relation,
        habits={
            "brothers": lambda entry: _one_more(entry, "(?:brothers|male)"),  # asked is for the others
            "first_number": lambda entry: _one_more(entry, ""),
        },
    ),
    "rotate_matrix": Traits(
        identity=lambda entry: min(_rotations(entry)),
        kind=_angle,
        habits={
            "upside_down": _upside_down,
            "quarter_turn": lambda entry: _as_rows(_rotations(entry)[1]),
        },
    ),
}
"""Data set -> its traits. Of all others a question's text is its identity."""
