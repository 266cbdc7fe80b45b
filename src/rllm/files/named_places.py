"""Places of a person's own code, kept under names: RLLM_HOME/agents.json, one writer at a time.

register("mine", "flow.py:solve") ──► {"version": 1, "agents": {"mine": "/home/me/flow.py:solve"}}
place_of("mine")                  ──► "/home/me/flow.py:solve"; a name that nobody registered stays as it is
"""

import fcntl
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors, write_atomic
from rllm.files.home import rllm_home

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VERSION = 1


@dataclass(slots=True, frozen=True)
class NamedPlaces:
    """The names of one kind."""

    kind: str
    """`agent` or `evaluator`."""

    def all(self) -> dict[str, str]:
        """Name -> where it is. Raises ConfigError, naming the file, for one that cannot be read."""
        path = self._path()
        try:
            data = json.loads(path.read_text())
            if data["version"] != _VERSION:
                raise ConfigError(
                    f"{path} is of version {data['version']}, this reads {_VERSION}; update rllm."
                )
            return {str(name): str(place) for name, place in data[f"{self.kind}s"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}); mend it, or delete it.") from error

    def place_of(self, name: str) -> str:
        """The place of a registered name; any other name as it is."""
        return name if ":" in name else self.all().get(name, name)

    def register(self, name: str, place: str) -> str:
        """Keep `place` (package.module:NAME or file.py:NAME) under a name; the place as it is kept.

        A file is kept by its absolute path. Raises ConfigError for a name that cannot be.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"An {self.kind} is to be called {name!r}; use letters, digits, dots, `_` and `-`, at most "
                "64."
            )
        file, _, attribute = place.rpartition(":")
        if file.endswith(".py"):
            place = f"{Path(file).resolve()}:{attribute}"
        with self._lock():
            self._write({**self.all(), name: place})
        return place

    def register_function(self, name: str, function: Callable[..., Any]) -> str:
        """Keep the place of a function, by its file.

        Raises ConfigError for one that nobody can find again, such as a function in another.
        """
        qualified_name = getattr(function, "__qualname__", "")
        try:
            file = inspect.getfile(function)
        except TypeError:
            file = ""
        if not os.path.isfile(file) or not qualified_name.isidentifier():
            raise ConfigError(
                f"{qualified_name or function!r} is to be registered as {name!r}, and is no function at the "
                "top of a file; put it there, or leave `register` out."
            )
        return self.register(name, f"{file}:{qualified_name}")

    def unregister(self, name: str) -> None:
        """Raises ConfigError for a name that nobody registered."""
        with self._lock():
            places = self.all()
            if name not in places:
                raise ConfigError(
                    f"No {self.kind} `{name}` was registered; there is {', '.join(places) or 'none at all'}."
                )
            del places[name]
            self._write(places)

    def _path(self) -> Path:
        return rllm_home() / f"{self.kind}s.json"

    def _write(self, places: dict[str, str]) -> None:
        document = {"version": _VERSION, f"{self.kind}s": places}
        write_atomic(self._path(), json.dumps(document, indent=1) + "\n")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with StorageErrors(rllm_home()):
            rllm_home().mkdir(parents=True, exist_ok=True)
            # A file of its own, because `write_atomic` puts a new file in the place of the one that was
            # locked.
            lock_file = rllm_home() / f".{self.kind}s.lock"
            descriptor = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


AGENT_PLACES, EVALUATOR_PLACES = NamedPlaces("agent"), NamedPlaces("evaluator")
