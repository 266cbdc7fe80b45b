"""Images of messages ──► `ImageFile` values within limits ──► ids in place of the marks of a chat template.

The forms of an image in a message are those of `rllm.types.content`. Addresses on the network are not
fetched here: a message could then make this machine call any other. Where a user has named hosts,
`rllm.models.vision.fetch` has put the images in their place before. What a message may carry is limited
before anything is decoded.
"""

import base64
import binascii
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rllm.errors import ConfigError
from rllm.types.content import is_image_part, source_of
from rllm.types.images import ImageFile
from rllm.types.messages import Message

MAX_BYTES = 20 << 20
"""The size of one image, as a file."""
MAX_PER_MESSAGE = 64
MAX_REQUEST_BYTES = 128 << 20
"""The size of all images of one request to a server, as base64 text."""
MAX_KEPT_BYTES = 2 << 30
"""The size of all images that a process keeps; the oldest go first."""
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


class ImageReader(Protocol):
    """From an image to the ids that stand for it in a vision model."""

    @property
    def mark_id(self) -> int:
        """The token that the chat template prints where an image stands."""
        ...

    @property
    def patch_mark_id(self) -> int:
        """The token that stands for each token of an image in what the model's own processor makes."""
        ...

    def with_frames(self, text: str) -> str:
        """A text that the chat template printed, with the words that the processor has around each image."""
        ...

    def ids(self, image: ImageFile) -> Sequence[int]:
        """The ids that take the place of the mark: patch ids, and what tokens the model has around them.

        Raises ConfigError for an image that cannot be read or is too large.
        """
        ...


class ImageTable:
    """Images of this process, each kept once. May be used from several threads."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[int, ImageFile] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def add(self, image: ImageFile) -> None:
        """Raises ConfigError where another image has the same number, which happens to one in 10^8 pairs of
        ten thousand, unless somebody looks for such a pair."""
        with self._lock:
            same_number = self._images.get(image.number)
            if same_number is not None:
                if same_number.data != image.data:
                    raise ConfigError(
                        f"Two images have hashes that begin alike, {same_number.sha256} and {image.sha256}; "
                        "rows cannot tell them apart. Save one of them anew."
                    )
                self._images.move_to_end(image.number)
                return
            self._images[image.number] = image
            self._num_bytes += len(image.data)
            while self._num_bytes > self._max_bytes and len(self._images) > 1:
                _, oldest = self._images.popitem(last=False)
                self._num_bytes -= len(oldest.data)

    def get(self, number: int) -> ImageFile:
        """Raises ConfigError for one that is not there (any more)."""
        with self._lock:
            image = self._images.get(number)
        if image is None:
            raise ConfigError(
                f"A row shows the image whose hash begins with {number:012x}, which is not in memory; "
                f"{self._max_bytes:,} bytes of images are kept, so use fewer or smaller ones at a time."
            )
        return image

    def __contains__(self, number: int) -> bool:
        return number in self._images


IMAGES = ImageTable()
"""By content, so one for all models of the process."""


def images_of(message: Message) -> list[ImageFile]:
    """The images of one message, in order. Raises ConfigError naming the value and the limit."""
    content = message.get("content")
    if not isinstance(content, list):
        return []
    parts = [part for part in content if is_image_part(part)]
    if len(parts) > MAX_PER_MESSAGE:
        raise ConfigError(f"A message has {len(parts)} images; at most {MAX_PER_MESSAGE} are read.")
    return [image_of(_url_of(part)) for part in parts]


def keep_images(messages: Sequence[Message]) -> None:
    """Have the images of these messages in memory: rows of their ids are about to be computed."""
    for message in messages:
        for image in images_of(message):
            IMAGES.add(image)


def with_patches(ids: Sequence[int], messages: Sequence[Message], reader: ImageReader) -> list[int]:
    """`ids` of a rendered text, with the ids of each image in place of its mark.

    Raises ConfigError where there are more or fewer marks than images: text may not pass for an image.
    """
    images = [image for message in messages for image in images_of(message)]
    num_marks = list(ids).count(reader.mark_id)
    if reader.patch_mark_id != reader.mark_id and reader.patch_mark_id in ids:
        raise ConfigError(
            f"The conversation's text has the token {reader.patch_mark_id}, which stands for a part of an "
            "image; take it out of the text."
        )
    if num_marks != len(images):
        raise ConfigError(
            f"The conversation has {len(images)} images and its text {num_marks} marks that stand for one; "
            "take the marks out of the text, or use a chat template that prints one for each image."
        )
    for image in images:
        IMAGES.add(image)
    left = iter(images)
    row: list[int] = []
    for each in ids:
        if each == reader.mark_id:
            row.extend(reader.ids(next(left)))
        else:
            row.append(each)
    return row


def as_data_url(image: ImageFile) -> str:
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


def image_of(url: str) -> ImageFile:
    """The image of a data URL. Raises ConfigError naming the value and the limit."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:"):
        raise ConfigError(
            f"An image is at {url:.80}, and addresses are not fetched: a message could then make this "
            "machine call any other. Send the image itself, as data:image/png;base64,…, or have a server and "
            "rows fetch from hosts that you name (--allowed-media-domains, `data.allowed_media_domains`)."
        )
    media_type, *options = head.removeprefix("data:").split(";")
    if not comma or "base64" not in options:
        raise ConfigError(f"An image begins with {head:.80}; it must be data:image/TYPE;base64,….")
    # Before anything is decoded: base64 has four characters for three bytes.
    if len(body) > MAX_BYTES * 4 // 3 + 4:
        raise ConfigError(
            f"An image of type {media_type:.40} has about {len(body) * 3 // 4:,} bytes; at most "
            f"{MAX_BYTES:,} are read. Scale it down."
        )
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"An image of type {media_type:.40} is no base64: {error}.") from error
    is_of_type = next((kind for magic, kind in _MAGIC if data.startswith(magic)), "")
    if not is_of_type or is_of_type != media_type.lower().replace("image/jpg", "image/jpeg"):
        names = ", ".join(kind for _, kind in _MAGIC)
        raise ConfigError(
            f"An image says that it is {media_type[:40] or 'of no type'}, but its bytes are "
            f"{is_of_type or f'none of {names}'}; send it under its own type."
        )
    return ImageFile(data, is_of_type)


def _url_of(part: Mapping[str, Any]) -> str:
    url = source_of(part)
    if not url:
        raise ConfigError(
            f"A message has a part of type {part['type']} with the keys {', '.join(sorted(map(str, part)))}; "
            "an image is written as image_url with a url, as image with a source, or as input_image with an "
            "image_url."
        )
    return url
