"""`rllm worker`: contracts in worker.md files, checked, run, and served."""

import asyncio
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from rllm.cli.command import Group, WritableFile, example, json_option, print_json, print_json_line
from rllm.cli.rows import json_lines
from rllm.cli.terminal import err, facts, out, print_next, print_sentence, table
from rllm.cli.worker_doors import mcp, serve, stdio
from rllm.cli.worker_graph import command as graph
from rllm.cli.worker_init import command as init
from rllm.cli.worker_options import counting, running_options, telemetry_of
from rllm.cli.worker_promote import command as promote
from rllm.contracts.contract import Contract
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError
from rllm.files.jsonl import parse_json

NOT_OK = 1


@click.group("worker", cls=Group)
def command() -> None:
    """Bounded workers from worker.md files: check, run and serve them.

    A worker.md file says what goes in, what comes out, and the limits.
    """


for each in (init, graph, promote, serve, mcp, stdio):
    command.add_command(each)


# ---- files -------------------------------------------------------------------------------------------------


@command.command(
    "validate", epilog=example("rllm worker validate worker.md", "rllm worker validate *.md --json")
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@json_option
def validate(paths: tuple[Path, ...], as_json: bool) -> None:
    """Check contracts. What is wrong is named with its line; nothing is run."""
    errors: list[str] = []
    contracts: list[Contract] = []
    for path in paths:
        try:
            contracts.append(read_contract(path))
        except ConfigError as error:
            errors.append(str(error))
    if errors:
        raise ConfigError("\n".join(errors))
    if as_json:
        print_json({"workers": [_facts_of(each) for each in contracts]})
        return
    for each in contracts:
        out().print(f"{each.source}: {each.id} {each.version} is a contract")
    if len(contracts) == 1:
        print_next(out(), [(["rllm", "worker", "show", contracts[0].source], "what it says")])


@command.command("list", epilog=example("rllm worker list", "rllm worker list workers/ --json"))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path())
@json_option
def list_workers(folder: Path, as_json: bool) -> None:
    """List the contracts in a folder: files called worker.md or *.worker.md, also in its folders."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory.")
    named = {*folder.rglob("worker.md"), *folder.rglob("*.worker.md")}
    paths = sorted(each for each in named if not each.is_dir())
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            rows.append(_facts_of(read_contract(path)))
        except ConfigError as error:
            rows.append({"source": str(path), "error": str(error)})
    if as_json:
        print_json({"workers": rows})
        return
    workers_table = table("file", "worker", "version", "purpose", prose=("purpose",))
    for row in rows:
        purpose = row.get("purpose") or row.get("error", "")
        workers_table.add_row(row["source"], row.get("id", "–"), row.get("version", "–"), purpose)
    out().print(workers_table)
    if not rows:
        print_next(out(), [(["rllm", "worker", "init", "my-worker"], "write one")])


@command.command("show", epilog=example("rllm worker show worker.md", "rllm worker show worker.md --json"))
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@json_option
def show(path: Path, as_json: bool) -> None:
    """Say what a contract asks for, gives and allows."""
    contract = read_contract(path)
    if as_json:
        print_json(_facts_of(contract))
        return
    console, limits, binding = out(), contract.constraints, contract.binding
    console.print(f"{contract.id} {contract.version}", style="bold")
    print_sentence(console, contract.purpose)
    console.print(
        facts(
            [
                ("takes", _fields_of(contract.input_schema.document)),
                ("gives", _fields_of(contract.output_schema.document)),
                ("time", f"{limits.timeout_seconds:g} s for a run"),
                ("attempts", str(limits.max_attempts)),
                ("one run per", limits.idempotency_key or "request"),
                ("done by", binding.actor or "none: the model itself answers"),
                ("model", binding.model or "none"),
            ]
        )
    )
    print_next(console, [(["rllm", "worker", "run", str(path), "--input", "{…}"], "run it once")])


# ---- runs --------------------------------------------------------------------------------------------------


@command.command(
    "run",
    epilog=example(
        """rllm worker run worker.md --input '{"run_id": "1", "task": "…", "context": {}}'""",
        "rllm worker run worker.md --input request.json --program my_worker.py:solve --json",
    ),
)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--input", "source", required=True, help="The inputs as JSON, or a file that holds them.")
@running_options
@json_option
def run(path: Path, source: str, as_json: bool, directory: Path | None, otel: bool, **binding: str) -> int:
    """Run a worker once. The exit code is 0 where its status is ok, else 1."""
    from rllm.worker.worker import Worker

    worker = Worker.load(path, directory=directory, telemetry=telemetry_of(otel), **binding)
    response = worker.run(_inputs(source))
    value = response.to_dict()
    if as_json:
        print_json(value)
    else:
        error = value["error"] or {}
        observability = value["observability"]
        out().print(
            facts(
                [
                    ("status", value["status"]),
                    *([("error", f"{error['code']}: {error['message']}")] if error else []),
                    ("attempt", f"{observability['attempt']} of {worker.contract.constraints.max_attempts}"),
                    (
                        "took",
                        f"{observability['duration_ms']:.0f} ms, {observability['model_calls']} model calls",
                    ),
                ]
            )
        )
        if response.outputs is not None:
            out().print(json.dumps(response.outputs, indent=2, ensure_ascii=False), soft_wrap=True)
    return 0 if response.is_ok else NOT_OK


@command.command(
    "batch",
    epilog=example(
        "rllm worker batch worker.md rows.jsonl --out answers.jsonl",
        "cat rows.jsonl | rllm worker batch worker.md - > answers.jsonl",
    ),
)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("rows", metavar="ROWS", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--out", "answers", type=WritableFile(), help="File for the answers.  [default: stdout]")
@click.option("--parallel", type=click.IntRange(1, 4096), default=64, show_default=True)
@running_options
@click.option("--json", "as_json", is_flag=True, help="Say how many of each status as JSON; errors as JSON.")
def batch(
    path: Path,
    rows: Path,
    answers: Path | None,
    parallel: int,
    as_json: bool,
    directory: Path | None,
    otel: bool,
    **binding: str,
) -> int:
    """Run a worker on every line of a file (or of stdin, `-`): one JSON object of inputs a line.

    Answers are JSON lines in the order of the rows. A batch that was stopped goes on where it was: what was
    answered is not asked again. A row without the text that is to be its idempotency key is named by what it
    holds, so equal ones are one run. The exit code is 0 where all are ok, else 1.
    """
    from rllm.worker.worker import Worker

    worker = Worker.load(path, directory=directory, telemetry=telemetry_of(otel), **binding)
    requests = [_named(worker.contract, row) for row in json_lines(rows)]
    with counting("runs", len(requests)) as count:
        responses = asyncio.run(worker.arun_all(requests, max_parallel=parallel, on_answer=count))
    if answers is None:
        for each in responses:
            print_json_line(each.to_dict())
    else:
        answers.write_bytes(b"".join(each.body + b"\n" for each in responses))
    statuses = Counter(str(each.status) for each in responses)
    summary = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    err().print(json.dumps(statuses) if as_json else f"{len(responses)} runs: {summary or 'none'}")
    return 0 if all(each.is_ok for each in responses) else NOT_OK


@command.command("runs", epilog=example("rllm worker runs DIRECTORY", "rllm worker runs DIRECTORY --json"))
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "-n", "limit", type=click.IntRange(1), default=20, show_default=True, help="How many, newest first."
)
@json_option
def runs(directory: Path, limit: int, as_json: bool) -> None:
    """List the runs that are kept in a directory, also while a server writes there."""
    from rllm.worker.store import RunStore

    store = RunStore(directory, read_only=True)
    try:
        rows = [row for _, row in zip(range(limit), store.runs(), strict=False)]
    finally:
        store.close()
    if as_json:
        print_json({"runs": rows})
        return
    runs_table = table("worker", "key", "status", "attempts", right=("attempts",))
    for row in rows:
        runs_table.add_row(
            row["worker_id"], row["key"][:60], row["status"] or "not final", str(row["attempts"])
        )
    out().print(runs_table)


def _facts_of(contract: Contract) -> dict[str, Any]:
    limits = contract.constraints
    return {
        "source": contract.source,
        "id": contract.id,
        "version": contract.version,
        "name": contract.name,
        "purpose": contract.purpose,
        "input_schema": contract.input_schema.document,
        "output_schema": contract.output_schema.document,
        "timeout_seconds": limits.timeout_seconds,
        "max_attempts": limits.max_attempts,
        "idempotency_key": limits.idempotency_key or None,
        "program": contract.binding.program or None,
        "agent": contract.binding.agent or None,
        "workflow": contract.binding.workflow or None,
        "model": contract.binding.model or None,
    }


def _fields_of(document: Any) -> str:
    required_names = document.get("required") or ()
    names = [name if name in required_names else f"{name}?" for name in document.get("properties") or {}]
    return ", ".join(names) or "any object"


def _named(contract: Contract, row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    digest = hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=8)
    return contract.with_key(row, f"row-{digest.hexdigest()}")


def _inputs(source: str) -> Any:
    is_text = source.lstrip().startswith(("{", "["))
    if not is_text and not Path(source).is_file():
        raise ConfigError(f"--input is {source!r:.100}, neither a JSON object nor a file that is there.")
    where = "--input" if is_text else source
    try:
        return parse_json(source if is_text else Path(source).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no JSON: {error}.") from error
