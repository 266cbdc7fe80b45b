"""`rllm view`: runs in the browser, on this machine alone; live while one writes.

directories ──► Sources ──► ViewServer ──► an address to open
"""

from pathlib import Path

import click

from rllm.cli.command import WritableFile, example, json_option, print_json, print_json_line
from rllm.cli.published_flags import accepted_switches
from rllm.cli.terminal import out, print_sentence
from rllm.files.atomic import StorageErrors
from rllm.view.export import default_address, exported_page, requests_of
from rllm.view.sources import Sources

DEFAULT_ROOTS = (Path("runs"), Path("evals"))
DEFAULT_PORT = 7355


@click.command(
    "view",
    epilog=example(
        "rllm view                                         runs/ and evals/",
        "rllm view runs/frozenlake-seed0 evals             these, and what lies below them",
        "rllm view evals/before --export report.html       its page as one file, to keep or to send",
    ),
)
@click.argument("directories", metavar="[DIR]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=int, default=DEFAULT_PORT, show_default=True, help="Port to listen on; 0 takes a free one."
)
@click.option(
    "--export",
    "export_path",
    metavar="FILE",
    type=WritableFile(),
    help="Write one page as a file that loads nothing, and serve nothing.",
)
@click.option(
    "--page",
    "address",
    default="",
    metavar="ADDRESS",
    help="Which page --export writes: what stands behind # in its address, such as episode?run=NAME&id=7.  "
    "[default: that of the only run, else the table of runs]",
)
@accepted_switches("--no-browser")
@json_option
def command(
    directories: tuple[Path, ...],
    host: str,
    port: int,
    export_path: Path | None,
    address: str,
    as_json: bool,
) -> None:
    """Look at runs, evaluations and episodes in the browser.

    DIR is a run, or a directory with runs below it (runs/ and evals/ by default). The page is for this
    machine and whoever has the token in its address. It reads, and writes nothing into a run.
    """
    sources = Sources(directories or [each for each in DEFAULT_ROOTS if each.is_dir()] or DEFAULT_ROOTS[:1])
    if export_path is not None:
        address = (address or default_address(sources)).rpartition("#")[2].removeprefix("/")
        page = exported_page(sources, address, requests_of(sources, address))
        with StorageErrors(export_path):
            export_path.write_text(page, encoding="utf-8")
        if as_json:
            print_json({"file": str(export_path), "page": address, "bytes": len(page.encode())})
        else:
            print_sentence(out(), f"{export_path} holds the page {address}.")
        return
    if address:
        raise click.UsageError("--page says which page --export writes; give --export FILE.html as well.")
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
