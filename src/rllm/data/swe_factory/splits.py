"""Splits that share no function: who trained on a bug in `f` is not measured on another bug in `f`.

tasks ── those of one function, or of copies of it, belong together ──► groups ──► train, validation, test
"""

import hashlib
from collections.abc import Mapping, Sequence

SPLITS = ("train", "validation", "test")
SHARES = {"test": 0.2, "validation": 0.15}
"""The least shares of all tasks, as far as there are groups; the rest is to train on."""


def splits_of(functions: Mapping[str, Sequence[str]], seed: int) -> dict[str, str]:
    """Task -> split, from task -> the functions that it touches (any names that are equal for copies)."""
    groups = _groups(functions)
    ordered_groups = sorted(groups, key=lambda each: _hash(seed, min(each)))
    splits: dict[str, str] = {}
    left = list(ordered_groups)
    for place, (split, share) in enumerate(SHARES.items()):
        count, still_empty = 0, len(SHARES) - place  # a group each for those behind it, if there are as many
        while count < share * len(functions) and len(left) > (still_empty if count else 1):
            group = left.pop()
            count += len(group)
            splits.update(dict.fromkeys(group, split))
    for group in left:
        splits.update(dict.fromkeys(group, "train"))
    return splits


def _groups(functions: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Tasks that are connected by functions (union-find)."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        parent.setdefault(name, name)
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for task, names in functions.items():
        for name in names:
            parent[root(f"task {task}")] = root(f"function {name}")
    groups: dict[str, list[str]] = {}
    for task in sorted(functions):
        groups.setdefault(root(f"task {task}"), []).append(task)
    return list(groups.values())


def _hash(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed}\0{name}".encode()).hexdigest()
