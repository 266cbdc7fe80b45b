"""A page as text: one line an element, with the id that actions take.

    page.js: rows ──► lines, the new ones marked ──► cut to the budget
                      ▲
    tabs, focus, error of the last action, what else happened

    Error: it is covered by a dialog
    Tabs: 0 Shop, 1* Basket
    [3] textbox "Name" value="Ada" focused
    * [7] button "Send"

What a page says stands in quotes and never begins a line, so that it cannot pass for anything else.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError

CHARS_PER_TOKEN = 3
"""Characters per token of such lines, a low figure: a budget is kept rather than used up."""
MAX_NODES = 3000
"""Rows that a page is asked for."""
MAX_WALKED = 30_000
"""Elements that are looked at."""
SHOWS = ("text", "picture", "both")
_POINTED = (
    "canvas",
    "circle",
    "ellipse",
    "line",
    "path",
    "polygon",
    "polyline",
    "rect",
    "svgtext",
    "box",
    "image",
)
"""Roles that are told with their place, because they have no name or are clicked by it."""
_HIDDEN_WHEN_FALSE = ("checked", "selected", "pressed", "disabled", "required", "readonly")


@dataclass(kw_only=True, slots=True, frozen=True)
class PageView:
    """The part of a page that an observation shows."""

    token_budget: int = 2000
    """The token budget of the tree; the rest is left out, and counted."""
    exclude: str = ""
    """CSS selector of what is not shown."""
    with_places: bool = False
    """Whether every line ends with where the element is, for actions of the mouse."""
    marks_changes: bool = True
    """Whether lines that are new since the last observation begin with a star."""
    viewport_only: bool = True
    with_address: bool = True
    """Whether title, address and tabs are told."""
    shows: str = "text"
    """`text`: the tree; `picture`: a screenshot instead; `both`. Goal, tabs and errors are text in all."""
    has_numbers: bool = True
    """Whether a screenshot has the ids of elements drawn on it."""
    clip: tuple[int, ...] = ()
    """(x, y, width, height) of the screenshot in pixels; empty for the whole view."""

    def __post_init__(self) -> None:
        if self.shows not in SHOWS:
            raise ConfigError(f"`shows` is {self.shows!r}; a page is shown as {', '.join(SHOWS)}.")
        if self.clip and (len(self.clip) != 4 or min(self.clip) < 0 or 0 in self.clip[2:]):
            raise ConfigError(f"`clip` is {self.clip}; give x, y, width and height in pixels.")


@dataclass(kw_only=True, slots=True, frozen=True)
class Observation:
    text: str
    header: str
    """The lines of the text before the tree."""
    lines: tuple[str, ...]
    """All lines of the tree, without marks, to compare the next ones with."""
    num_left_out: int


def observe_options(view: PageView, *, first_id: int, quiet_ms: int, limit_ms: int) -> dict[str, Any]:
    """Options of `rllm.observe` in page.js."""
    return {
        "excluded": view.exclude,
        "maxNodes": MAX_NODES,
        "maxWalked": MAX_WALKED,
        "nameLimit": 200,
        "viewportOnly": view.viewport_only,
        "firstId": first_id,
        "quietMs": quiet_ms,
        "limitMs": limit_ms,
    }


def describe(
    page: Mapping[str, Any],
    view: PageView,
    *,
    before: Collection[str] | None = None,
    header: Sequence[str] = (),
) -> Observation:
    """The page that `rllm.observe` answered. `before`: lines of the observation before this one."""
    lines = tuple(_line(row, page["focused"], view) for row in page["rows"])
    old_lines = None if before is None or not view.marks_changes else set(before)
    texts: list[str] = []
    room = view.token_budget * CHARS_PER_TOKEN
    for row, line in zip(page["rows"], lines, strict=True):
        mark = "* " if old_lines is not None and line not in old_lines else ""
        text = f"{'  ' * min(row[0], 8)}{mark}{line}"
        room -= len(text) + 1
        if room < 0:
            break
        texts.append(text)
    left_out = len(lines) - len(texts)
    foot = [f"({left_out} more lines are left out)"] if left_out else []
    if page["isCut"]:
        foot.append("(the page is larger than what is looked at)")
    return Observation(
        text="\n".join([*header, *texts, *foot]) if texts or header else "(nothing is visible)",
        header="\n".join(header),
        lines=lines,
        num_left_out=left_out,
    )


def in_quotes(text: str) -> str:
    """A text of a page, in quotes on one line."""
    return json.dumps(text, ensure_ascii=False)


def _line(row: Sequence[Any], focus_id: int | None, view: PageView) -> str:
    _, number, role, name, states, x, y, width, height = row
    parts = [f"[{number}] {role}"]
    if name:
        parts.append(in_quotes(name))
    for state, value in states.items():
        if value is True:
            parts.append(state)
        elif value is False:
            if state not in _HIDDEN_WHEN_FALSE:
                parts.append(f"{state}=false")
        elif value or state == "value":
            parts.append(f"{state}={in_quotes(value)}")
    if number == focus_id:
        parts.append("focused")
    if view.with_places or role in _POINTED:
        parts.append(f"at ({x + width // 2}, {y + height // 2}) size {width}x{height}")
    return " ".join(parts)
