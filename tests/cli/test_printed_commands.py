"""Every command that the program prints, suggests in a message or shows in its help is one that it takes.

They are read off the source: lists of words that begin with "rllm", and texts that hold `rllm …`. What is
only known while it runs stands as the word X, and stands for nothing that is checked.
"""

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rllm.cli.main import rllm

UNKNOWN = "X"
SHELL = ("<", ">", "|", "&", "&&", "#")
"""What ends a command in a shell."""
SOURCE = Path(__file__).resolve().parents[2] / "src" / "rllm"
QUOTED = re.compile(r"`(rllm [^`]+)`")
SHOWN = re.compile(r"^\s*(?:Next: )?(rllm [a-z].*?)(?:\s{2,}.*)?$", re.MULTILINE)
"""A line of help: the command, then at least two blanks and what it does."""


def _text(node: ast.AST) -> str | None:
    """A text as it is written, with X for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else UNKNOWN for part in node.values)
    return None


def _words(node: ast.List) -> list[str] | None:
    """A list of words that is a command; what is spread into it is left out."""
    if not node.elts or _text(node.elts[0]) != "rllm" or len(node.elts) < 2:
        return None
    return [_text(each) or UNKNOWN for each in node.elts[1:] if not isinstance(each, ast.Starred)]


def printed_in(path: Path) -> Iterator[tuple[int, list[str], bool]]:
    """(line, words, whether all of them are there) of every command that a file prints."""
    source = path.read_text()
    if '"rllm"' not in source and "rllm " not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.expr):
            continue
        if isinstance(node, ast.List) and (words := _words(node)) is not None:
            yield node.lineno, words, not any(isinstance(each, ast.Starred) for each in node.elts)
        elif (text := _text(node)) is not None and "rllm " in text:
            in_help = path.parent.name == "cli" and not text.startswith("`")
            for match in [*QUOTED.finditer(text), *(SHOWN.finditer(text) if in_help else ())]:
                words = _split(match[1])
                if words is not None:
                    yield node.lineno, words, False


def _split(command: str) -> list[str] | None:
    """The words behind `rllm`; None for the middle of a sentence."""
    try:
        words = shlex.split(command)[1:]
    except ValueError:
        return None
    return words if words and re.fullmatch(r"[a-z-]+", words[0]) else None


def trouble_with(words: list[str], is_whole: bool) -> str:
    """Why the program would not take these words; empty where it would."""
    command: click.Command = rllm
    context = click.Context(rllm, info_name="rllm")
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        if rest[0] == UNKNOWN:
            return ""
        if rest[0].startswith("-"):
            break
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            return f"there is no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    if isinstance(command, click.Group) and not rest:
        return ""
    rest = list(itertools.takewhile(lambda word: word not in SHELL, rest))
    rest = [each for each in rest if each not in ("…", "...")]  # and so on
    try:
        values, left, _ = command.make_parser(context).parse_args(rest)
    except click.UsageError as error:
        return error.format_message()
    if left and not isinstance(command, click.Group):
        return f"nothing takes {' '.join(left)}"
    missing = [each.name for each in command.params if each.required and not values.get(each.name or "")]
    return f"it lacks {', '.join(map(str, missing))}" if missing and is_whole else ""


FILES = sorted(SOURCE.rglob("*.py"))


def test_every_printed_command_is_taken() -> None:
    commands = [
        (f"{path.relative_to(SOURCE)}:{line}", words, trouble_with(words, is_whole))
        for path in FILES
        for line, words, is_whole in printed_in(path)
    ]
    assert len(commands) > 80
    assert [each for each in commands if each[2]] == []


def test_what_would_not_be_taken_is_found(subtests: pytest.Subtests) -> None:
    for words, trouble in [
        (["serve", "--model", UNKNOWN], "No such option"),
        (["serve", "model", UNKNOWN], ""),
        (["sevre", "model"], "there is no command sevre"),
        (["runs", "show"], ""),
        (["eval"], ""),
        (["runs", "show", "a", "b"], "nothing takes b"),
    ]:
        with subtests.test(words=words, trouble=trouble):
            assert trouble in trouble_with(words, is_whole=False)
            assert bool(trouble) == bool(trouble_with(words, is_whole=False))
