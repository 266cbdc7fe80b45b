"""LiveCodeBench's private tests: base64 of zlib of a pickle of JSON text. Unpickled without running anything.

A pickle can name any function and call it. Ours can name none: strings, numbers, lists and dicts come out,
and whatever asks for more is refused.
"""

import base64
import binascii
import functools
import io
import pickle
import zlib
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.long_integers import json_value

MAX_BYTES = 512 * 2**20
"""The size of one problem's tests, unpacked; the largest published ones have some dozen MiB."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def private_tests(field: Any) -> list[dict[str, Any]]:
    """The tests of `private_test_cases`: JSON, or packed. Raises RewardError for anything else."""
    if field is None or field == "":
        return []
    if not isinstance(field, str | list):
        raise RewardError(f"The task's `private_test_cases` are a {type(field).__name__}; they must be text.")
    tests = field if isinstance(field, list) else _unpack(field)
    if not isinstance(tests, list) or not all(isinstance(each, dict) for each in tests):
        raise RewardError(
            f"The task's `private_test_cases` hold {tests!r:.200}; they must be a list of tests."
        )
    return tests


@functools.lru_cache(maxsize=64)  # a group of attempts is at one task
def _unpack(field: str) -> Any:
    try:
        if field.lstrip().startswith("["):
            return json_value(field)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(field, validate=True), MAX_BYTES)
        if not unpacker.eof:
            raise ValueError(f"more than {MAX_BYTES} bytes, or cut off")
        value = _PlainUnpickler(io.BytesIO(data)).load()
        return json_value(value) if isinstance(value, str) else value
    except (
        ValueError,
        binascii.Error,
        zlib.error,
        pickle.UnpicklingError,
        EOFError,
        RecursionError,
    ) as error:
        raise RewardError(f"The task's `private_test_cases` cannot be read: {error}") from error
    except (IndexError, KeyError, AttributeError, TypeError, MemoryError) as error:  # of a broken pickle
        raise RewardError(f"The task's `private_test_cases` are a broken pickle: {error!r}") from error
