"""A JSONL file ──► its rows, or an error that says which line is none."""

import json
import math
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line; empty lines are skipped.

    Raises ConfigError that names the file and the line.
    """
    return [row for _, row in read_jsonl_lines(path)]


def read_jsonl_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The same with the number of each line, counted from 1."""
    if not path.is_file():
        raise ConfigError(f"There is no dataset {path}; give a file with one JSON object a line.")
    rows: list[tuple[int, dict[str, Any]]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append((number, _row(line, f"{path}:{number}")))
    if not rows:
        raise ConfigError(f"{path} is empty; give a file with one JSON object a line.")
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8: {error.reason} at byte {error.start}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    if rb"\u" in line:
        require_unicode(row, where)
    if not isinstance(row, dict):
        raise ConfigError(f"{where} holds a {type(row).__name__}; each line must be a JSON object.")
    return row


def require_unicode(value: Any, where: str) -> None:
    """Raises ConfigError for text with half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        json.dumps(value, ensure_ascii=False, default=repr).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise ConfigError(
            f"{where} has {half}, which is half of a character and no text in UTF-8; write both halves, or "
            "leave it out."
        ) from error


def parse_json(text: str) -> Any:
    """The value of a JSON text, none of it lost or made up on the way.

    Raises ValueError for what is no JSON, for NaN and numbers that a float cannot hold, and for an object in
    which two values have one name, of which Python would keep the last; RecursionError for deep nesting.
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object_of_pairs)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is more than a float holds")
    return number


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"an object has {names.count(twice)} values of `{twice}`, and keeps one; remove the others"
        )
    return value
