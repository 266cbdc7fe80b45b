"""`rllm doctor web`: which browser is here, does it start, and does it play a page?

packages, Chromium ──► one page of this process, one click ──► findings
"""

import asyncio
from dataclasses import asdict, dataclass

import click
from rich.text import Text

from rllm.cli.command import example, json_option, print_json
from rllm.cli.installed import EXTRAS, is_older, version_of
from rllm.cli.terminal import facts, out, print_next
from rllm.errors import RllmError

_STYLES = {"ok": "green", "warning": "yellow", "broken": "bold red"}
_PAGE = b"<title>Doctor</title><button onclick=\"this.textContent = 'Done'\">Go</button>"


@dataclass(kw_only=True, slots=True)
class WebFinding:
    name: str
    status: str
    """`ok`, `warning` or `broken`."""
    detail: str


@click.command("web", epilog=example("rllm doctor web", "rllm doctor web --json"))
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check that websites can be played here.

    Says which Chromium was found and how to get one, starts it, and clicks on a page of its own. Exit code
    1 when something is missing.
    """
    findings = examine()
    ready = all(each.status != "broken" for each in findings)
    if as_json:
        print_json({"findings": [asdict(each) for each in findings], "ready": ready})
    else:
        console = out()
        console.print(
            facts(
                (each.name, Text.assemble((f"{each.status:<8}", _STYLES[each.status]), each.detail))
                for each in findings
            )
        )
        if ready:
            command = ["rllm", "eval", "miniwob/click-test-2", "--model", "builtin:tiny", "--num-tasks", "8"]
            print_next(console, [(command, "play in it")])
    ctx.exit(0 if ready else 1)


def examine() -> list[WebFinding]:
    """All findings in the order they are shown; the first thing that is broken ends them."""
    findings = [_package(name, oldest) for name, oldest in EXTRAS["web"].items()]
    if any(each.status == "broken" for each in findings):
        return findings
    from rllm.environments.web.chromium import SANDBOX_VARIABLE, find_chromium, uses_sandbox

    try:
        chromium = find_chromium()
    except RllmError as error:
        return [*findings, WebFinding(name="Chromium", status="broken", detail=str(error))]
    findings.append(WebFinding(name="Chromium", status="ok", detail=f"{chromium.path}, {chromium.origin}"))
    findings.append(
        WebFinding(name="sandbox", status="ok", detail="Chromium isolates its own processes")
        if uses_sandbox()
        else WebFinding(
            name="sandbox",
            status="warning",
            detail=f"off, because this is root or {SANDBOX_VARIABLE} is 0; open no pages of strangers, "
            "or use another account",
        )
    )
    return [*findings, _self_test()]


def _package(name: str, oldest: str) -> WebFinding:
    version = version_of(name)
    if version is None or is_older(version, oldest):
        have = "not installed" if version is None else f"{version}, but {oldest} or newer is needed"
        return WebFinding(name=name, status="broken", detail=f"{have}; run: pip install 'rllm[web]'")
    return WebFinding(name=name, status="ok", detail=version)


def _self_test() -> WebFinding:
    from rllm.environments.web.browser import close_browser

    try:
        version, text = asyncio.run(_click())
    except (RllmError, OSError, TimeoutError) as error:
        detail = f"{type(error).__name__}: {error}"
        return WebFinding(name="self test", status="broken", detail=detail)
    finally:
        close_browser()
    if '"Done"' not in text:
        return WebFinding(name="self test", status="broken", detail=f"a click changed nothing: {text[:200]}")
    return WebFinding(
        name="self test", status="ok", detail=f"Chromium {version} showed a page and was clicked"
    )


async def _click() -> tuple[str, str]:
    """(version of the browser, what a page shows after a click)."""
    from rllm.environments.web.browser import browser_version
    from rllm.environments.web.env import WebEnv
    from rllm.environments.web.network import SiteResponse

    env = WebEnv(
        start_url="http://doctor.test/", sites={"doctor.test": lambda request: SiteResponse(body=_PAGE)}
    )
    try:
        await env.reset()
        observation, *_ = await env.step('click("1")')
        return await browser_version(), str(observation)
    finally:
        env.close()
