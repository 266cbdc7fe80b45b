"""`rllm view`: runs in the browser, on this machine alone; live while one writes.

directories ──► Sources ──► ViewServer ──► an address to open
"""

from pathlib import Path

import click

from rllm.cli.command import example, json_option, print_json_line
from rllm.cli.published_flags import accepted_switches
from rllm.cli.terminal import out
from rllm.view.sources import Sources

DEFAULT_ROOT = Path("runs")
DEFAULT_PORT = 7355


@click.command(
    "view",
    epilog=example(
        "rllm view                                         the runs in runs/",
        "rllm view runs/frozenlake-seed0 evaluations       these, and what lies below them",
    ),
)
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=int, default=DEFAULT_PORT, show_default=True, help="Port to listen on; 0 takes a free one."
)
@accepted_switches("--no-browser")
@json_option
def command(directories: tuple[Path, ...], host: str, port: int, as_json: bool) -> None:
    """Look at runs, evaluations and episodes in the browser.

    DIR is a run, or a directory with runs below it (runs/ by default). The page is for this machine and
    whoever has the token in its address. It reads, and writes nothing into a run.
    """
    sources = Sources(directories or (DEFAULT_ROOT,))
    from rllm.view.server import ViewServer, kept_token

    server = ViewServer(sources, host=host, port=port, token=kept_token())
    if as_json:
        print_json_line({"url": server.url, "port": server.port})
    else:
        console = out()
        console.print(f"{len(sources.runs())} runs. Open in a browser:", highlight=False)
        console.print(server.url, style="bold", soft_wrap=True, highlight=False, markup=False)
        console.print("Ctrl-C ends it.", style="dim")
    server.serve()
