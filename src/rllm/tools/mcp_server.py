"""The way to an MCP server: a command, an address, or an object in this process.

{"command": "mcp-server-git", "args": ["-r", "."]} ──MCPServer.from_dict──► MCPServer ──► MCPPool
{"url": "http://127.0.0.1:8000/mcp"}                                          ▲
{"target": "rllm.tools.mcp_calculator:calculator_server"}  ───────────────────┘
"""

import difflib
import importlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, RllmError
from rllm.errors.redaction import hide_key, holds_key

_DEFAULT_SESSIONS = 64
_WAYS = ("command", "url", "target")


class MCPServerError(RllmError):
    """Raised when a server does not start, dies or breaks the protocol: a failure of the infrastructure.

    The message has what the server wrote last on stderr.
    """


@dataclass(kw_only=True, frozen=True, eq=False)
class MCPServer:
    """One server, and how patient we are with it. Exactly one of `command`, `url` and `target` is set."""

    name: str = ""
    """The name for people; messages have it."""
    command: Sequence[str] | str = ()
    """Started as a process that speaks over stdin and stdout: a list of words, or one line as in a shell."""
    args: Sequence[str] = ()
    """More words of the command, for those who copy `mcpServers` entries."""
    env: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """All that the process sees beyond PATH, HOME, USER, LOGNAME, SHELL and TERM."""
    env_from: Sequence[str] = ()
    """Names of our own environment variables that it may see too, such as a key."""
    cwd: str = ""
    url: str = ""
    """Reached over streamable HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    headers_from: Mapping[str, str] = field(default_factory=dict[str, str])
    """Header -> the environment variable that holds its value."""
    target: Any = None
    """In this process: a server object of the SDK, a function that makes one for each session, or
    `package.module:name` of either."""
    shared: bool = False
    """True: the server keeps nothing between calls, so all rollouts may use the same sessions. False: each
    lease has a session of its own, from which nothing reaches the next lease."""
    only: Sequence[str] = ()
    """The tools that are offered; all of them when empty."""
    prefix: str = ""
    """Put before the tools' names, so that two servers may have tools of one name."""
    connect_timeout_s: float = 60.0
    """For the start and the first handshake."""
    list_timeout_s: float = 30.0
    """For the whole list of tools, all its pages."""
    call_timeout_s: float = 30.0
    lease_timeout_s: float = 120.0
    """The time that a rollout waits for a session when `max_sessions` are in use."""
    max_sessions: int = 0
    """Sessions at once; 0 takes 64, or 1 with `shared`. Leases beyond it wait; with `shared` they share."""
    warm: int = 0
    """Sessions that are opened before a lease asks for them: for servers that start slowly."""

    def __post_init__(self) -> None:
        ways = [way for way in _WAYS if getattr(self, way) not in ((), [], "", None)]
        if len(ways) != 1:
            has = " and ".join(ways) or "neither command, url nor target"
            raise ConfigError(f"MCP server {self.name!r} has {has}; give one of command, url and target.")
        if self.url and not re.match(r"https?://", self.url):
            raise ConfigError(
                f"MCP server {self.name!r}: `url` is {self.url!r}; it begins with http:// or https://."
            )
        for name in ("connect_timeout_s", "list_timeout_s", "call_timeout_s", "lease_timeout_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"MCP server {self.title}: `{name}` is {getattr(self, name)}; it must be above 0 seconds."
                )
        if self.max_sessions < 0 or not 0 <= self.warm <= self.most_sessions:
            raise ConfigError(
                f"MCP server {self.title}: `max_sessions` is {self.max_sessions} and `warm` {self.warm}; "
                f"neither may be below 0, and `warm` not above {self.most_sessions}."
            )
        of_command, of_url = ("args", "env", "env_from", "cwd"), ("headers", "headers_from")
        for key in (*(() if self.command else of_command), *(() if self.url else of_url)):
            if getattr(self, key):
                raise ConfigError(
                    f"MCP server {self.title}: `{key}` does nothing for a server reached like this."
                )

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.name or (" ".join(self.words[:3]) if self.command else self.url or _name_of(self.target))

    @property
    def most_sessions(self) -> int:
        return self.max_sessions or (1 if self.shared else _DEFAULT_SESSIONS)

    @property
    def words(self) -> list[str]:
        """The command as words; text that is the path of a file is one, whatever spaces it holds."""
        if not isinstance(self.command, str):
            return [*self.command, *self.args]
        is_path = Path(self.command).is_file()
        return [*([self.command] if is_path else shlex.split(self.command)), *self.args]

    @property
    def key(self) -> str:
        """Equal for servers that may share a pool. Not for logs: it holds what is in `env` and `headers`."""
        return repr([*self._values(), self.target if isinstance(self.target, str) else id(self.target)])

    def environment(self) -> dict[str, str]:
        """`env` and what `env_from` names. Raises ConfigError for a variable that is not set."""
        return dict(self.env) | {name: self._own(name) for name in self.env_from}

    def http_headers(self) -> dict[str, str]:
        """`headers` and what `headers_from` names. Raises ConfigError for a variable that is not set."""
        headers = dict(self.headers) | {header: self._own(name) for header, name in self.headers_from.items()}
        for name, value in headers.items():
            if holds_key(name):
                hide_key(value.removeprefix("Bearer "))
        return headers

    def make_target(self) -> Any:
        """The server object for one session: what a function makes, or the one object that there is.

        Raises ConfigError for a name that leads nowhere.
        """
        target = _looked_up(self.target, self.title) if isinstance(self.target, str) else self.target
        is_function = callable(target) and not hasattr(target, "list_tools")
        return target() if is_function else target

    @classmethod
    def from_dict(cls, info: Mapping[str, Any], name: str = "") -> "MCPServer":
        """From an entry of `mcpServers`, or of a task. Raises ConfigError for keys that there are not."""
        names = [each.name for each in fields(cls)]
        for key in info:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"it takes {', '.join(names)}."
                raise ConfigError(
                    f"MCP server {name or info.get('name', '')!r} does not know `{key}`; {hint}"
                )
        return cls(**{"name": name, **info})

    def _values(self) -> list[Any]:
        values = [getattr(self, each.name) for each in fields(self) if each.name != "target"]
        return [sorted(value.items()) if isinstance(value, Mapping) else value for value in values]

    def _own(self, name: str) -> str:
        if name not in os.environ:
            raise ConfigError(
                f"MCP server {self.title} needs the environment variable {name}, which is not set."
            )
        hide_key(os.environ[name])
        return os.environ[name]


def _looked_up(target: str, title: str) -> Any:
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"MCP server {title}: `target` is {target!r}, which leads nowhere ({error}); write "
            "package.module:name."
        ) from error


def _name_of(target: Any) -> str:
    if isinstance(target, str) or target is None:
        return str(target)
    return getattr(target, "name", None) or getattr(target, "__name__", type(target).__name__)
