"""Agents and programs by names of one's own: RLLM_HOME/agents.json, written whole, one writer at a time.

register("mine", "flow.py:solve") ──► {"version": 1, "agents": {"mine": "/home/me/flow.py:solve"}}
place_of("mine")                  ──► "/home/me/flow.py:solve"; a name that nobody registered stays as it is
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rllm.data.home import rllm_home
from rllm.errors import ConfigError
from rllm.store.files import StorageErrors, write_atomic

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION = 1


def registered_agents() -> dict[str, str]:
    """Name -> where it is. Raises ConfigError, naming the file, for one that cannot be read."""
    path = _path()
    try:
        data = json.loads(path.read_text())
        if data["version"] != _VERSION:
            raise ConfigError(f"{path} is of version {data['version']}, this reads {_VERSION}; update rllm.")
        return {str(name): str(place) for name, place in data["agents"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); mend it, or delete it.") from error


def place_of(name: str) -> str:
    """Where a registered agent is; any other name as it is."""
    return name if ":" in name else registered_agents().get(name, name)


def register_agent(name: str, place: str) -> str:
    """Keep `place` (package.module:NAME or file.py:NAME) under a name; the place as it is kept.

    A file is kept by its absolute path. Raises ConfigError for a name that cannot be.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"An agent is to be called {name!r}; use letters, digits, dots, `_` and `-`, at most 64."
        )
    file, _, attribute = place.rpartition(":")
    if file.endswith(".py"):
        place = f"{Path(file).resolve()}:{attribute}"
    with _lock():
        _write({**registered_agents(), name: place})
    return place


def unregister_agent(name: str) -> None:
    """Raises ConfigError for a name that nobody registered."""
    with _lock():
        agents = registered_agents()
        if name not in agents:
            raise ConfigError(
                f"No agent `{name}` was registered; there is {', '.join(agents) or 'none at all'}."
            )
        del agents[name]
        _write(agents)


def _path() -> Path:
    return rllm_home() / "agents.json"


def _write(agents: dict[str, str]) -> None:
    write_atomic(_path(), json.dumps({"version": _VERSION, "agents": agents}, indent=1) + "\n")


@contextmanager
def _lock() -> Iterator[None]:
    with StorageErrors(rllm_home()):
        rllm_home().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(rllm_home() / ".agents.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
