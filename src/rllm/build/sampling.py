"""`--sampling temperature=0.6 --sampling max_tokens=2048` ──► SamplingParams."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rllm.errors import ConfigError
from rllm.types.messages import SamplingParams

_READ: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_tokens": int,
    "stop": lambda text: tuple(part for part in text.split("|") if part),
}
"""The sampling parameters that can be set, each with the reader of its text; several texts of `stop` have |
between them."""


def sampling_of(assignments: Mapping[str, str], base: SamplingParams = SamplingParams()) -> SamplingParams:
    """`base` with what is assigned. Raises ConfigError naming the field and the value."""
    changes: dict[str, Any] = {}
    for name, text in assignments.items():
        if name not in _READ:
            nearest = difflib.get_close_matches(name, _READ, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(_READ)}."
            raise ConfigError(f"There is no sampling field `{name}`; {hint}")
        try:
            changes[name] = _READ[name](text)
        except ValueError as error:
            raise ConfigError(f"`{name}` is {text!r}; it must be a number.") from error
    try:
        return replace(base, **changes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def assignments_of(words: tuple[str, ...]) -> dict[str, str]:
    """`k=v` words by name. Raises ConfigError for a word without `=`, and for a name that is said twice."""
    assignments: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise ConfigError(f"`{word}` says no value; write it as temperature=0.6.")
        if name in assignments:
            raise ConfigError(f"`{name}` is said twice: {assignments[name]} and {value}.")
        assignments[name] = value
    return assignments
