"""Configurations as trees of mappings, and as whole keys such as `data.max_prompt_length`."""

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """(whole key, value) of everything that is no mapping."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of these whole keys."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree
