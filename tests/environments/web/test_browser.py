"""The life of the browser: shared, replaced when it dies or hangs, gone when its owner is killed."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import psutil
import pytest

from rllm.environments.web import SiteRequest, SiteResponse, WebEnv
from rllm.environments.web import context as context_file
from rllm.environments.web.browser import BrowserThread, browser_thread, run_in_browser
from rllm.environments.web.chromium import find_chromium
from rllm.environments.web.context import _log_in  # pyright: ignore[reportPrivateUsage]
from rllm.errors import BrowserError, ConfigError

Play = Callable[..., WebEnv]

OWNER = """
import asyncio, sys
from rllm.environments.web import SiteResponse, WebEnv
from rllm.environments.web.browser import browser_thread

async def main():
    site = {"site.test": lambda request: SiteResponse(body=b"<p>x")}
    envs = [WebEnv(start_url="http://site.test/", sites=site) for _ in range(3)]
    await asyncio.gather(*(env.reset() for env in envs))
    running = await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(browser_thread().browser(), browser_thread().loop))
    print(running.pid, browser_thread().keeper.folder, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def browser_pid() -> int:
    async def pid(thread: Any) -> int:
        return (await thread.browser()).pid

    return await run_in_browser(pid)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.1)
    return condition()


async def test_features_that_playwright_turns_off_stay_off(play: Play) -> None:
    await play("<p>one").reset()
    switch = "--disable-features="
    lists = [
        each.removeprefix(switch).split(",")
        for each in psutil.Process(await browser_pid()).cmdline()
        if each.startswith(switch)
    ]
    playwright_s, ours = lists  # of two lists Chromium takes the last
    assert {*playwright_s} < {*ours}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_browser_that_dies_or_hangs_costs_its_episodes_and_is_replaced(
    play: Play, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_file, "PAGE_LIMIT_S", 3.0)
    envs = [play("<p>one"), play("<p>two")]
    await asyncio.gather(*(env.reset() for env in envs))
    pid, num_started = await browser_pid(), browser_thread().num_started
    os.kill(pid, how)
    results = await asyncio.gather(*(env.step("noop(1)") for env in envs), return_exceptions=True)
    assert [type(each) for each in results] == [BrowserError, BrowserError]
    text, _ = await play("<p>three").reset()
    assert '"three"' in text
    assert browser_thread().num_started == num_started + 1
    assert wait_until(lambda: not runs(pid))


@pytest.mark.slow
async def test_a_driver_that_dies_costs_its_episodes_and_is_replaced(play: Play) -> None:
    env = play("<p>one")
    await env.reset()
    browser_thread().loop.kill_driver()
    with pytest.raises(BrowserError):
        await env.step("noop(1)")
    text, _ = await play("<p>two").reset()
    assert '"two"' in text


def processes_in(folder: Path) -> list[int]:
    """Processes that were started with `folder` as their place for what they write."""
    known = [f"{name}={folder}".encode() for name in ("TMPDIR", "HOME")]
    return [
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdigit() and runs(int(each.name)) and any(one in environ_of(each) for one in known)
    ]


def environ_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:  # it ended meanwhile, or is another's
        return b""


@pytest.fixture
def owner(chromium: str, tmp_path: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Starts a program that plays, whose temporary files are in `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> "subprocess.Popen[str]":
        program = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path), "OPENAI_API_KEY": "canary-key"},
        )
        started.append(program)
        return program

    yield start
    for each in started:
        each.kill()
        each.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_nothing_is_left_when_the_owner_is_killed(
    owner: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path, whole_group: bool
) -> None:
    program = owner(OWNER)
    assert program.stdout is not None
    pid, folder = program.stdout.readline().split()
    assert runs(int(pid))
    assert Path(folder).parent == tmp_path
    processes = processes_in(Path(folder))
    assert int(pid) in processes
    assert not any(b"canary-key" in environ_of(Path(f"/proc/{each}")) for each in processes)
    os.killpg(program.pid, signal.SIGKILL) if whole_group else os.kill(program.pid, signal.SIGKILL)
    program.wait()
    assert wait_until(lambda: not processes_in(Path(folder)))
    assert wait_until(lambda: list(tmp_path.iterdir()) == [])


@pytest.mark.slow
def test_nothing_is_left_of_an_evaluation_that_is_killed(chromium: str, tmp_path: Path) -> None:
    command = ["eval", "miniwob/click-test", "--agent", "web", "--model", "builtin:tiny", "--num-tasks", "64"]
    place, temporary = tmp_path / "work", tmp_path / "tmp"
    place.mkdir()
    temporary.mkdir()
    program = subprocess.Popen(
        [sys.executable, "-m", "rllm", *command, "--output", str(place / "evaluation")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert wait_until(lambda: bool(list(temporary.glob("rllm-browser-*"))), 120)
    browsers = list(temporary.glob("rllm-browser-*"))
    assert wait_until(lambda: len(processes_in(browsers[0])) >= 3, 120), "the driver, Chromium, a page"
    program.kill()
    program.wait()
    assert wait_until(lambda: not processes_in(browsers[0]))
    assert wait_until(lambda: not browsers[0].exists())


@pytest.mark.slow
def test_nothing_is_left_at_exit(owner: Callable[[str], "subprocess.Popen[str]"], tmp_path: Path) -> None:
    output, errors = owner(OWNER.replace("await asyncio.sleep(600)", "pass")).communicate(timeout=120)
    _, folder = output.split()
    assert processes_in(Path(folder)) == []
    assert list(tmp_path.iterdir()) == []
    assert errors == ""


async def test_the_proxy_of_a_context_answers_nobody_else(play: Play) -> None:
    """Another program of this machine cannot get at the site of a task, or out, through its port."""
    headers: list[Mapping[str, str]] = []

    def serve(request: SiteRequest) -> SiteResponse:
        headers.append(request.headers)
        return SiteResponse(body=b"<p>inside")

    env = play(serve)
    await env.reset()
    network = env._context.network  # pyright: ignore
    for login in ("", "Proxy-Authorization: Basic cmxsbTp3cm9uZw==\r\n"):
        for request in ("GET http://site.test/", "CONNECT example.org:443", "GET http://login.rllm.test/"):
            reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
            writer.write(f"{request} HTTP/1.1\r\n{login}\r\n".encode())
            assert (await reader.read()).startswith(b"HTTP/1.1 407")
            writer.close()
    assert not any("proxy-authorization" in each for each in headers), "no site knows the token"
    text, *_ = await env.step('goto("http://site.test/?again")')
    assert "inside" in text


async def test_a_site_that_speaks_as_the_proxy_does_not_make_the_context_forget_its_token(play: Play) -> None:
    ask = (("Proxy-Authenticate", 'Basic realm="rllm"'),)
    env = play({"/": "<a href=/x>Go</a>", "/x": lambda _: SiteResponse(status=407, headers=ask)})
    await env.reset()
    await env.step('click("1")')
    text, *_ = await env.step('goto("http://site.test/")')
    assert 'link "Go"' in text


async def test_a_site_that_raises_ends_the_episode(play: Play) -> None:
    def fail(request: SiteRequest) -> SiteResponse:
        raise ValueError("no such row")

    env = play({"/": "<a href=/x>Go</a>", "/x": fail})
    await env.reset()
    with pytest.raises(BrowserError, match=r"site\.test .*ValueError: no such row"):
        await env.step('click("1")')


@pytest.mark.slow
async def test_a_reset_that_is_cancelled_leaves_no_port_open(play: Play) -> None:
    await play("<p>first").reset()
    for delay_s in (0.0, 0.01, 0.03, 0.1, 0.3):
        work = asyncio.ensure_future(play("<p>x").reset())
        await asyncio.sleep(delay_s)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def num_contexts(thread: BrowserThread) -> int:
        return len((await thread.browser()).contexts)

    def num_listening() -> int:
        return sum(each.status == "LISTEN" for each in psutil.Process().net_connections("tcp4"))

    for _ in range(100):  # what a cancelled reset undoes takes a moment
        if num_listening() == await run_in_browser(num_contexts):
            break
        await asyncio.sleep(0.1)
    assert num_listening() == await run_in_browser(num_contexts)


def test_a_machine_without_chromium_is_told_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.delenv("RLLM_CHROMIUM", raising=False)
    with pytest.raises(ConfigError, match=r"Chromium .*`apt-get install"):
        find_chromium()
    monkeypatch.setenv("RLLM_CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="RLLM_CHROMIUM is"):
        find_chromium()
    build = tmp_path / "chromium_headless_shell-1200" / "chrome-linux" / "headless_shell"
    build.parent.mkdir(parents=True)
    build.write_text("")
    build.chmod(0o755)
    monkeypatch.delenv("RLLM_CHROMIUM")
    assert find_chromium().path == str(build)


class _LoginSession:
    """A session that Chromium tells of one more request while it is being let go, as of a page's icon."""

    def __init__(self, *, is_lost: bool) -> None:
        self._is_lost = is_lost
        self.handlers: dict[str, Any] = {}
        self._is_open = True
        self.answered: list[str] = []

    def on(self, event: str, handler: Any) -> None:
        self.handlers[event] = handler

    async def send(self, method: str, parameters: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if not self._is_open:
            raise RuntimeError("the session is closed")
        if method != "Fetch.enable":
            self.answered.append(parameters["requestId"])

    async def goto(self, url: str) -> None:
        self.handlers["Fetch.requestPaused"]({"requestId": "page"})
        await asyncio.sleep(0)
        if self._is_lost:
            self._is_open = False
            self.handlers["Fetch.requestPaused"]({"requestId": "lost"})
            raise ConnectionError("the page was lost")

    async def detach(self) -> None:
        self.handlers["Fetch.requestPaused"]({"requestId": "icon"})
        self._is_open = False
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_login_leaves_no_answer_behind_whose_error_nobody_reads(is_lost: bool) -> None:
    unread: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    session = _LoginSession(is_lost=is_lost)
    context = SimpleNamespace(new_cdp_session=AsyncMock(return_value=session))
    page: Any = SimpleNamespace(context=context, goto=session.goto)
    with pytest.raises(ConnectionError) if is_lost else nullcontext():
        await _log_in(page, "token")
    await asyncio.sleep(0.01)
    session.handlers.clear()
    gc.collect()
    assert unread == []
    assert is_lost or session.answered == ["page"]
