"""Readers of the values of published keys: each raises ValueError that says what it takes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from rllm.errors import choices_of

Reader = Callable[[Any], Any]


def whole(least: int | None = None) -> Reader:
    """A whole number; 1e3 is one, 2.5 and true are none."""

    def read(value: Any) -> int:
        read_number = number(value)
        if not read_number.is_integer():
            raise ValueError("write a whole number")
        if least is not None and read_number < least:
            raise ValueError(f"it must be at least {least}")
        return int(read_number)

    return read


def number(value: Any) -> float:
    """A finite number, or the text of one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("write a number")
    try:
        read = float(value)
    except ValueError:
        read = math.nan
    if not math.isfinite(read):
        raise ValueError("write a finite number")
    return read


def switch(value: Any) -> bool:
    """True or false; any other text counts as true for Python, and is refused here."""
    by_text = {"true": True, "false": False}
    if isinstance(value, bool) or str(value).lower() in by_text:
        return by_text[str(value).lower()]
    raise ValueError("write true or false")


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("write a text")
    return value


def pair(value: Any) -> tuple[float, float]:
    """Two numbers in a list."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("write a list of two numbers, such as [0.9,0.999]")
    return number(value[0]), number(value[1])


def one_of(names: Mapping[str, str]) -> Reader:
    """A reader of names that gives their meaning."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError(choices_of(value, names))
        return names[value]

    return read
