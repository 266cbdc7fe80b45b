"""A name in a configuration or command ──► the Python object that it names.

solver                     an entry point of an installed package
package.module:solve       an attribute of a module; the current directory is looked in first
my_flow.py:solve           an attribute of a file, which is imported once and may import its neighbours
"""

import difflib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from rllm.errors import ConfigError

USER_MODULE = "rllm_user_"
"""The prefix of the name of a module that was made from a user's file."""


def object_named(name: str, *, group: str, what: str) -> Any:
    """The object; `what` is it called in errors, `group` holds its entry points.

    Raises ConfigError that says which part of the name leads nowhere, with the nearest one that does.
    """
    place, separator, attribute = name.rpartition(":")
    if separator and place and attribute:
        module = _file_module(place, what) if _is_file_name(place) else _module(place, what)
        return _attribute(module, attribute, place, what)
    if name.endswith(".py"):
        module = _file_module(name, what)
        raise ConfigError(
            f"`{name}` does not say which {what}; write {name}:NAME. It holds "
            f"{_name_list(_own_names(module))}."
        )
    return _entry_point(name, group, what)


def name_arguments(name: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of `NAME?argument=value&…`; a value is JSON, or else text."""
    target, _, query = name.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"`{name}`: {error}; write arguments as ?name=value&name=value.") from error
    return target, {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _is_file_name(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _file_module(place: str, what: str) -> ModuleType:
    path = Path(place).resolve()
    digest = hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()
    module_name = f"{USER_MODULE}{path.stem}_{digest}"
    if module_name in sys.modules:  # perhaps brought from another machine, without its file
        return sys.modules[module_name]
    if not path.is_file():
        nearest = difflib.get_close_matches(path.name, _python_files(path.parent), n=1)
        hint = f" Did you mean {Path(place).with_name(nearest[0])}?" if nearest else ""
        raise ConfigError(f"There is no file {place} for the {what}.{hint}")
    _look_in(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, Exception):
            raise _import_failed(place, error) from error
        raise
    return module


def _module(place: str, what: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise _import_failed(place, error) from error
        raise ConfigError(
            f"There is no module `{place}` for the {what} ({error}); "
            "write package.module:NAME or file.py:NAME."
        ) from error
    except Exception as error:
        raise _import_failed(place, error) from error


def _look_in(directory: Path) -> None:
    """As `python file.py` does, so that a program finds its neighbours."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _import_failed(place: str, error: Exception) -> ConfigError:
    if isinstance(error, ModuleNotFoundError):
        return ConfigError(f"{place} needs `{error.name}`, which is not installed; install it.")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return ConfigError(f"{place} cannot be imported: {type(error).__name__}: {error}{where}")


def _attribute(module: ModuleType, attribute: str, place: str, what: str) -> Any:
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            nearest = difflib.get_close_matches(part, [name for name in dir(target) if name[0] != "_"], n=1)
            hint = (
                f"did you mean `{nearest[0]}`?" if nearest else f"it holds {_name_list(_own_names(module))}."
            )
            raise ConfigError(f"{place} has no {what} `{attribute}`; {hint}")
        target = getattr(target, part)
    return target


def _entry_point(name: str, group: str, what: str) -> Any:
    entry_points = {each.name: each for each in importlib.metadata.entry_points(group=group)}
    if name not in entry_points:
        nearest = difflib.get_close_matches(name, entry_points, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else "write package.module:NAME or file.py:NAME."
        raise ConfigError(f"There is no {what} `{name}`; {hint}")
    try:
        return entry_points[name].load()
    except Exception as error:
        raise _import_failed(f"The {what} `{name}`", error) from error


def _own_names(module: ModuleType) -> list[str]:
    """The names that the module itself defines and others may call."""
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_"
        and callable(value)
        and getattr(value, "__module__", module.__name__) == module.__name__
    ]


def _name_list(names: list[str]) -> str:
    return ", ".join(names[:8]) if names else "none"


def _python_files(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*.py")] if directory.is_dir() else []
