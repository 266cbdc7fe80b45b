"""`rllm worker init`: a contract to start from, of rows and of whoever does the work."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import click

from rllm.cli.command import WritableFile, example, json_option, print_json
from rllm.cli.rows import json_lines
from rllm.cli.terminal import out, print_next
from rllm.cli.worker_options import as_the_file_names, binding_options
from rllm.contracts.contract import Binding
from rllm.contracts.worker_file import parse_contract
from rllm.errors import ConfigError

_STARTER = """\
---
id: {id}
name: {name}
version: 0.1.0
tags: []
{binding}---

# {name}

{hint}

## worker.md contract

Purpose: {purpose}

### Input schema

```json
{input_schema}
```

### Output schema

```json
{output_schema}
```

### Constraints

- timeout_seconds: 30
- max_attempts: 2
- idempotency_key: run_id
- status_enum: [ok, retryable_error, invalid_request, invalid_output]

## How this should be used

Validate it with `rllm worker validate`, try it with `rllm worker run`, serve it with `rllm worker serve`.
"""
_RUN_ID = {"run_id": {"type": "string"}}
_STATUS = {
    "type": "string",
    "enum": ["ok", "retryable_error", "invalid_request", "invalid_output"],
}
_UNBOUND = """Replace the purpose and the schemas with your real task, then name who does it in the front
matter: `rllm: {program: my_worker.py:solve, model: runs/my-run}`; with a model alone, it answers itself."""
_BOUND = "Replace the purpose, and look whether the schemas are those of your real task."


@click.command(
    "init",
    epilog=example(
        "rllm worker init summarise",
        "rllm worker init grade --rows rows.jsonl --output score --model runs/grader",
        "rllm worker init solve --program flow.py:solve --model builtin:tiny --json",
    ),
)
@click.argument("worker_id", metavar="ID")
@click.option(
    "--rows",
    metavar="FILE|NAME",
    help="A file or a data set whose columns become the input, with the types of the first 100 rows.",
)
@click.option(
    "--output", "outputs", multiple=True, metavar="COLUMN", help="A column that is an output instead."
)
@binding_options
@click.option("--out", "path", type=WritableFile(), help="File to write.  [default: ID.worker.md]")
@json_option
def command(
    worker_id: str,
    rows: str | None,
    outputs: tuple[str, ...],
    path: Path | None,
    as_json: bool,
    **binding: str,
) -> None:
    """Write a contract to start from; with --program, --agent, --workflow or --model it is ready to run."""
    path = path or Path(f"{worker_id}.worker.md")
    if path.exists():
        raise ConfigError(f"{path} is there already; give another --out.")
    if outputs and rows is None:
        raise ConfigError("--output names a column of --rows; give the rows.")
    names: Any = {name: as_the_file_names(value, path) for name, value in binding.items()}
    bound = Binding(**names)
    from rllm.build.workers import actor_facts

    actor = actor_facts(bound, path)
    columns, mandatory = (actor.inputs, actor.mandatory) if rows is None else _columns(rows)
    result = actor.outputs
    if rows is not None and "run_id" in columns:
        raise ConfigError(f"{rows} has a column `run_id`, which names a run here; rename it.")
    for name in outputs:
        if name not in columns:
            raise ConfigError(f"{rows} has no column `{name}`; it has {', '.join(columns)}.")
        if name == "status":
            raise ConfigError(f"{rows} has a column `status`, which says how a run ended here; rename it.")
    if outputs:
        result = {name: columns.pop(name) for name in outputs}
    text = _STARTER.format(
        id=worker_id,
        name=worker_id.replace("-", " ").replace("_", " ").capitalize(),
        binding=_front_matter(bound),
        hint=_BOUND if bound.is_bound else _UNBOUND,
        purpose=actor.purpose,
        input_schema=_object_schema(_RUN_ID | columns, {"run_id", *mandatory}),
        output_schema=_object_schema(_RUN_ID | {"status": _STATUS} | result),
    )
    parse_contract(text, source=str(path))
    path.write_text(text, encoding="utf-8")
    if as_json:
        print_json({"path": str(path), "id": worker_id})
        return
    out().print(f"Wrote {path}")
    print_next(out(), [(["rllm", "worker", "validate", str(path)], "check it")])


def _front_matter(binding: Binding) -> str:
    names = {name: getattr(binding, name) for name in ("program", "agent", "workflow", "model")}
    pairs = ", ".join(f"{name}: {json.dumps(value)}" for name, value in names.items() if value)
    return f"rllm: {{{pairs}}}\n" if pairs else ""


def _object_schema(properties: dict[str, Any], mandatory: Collection[str] | None = None) -> str:
    """Without `mandatory` all are."""
    schema = {
        "type": "object",
        "additionalProperties": False,
        "required": [name for name in properties if mandatory is None or name in mandatory],
        "properties": properties,
    }
    return json.dumps(schema, indent=2, ensure_ascii=False)


def _rows_of(source: str) -> Iterable[Any]:
    """The rows, one after another: nobody waits for a long file of which a hundred are looked at."""
    path = Path(source)
    if source == "-" or (path.is_file() and path.suffix not in (".csv", ".parquet")):
        return json_lines(path)
    from rllm.build.rows import rows_of

    return rows_of(source, "")


def _columns(source: str) -> tuple[dict[str, Any], list[str]]:
    """A property for every column, and those that each row has; the types are those of the first rows."""
    types: dict[str, set[str]] = {}
    in_all: list[str] = []
    num_rows = 0
    for num_rows, row in enumerate(_rows_of(source), 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{source}:{num_rows} is no object; a row has columns.")
        in_all = [name for name in in_all if name in row] if types else list(row)
        for name, value in row.items():
            types.setdefault(name, set()).add(_json_type(value))
        if num_rows == 100:
            break
    if not types:
        raise ConfigError(f"{source} has no rows with columns.")
    properties = {
        name: {"type": next(iter(kinds)) if len(kinds) == 1 else sorted(kinds)}
        for name, kinds in types.items()
    }
    return properties, in_all


def _json_type(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")
