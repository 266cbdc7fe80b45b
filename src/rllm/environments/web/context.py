"""One browser context with its tabs: what happens in it, and questions to its pages.

    page.js in an isolated world ◄── Tab.call("observe", …)
    dialogs, downloads, new windows, crashes ──► decided here ──► `notes`, which the next observation tells,
                                                                  or `failure`, which ends the episode

Decided: alerts are accepted, confirmations too, prompts get their default text; downloads are cancelled;
windows become tabs; service workers, permissions and the clipboard are off; a page that floods any of these
fails.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from rllm.environments.web.network import LOGIN_HOST, USER, ContextNetwork
from rllm.errors import BrowserError

if TYPE_CHECKING:
    from playwright.async_api import Browser, CDPSession, Dialog, Download, Page
    from playwright.async_api import BrowserContext as PlaywrightContext

VIEWPORT = (1024, 768)
PAGE_LIMIT_S = 20.0
"""A page that does not answer within this time hangs."""
UNDO_LIMIT_S = 5.0
"""To close a context that was only half opened."""
STOP_S = 10.0
"""A page that does not answer for so long is told to load nothing more: while a server keeps it waiting for
the next page, Chromium lets nobody ask the one that is shown."""
MAX_DIALOGS = 20
MAX_WINDOWS = 20
"""The number of windows of one episode; with more a page floods."""
MAX_TABS = 8
"""Windows beyond these are closed at once."""
_MAX_NOTES = 20
_WORLD = "rllm"
_SOURCE = resources.files("rllm").joinpath("environments/web/page.js").read_text(encoding="utf-8")
_GONE = re.compile("has been closed|crashed|[Cc]onnection closed")
_UNCOUNTED = ("EventSource", "Ping", "Prefetch", "Preflight", "WebSocket")
"""Types of requests that nobody waits for."""
_SCHEMES = ("http:", "https:", "about:", "data:", "blob:", "chrome-error:")
"""The schemes of addresses that a tab may show."""


class Tab:
    """One page, and the world in it where page.js runs."""

    def __init__(self, page: "Page", note: Callable[[str], None]) -> None:
        self.page = page
        self._note = note
        self._session: CDPSession | None = None
        self._world: int | None = None
        self._requests: set[str] = set()
        self._all_answered = asyncio.Event()
        self._all_answered.set()

    @property
    def has_requests(self) -> bool:
        """Whether the page waits for an answer from its network."""
        return bool(self._requests)

    async def wait_for_answers(self, limit_s: float) -> None:
        """Until the page waits for none, or the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._all_answered.wait()

    def _note_request(self, event: dict[str, Any]) -> None:
        if event.get("type") not in _UNCOUNTED:
            self._requests.add(event["requestId"])
            self._all_answered.clear()

    def _note_answer(self, event: dict[str, Any]) -> None:
        self._requests.discard(event["requestId"])
        if not self._requests:
            self._all_answered.set()

    async def call(self, function: str, *arguments: Any) -> Any:
        """The value of a function of page.js. Raises BrowserError for a page that hangs or is gone."""
        from playwright.async_api import Error

        limit_s = PAGE_LIMIT_S
        expression = f"rllm.{function}({', '.join(map(json.dumps, arguments))})"
        stopping = asyncio.ensure_future(self._stop_later())
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._evaluate(expression)
                    except Error as error:  # the document was replaced meanwhile: ask the new one
                        if self.page.is_closed() or _GONE.search(str(error)):
                            raise BrowserError(f"The page is gone: {str(error)[:200]}") from error
                        self._world = None
                        await asyncio.sleep(0.01)
        except TimeoutError as late:
            raise BrowserError(
                f"The page {self.page.url[:200]!r} did not answer within {limit_s:g} s."
            ) from late
        finally:
            stopping.cancel()

    async def _stop_later(self) -> None:
        await asyncio.sleep(STOP_S)
        await self.stop_loading()

    async def forget_history(self) -> None:
        """Leave no page of another episode to go back to. Raises BrowserError."""
        from playwright.async_api import Error

        try:
            async with asyncio.timeout(PAGE_LIMIT_S):
                while True:
                    try:
                        await self.send("Page.resetNavigationHistory")
                        return
                    except Error as error:  # refused for a moment while a document replaces another
                        if self.page.is_closed() or _GONE.search(str(error)):
                            raise BrowserError(f"The page is gone: {str(error)[:200]}") from error
                        await asyncio.sleep(0.02)
        except TimeoutError as late:
            raise BrowserError(f"The page {self.page.url[:200]!r} does not come to rest.") from late

    async def stop_loading(self) -> None:
        """Give up what the page waits for."""
        from playwright.async_api import Error

        if self._session is not None:
            with contextlib.suppress(Error):  # it is gone: whoever asks it next is told
                await self._session.send("Page.stopLoading")
            self._note("What the page was waiting for did not come, and was given up.")

    async def evaluate(self, function: str, argument: Any = None) -> Any:
        """The value of a function in the page's own world, for pages of ours. Raises BrowserError."""
        from playwright.async_api import Error

        try:
            async with asyncio.timeout(PAGE_LIMIT_S):
                return await self.page.evaluate(function, argument)
        except (Error, TimeoutError) as error:
            raise BrowserError(f"The page {self.page.url[:200]!r} failed: {str(error)[:300]}") from error

    async def picture(self, clip: Sequence[int] = ()) -> str:
        """A PNG of the view, or of (x, y, width, height) in it, in base64. Raises BrowserError."""
        from playwright.async_api import Error

        parameters: dict[str, Any] = {"format": "png", "optimizeForSpeed": True}
        try:
            async with asyncio.timeout(PAGE_LIMIT_S):
                if clip:  # counted from the corner of the document, which may be scrolled
                    view = (await self.send("Page.getLayoutMetrics"))["cssVisualViewport"]
                    x, y = clip[0] + view["pageX"], clip[1] + view["pageY"]
                    area = {"x": x, "y": y, "width": clip[2], "height": clip[3], "scale": 1}
                    parameters["clip"] = area
                return (await self.send("Page.captureScreenshot", parameters))["data"]
        except (Error, TimeoutError) as error:
            raise BrowserError(
                f"The page {self.page.url[:200]!r} gave no picture: {str(error)[:200]}"
            ) from error

    async def wait_for_load(self) -> None:
        """Wait until all that the page is made of is there. Raises BrowserError."""
        from playwright.async_api import Error

        try:
            await self.page.wait_for_load_state("load", timeout=PAGE_LIMIT_S * 1000)
        except Error as error:
            raise BrowserError(
                f"The page {self.page.url[:200]!r} did not load: {str(error)[:300]}"
            ) from error

    async def send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """One command of the DevTools protocol to this page."""
        session = self._session
        if session is None:
            session = self._session = await self.page.context.new_cdp_session(self.page)
            session.on("Network.requestWillBeSent", self._note_request)
            session.on("Network.loadingFinished", self._note_answer)
            session.on("Network.loadingFailed", self._note_answer)
            # Only the events are wanted: with these sizes Chromium keeps no bodies for us.
            await session.send("Network.enable", {"maxTotalBufferSize": 0, "maxResourceBufferSize": 0})
        return await session.send(method, parameters or {})

    async def _evaluate(self, expression: str) -> Any:
        if self._world is None:
            frame = (await self.send("Page.getFrameTree"))["frameTree"]["frame"]["id"]
            # Scripts of the page neither see nor replace what runs in a world of ours.
            world = await self.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": _WORLD})
            self._world = world["executionContextId"]
            await self._run(f"{_SOURCE};0")
        return await self._run(expression)

    async def _run(self, expression: str) -> Any:
        answer = await self.send(
            "Runtime.evaluate",
            {
                "expression": expression,
                "contextId": self._world,
                "returnByValue": True,
                "awaitPromise": True,
            },
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            text = details.get("exception", {}).get("description", details.get("text", ""))
            raise BrowserError(f"A question to the page {self.page.url[:200]!r} failed: {text[:500]}")
        return answer["result"].get("value")

    async def object_id(self, element: int) -> str:
        """The DevTools protocol's name of an element."""
        answer = await self.send(
            "Runtime.evaluate", {"expression": f"rllm.elementOf({element})", "contextId": self._world}
        )
        return answer["result"]["objectId"]


class BrowserContext:
    """Cookies, storage, network and tabs of one episode at a time."""

    def __init__(self, context: "PlaywrightContext", network: ContextNetwork, use: str) -> None:
        self.context = context
        self.network = network
        self.use = use
        self.tabs: list[Tab] = []
        self.active = 0
        self.notes: list[str] = []
        """The events since the last observation."""
        self.failure: str | None = None
        """The reason that the episode cannot go on."""
        self.num_episodes = 0
        self.num_dialogs = 0
        self.num_windows = 0
        self.keys_down: set[str] = set()
        """Keys and buttons that are down."""
        self._tasks: set[asyncio.Task[None]] = set()
        context.on("dialog", lambda dialog: self._in_background(self._decide_dialog(dialog)))
        context.on("page", self._add_tab)

    @classmethod
    async def open(cls, browser: "Browser", use: str) -> "BrowserContext":
        from playwright.async_api import Error

        async with contextlib.AsyncExitStack() as undo:
            network = ContextNetwork()
            await network.start()
            undo.push_async_callback(network.close)
            try:
                context = await browser.new_context(
                    viewport={"width": VIEWPORT[0], "height": VIEWPORT[1]},
                    service_workers="block",
                    accept_downloads=False,
                    permissions=[],
                    locale="en-US",
                    timezone_id="UTC",
                    reduced_motion="reduce",
                    # Chromium does not use a proxy for loopback addresses,
                    # unless the list of exceptions takes that rule away.
                    proxy={"server": f"http://127.0.0.1:{network.port}", "bypass": "<-loopback>"},
                )
                undo.push_async_callback(_close_context, context, UNDO_LIMIT_S)
                own = cls(context, network, use)
                async with asyncio.timeout(PAGE_LIMIT_S):
                    await _log_in(await context.new_page(), network.token)
            except (Error, TimeoutError) as error:
                raise BrowserError(f"The browser opened no context: {str(error)[:500]}") from error
            undo.pop_all()
        return own

    @property
    def tab(self) -> Tab:
        """The tab in front. Raises BrowserError where the episode cannot go on."""
        self.require_well()
        return self.tabs[self.active]

    @property
    def is_pristine(self) -> bool:
        """Whether an episode left the context as it was, but for its page."""
        return self.failure is None and len(self.tabs) == 1 and not self.keys_down and not self.num_windows

    def begin(self) -> None:
        """A new episode: nothing has happened yet."""
        self.notes.clear()
        self.num_dialogs = self.num_windows = 0

    def require_well(self) -> None:
        if self.network.failure is not None:
            self.fail(self.network.failure)
        if self.failure is not None:
            raise BrowserError(self.failure)
        for tab in self.tabs:
            if not tab.page.url.startswith(_SCHEMES):
                self.fail(f"A page went to {tab.page.url[:200]!r}, which no page of a task may show.")
                raise BrowserError(self.failure)

    def note(self, text: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)

    def fail(self, cause: str) -> None:
        """The first cause counts."""
        if self.failure is None:
            self.failure = cause

    async def ensure_tab(self) -> None:
        """Where the pages have closed all tabs, an empty one is opened."""
        from playwright.async_api import Error

        if not self.tabs and self.failure is None:
            try:
                await self.context.new_page()
            except Error as error:
                self.fail(f"The browser opened no tab: {str(error)[:200]}")

    async def close(self, limit_s: float) -> bool:
        """Whether it closed within the limit."""
        self.fail("The context is closed.")
        for each in list(self._tasks):
            each.cancel()
        await self.close_network()
        return await _close_context(self.context, limit_s)

    async def close_network(self) -> None:
        await self.network.close()

    # ---- what pages do -----------------------------------------------------------------------------------

    def _add_tab(self, page: "Page") -> None:
        tab = Tab(page, self.note)
        page.on("close", lambda _: self._remove_tab(tab))
        page.on("crash", lambda _: self.fail("A page crashed: it was killed, or out of memory."))
        page.on("download", self._note_download)
        # The tab of the context itself is no window that a page opened.
        self.num_windows += bool(self.tabs)
        if self.num_windows > MAX_WINDOWS:
            self.fail(f"The page opened more than {MAX_WINDOWS} windows.")
        if len(self.tabs) >= MAX_TABS:
            self.note(f"A window was closed at once: there are {MAX_TABS} tabs already.")
            self._in_background(_close_page(page))
            return
        self.tabs.append(tab)
        if len(self.tabs) > 1:
            self.active = len(self.tabs) - 1
            self.note(f"A new tab was opened: {self.active}.")

    def _remove_tab(self, tab: Tab) -> None:
        if tab not in self.tabs:
            return
        place = self.tabs.index(tab)
        self.tabs.remove(tab)
        # Tabs behind the closed one move up by a number, and the tab in front has to stay in front.
        if place < self.active or self.active == len(self.tabs):
            self.active = max(0, self.active - 1)
        self.note(f"Tab {place} was closed.")

    def _note_download(self, download: "Download") -> None:
        self.note(f"A download was cancelled: {json.dumps(download.suggested_filename[:100])}.")

    async def _decide_dialog(self, dialog: "Dialog") -> None:
        self.num_dialogs += 1
        if self.num_dialogs > MAX_DIALOGS:
            self.fail(f"The page showed more than {MAX_DIALOGS} dialogs.")
        # Beyond the limit it is settled too, because an open dialog blocks its page.
        message = json.dumps(" ".join(dialog.message[:300].split()), ensure_ascii=False)
        if dialog.type == "prompt":
            self.note(f"A prompt was accepted with its default text: {message}.")
            await _settle_dialog(dialog, dialog.default_value)
        else:
            if dialog.type != "beforeunload":
                self.note(f"A dialog ({dialog.type}) was accepted: {message}.")
            await _settle_dialog(dialog, None)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _log_in(page: "Page", token: str) -> None:
    """Show the token to the context's proxy once; Chromium sends it by itself from then on, to nobody else.

    Playwright's own way (`proxy={"username": …}`) would hold up every request, and turn the cache off.
    """
    session = await page.context.new_cdp_session(page)
    answers: set[asyncio.Future[Any]] = set()
    is_over = False

    def answer(method: str, event: dict[str, Any], **parameters: Any) -> None:
        if not is_over:  # a request that comes later, as for an icon, goes on once the session is detached
            request = {"requestId": event["requestId"]}
            answers.add(asyncio.ensure_future(session.send(method, request | parameters)))

    login = {"response": "ProvideCredentials", "username": USER, "password": token}
    session.on("Fetch.requestPaused", lambda event: answer("Fetch.continueRequest", event))
    session.on(
        "Fetch.authRequired",
        lambda event: answer("Fetch.continueWithAuth", event, authChallengeResponse=login),
    )
    try:
        await session.send("Fetch.enable", {"handleAuthRequests": True})
        await page.goto(f"http://{LOGIN_HOST}/")
    finally:
        is_over = True
        outcomes = await asyncio.gather(*answers, return_exceptions=True)
    for each in outcomes:
        if isinstance(each, BaseException):
            raise each
    await session.detach()


async def _close_context(context: "PlaywrightContext", limit_s: float) -> bool:
    """Whether it closed within the limit."""
    from playwright.async_api import Error

    try:
        async with asyncio.timeout(limit_s):
            await context.close()
    except (Error, TimeoutError):
        return False
    return True


async def _close_page(page: "Page") -> None:
    from playwright.async_api import Error

    with contextlib.suppress(Error):
        await page.close()


async def _settle_dialog(dialog: "Dialog", text: str | None) -> None:
    from playwright.async_api import Error

    with contextlib.suppress(Error):  # its page was closed meanwhile
        if text is None:
            await dialog.accept()
        else:
            await dialog.accept(text)
