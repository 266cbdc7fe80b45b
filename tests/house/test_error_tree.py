"""The tree drawn at the top of `rllm.errors` and its classes are the same tree."""

import inspect
import re

import rllm.errors

BRANCH = re.compile(r"^ {4}(?P<indent>[│ ]*)(?P<fork>[├└]── )?(?P<name>[A-Z]\w*)")


def drawn_parents(picture: str) -> dict[str, str]:
    """Class to the class above it, as the picture draws them."""
    parents: dict[str, str] = {}
    open_branch: list[str] = []
    for line in picture.splitlines():
        if match := BRANCH.match(line):
            depth = len(match["indent"]) // 4 + (1 if match["fork"] else 0)
            open_branch[depth:] = [match["name"]]
            if depth:
                parents[match["name"]] = open_branch[depth - 1]
    return parents


def classes() -> dict[str, type[Exception]]:
    return {
        name: each
        for name, each in vars(rllm.errors).items()
        if inspect.isclass(each) and issubclass(each, Exception) and each.__module__ == "rllm.errors"
    }


def test_every_error_stands_in_the_picture_below_its_parent() -> None:
    parents = {name: each.__base__.__name__ for name, each in classes().items() if name != "RllmError"}
    assert drawn_parents(rllm.errors.__doc__ or "") == parents


def test_every_error_says_who_raises_it() -> None:
    assert [name for name, each in classes().items() if not each.__dict__.get("__doc__")] == []


def test_the_picture_is_read_by_its_branches() -> None:
    picture = """
    Root
    ├── A   raised here
    │   └── B
    └── C
        └── D
    """
    assert drawn_parents(picture) == {"A": "Root", "B": "A", "C": "Root", "D": "C"}
