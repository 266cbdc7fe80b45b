"""`rllm worker promote`: another model behind a worker, if an evaluation says that it is better."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

from rllm.cli.command import example, json_option, print_json
from rllm.cli.terminal import facts, out, rate
from rllm.cli.worker_options import as_the_file_names, counting
from rllm.config.names import object_named
from rllm.contracts.binding_edit import with_model
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError
from rllm.rewards.evaluator import ENTRY_POINTS
from rllm.store.files import write_atomic

NOT_BETTER = 1
_RELOAD_S = 600.0
"""For a server to load the model."""


@click.command(
    "promote",
    epilog=example(
        "rllm worker promote worker.md runs/better --if-better held-out.jsonl",
        "rllm worker promote worker.md runs/better --if-better held-out.jsonl --server http://127.0.0.1:8090 "
        "--token TOKEN",
    ),
)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("candidate", metavar="RUN")
@click.option(
    "--if-better",
    "rows",
    required=True,
    type=click.Path(path_type=Path),
    help='Rows that neither model learned from: {"inputs": {…}, "outputs": {…}} a line.',
)
@click.option("--evaluator", default="", help="file.py:NAME, a function of inputs and outputs: right or not.")
@click.option(
    "--server", default="", metavar="URL", help="A server of this file, which changes over at once."
)
@click.option("--token", default="", envvar="RLLM_WORKER_TOKEN", help="Of --server.")
@click.option("--parallel", type=click.IntRange(1, 4096), default=64, show_default=True)
@json_option
def command(
    path: Path,
    candidate: str,
    rows: Path,
    evaluator: str,
    server: str,
    token: str,
    parallel: int,
    as_json: bool,
) -> int:
    """Let a worker have another model, if that is better.

    The worker does all rows with its model and with RUN, and only if the whole 95 % interval of the
    difference is above 0 does RUN become the model in FILE, and in the server. A server drops no call. The
    exit code is 0 where RUN was promoted, else 1.
    """
    from rllm.worker.promotion import compare_models, read_requests

    contract = read_contract(path)
    if path.is_symlink():
        raise ConfigError(f"{path} is a link, and names in it begin beside it; give {path.resolve()} itself.")
    named = as_the_file_names(candidate, path)
    before = path.read_bytes()
    new_text = with_model(before.decode(), named, source=str(path))
    judge: Any = object_named(evaluator, group=ENTRY_POINTS, what="evaluator") if evaluator else None
    requests = read_requests(rows, contract, is_judged=judge is not None)
    with counting("runs with either model", 2 * len(requests)) as count:
        verdict = asyncio.run(
            compare_models(contract, named, requests, judge=judge, max_parallel=parallel, on_answer=count)
        )
    is_reloaded = False
    if verdict.is_better:
        if path.read_bytes() != before:
            raise ConfigError(
                f"{path} was changed while {named} was evaluated, and is left as it is. {named} was better "
                f"({rate(verdict.current)} → {rate(verdict.candidate)}): promote it again."
            )
        write_atomic(path, new_text)
        if server:
            _reload(server, token, contract.id)
            is_reloaded = True
    if as_json:
        print_json(
            {**verdict.to_dict(), "promoted": verdict.is_better, "reloaded": is_reloaded, "model": named}
        )
        return 0 if verdict.is_better else NOT_BETTER
    low, high = (100 * each for each in verdict.interval)
    out().print(
        facts(
            [
                ("requests", str(verdict.requests)),
                (contract.binding.model, rate(verdict.current)),
                (named, rate(verdict.candidate)),
                ("difference", f"{100 * verdict.difference:+.1f} points, 95 %: {low:+.1f} to {high:+.1f}"),
                ("promoted", _outcome(verdict.is_better, is_reloaded, path)),
            ]
        )
    )
    return 0 if verdict.is_better else NOT_BETTER


def _outcome(is_better: bool, is_reloaded: bool, path: Path) -> str:
    if not is_better:
        return "no: the interval is not above 0; more rows make it narrower"
    return f"yes, in {path}{' and in the server' if is_reloaded else ''}"


def _reload(server: str, token: str, worker_id: str) -> None:
    """Raises ConfigError where the server does not change over; the file has the new model by then."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = Request(
        f"{server.rstrip('/')}/workers/{worker_id}/model", data=b"", headers=headers, method="POST"
    )
    try:
        with urlopen(request, timeout=_RELOAD_S):
            return
    except HTTPError as error:
        text = error.read(2000).decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        reason = f"answered {error.code}: {text}"
    except (URLError, OSError, ValueError) as error:
        reason = f"cannot be reached: {error}"
    raise ConfigError(f"The file has the new model, but {server} {reason}; restart the server.")
