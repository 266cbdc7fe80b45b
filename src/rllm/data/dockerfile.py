"""A Dockerfile as instructions: lines joined, here-documents body out, variables filled in, each with the
number of the line where it begins. Nothing is run here.

    text ──instructions_of──► DockerLine(line, word, text, flags, documents) ──filled──► the same without
    $NAME

The rules are those of Docker's reference: comments and empty lines inside a continued line are dropped, `#
escape=`
at the top may name another character than the backslash, and only some instructions have variables filled
in (a RUN line's are the shell's).
"""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rllm.errors import ConfigError

WORDS = {
    *("FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "SHELL"),
    *("LABEL", "MAINTAINER", "EXPOSE", "VOLUME", "STOPSIGNAL", "HEALTHCHECK", "CMD", "ENTRYPOINT", "ONBUILD"),
}
_FILLED = ("FROM", "COPY", "ADD", "ENV", "WORKDIR", "USER")
"""Instructions in which variables are filled in here, of those that do anything."""
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_DOCUMENT = re.compile(r"<<(-?)([\"']?)(\w+)\2")
_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^}]*))?\})")
_FLAG = re.compile(r"--([a-z-]+)(?:=(\"[^\"]*\"|\S*))?\s*")


@dataclass(kw_only=True, slots=True, frozen=True)
class DockerLine:
    """One instruction."""

    where: str
    """`path:line` of where it begins."""
    word: str
    text: str
    """All after the word and its flags, on one line."""
    flags: tuple[tuple[str, str], ...] = ()
    """(name, value) of `--name=value`."""
    documents: tuple[str, ...] = ()
    """Texts of its here-documents."""

    @property
    def words(self) -> list[str]:
        """The words of its JSON form, or of a line. Raises ConfigError for quotes that do not end."""
        json_words = self.json_words
        if json_words is not None:
            return json_words
        try:
            return shlex.split(self.text)
        except ValueError as error:
            raise ConfigError(
                f"{self.where}: `{self.word} {self.text:.80}` cannot be read: {error}."
            ) from error

    @property
    def json_words(self) -> list[str] | None:
        """The words of its JSON form; None for another form."""
        if not self.text.startswith("["):
            return None
        try:
            words = json.loads(self.text)
        except ValueError:
            return None
        return words if isinstance(words, list) and all(isinstance(each, str) for each in words) else None


def instructions_of(path: Path) -> list[DockerLine]:
    """Raises ConfigError, naming the line, for a word that is no instruction and a here-document without
    end."""
    try:
        # Not `splitlines`: it ends a line at characters that Docker has within one, such as U+2028.
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    escape = _escape_of(lines)
    instructions: list[DockerLine] = []
    number = 0
    while number < len(lines):
        first = number
        text, number = _join(lines, number, escape)
        if not text:
            continue
        where = f"{path}:{_first_line(lines, first) + 1}"
        word, *behind = text.split(None, 1)
        rest = behind[0] if behind else ""
        if word.upper() not in WORDS:
            raise ConfigError(f"{where}: `{text:.80}` begins with no instruction of a Dockerfile.")
        documents: list[str] = []
        if word.upper() in ("RUN", "COPY", "ADD"):
            for dash, _, name in _DOCUMENT.findall(rest):
                document, number = _document(lines, number, name, where, is_indented=bool(dash))
                documents.append(document)
        flags, rest = _flags_of(rest.strip())
        instructions.append(
            DockerLine(where=where, word=word.upper(), text=rest, flags=flags, documents=tuple(documents))
        )
    return instructions


def fill_line(instruction: DockerLine, variables: Mapping[str, str]) -> DockerLine:
    """The instruction with `$NAME`, `${NAME}`, `${NAME:-other}` and `${NAME:+other}` filled in, where
    Docker does."""
    if instruction.word not in _FILLED:
        return instruction
    flags = tuple((name, fill(value, variables)) for name, value in instruction.flags)
    return replace(instruction, text=fill(instruction.text, variables), flags=flags)


def fill(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[0] == "\\$":
            return "$"
        value_here, rule, other = variables.get(match[1] or match[2]), match[3] or "", match[4] or ""
        is_there = bool(value_here) if rule.startswith(":") else value_here is not None
        if rule.endswith("+"):
            return other if is_there else ""
        return (value_here or "") if is_there or not rule else other

    return _VARIABLE.sub(value, text)


def pairs_of(instruction: DockerLine) -> dict[str, str]:
    """The variables of an ENV, or the options of a LABEL: `A=1 B=2`, or `A the rest of the line`."""
    words = instruction.words
    if words and all("=" in word for word in words):
        return dict(word.split("=", 1) for word in words)
    if len(words) < 2 or "=" in words[0]:
        raise ConfigError(f"{instruction.where}: `{instruction.word} {instruction.text:.80}` gives no value.")
    return {words[0]: instruction.text.split(None, 1)[1]}


def _escape_of(lines: list[str]) -> str:
    for line in lines:
        match = _DIRECTIVE.fullmatch(line.strip())
        if match is None:
            break
        if match[1].lower() == "escape":
            return match[2]
    return "\\"


def _first_line(lines: list[str], number: int) -> int:
    while not lines[number].strip() or lines[number].lstrip().startswith("#"):
        number += 1
    return number


def _join(lines: list[str], number: int, escape: str) -> tuple[str, int]:
    """The instruction that begins at or after a line, and the number of the line behind it."""
    parts: list[str] = []
    while number < len(lines):
        line = lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        if not line.endswith(escape):
            parts.append(line)
            break
        parts.append(line.removesuffix(escape).rstrip())
    return " ".join(parts), number


def _document(lines: list[str], number: int, name: str, where: str, *, is_indented: bool) -> tuple[str, int]:
    body: list[str] = []
    for place in range(number, len(lines)):
        line = lines[place].lstrip("\t") if is_indented else lines[place]
        if line == name:
            return "".join(f"{each}\n" for each in body), place + 1
        body.append(line)
    raise ConfigError(f"{where}: the here-document `{name}` has no end.")


def _flags_of(text: str) -> tuple[tuple[tuple[str, str], ...], str]:
    flags: list[tuple[str, str]] = []
    while match := _FLAG.match(text):
        flags.append((match[1], (match[2] or "").strip('"')))
        text = text[match.end() :]
    return tuple(flags), text
