"""Rows of JSON, one a line, from a file or from stdin."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.files.jsonl import parse_json

_MAX_LINE_CHARACTERS = 32 << 20


def json_lines(path: Path) -> Iterator[Any]:
    """The values of the lines that are not blank; `-` is stdin.

    Raises ConfigError with the line of what is no JSON.
    """
    try:
        with ExitStack() as stack:
            stream = sys.stdin if str(path) == "-" else stack.enter_context(path.open(encoding="utf-8"))
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _row(path, number, line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _row(path: Path, number: int, line: str) -> Any:
    if len(line) > _MAX_LINE_CHARACTERS:
        raise ConfigError(f"{path}:{number} has {len(line):,} characters; a row has at most 32 Mi.")
    try:
        return parse_json(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{number} is no JSON: {error}.") from error
