"""The commands serve, mcp and stdio of `rllm worker`: where requests come in."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rllm.build.serving import run_server, settle_process
from rllm.cli.command import argument, example, option, options_of, print_json_line
from rllm.cli.terminal import facts, out
from rllm.cli.worker_options import bound_contracts, running_options, telemetry_of
from rllm.contracts.contract import Contract
from rllm.errors import ConfigError

if TYPE_CHECKING:
    from rllm.worker.host import WorkerHost


@dataclass(kw_only=True, slots=True, frozen=True)
class ServeOptions:
    """The options of `rllm worker serve`, as the user typed them."""

    paths: tuple[Path, ...] = argument(
        metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
    )
    address: str = option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
    port: int = option(
        "--port", type=click.IntRange(0, 65_535), default=8090, show_default=True, help="0: any free one."
    )
    token: str | None = option("--token", help="Token that clients must send. A new one is made by default.")
    no_auth: bool = option(
        "--no-auth", is_flag=True, help="Ask for no token; only on this machine's own address."
    )
    parallel: int = option(
        "--parallel", type=click.IntRange(1, 4096), default=64, show_default=True, help="Runs at once."
    )
    queue: int = option(
        "--queue", type=click.IntRange(0), default=1024, show_default=True, help="Runs that may wait."
    )


@click.command(
    "serve",
    epilog=example(
        "rllm worker serve worker.md --port 8090",
        "rllm worker serve a.worker.md b.worker.md --model builtin:tiny --json",
    ),
)
@options_of(
    ServeOptions,
    running_options,
    click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when it listens."),
)
def serve(directory: Path | None, otel: bool, as_json: bool, options: ServeOptions, **binding: str) -> None:
    """Serve workers over HTTP: POST /workers/ID/runs; /openapi.json says the rest."""
    if options.no_auth and options.token is not None:
        raise ConfigError("--token and --no-auth exclude each other; leave one of them out.")
    if options.token == "":
        raise ConfigError("--token is empty; choose one, leave it out to have one made, or say --no-auth.")
    contracts, directory = bound_contracts(options.paths, directory, binding)

    telemetry = telemetry_of(otel)

    async def until_stopped() -> None:
        from rllm.worker.host import WorkerHost
        from rllm.worker.http import WorkerServer

        stop = asyncio.Event()
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, stop.set)
        async with WorkerHost(
            contracts, directory, max_parallel=options.parallel, max_queue=options.queue, telemetry=telemetry
        ) as host:
            server = WorkerServer(
                host,
                address=options.address,
                port=options.port,
                token=None if options.no_auth else options.token or "",
            )
            await server.start()
            settle_process()
            try:
                _print_listening(server.url, server.token, contracts, directory, as_json)
                await stop.wait()
            finally:
                await server.close()

    run_server(until_stopped())


@click.command(
    "mcp",
    epilog=example(
        "rllm worker mcp worker.md", "claude mcp add my-worker -- rllm worker mcp /path/to/worker.md"
    ),
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@running_options
@click.option(
    "--json", is_flag=True, expose_value=False, help="Errors as JSON on stderr; stdout is the protocol's."
)
def mcp(paths: tuple[Path, ...], directory: Path | None, otel: bool, **binding: str) -> None:
    """Be an MCP server on stdin and stdout: each worker is a tool with its schema."""
    from rllm.worker.mcp import serve_stdio

    _serve_until_closed(serve_stdio, paths, directory, otel, binding)


@click.command(
    "stdio",
    epilog=example(
        "rllm worker stdio worker.md", "cat requests.jsonl | rllm worker stdio worker.md > answers.jsonl"
    ),
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@running_options
@click.option(
    "--json", is_flag=True, expose_value=False, help="Errors as JSON on stderr; stdout is the answers'."
)
def stdio(paths: tuple[Path, ...], directory: Path | None, otel: bool, **binding: str) -> None:
    """Answer requests on stdin, a line of JSON each, with a line on stdout.

    {"inputs": {…}} and, if you like, worker_id, version, trace, constraints, and an id that comes back.
    Answers leave as they come.
    """
    from rllm.worker.lines import serve_lines

    def answer(host: "WorkerHost") -> Awaitable[object]:
        return serve_lines(host, sys.stdin, lambda line: print_json_line(json.loads(line)))

    _serve_until_closed(answer, paths, directory, otel, binding)


def _serve_until_closed(
    serve: "Callable[[WorkerHost], Awaitable[object]]",
    paths: tuple[Path, ...],
    directory: Path | None,
    otel: bool,
    binding: dict[str, str],
) -> None:
    """Over standard input and output, until its other end closes them."""
    contracts, directory = bound_contracts(paths, directory, binding)
    telemetry = telemetry_of(otel)

    async def until_closed() -> None:
        from rllm.worker.host import WorkerHost

        async with WorkerHost(contracts, directory, telemetry=telemetry) as host:
            await serve(host)

    asyncio.run(until_closed())


def _print_listening(
    url: str, token: str | None, contracts: list[Contract], directory: Path, as_json: bool
) -> None:
    if as_json:
        workers = [each.id for each in contracts]
        print_json_line({"url": url, "token": token, "workers": workers, "directory": str(directory)})
        return
    console = out()
    console.print(f"\nListening on {url}", style="bold", soft_wrap=True)
    console.print(facts([("workers", ", ".join(each.id for each in contracts)), ("runs", str(directory))]))
    header = f" -H 'Authorization: Bearer {token}'" if token else ""
    console.print(
        f"\n  curl {url}/workers/{contracts[0].id}/runs{header} -d '{{\"inputs\": {{…}}}}'\n", soft_wrap=True
    )
