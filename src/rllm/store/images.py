"""Images of episodes, each once in a store: the text of an episode refers to them by hash.

    payload with "data:image/png;base64,…"  ──without_images──► "rllm-image:HASH:image/png" + {HASH: bytes}
                                            ◄──with_images────

Only an episode that is linked to images has references, so a text that happens to look like one stays as it
is. What base64 would not give back to the letter stays in the text.
"""

import base64
import binascii
import hashlib
import re
import sqlite3
from collections.abc import Mapping

_REFERENCE = "rllm-image:"
_DATA_URL = re.compile(r'"data:(image/[a-z.+-]+);base64,([A-Za-z0-9+/]{64,}={0,2})"')
_REFERENCE_URL = re.compile(r'"rllm-image:([0-9a-f]{64}):(image/[a-z.+-]+)"')


def without_images(text: str, images: dict[str, bytes]) -> str:
    """JSON `text` with a reference for each image, which is added to `images` by its hash."""
    if "data:image/" not in text or _REFERENCE in text:
        return text

    def refer(match: re.Match[str]) -> str:
        media_type, body = match.groups()
        try:
            data = base64.b64decode(body)
        except binascii.Error:
            return match[0]
        if base64.b64encode(data).decode() != body:
            return match[0]
        sha256 = hashlib.sha256(data).hexdigest()
        images[sha256] = data
        return f'"{_REFERENCE}{sha256}:{media_type}"'

    return _DATA_URL.sub(refer, text)


def with_images(text: str, images: Mapping[str, bytes]) -> str:
    """The text before `without_images`. Raises sqlite3.DatabaseError for an image that is not there."""

    def write(match: re.Match[str]) -> str:
        sha256, media_type = match.groups()
        if sha256 not in images:
            error = sqlite3.DatabaseError(f"an episode refers to image {sha256}, which is not there")
            error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise error
        return f'"data:{media_type};base64,{base64.b64encode(images[sha256]).decode()}"'

    return _REFERENCE_URL.sub(write, text)


def save_images(connection: sqlite3.Connection, images_of: Mapping[int, Mapping[str, bytes]]) -> None:
    """Keep the images of episodes, by row id."""
    for row_id, images in images_of.items():
        connection.executemany("INSERT OR IGNORE INTO images (sha256, data) VALUES (?, ?)", images.items())
        connection.executemany(
            "INSERT INTO episode_images (episode, sha256) VALUES (?, ?)", ((row_id, each) for each in images)
        )


def load_images(connection: sqlite3.Connection, row_id: int) -> dict[str, bytes]:
    """Those of an episode, by hash."""
    return dict(
        connection.execute(
            "SELECT images.sha256, data FROM images JOIN episode_images USING (sha256) WHERE episode = ?",
            (row_id,),
        )
    )


def forget_unused_images(connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM images WHERE sha256 NOT IN (SELECT sha256 FROM episode_images)")
