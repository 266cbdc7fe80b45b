"""Files of rows ⇄ rows: JSONL, JSON, CSV and Parquet, by the ending of the name.

    rows.jsonl  rows.jsonl.gz  rows.json  rows.csv  rows.tsv  rows.parquet ──read_rows──► [{...}, ...]
    [{...}, ...] ──write_rows──► the same, whole or not at all

In JSON, bytes (pictures of Parquet files) are `{"$bytes": "base64…"}` and dates are ISO text, so that every
row survives the way through a file.
"""

import base64
import csv
import gzip
import io
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from rllm.data.unpacking import Allowance, gunzip
from rllm.errors import ConfigError
from rllm.files.atomic import write_atomic
from rllm.files.jsonl import parse_json, read_jsonl_lines, require_unicode

FORMATS = (".jsonl", ".jsonl.gz", ".json", ".csv", ".tsv", ".parquet", ".arrow")
_BYTES = "$bytes"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every row of a file. Raises ConfigError that names the file, and line or row where one is broken."""
    ending = format_of(path.name)
    if not path.is_file():
        raise ConfigError(f"There is no file {path}; give one of {', '.join(FORMATS)}.")
    if ending == ".jsonl":
        return [_with_bytes(row, f"{path}:{number}") for number, row in read_jsonl_lines(path)]
    return rows_in(path.read_bytes(), path.name)


def rows_in(data: bytes, name: str, allowance: Allowance | None = None) -> list[dict[str, Any]]:
    """The rows of a file's content; `name` says the format and is what errors name.

    `allowance`: what may still come out of the archive that the file is from. Raises ConfigError for what
    unpacks to too much.
    """
    ending = format_of(name)
    allowance = allowance or Allowance(name, len(data))
    if ending == ".parquet":
        from rllm.data.parquet import parquet_rows

        return parquet_rows(data, name, allowance)
    if ending == ".arrow":
        from rllm.data.parquet import arrow_rows

        return arrow_rows(data, name, allowance)
    if ending == ".jsonl.gz":
        data = gunzip(data, name, allowance)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8: {error.reason} at byte {error.start}.") from error
    if ending in (".csv", ".tsv"):
        rows = _csv_rows(text, name, "," if ending == ".csv" else "\t")
    elif ending == ".json":
        rows = _json_rows(text, name)
    else:
        rows = _jsonl_rows(text, name)
    if not rows:
        raise ConfigError(f"{name} has no rows.")
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file in the format that its name says; it is there whole or not at all."""
    ending = format_of(path.name)
    if ending == ".arrow":
        raise ConfigError(f"{path} would be an Arrow file, which is read here and not written; use .parquet.")
    if ending == ".parquet":
        from rllm.data.parquet import parquet_bytes

        write_atomic(path, parquet_bytes([dict(row) for row in rows], path.name))
    elif ending == ".json":
        texts = [_json_text(row, number) for number, row in enumerate(rows)]
        write_atomic(path, json.dumps([json.loads(text) for text in texts], indent=1) + "\n")
    elif ending in (".csv", ".tsv"):
        write_atomic(path, _csv_text(list(rows), "," if ending == ".csv" else "\t"))
    else:
        data = jsonl_bytes(rows)
        # No time in the header, so that the same rows give the same bytes.
        write_atomic(path, gzip.compress(data, mtime=0) if ending == ".jsonl.gz" else data)


def jsonl_bytes(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """One JSON object a line. Raises ConfigError, naming row and field, for what JSON cannot hold."""
    lines: list[str] = []
    for number, row in enumerate(rows):
        lines.append(_json_text(row, number))
    return ("\n".join(lines) + "\n" if lines else "").encode()


def _json_text(row: Mapping[str, Any], number: int) -> str:
    try:
        return json.dumps(plain(row), allow_nan=False)
    except (TypeError, ValueError) as error:
        name, reason = next(
            ((name, reason) for name, value in row.items() if (reason := _no_json(value))), ("", str(error))
        )
        raise ConfigError(
            f"Row {number}: column `{name}` cannot be kept as JSON ({reason}); fill it or leave it out."
        ) from error


def _no_json(value: Any) -> str:
    """Return the reason why JSON cannot hold a value; empty where it can."""
    try:
        json.dumps(plain(value), allow_nan=False)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def format_of(name: str) -> str:
    """The ending that says what is in a file."""
    for ending in sorted(FORMATS, key=len, reverse=True):
        if name.endswith(ending):
            return ending
    raise ConfigError(f"{name} ends with none of {', '.join(FORMATS)}; say what it is by its name.")


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, bytes | bytearray | memoryview):
        return {_BYTES: base64.b64encode(bytes(value)).decode()}
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)  # as text, which keeps every digit
    item = getattr(value, "item", None)  # a scalar of numpy
    return item() if callable(item) and not isinstance(value, str) else value


def _with_bytes(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_BYTES}:
            try:
                return base64.b64decode(value[_BYTES], validate=True)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{where} has bytes under `{_BYTES}` that are no base64: {error}."
                ) from error
        return {name: _with_bytes(each, where) for name, each in value.items()}
    return [_with_bytes(each, where) for each in value] if isinstance(value, list) else value


def _jsonl_rows(text: str, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_object(_parse(line, f"{name}:{number}"), f"{name}:{number}"))
    return rows


def _json_rows(text: str, name: str) -> list[dict[str, Any]]:
    """A list of objects; JSON lines under a name that ends with .json are common on hubs, so they are
    read too."""
    if not text.lstrip().startswith("["):
        return _jsonl_rows(text, name)
    return [_object(each, f"{name}: row {number}") for number, each in enumerate(_parse(text, name))]


def _parse(text: str, where: str) -> Any:
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from error
    # In text decoded from UTF-8 only an escape can make half of a surrogate pair.
    if r"\u" in text:
        require_unicode(value, where)
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds a {type(value).__name__}; each row must be a JSON object.")
    return _with_bytes(value, where)


def _csv_rows(text: str, name: str, delimiter: str) -> list[dict[str, Any]]:
    # The limit of the module is 128 KiB for a field.
    csv.field_size_limit(sys.maxsize)
    rows: list[dict[str, Any]] = []
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    columns = list(reader.fieldnames or ())
    if duplicates := [column for column in columns if columns.count(column) > 1]:
        raise ConfigError(
            f"{name} has {columns.count(duplicates[0])} columns `{duplicates[0]}`, and a row keeps one; "
            "rename or remove the others."
        )
    for number, row in enumerate(reader):
        if None in row or None in row.values():
            raise ConfigError(
                f"{name}: row {number} has {'more' if None in row else 'fewer'} fields than the header; "
                "quote fields that hold the separator."
            )
        rows.append(dict(row))
    return rows


def _csv_text(rows: list[Mapping[str, Any]], delimiter: str) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, columns, delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(row) for row in rows)
    return buffer.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """CSV holds text alone: what has parts is written as JSON."""
    return {
        name: json.dumps(plain(value)) if isinstance(value, dict | list | tuple | bytes) else value
        for name, value in row.items()
    }
