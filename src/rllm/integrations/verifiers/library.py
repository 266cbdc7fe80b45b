"""The library verifiers, with what an import of it must not change in this process."""
# pyright: reportMissingImports=false

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, MissingExtraError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def verifiers_library() -> Any:
    """The module. Raises MissingExtraError where it is not installed, ConfigError for another version."""
    try:
        import verifiers
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "verifiers", "verifiers") from error
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"verifiers {metadata.version('verifiers')} has no `load_environment`: from 0.4 on it runs "
            "environments of another kind. Take the one before: pip install 'rllm[verifiers]'"
        )
    return verifiers


def load_environment(name: str, arguments: dict[str, Any]) -> Any:
    """The environment of an installed package, or of a module in the working directory.

    Raises ConfigError for one that is not there, or that does not load.
    """
    library = verifiers_library()
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with own_signal_handlers():
            return library.load_environment(name, **arguments)
    except Exception as error:
        cause = error.__cause__ or error
        mend = (
            "Install its package, or start where its module is."
            if isinstance(cause, ImportError)
            else "Its arguments are given as verifiers:NAME?name=value."
        )
        raise ConfigError(f"verifiers cannot load `{name}`: {error} ({cause!r:.300}). {mend}") from error


def module_source(name: str) -> str:
    """The text of the module that `load_environment` of this name imports; empty for a binary one."""
    spec = find_spec(name.rpartition("/")[2].replace("-", "_"))
    origin = Path(spec.origin or "") if spec is not None else Path()
    return origin.read_text("utf-8") if origin.suffix == ".py" else ""


@contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Keep the handlers of this process: each environment of verifiers sets its own for SIGINT and SIGTERM,
    which end the process before a run is saved.

    Raises ConfigError outside of the main thread, where verifiers cannot set them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("An environment of verifiers is loaded in the main thread of a process.")
    handlers = {each: signal.getsignal(each) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
