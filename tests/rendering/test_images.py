import base64
import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image as Pictures

from rllm.errors import ConfigError
from rllm.models.vision.pillow import pillow_image
from rllm.rendering.images import (
    IMAGES,
    MAX_BYTES,
    MAX_PER_MESSAGE,
    ImageTable,
    as_data_url,
    images_of,
    keep_images,
    with_patches,
)
from rllm.rendering.template import as_template_sees
from rllm.types.images import MAX_PATCHES, PATCH_IDS_FROM, ImageFile, image_numbers, patch_ids


def _png(size: tuple[int, int] = (3, 2), **options: Any) -> bytes:
    buffer = io.BytesIO()
    Pictures.new("RGB", size, (200, 10, 30)).save(buffer, "PNG", **options)
    return buffer.getvalue()


def _grey_of_16_bits() -> bytes:
    buffer = io.BytesIO()
    Pictures.new("I;16", (3, 2), 30_000).save(buffer, "PNG")
    return buffer.getvalue()


def _message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_image_is_the_same_however_a_protocol_writes_it() -> None:
    data = _png()
    body = base64.b64encode(data).decode()
    parts = [
        _part(_url(data)),
        {"type": "image_url", "image_url": _url(data)},
        {"type": "input_image", "image_url": _url(data), "detail": "low"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": body}},
    ]
    images = images_of(_message({"type": "text", "text": "x"}, *parts))
    assert images == [ImageFile(data, "image/png")] * 4
    assert images_of({"role": "user", "content": "text"}) == []


def test_what_is_no_image_within_the_limits_is_refused_with_the_value(subtests: pytest.Subtests) -> None:
    for part, reason in [
        (_part("http://169.254.169.254/latest/meta-data"), "http://169.254.169.254/.* not fetched"),
        (_part("file:///etc/passwd"), "file:///etc/passwd"),
        ({"type": "image", "source": {"type": "url", "url": "https://x.test/a.png"}}, "not fetched"),
        ({"type": "image", "source": {"type": "file", "file_id": "file_1"}}, "type image with the keys"),
        (_part(7), "type image_url with the keys"),
        (_part("data:image/png,abc"), "must be data:image/TYPE;base64"),
        (_part("data:image/png;base64,%%%"), "is no base64"),
        (_part(_url(b"<svg/>", "image/svg+xml")), r"image/svg.xml.*image/png"),
        (_part(_url(b"\xff\xd8\xff" + bytes(9))), r"image/png.*image/jpeg"),
        (_part(_url(b"", "")), "says that it is of no type"),
        (_part("data:image/png;base64," + "A" * (MAX_BYTES * 4 // 3 + 8)), f"at most {MAX_BYTES:,} are read"),
    ]:
        with subtests.test(part=part, reason=reason):
            with pytest.raises(ConfigError, match=reason) as error:
                images_of(_message(part))
            assert len(str(error.value)) < 400, "an error does not repeat the image"


def test_an_image_of_as_many_bytes_as_are_read_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.rendering.images.MAX_BYTES", len(_png()))
    assert images_of(_message(_part(_url(_png())))) == [ImageFile(_png(), "image/png")]


def test_more_images_than_a_message_may_have_are_refused_before_any_is_read() -> None:
    parts = [_part("http://never.read")] * (MAX_PER_MESSAGE + 1)
    with pytest.raises(ConfigError, match=f"{MAX_PER_MESSAGE + 1} images; .*{MAX_PER_MESSAGE}"):
        images_of(_message(*parts))


def _bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(99)))
        + chunk(b"IEND", b"")
    )


def test_bombs_and_broken_files_are_refused_before_they_are_decoded(subtests: pytest.Subtests) -> None:
    for data, reason in [
        (_bomb(8_000, 8_000), "has 8000 x 8000 pixels; at most 40,000,000"),
        (_bomb(10_000, 10_000), "far above the 40,000,000 pixels"),
        (_bomb(60_000, 60_000), "far above the 40,000,000 pixels"),
        (_png()[:40], "cannot be decoded"),
        (_bomb(30, 30), "cannot be decoded"),
        (b"\x89PNG\r\n\x1a\n", "cannot be decoded"),
        (_grey_of_16_bits(), "16 bits of grey"),
    ]:
        with subtests.test(data=data, reason=reason), pytest.raises(ConfigError, match=reason):
            pillow_image(ImageFile(data, "image/png"))


def test_a_moving_image_is_refused_and_a_transparent_one_is_read() -> None:
    frames = [Pictures.new("RGB", (2, 2), color) for color in ("red", "blue")]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(ConfigError, match="has 2 frames"):
        pillow_image(ImageFile(buffer.getvalue(), "image/gif"))
    buffer = io.BytesIO()
    Pictures.new("RGBA", (2, 3), (1, 2, 3, 4)).save(buffer, "PNG")
    pixels = pillow_image(ImageFile(buffer.getvalue(), "image/png"))
    assert (pixels.mode, pixels.size, pixels.getpixel((0, 0))) == ("RGB", (2, 3), (1, 2, 3))


def test_ids_of_patches_name_their_image_and_their_place() -> None:
    image = ImageFile(_png(), "image/png")
    ids = patch_ids(image.number, 3)
    assert image.number == int(image.sha256[:12], 16)
    assert image_numbers([5, *ids, 7, *patch_ids(9, 2), *ids]) == [image.number, 9]
    assert [each - ids[0] for each in ids] == [0, 1, 2]
    assert PATCH_IDS_FROM <= min(ids) <= max(patch_ids((1 << 48) - 1, MAX_PATCHES)) < 1 << 63
    with pytest.raises(ValueError, match=f"has {MAX_PATCHES + 1} tokens"):
        patch_ids(1, MAX_PATCHES + 1)


def test_a_table_keeps_each_image_once_and_forgets_the_oldest() -> None:
    table = ImageTable(max_bytes=20)
    images = [ImageFile(bytes([number]) * 10, "image/png") for number in range(3)]
    for image in (*images[:2], images[0], images[2]):
        table.add(image)
    assert [image.number in table for image in images] == [True, False, True]
    assert table.get(images[0].number) is images[0]
    with pytest.raises(ConfigError, match=f"{images[1].number:012x}, .*memory"):
        table.get(images[1].number)


def test_an_image_that_is_larger_than_the_table_is_kept_alone() -> None:
    table = ImageTable(max_bytes=5)
    images = [ImageFile(bytes([number]) * 10, "image/png") for number in range(2)]
    for image in images:
        table.add(image)
        assert table.get(image.number) is image
    assert images[0].number not in table


def test_two_images_whose_hashes_begin_alike_are_never_taken_for_each_other() -> None:
    first, second = (ImageFile(data, "image/png") for data in (b"one", b"two"))
    second.__dict__["sha256"] = first.sha256[:12] + "0" * 52
    table = ImageTable()
    table.add(first)
    with pytest.raises(ConfigError, match="alike"):
        table.add(second)


class _Reader:
    """A mark becomes a begin token, one id for each byte of the image, and an end token."""

    mark_id = 7

    def __init__(self, patch_mark_id: int = mark_id) -> None:
        self.patch_mark_id = patch_mark_id

    def with_frames(self, text: str) -> str:
        return text

    def ids(self, image: ImageFile) -> list[int]:
        return [1, *patch_ids(image.number, len(image.data) % 5 + 1), 2]


def test_the_ids_of_each_image_stand_where_its_mark_stood_and_the_image_is_kept() -> None:
    images = [ImageFile(_png((size, 2)), "image/png") for size in (4, 6)]
    messages = [_message({"type": "text", "text": "x"}, _part(as_data_url(image))) for image in images]
    reader = _Reader()
    first, second = (reader.ids(image) for image in images)
    assert with_patches([5, 7, 6, 7, 8], messages, reader) == [5, *first, 6, *second, 8]
    assert [IMAGES.get(image.number) for image in images] == images
    assert with_patches([5, 6], [], reader) == [5, 6]
    of_two_marks = _Reader(patch_mark_id=9)
    assert with_patches([5, 7, 6, 7, 8], messages, of_two_marks) == [5, *first, 6, *second, 8]
    with pytest.raises(ConfigError, match="token 9"):
        with_patches([5, 7, 9, 7], messages, of_two_marks)
    for ids in ([5, 7], [7, 7, 7]):
        with pytest.raises(ConfigError, match=f"2 images .*{ids.count(7)} marks"):
            with_patches(ids, messages, reader)


def test_a_template_sees_a_mark_for_an_image_beside_text_and_text_where_there_is_no_image() -> None:
    text = {"type": "text", "text": "x"}
    how = {"short_ids": False, "text_arguments": False, "takes_images": True}
    beside = as_template_sees(_message(text, _part(_url(_png()))), **how)
    assert beside["content"] == [text, {"type": "image"}]
    assert as_template_sees(_message(text), **how)["content"] == "x"


def test_images_of_rows_that_are_about_to_be_computed_are_in_memory() -> None:
    image = ImageFile(_png((9, 9)), "image/png")
    assert image.number not in IMAGES
    keep_images([_message(_part(as_data_url(image)))])
    assert IMAGES.get(image.number) == image
