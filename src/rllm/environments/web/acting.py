"""Actions, done. What cannot be done raises ImpossibleAction, which the agent is told as an observation.

WebAction ──► where is it, and can the mouse reach it? (page.js) ──► input of the browser itself, as a hand's
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rllm.environments.web.actions import WebAction
from rllm.environments.web.context import MAX_TABS, BrowserContext
from rllm.errors import BrowserError

if TYPE_CHECKING:
    from playwright.async_api import Page

GOTO_LIMIT_S = 15.0
INPUT_LIMIT_S = 15.0
MAX_WAIT_MS = 5000
"""Longest `noop`."""


class ImpossibleAction(Exception):
    """Raised for an action that has no effect; the message says why, for the agent."""


async def act(context: BrowserContext, action: WebAction, files: Mapping[str, str]) -> None:
    """Do one action in the tab in front. `files`: name -> path, of what may be uploaded.

    Raises ImpossibleAction for what the page does not permit, BrowserError where page or browser fail.
    """
    from playwright.async_api import Error
    from playwright.async_api import TimeoutError as PlaywrightTimeout

    tab = context.tab
    try:
        async with asyncio.timeout(INPUT_LIMIT_S + GOTO_LIMIT_S):
            if action.name == "upload_file":
                await _upload(context, files, **action.arguments)
            else:
                await _HANDS[action.name](context, **action.arguments)
    # Playwright's own limit on one command. It is a kind of Error, so it has to be caught before that.
    except PlaywrightTimeout as late:
        await tab.stop_loading()
        raise ImpossibleAction("it took too long") from late
    except TimeoutError as late:
        raise BrowserError(f"The page {tab.page.url[:200]!r} did not answer to `{action.name}`.") from late
    except Error as error:
        context.require_well()
        if tab.page.is_closed():
            return  # the action closed its own tab
        raise ImpossibleAction(str(error).splitlines()[0][:200]) from error


# ---- elements ------------------------------------------------------------------------------------------


async def _place(context: BrowserContext, bid: int, *, aim: bool = True) -> tuple[float, float]:
    target = await context.tab.call("target", bid, aim)
    if "error" in target:
        raise ImpossibleAction(target["error"])
    if "option" in target:
        raise ImpossibleAction("it is an option of a list; use select_option")
    return target["x"], target["y"]


async def _click(
    context: BrowserContext, bid: int, button: str, modifiers: list[str], clicks: int = 1
) -> None:
    x, y = await _place(context, bid)
    page = context.tab.page
    for each in modifiers:
        await page.keyboard.down(each)
    try:
        await page.mouse.click(x, y, button=button, click_count=clicks)  # pyright: ignore[reportArgumentType]
    finally:
        # A modifier that stays down would change every later click and key.
        for each in modifiers:
            await page.keyboard.up(each)


async def _dblclick(context: BrowserContext, bid: int, button: str, modifiers: list[str]) -> None:
    await _click(context, bid, button, modifiers, clicks=2)


async def _hover(context: BrowserContext, bid: int) -> None:
    await context.tab.page.mouse.move(*await _place(context, bid))


async def _fill(context: BrowserContext, bid: int, value: str) -> None:
    _require(await context.tab.call("fill", bid, value))


async def _clear(context: BrowserContext, bid: int) -> None:
    await _fill(context, bid, "")


async def _focus(context: BrowserContext, bid: int) -> None:
    _require(await context.tab.call("focus", bid))


async def _select_option(context: BrowserContext, bid: int, options: list[str]) -> None:
    _require(await context.tab.call("select", bid, options))


async def _press(context: BrowserContext, bid: int, key_comb: str) -> None:
    await _focus(context, bid)
    await _keyboard_press(context, key_comb)


async def _drag_and_drop(context: BrowserContext, from_bid: int, to_bid: int) -> None:
    start = await _place(context, from_bid)
    end = await _place(context, to_bid, aim=False)
    await _drag(context.tab.page, start, end)


async def _upload(context: BrowserContext, files: Mapping[str, str], bid: int, file: list[str]) -> None:
    for each in file:
        if each not in files:
            raise ImpossibleAction(f"there is no file {each[:60]!r}; there are: {', '.join(files) or 'none'}")
    target = await context.tab.call("target", bid, False)
    if "error" in target:
        raise ImpossibleAction(target["error"])
    if target["type"] != "file":
        raise ImpossibleAction("it takes no file")
    await context.tab.send(
        "DOM.setFileInputFiles",
        {"files": [files[each] for each in file], "objectId": await context.tab.object_id(bid)},
    )


def _require(error: str) -> None:
    if error:
        raise ImpossibleAction(error)


# ---- mouse and keyboard --------------------------------------------------------------------------------


async def _scroll(context: BrowserContext, delta_x: float, delta_y: float) -> None:
    await context.tab.call("scroll", delta_x, delta_y)


async def _mouse_move(context: BrowserContext, x: float, y: float) -> None:
    await context.tab.page.mouse.move(x, y)


async def _mouse_down(context: BrowserContext, x: float, y: float, button: Any) -> None:
    await context.tab.page.mouse.move(x, y)
    await context.tab.page.mouse.down(button=button)
    context.keys_down.add(button)


async def _mouse_up(context: BrowserContext, x: float, y: float, button: Any) -> None:
    await context.tab.page.mouse.move(x, y)
    await context.tab.page.mouse.up(button=button)
    context.keys_down.discard(button)


async def _mouse_click(context: BrowserContext, x: float, y: float, button: Any) -> None:
    await context.tab.page.mouse.click(x, y, button=button)


async def _mouse_dblclick(context: BrowserContext, x: float, y: float, button: Any) -> None:
    await context.tab.page.mouse.click(x, y, button=button, click_count=2)


async def _mouse_drag(
    context: BrowserContext, from_x: float, from_y: float, to_x: float, to_y: float
) -> None:
    await _drag(context.tab.page, (from_x, from_y), (to_x, to_y))


async def _drag(page: "Page", start: tuple[float, float], end: tuple[float, float]) -> None:
    """In steps, because pages take a drag for one only after some movement."""
    await page.mouse.move(*start)
    await page.mouse.down()
    await page.mouse.move(*end, steps=4)
    await page.mouse.up()


async def _keyboard_press(context: BrowserContext, key: str) -> None:
    with _known_keys(key):
        await context.tab.page.keyboard.press(key)


async def _keyboard_down(context: BrowserContext, key: str) -> None:
    with _known_keys(key):
        await context.tab.page.keyboard.down(key)
    context.keys_down.add(key)


async def _keyboard_up(context: BrowserContext, key: str) -> None:
    with _known_keys(key):
        await context.tab.page.keyboard.up(key)
    context.keys_down.discard(key)


@contextlib.contextmanager
def _known_keys(key: str) -> Iterator[None]:
    from playwright.async_api import Error

    try:
        yield
    except Error as error:
        if "Unknown key" in str(error):
            raise ImpossibleAction(f"there is no key {key[:40]!r}") from error
        raise


async def _keyboard_type(context: BrowserContext, text: str) -> None:
    await context.tab.page.keyboard.type(text[:2000])


async def _keyboard_insert_text(context: BrowserContext, text: str) -> None:
    await context.tab.page.keyboard.insert_text(text)


# ---- pages and tabs ------------------------------------------------------------------------------------


async def _noop(context: BrowserContext, wait_ms: float) -> None:
    await asyncio.sleep(min(max(wait_ms, 0), MAX_WAIT_MS) / 1000)


async def _goto(context: BrowserContext, url: str) -> None:
    if url != "about:blank" and not context.network.allows(url):
        raise ImpossibleAction(f"{url[:100]!r} is closed to this task")
    # Only until the page begins to come; the observation waits for the rest, with a limit of its own.
    await context.tab.page.goto(url, wait_until="commit", timeout=GOTO_LIMIT_S * 1000)


async def _go_back(context: BrowserContext) -> None:
    await _go(context, -1)


async def _go_forward(context: BrowserContext) -> None:
    await _go(context, 1)


async def _go(context: BrowserContext, by: int) -> None:
    """One page on in the history, if that is of the task: its first page is what was open before."""
    history = await context.tab.send("Page.getNavigationHistory")
    place = history["currentIndex"] + by
    entries = history["entries"]
    if not 0 <= place < len(entries) or not context.network.allows(entries[place]["url"]):
        raise ImpossibleAction("there is no such page in the history")
    await context.tab.send("Page.navigateToHistoryEntry", {"entryId": entries[place]["id"]})


async def _new_tab(context: BrowserContext) -> None:
    if len(context.tabs) >= MAX_TABS:
        raise ImpossibleAction(f"there are {MAX_TABS} tabs already")
    await context.context.new_page()


async def _tab_close(context: BrowserContext) -> None:
    if len(context.tabs) == 1:
        raise ImpossibleAction("it is the only tab")
    await context.tab.page.close()


async def _tab_focus(context: BrowserContext, index: float) -> None:
    if index != int(index) or not 0 <= index < len(context.tabs):
        raise ImpossibleAction(f"there is no tab {index:g}; there are {len(context.tabs)}, from 0 on")
    context.active = int(index)
    await context.tab.page.bring_to_front()


_HANDS: dict[str, Callable[..., Awaitable[None]]] = {
    "noop": _noop,
    "click": _click,
    "dblclick": _dblclick,
    "hover": _hover,
    "fill": _fill,
    "clear": _clear,
    "focus": _focus,
    "select_option": _select_option,
    "press": _press,
    "drag_and_drop": _drag_and_drop,
    "scroll": _scroll,
    "mouse_move": _mouse_move,
    "mouse_down": _mouse_down,
    "mouse_up": _mouse_up,
    "mouse_click": _mouse_click,
    "mouse_dblclick": _mouse_dblclick,
    "mouse_drag_and_drop": _mouse_drag,
    "keyboard_press": _keyboard_press,
    "keyboard_down": _keyboard_down,
    "keyboard_up": _keyboard_up,
    "keyboard_type": _keyboard_type,
    "keyboard_insert_text": _keyboard_insert_text,
    "goto": _goto,
    "go_back": _go_back,
    "go_forward": _go_forward,
    "new_tab": _new_tab,
    "tab_close": _tab_close,
    "tab_focus": _tab_focus,
}
