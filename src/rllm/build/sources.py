"""Evidence that a score came from the same code: hashes of source."""

import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rllm.eval.plan import hash_of


def source_hash(target: Any, arguments: Mapping[str, Any] | None = None) -> str:
    """Hash of the file that a class or function is written in, because prompts and helpers stand beside it,
    with what it is given; of its name where there is no source.
    """
    source_object = inspect.unwrap(target) if callable(target) else target
    name = getattr(source_object, "__qualname__", type(source_object).__qualname__)
    try:
        source = inspect.getsource(inspect.getmodule(source_object) or source_object)
    except (OSError, TypeError):
        source = ""
    return hash_of({"name": name, "source": source, "arguments": dict(arguments or {})})


def version() -> str:
    """Version of rLLM."""
    try:
        return metadata.version("rllm")
    except metadata.PackageNotFoundError:
        return "0+checkout"
