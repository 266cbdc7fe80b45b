"""Small pictures that worlds draw, and the messages that show them.

    shapes by name, places in pixels ──► Canvas ──► PNG ──► {"role": "user", "content": [image, text]}

What a picture says never lies on a grid of patches: scale, place and colours are drawn for each instance.
"""

import base64
import io
from typing import Any

import numpy as np

from rllm.errors import MissingExtraError
from rllm.types.messages import Message

SIDE = 48
"""Pixels of a picture, as `builtin:tiny-vl` reads them."""
SHAPES = ("circle", "diamond", "square", "plus", "cross", "ring")
Colour = tuple[int, int, int]


class Canvas:
    """A square of one colour to draw on. Raises MissingExtraError where pillow is not installed."""

    def __init__(self, background: Colour, side: int = SIDE) -> None:
        try:
            from PIL import Image, ImageDraw
        except ImportError as error:
            raise MissingExtraError("pillow", "vision") from error
        self._image = Image.new("RGB", (side, side), background)
        self._draw = ImageDraw.Draw(self._image)

    def box(self, left: float, top: float, width: float, height: float, colour: Colour) -> None:
        """A filled rectangle of whole pixels."""
        x, y = round(left), round(top)
        self._draw.rectangle((x, y, x + round(width) - 1, y + round(height) - 1), fill=colour)

    def line(self, points: list[tuple[float, float]], colour: Colour, width: int = 2) -> None:
        """Straight pieces from point to point, (x, y)."""
        self._draw.line(points, fill=colour, width=width)

    def shape(self, kind: str, centre: tuple[float, float], radius: float, colour: Colour) -> None:
        """One of SHAPES around (x, y)."""
        (x, y), r, draw = centre, radius, self._draw
        around = (x - r, y - r, x + r, y + r)
        match kind:
            case "circle":
                draw.ellipse(around, fill=colour)
            case "ring":
                draw.ellipse(around, outline=colour, width=max(2, round(r / 2)))
            case "diamond":
                draw.polygon([(x, y - r), (x + r, y), (x, y + r), (x - r, y)], fill=colour)
            case "square":
                r *= 0.8
                draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
            case "plus":
                draw.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=colour)
                draw.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=colour)
            case "cross":
                r *= 0.8
                width = max(2, round(r * 0.7))
                draw.line((x - r, y - r, x + r, y + r), fill=colour, width=width)
                draw.line((x - r, y + r, x + r, y - r), fill=colour, width=width)
            case _:
                raise ValueError(f"There is no shape {kind!r}; there are {', '.join(SHAPES)}.")

    def data_url(self) -> str:
        """The picture as PNG."""
        file = io.BytesIO()
        self._image.save(file, "PNG", compress_level=1)
        return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def colour_between(rng: np.random.Generator, low: Colour, high: Colour) -> Colour:
    """Each channel drawn evenly, both ends included."""
    red, green, blue = (int(each) for each in rng.integers(low, np.array(high) + 1))
    return red, green, blue


def showing(url: str, text: str = "") -> list[Message]:
    """The observation that shows an image, and says `text` under it."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}]
    if text:
        content.append({"type": "text", "text": text})
    return [{"role": "user", "content": content}]
