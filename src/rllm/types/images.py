"""Images in token rows, and their ids.

    bytes of an image ──sha256──► number (48 bits) ──► patch ids: one for each token that stands for it

A patch id is 2^62 + number · 2^14 + place. It says which image, and which of its tokens, so rows of ids tell
images apart as they tell words apart: prefixes that are equal as ids are equal as what a model reads. No
vocabulary reaches up to them. The bytes are kept once, by hash, outside of the rows.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

PATCH_IDS_FROM = 1 << 62
PLACE_BITS = 14
MAX_PATCHES = 1 << PLACE_BITS
"""Tokens of one image."""
_NUMBER_BITS = 48


@dataclass(frozen=True)
class ImageFile:
    """The bytes of a file, as a message carried them."""

    data: bytes
    media_type: str
    """`image/png`, `image/jpeg`, `image/webp` or `image/gif`."""

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def number(self) -> int:
        """The first 48 bits of its hash."""
        return number_of_hash(self.sha256)


def number_of_hash(sha256: str) -> int:
    return int(sha256[: _NUMBER_BITS // 4], 16)


def patch_ids(number: int, count: int) -> list[int]:
    """Ids of all `count` tokens of an image."""
    if not 0 < count <= MAX_PATCHES:
        raise ValueError(f"An image has {count} tokens; a row can name 1 to {MAX_PATCHES} of one image.")
    first = PATCH_IDS_FROM | number << PLACE_BITS
    return list(range(first, first + count))


def ids_array(ids: Sequence[int]) -> "array[int]":
    """A row of ids in half the room where it shows no image."""
    return array("q" if ids and max(ids) >= PATCH_IDS_FROM else "i", ids)


def image_numbers(ids: Iterable[int]) -> list[int]:
    """Numbers of the images that a row of ids shows, each once, in the order of their first tokens."""
    return list(
        dict.fromkeys((each ^ PATCH_IDS_FROM) >> PLACE_BITS for each in ids if each >= PATCH_IDS_FROM)
    )


def image_runs(ids: Sequence[int] | NDArray[np.int64]) -> list[tuple[int, int]]:
    """(place of the first token, number of tokens) of each image that a row of ids shows, in their order."""
    ids_T = np.asarray(ids, dtype=np.int64)
    is_patch_T = ids_T >= PATCH_IDS_FROM
    is_next_T = np.zeros(len(ids_T) + 1, dtype=np.bool_)
    is_next_T[1:-1] = is_patch_T[1:] & (np.diff(ids_T) == 1) & (ids_T[1:] % MAX_PATCHES > 0)
    firsts_I = np.flatnonzero(is_patch_T & ~is_next_T[:-1])
    ends_I = np.flatnonzero(is_patch_T & ~is_next_T[1:]) + 1
    return list(zip(firsts_I.tolist(), (ends_I - firsts_I).tolist(), strict=True))


def later_of_image(ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """[T] how many tokens of the same image stand behind each token; 0 for words."""
    later_T = np.zeros(len(ids), dtype=np.int64)
    for first, count in image_runs(ids):
        later_T[first : first + count] = np.arange(count)[::-1]
    return later_T
