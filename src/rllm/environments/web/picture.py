"""A screenshot of a page, with the ids of what can be acted on drawn where it is.

    tab ──► PNG ──► frames and numbers of rows ──► data URI, as messages show images

The marks are drawn on the picture and not into the page, which cannot see them.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

from rllm.environments.web.context import Tab
from rllm.errors import MissingExtraError

MARKED = frozenset(
    (
        *("button", "checkbox", "colorpicker", "combobox", "datepicker", "fileinput", "link", "listbox"),
        *("menuitem", "option", "radio", "searchbox", "slider", "spinbutton", "switch", "tab", "textbox"),
    )
)
"""Roles that get a number."""
_COLOURS = ("#d0021b", "#0b6b2f", "#0a58ca", "#8e24aa", "#b35900")
_FONT_SIZE = 11


async def screenshot(tab: Tab, rows: Sequence[Sequence[Any]], *, clip: Sequence[int], has_marks: bool) -> str:
    """The view of the tab, as `data:image/png;base64,…`.

    `rows` are those of `rllm.observe`; `clip` is (x, y, width, height) in pixels, empty for all of the view.
    Raises BrowserError where the page gives no picture.
    """
    picture = await tab.picture(clip)
    corner = (clip[0], clip[1]) if clip else (0, 0)
    return f"data:image/png;base64,{_with_marks(picture, rows, corner) if has_marks else picture}"


def _with_marks(picture: str, rows: Sequence[Sequence[Any]], corner: tuple[int, int]) -> str:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise MissingExtraError("pillow", "web") from error
    with Image.open(io.BytesIO(base64.b64decode(picture))) as screen:
        image = screen.convert("RGB")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(_FONT_SIZE)
    for _, number, role, _, _, left, top, width, height in rows:
        x, y = left - corner[0], top - corner[1]
        if role not in MARKED or x >= image.width or y >= image.height or x + width <= 0 or y + height <= 0:
            continue
        colour = _COLOURS[number % len(_COLOURS)]
        draw.rectangle((x, y, x + width - 1, y + height - 1), outline=colour)
        label = draw.textbbox((max(x, 0) + 1, max(y, 0)), str(number), font=font)
        draw.rectangle(label, fill=colour)
        draw.text(label[:2], str(number), fill="white", font=font, anchor="lt")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()
