"""`rllm worker promote`: another model behind a worker, if an evaluation says that it is better."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import click

from rllm.build.judges import output_judge_named
from rllm.cli.command import argument, example, json_option, option, options_of, print_json, shared
from rllm.cli.terminal import facts, out, rate
from rllm.cli.worker_options import as_the_file_names, counting
from rllm.contracts.binding_edit import with_model
from rllm.contracts.worker_file import read_contract
from rllm.errors import ConfigError
from rllm.files.atomic import write_atomic

NOT_BETTER = 1
_RELOAD_S = 600.0
"""For a server to load the model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PromoteOptions:
    """The options of `rllm worker promote`, as the user typed them."""

    path: Path = argument(metavar="FILE", type=click.Path(path_type=Path))
    candidate: str = argument(metavar="RUN")
    rows: Path = option(
        "--if-better",
        required=True,
        type=click.Path(path_type=Path),
        help='Rows that neither model learned from: {"inputs": {…}, "outputs": {…}} a line.',
    )
    evaluator: str = option(
        "--evaluator", default="", help="file.py:NAME, a function of inputs and outputs: right or not."
    )
    server: str = option(
        "--server", default="", metavar="URL", help="A server of this file, which changes over at once."
    )
    token: str = option("--token", default="", envvar="RLLM_WORKER_TOKEN", help="Of --server.")
    parallel: int = option("--parallel", type=click.IntRange(1, 4096), default=64, show_default=True)
    as_json: bool = shared(json_option)


@click.command(
    "promote",
    epilog=example(
        "rllm worker promote worker.md runs/better --if-better held-out.jsonl",
        "rllm worker promote worker.md runs/better --if-better held-out.jsonl --server http://127.0.0.1:8090 "
        "--token TOKEN",
    ),
)
@options_of(PromoteOptions)
def command(options: PromoteOptions) -> int:
    """Let a worker have another model, if that is better.

    The worker does all rows with its model and with RUN, and only if the whole 95 % interval of the
    difference is above 0 does RUN become the model in FILE, and in the server. A server drops no call. The
    exit code is 0 where RUN was promoted, else 1.
    """
    from rllm.worker.promotion import compare_models, read_requests

    contract = read_contract(options.path)
    if options.path.is_symlink():
        raise ConfigError(
            f"{options.path} is a link, and names in it begin beside it; give "
            f"{options.path.resolve()} itself."
        )
    candidate = as_the_file_names(options.candidate, options.path)
    before = options.path.read_bytes()
    new_text = with_model(before.decode(), candidate, source=str(options.path))
    judge = output_judge_named(options.evaluator) if options.evaluator else None
    requests = read_requests(options.rows, contract, is_judged=judge is not None)
    with counting("runs with either model", 2 * len(requests)) as count:
        verdict = asyncio.run(
            compare_models(
                contract, candidate, requests, judge=judge, max_parallel=options.parallel, on_answer=count
            )
        )
    is_reloaded = False
    if verdict.is_better:
        if options.path.read_bytes() != before:
            raise ConfigError(
                f"{options.path} was changed while {candidate} was evaluated, and is left as it is. "
                f"{candidate} was better ({rate(verdict.current)} → {rate(verdict.candidate)}): promote "
                "it again."
            )
        write_atomic(options.path, new_text)
        if options.server:
            _reload(options.server, options.token, contract.id)
            is_reloaded = True
    if options.as_json:
        print_json(
            {**verdict.to_dict(), "promoted": verdict.is_better, "reloaded": is_reloaded, "model": candidate}
        )
        return 0 if verdict.is_better else NOT_BETTER
    low, high = (100 * each for each in verdict.interval)
    out().print(
        facts(
            [
                ("requests", str(verdict.requests)),
                (contract.binding.model, rate(verdict.current)),
                (candidate, rate(verdict.candidate)),
                ("difference", f"{100 * verdict.difference:+.1f} points, 95 %: {low:+.1f} to {high:+.1f}"),
                ("promoted", _outcome(verdict.is_better, is_reloaded, options.path)),
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
