"""One Chromium for the whole process, in a thread with a loop of its own, and the contexts in it.

    environments, in any loop or thread ──► run_in_browser(…) ──► the browser's loop
                                                                    lease ──► BrowserContext ──► release
    a browser that died, or does not answer ──► its contexts fail, the next lease starts another
    this process dies ──► the keeper (`keeper`) kills all that was started here, and removes what it wrote

Playwright's objects belong to the loop that made them, so they live here and nowhere else, and a page that
keeps its renderer busy keeps no engine waiting.
"""

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rllm.environments.web.chromium import FLAGS, SANDBOX_VARIABLE, find_chromium, uses_sandbox
from rllm.environments.web.context import BrowserContext
from rllm.environments.web.keeper import Keeper, KeptLoop
from rllm.errors import BrowserError, MissingExtraError

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Playwright

Value = TypeVar("Value")

MAX_IDLE = 32
"""Contexts that are kept for later episodes."""
MAX_EPISODES = 200
"""Episodes that one context serves before another takes its place: pages leak."""
START_LIMIT_S = 90.0
ANSWER_LIMIT_S = 10.0
"""A browser that does not tell its version within this time hangs."""
CLOSE_LIMIT_S = 10.0
_NUM_OPENING = 2
"""Contexts that are opened at the same time: opening is what costs most."""


class RunningBrowser:
    """One process of Chromium with its contexts. Only used in the loop of the browser."""

    def __init__(self, browser: "Browser", session: "CDPSession", pid: int, keeper: Keeper) -> None:
        self.browser = browser
        self.pid = pid
        self.contexts: set[BrowserContext] = set()
        self.idle: dict[str, list[BrowserContext]] = {}
        """By what they were used for."""
        self.is_given_up = False
        self._session = session
        self._keeper = keeper
        self._group = os.getpgid(pid)
        """Not the browser's own id: distributions start it by a script, which is the head of its group."""
        keeper.watch(self._group)
        self._opening = asyncio.Semaphore(_NUM_OPENING)

    @classmethod
    async def start(cls, playwright: "Playwright", keeper: Keeper) -> "RunningBrowser":
        from playwright.async_api import Error

        chromium = find_chromium()
        try:
            async with asyncio.timeout(START_LIMIT_S):
                browser = await playwright.chromium.launch(
                    executable_path=chromium.path,
                    args=list(FLAGS),
                    chromium_sandbox=uses_sandbox(),
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                    timeout=START_LIMIT_S * 1000,
                )
                session = await browser.new_browser_cdp_session()
                processes = (await session.send("SystemInfo.getProcessInfo"))["processInfo"]
            pid = next(int(each["id"]) for each in processes if each["type"] == "browser")
            return cls(browser, session, pid, keeper)
        except (Error, TimeoutError, ProcessLookupError) as error:
            mend = (
                f" Without user namespaces, {SANDBOX_VARIABLE}=0 does without its sandbox."
                if uses_sandbox()
                else ""
            )
            raise BrowserError(f"{chromium.path} did not start: {str(error)[:500]}{mend}") from error

    async def lease(self, use: str) -> BrowserContext:
        """An idle context that was used for the same, or a new one."""
        while idle := self.idle.get(use):
            context = idle.pop()
            # An idle context can fail too, as when its page crashes.
            if context.failure is None:
                return context
            await self.discard(context)
        async with self._opening:
            context = await BrowserContext.open(self.browser, use)
        self.contexts.add(context)
        return context

    async def release(self, context: BrowserContext, *, reusable: bool) -> None:
        context.num_episodes += 1
        num_idle = sum(map(len, self.idle.values()))
        if (
            reusable
            and context.failure is None
            and context.num_episodes < MAX_EPISODES
            and num_idle < MAX_IDLE
        ):
            self.idle.setdefault(context.use, []).append(context)
            return
        await self.discard(context)

    async def discard(self, context: BrowserContext) -> None:
        """Close a context; a browser that cannot do that is given up."""
        self.contexts.discard(context)
        if not await context.close(CLOSE_LIMIT_S) and not await self.answers():
            await self.give_up()

    async def answers(self) -> bool:
        """Whether the browser itself, apart from its pages, is alive."""
        from playwright.async_api import Error

        if self.is_given_up or not self.browser.is_connected():
            return False
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await self._session.send("Browser.getVersion")
        except (TimeoutError, Error):
            return False
        return True

    async def give_up(self) -> None:
        """End the process, whatever it does."""
        self.is_given_up = True
        self._keeper.kill(self._group)
        for each in list(self.contexts):
            self.contexts.discard(each)
            each.fail("The browser was given up, because it did not answer.")
            await each.close_network()

    async def close(self) -> None:
        from playwright.async_api import Error

        for each in list(self.contexts):
            await each.close_network()
        if not self.is_given_up:
            with contextlib.suppress(TimeoutError, Error):
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await self.browser.close()
            await self.give_up()


class BrowserThread:
    """The thread with the loop, and the browser that runs at present."""

    def __init__(self) -> None:
        self.keeper = Keeper()
        self.loop = KeptLoop(self.keeper)
        self._thread = threading.Thread(target=self._run, name="rllm-browser", daemon=True)
        self._thread.start()
        self._playwright: Playwright | None = None
        self._running: RunningBrowser | None = None
        self._starting = asyncio.Lock()
        self.num_started = 0
        """Browsers that were started so far; each but the first replaced one."""

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    async def browser(self) -> RunningBrowser:
        """The browser that runs, or a new one where none does."""
        # Many episodes begin at once; they share one browser, also one that is still starting.
        async with self._starting:
            running = self._running
            if running is not None and (running.is_given_up or not running.browser.is_connected()):
                await running.close()
                self._running = None
            if self._running is None:
                if self._playwright is None or not self.loop.runs_driver:
                    self._playwright = await _start_playwright()
                try:
                    self._running = await RunningBrowser.start(self._playwright, self.keeper)
                except BrowserError:
                    self.loop.kill_driver()  # and with it a browser that was half started
                    raise
                self.num_started += 1
            return self._running

    async def stop(self) -> None:
        """Close the browser and Playwright."""
        if self._running is not None:
            await self._running.close()
        if self._playwright is not None and self.loop.runs_driver:
            await self._playwright.stop()
        self._running = self._playwright = None

    def close(self) -> None:
        """Stop everything, and the thread."""
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result(timeout=4 * CLOSE_LIMIT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
        self.keeper.close()


async def _start_playwright() -> "Playwright":
    try:
        from playwright.async_api import async_playwright
    except ImportError as error:
        raise MissingExtraError("playwright", "web") from error
    return await async_playwright().start()


_lock = threading.Lock()
_thread: BrowserThread | None = None
_owner = 0
"""The process that started the thread: a fork has none."""


def browser_thread() -> BrowserThread:
    """The one of this process, started when it is first asked for."""
    global _thread, _owner
    with _lock:
        if _thread is None or _owner != os.getpid():
            _thread, _owner = BrowserThread(), os.getpid()
        return _thread


async def run_in_browser(work: Callable[[BrowserThread], Coroutine[Any, Any, Value]]) -> Value:
    """Run `work` in the loop of the browser and wait for it here. Cancelling the one cancels the other."""
    thread = browser_thread()
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(thread), thread.loop))


async def browser_version() -> str:
    """Version of the browser of this process, which is started where none runs."""

    async def version(thread: BrowserThread) -> str:
        return (await thread.browser()).browser.version

    return await run_in_browser(version)


def wait_for_browser(work: Callable[[BrowserThread], Coroutine[Any, Any, Value]], limit_s: float) -> Value:
    """The same for callers without a loop, which wait in their thread."""
    thread = browser_thread()
    return asyncio.run_coroutine_threadsafe(work(thread), thread.loop).result(limit_s)


def close_browser() -> None:
    """Close the browser of this process, where there is one. It happens at exit by itself."""
    global _thread
    with _lock:
        thread, _thread = _thread, None
    if thread is not None and _owner == os.getpid():
        thread.close()


atexit.register(close_browser)
