"""Files that another machine may have written: regular ones alone, and no larger than an honest one is."""

import os
import stat
from pathlib import Path

from rllm.errors import ConfigError

MOST_JSON_BYTES = 64 << 20
"""The size of a file that holds one JSON value, such as a configuration or a summary."""


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises ConfigError for a device, a pipe or a directory, and for more than `most_bytes`; OSError as `open`
    does.
    """
    # Without O_NONBLOCK a pipe that has no writer would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is no regular file; restore it, or name another directory.")
        if status.st_size > most_bytes:
            raise ConfigError(
                f"{path} has {status.st_size:,} bytes, and at most {most_bytes:,} are read; restore it, or "
                "name another directory."
            )
        return file.read(most_bytes)
