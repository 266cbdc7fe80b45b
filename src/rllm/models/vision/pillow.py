"""Bytes of an image file ──Pillow──► pixels, within limits that are checked before anything is decoded."""

import importlib
import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rllm.errors import ConfigError, MissingExtraError
from rllm.types.images import ImageFile

MAX_PIXELS = 40_000_000
"""The pixels of one image: twice those of a camera's. Decoded, they have 120 MB."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def require_pillow() -> None:
    """Raises MissingExtraError where images cannot be read."""
    try:
        importlib.import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise MissingExtraError("pillow", "vision") from error


def pillow_image(image: ImageFile) -> Any:
    """A `PIL.Image.Image` in RGB, turned as its camera says it should be.

    Raises ConfigError naming the value and the limit for one that is too large, broken or moving.
    """
    require_pillow()
    import PIL.ImageOps

    with _file_within_limits(image) as file:
        return PIL.ImageOps.exif_transpose(file).convert("RGB")


def opaque_image(image: ImageFile) -> ImageFile:
    """The image itself; of a transparent one, the colours that `pillow_image` has of it, as PNG.

    Programs that open the file lay it on a background of their own choice, vLLM on white, and so see other
    pixels than the processor of a model, which leaves transparency out. Raises ConfigError as `pillow_image`.
    """
    with _file_within_limits(image) as file:
        if not file.has_transparency_data:
            return image
    buffer = io.BytesIO()
    pillow_image(image).save(buffer, "PNG")
    return ImageFile(buffer.getvalue(), "image/png")


def require_decodable(image: ImageFile) -> None:
    """Raises ConfigError as `pillow_image` does, for what the head of the file says; nothing is decoded."""
    require_pillow()
    with _file_within_limits(image):
        pass


@contextmanager
def _file_within_limits(image: ImageFile) -> Iterator[Any]:
    """The file, of which only the head was read, within the limits."""
    import PIL.Image

    what = f"An image of {len(image.data):,} bytes ({image.media_type})"
    bombs = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)
    try:
        with PIL.Image.open(io.BytesIO(image.data), formats=_FORMATS) as file:
            width, height = file.size
            if width * height > MAX_PIXELS:
                raise ConfigError(
                    f"{what} has {width} x {height} pixels; at most {MAX_PIXELS:,} are read. Scale it down."
                )
            if (num_frames := getattr(file, "n_frames", 1)) != 1:
                raise ConfigError(f"{what} has {num_frames} frames; send the one that is meant.")
            if file.mode.startswith("I"):
                raise ConfigError(
                    f"{what} has 16 bits of grey a pixel, of which every program that reads 8 shows nearly "
                    "all as white; save it with 8."
                )
            yield file
    except bombs as error:
        raise ConfigError(f"{what} is far above the {MAX_PIXELS:,} pixels that are read: {error}") from error
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error) as error:
        raise ConfigError(f"{what} cannot be decoded: {error}") from error


def probe_image() -> ImageFile:
    """A small picture in which no two places are alike."""
    import PIL.Image

    picture = PIL.Image.merge(
        "RGB", [PIL.Image.linear_gradient("L").rotate(angle).resize((60, 44)) for angle in (0, 90, 45)]
    )
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return ImageFile(buffer.getvalue(), "image/png")
