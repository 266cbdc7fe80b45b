"""Parquet ⇄ rows, and Arrow ──► rows. The one home of pyarrow in this room."""

from collections.abc import Iterable
from typing import Any

from rllm.data.unpacking import Allowance
from rllm.errors import ConfigError, MissingExtraError

_ROW_BYTES = 64
_VALUE_BYTES = 8
"""The least memory of a row and of a value, also where the file says a million times that they are null."""
_BATCH_ROWS = 1024


def parquet_rows(data: bytes, name: str, allowance: Allowance) -> list[dict[str, Any]]:
    """Every row of a Parquet file's content. Raises ConfigError, naming the file, for what is none, and for
    one whose rows take more than is allowed."""
    arrow, parquet = _pyarrow()
    try:
        # A text that stands once in a file and in a million rows is kept once until it was measured.
        once = [each.path for each in _columns(arrow, parquet, data) if each.physical_type == "BYTE_ARRAY"]
        file = parquet.ParquetFile(arrow.BufferReader(data), read_dictionary=once)
        _take_declared(file.metadata, allowance)
        return _rows(file.iter_batches(batch_size=_BATCH_ROWS), allowance)
    except arrow.ArrowException as error:
        raise ConfigError(f"{name} is no Parquet file: {error}") from error


def _columns(arrow: Any, parquet: Any, data: bytes) -> list[Any]:
    schema = parquet.ParquetFile(arrow.BufferReader(data)).schema
    return [schema.column(number) for number in range(len(schema.names))]


def _take_declared(metadata: Any, allowance: Allowance) -> None:
    """Claim the memory that the pages unpack to, before they are unpacked: it is held while a batch is
    read."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    allowance.require(max((group.total_byte_size for group in groups), default=0))


def arrow_rows(data: bytes, name: str, allowance: Allowance) -> list[dict[str, Any]]:
    """Every row of a file in Arrow's stream format, as `datasets` writes them, or in its file format. Raises
    ConfigError as `parquet_rows` does."""
    arrow, _ = _pyarrow()
    from pyarrow import ipc

    try:
        if not data.startswith(b"ARROW1"):
            return _rows(ipc.open_stream(arrow.BufferReader(data)), allowance)
        reader = ipc.open_file(arrow.BufferReader(data))
        return _rows(map(reader.get_batch, range(reader.num_record_batches)), allowance)
    except arrow.ArrowException as error:
        raise ConfigError(f"{name} is no Arrow file: {error}") from error


def _rows(batches: Iterable[Any], allowance: Allowance) -> list[dict[str, Any]]:
    """Rows of Python's own values, each batch measured before it is made into them."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        allowance.take(_ROW_BYTES * batch.num_rows + sum(map(_num_bytes, batch.columns)))
        rows += batch.to_pylist()
    return rows


def _num_bytes(array: Any) -> int:
    """Size of the values, each counted as often as it stands in a row."""
    from pyarrow import compute, types

    functions: Any = compute  # made at import, so that no type checker sees them

    if types.is_dictionary(array.type):
        sizes = functions.binary_length(array.dictionary) if _is_text(array.dictionary.type) else None
        if sizes is None:
            return _VALUE_BYTES * len(array) + _num_bytes(array.dictionary.take(array.indices))
        return _VALUE_BYTES * len(array) + (functions.sum(sizes.take(array.indices)).as_py() or 0)
    if types.is_struct(array.type):
        return _VALUE_BYTES * len(array) + sum(map(_num_bytes, array.flatten()))
    if types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        return _VALUE_BYTES * len(array) + _num_bytes(array.flatten())
    if types.is_map(array.type):
        return _VALUE_BYTES * len(array) + _num_bytes(array.keys) + _num_bytes(array.items)
    return max(array.nbytes, _VALUE_BYTES * len(array))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def parquet_bytes(rows: list[dict[str, Any]], name: str) -> bytes:
    """Rows as the content of a Parquet file. Raises ConfigError where a column holds values of several
    types."""
    arrow, parquet = _pyarrow()
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        table = arrow.table({each: arrow.array([row.get(each) for row in rows]) for each in columns})
    except (arrow.ArrowException, TypeError) as error:
        raise ConfigError(
            f"{name}: these rows do not fit into Parquet columns ({error}); use JSONL."
        ) from error
    sink = arrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "pyarrow", "data") from error
    return pyarrow, pyarrow.parquet
