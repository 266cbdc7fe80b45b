"""The tools of a software-engineering agent, in its sandbox: shell, file editor, search.

Whatever a call asks for, it gets a text: output, or an error that it can read. Files are read and written
through the sandbox, which follows no link; a sandbox that fails itself raises SandboxError.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from rllm.data.swe_repository import PLACE
from rllm.environments.swe.scaffolds import BASH, EDITOR, TOOLS, SWECall
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import Limits, Status
from rllm.tools.base import ToolError
from rllm.tools.clipping import clip

MAX_SHOWN_CHARS = 10_000
"""The length of one output."""
MAX_FILE_BYTES = 4 << 20
"""The size of a file that is looked at or changed."""
_CONTEXT_LINES = 4
"""Shown around a change."""


class SWETools:
    """One sandbox's tools, with what can be undone in it."""

    def __init__(self, sandbox: Sandbox, variables: Mapping[str, str], *, timeout_s: float) -> None:
        self._sandbox = sandbox
        self._variables = dict(variables)
        self._limits: Limits = replace(sandbox.limits, wall_s=timeout_s, cpu_s=timeout_s)
        self._earlier: dict[str, list[bytes | None]] = {}

    @property
    def undo(self) -> dict[str, tuple[bytes | None, ...]]:
        """Path -> what an edit can be taken back to, the latest last."""
        return {path: tuple(texts) for path, texts in self._earlier.items()}

    @undo.setter
    def undo(self, earlier: Mapping[str, Sequence[bytes | None]]) -> None:
        self._earlier = {path: [*texts] for path, texts in earlier.items()}
        """Path -> what the file held before each change; None for a file that was not there."""

    def answer(self, call: SWECall, tool_names: tuple[str, ...]) -> str:
        """The output of a call, as text."""
        if call.name not in tool_names:
            return f"Error: there is no tool `{call.name}`; there are {', '.join(tool_names)}."
        try:
            if TOOLS[call.name] == BASH:
                return self._bash(call.arguments)
            if TOOLS[call.name] == EDITOR:
                return clip(self._edit(call.arguments), MAX_SHOWN_CHARS)
            return self._search(call.arguments)
        except ToolError as error:
            return f"Error: {error}"

    # ---- shell -------------------------------------------------------------------------------------------

    def _bash(self, arguments: Mapping[str, Any]) -> str:
        command = str(arguments.get("command") or arguments.get("cmd") or "")
        if not command.strip():
            raise ToolError("`command` is empty; give a command.")
        return self._run(f"exec 2>&1\n{command}")

    def _run(self, script: str) -> str:
        result = self._sandbox.exec(
            ["bash", "-c", script], cwd=PLACE, env=self._variables, limits=self._limits
        )
        output = clip(result.stdout + result.stderr, MAX_SHOWN_CHARS)
        if result.status in (Status.OK, Status.ERROR):
            end = f"[exit code {result.exit_code}]"
        elif result.status is Status.TIMEOUT:
            end = f"[stopped: it took more than {self._limits.wall_s:g} s]"
        else:
            end = f"[stopped: {result.status}]"
        return f"{output.rstrip()}\n{end}" if output.strip() else end

    def _search(self, arguments: Mapping[str, Any]) -> str:
        term = str(arguments.get("search_term") or arguments.get("query") or "")
        if not term:
            raise ToolError("`search_term` is empty; give the text to find.")
        path = _place(arguments.get("path") or PLACE)
        # `-e` and `--`, because a term or a path may begin with a dash.
        words = ["grep", "-rnIF", "--exclude-dir=.git", "-e", term, "--", path]
        lines = self._run(shlex.join(words) + " | head -n 200")
        return "Nothing was found." if lines == "[exit code 0]" else lines

    # ---- editor ------------------------------------------------------------------------------------------

    def _edit(self, arguments: Mapping[str, Any]) -> str:
        commands = {
            "view": self._view,
            "create": self._create,
            "str_replace": self._replace,
            "insert": self._insert,
            "undo_edit": self._undo,
        }
        name = str(arguments.get("command", ""))
        if name not in commands:
            raise ToolError(f"`command` is {name!r}; it is one of {', '.join(commands)}.")
        if not arguments.get("path"):
            raise ToolError("`path` is missing.")
        path = _place(arguments["path"])
        try:
            return commands[name](path, arguments)
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror or error}") from error

    def _view(self, path: str, arguments: Mapping[str, Any]) -> str:
        if self._is_directory(path):
            words = shlex.join(["find", path, "-maxdepth", "2", "-not", "-path", "*/.*"])
            return f"Files below {path}, two levels deep:\n{self._run(f'{words} | sort')}"
        lines = self._text(path).split("\n")
        first, last = _range(arguments.get("view_range"), len(lines))
        return _number_lines(lines, first, last)

    def _create(self, path: str, arguments: Mapping[str, Any]) -> str:
        if "file_text" not in arguments:
            raise ToolError("`file_text` is missing; give the content of the new file.")
        if self._bytes(path) is not None or self._is_directory(path):
            raise ToolError(f"{path} is there already; change it with str_replace, or take another name.")
        self._write(path, None, str(arguments["file_text"]))
        return f"{path} was made."

    def _replace(self, path: str, arguments: Mapping[str, Any]) -> str:
        old, new = str(arguments.get("old_str", "")), str(arguments.get("new_str") or "")
        if not old:
            raise ToolError("`old_str` is missing; give the text to replace.")
        text = self._text(path)
        count = text.count(old)
        if count != 1:
            where = "does not stand" if not count else f"stands {count} times"
            raise ToolError(
                f"`old_str` {where} in {path}; it must stand there exactly once. Nothing changed."
            )
        at = text.index(old)
        new_text = text[:at] + new + text[at + len(old) :]
        self._write(path, text, new_text)
        return self._around(path, new_text, text[:at].count("\n"), new.count("\n") + 1)

    def _insert(self, path: str, arguments: Mapping[str, Any]) -> str:
        text = self._text(path)
        lines = text.split("\n")
        new = str(arguments.get("new_str") or arguments.get("insert_text") or "")
        at = _number(arguments.get("insert_line"), "insert_line")
        most = len(lines) - (text.endswith("\n") or not text)
        if not 0 <= at <= most:
            raise ToolError(f"`insert_line` is {at}; {path} has {most} lines. Nothing changed.")
        new_lines = new.removesuffix("\n").split("\n")
        new_text = "\n".join([*lines[:at], *new_lines, *lines[at:]])
        self._write(path, text, new_text)
        return self._around(path, new_text, at, len(new_lines))

    def _undo(self, path: str, arguments: Mapping[str, Any]) -> str:
        if not self._earlier.get(path):
            raise ToolError(f"{path} has no change to undo.")
        earlier = self._earlier[path].pop()
        if earlier is None:
            self._sandbox.exec(["rm", "-f", "--", path])
            return f"{path} was removed again."
        self._sandbox.write(path, earlier)
        return f"The last change of {path} was undone."

    def _around(self, path: str, text: str, start: int, count: int) -> str:
        first, last = max(1, start + 1 - _CONTEXT_LINES), start + count + _CONTEXT_LINES
        lines = text.split("\n")
        return f"{path} was changed:\n{_number_lines(lines, first, min(last, len(lines)))}"

    def _is_directory(self, path: str) -> bool:
        return self._sandbox.exec(["test", "-d", path]).status is Status.OK

    def _bytes(self, path: str) -> bytes | None:
        try:
            return self._sandbox.read(path, most_bytes=MAX_FILE_BYTES)
        except FileNotFoundError:
            return None

    def _text(self, path: str) -> str:
        data = self._sandbox.read(path, most_bytes=MAX_FILE_BYTES)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ToolError(f"{path} is not UTF-8; work on it with bash.") from error

    def _write(self, path: str, earlier: str | None, text: str) -> None:
        mode = "" if earlier is None else self._sandbox.exec(["stat", "-c", "%a", path]).stdout.strip()
        self._sandbox.write(path, text)
        if mode not in ("", "644"):  # a file is written anew
            self._sandbox.exec(["chmod", mode, path])
        self._earlier.setdefault(path, []).append(None if earlier is None else earlier.encode())


def _place(path: Any) -> str:
    """Where a path leads, from the repository on."""
    return str(PurePosixPath(PLACE) / str(path))


def _number(value: Any, name: str) -> int:
    try:
        return int(str(value).strip())
    except ValueError as error:
        raise ToolError(f"`{name}` is {value!r:.40}; it must be a whole number.") from error


def _range(value: Any, num_lines: int) -> tuple[int, int]:
    """First and last line, counted from 1."""
    if value in (None, "", []):
        return 1, num_lines
    bounds = value
    if isinstance(value, str):
        try:
            bounds = json.loads(value)
        except ValueError:
            bounds = None
    if not isinstance(bounds, list) or len(bounds) != 2:
        raise ToolError(f"`view_range` is {value!r:.40}; write two line numbers, as [10, 40].")
    first, last = (_number(each, "view_range") for each in bounds)
    last = num_lines if last == -1 else min(last, num_lines)
    if not 1 <= first <= last:
        raise ToolError(f"`view_range` is {value!r:.40}; the file has {num_lines} lines.")
    return first, last


def _number_lines(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{number:>6}\t{lines[number - 1]}" for number in range(first, last + 1))
