"""Imports under published names, resolved when a program makes them.

    from rllm.sdk import session                   no such module: one is made of the rows of the table
    from rllm.data.dataset import DatasetRegistry  the module lacks the name: its `__getattr__` looks there
    from rllm.harnesses.react import ReActHarness  a refused row: ImportError with the successor

The finder costs one comparison for an import of another library, and reads the table with the first import of
a room of ours. A name that has a new home is found there, and says so once, as a DeprecationWarning.
"""

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OWN = "rllm.published"


class PublishedFinder:
    """A finder of `sys.meta_path`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as the table describes it; None for all that the table does not speak of.

        Raises ModuleNotFoundError with the successor for a module, or a name in one, that is refused.
        """
        if not fullname.startswith("rllm.") or fullname.startswith(_OWN):
            return None
        from rllm.published import table

        if fullname in table.PACKAGES:
            from rllm.published.config_files import package_spec

            return package_spec(fullname)
        if fullname not in table.MODULES and fullname not in table.REFUSED_MODULES:
            module, _, name = fullname.rpartition(".")
            if (successor := table.REFUSED_NAMES.get(module, {}).get(name)) is not None:
                raise refusal(module, name, successor)  # `from module import name`, which the module has not
            return None
        spec = self._other_spec(fullname, path, target)
        if spec is not None:
            if spec.loader is not None:
                spec.loader = _ExtendingLoader(spec.loader)  # pyright: ignore[reportAttributeAccessIssue]
            return spec
        if fullname in table.REFUSED_MODULES:
            raise refusal(fullname, "", table.REFUSED_MODULES[fullname])
        return ModuleSpec(fullname, _TableLoader(), is_package=True)  # pyright: ignore[reportArgumentType]

    def _other_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        """The answer of the other finders: the module itself, where this package has it."""
        for finder in sys.meta_path:
            if finder is not self and (find := getattr(finder, "find_spec", None)) is not None:
                spec = find(fullname, path, target)
                if spec is not None:
                    return spec
        return None


class _TableLoader:
    """Makes a module that has nothing but rows of the table."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from rllm.published import table

        _extend(module)
        module.__dict__["__all__"] = sorted(table.NAMES.get(module.__name__, ()))


class _ExtendingLoader:
    """The loader of a module of ours, which gets the rows of the table besides."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _extend(module)


def install() -> None:
    """Put the finder in front of the others, once."""
    if not any(isinstance(each, PublishedFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, PublishedFinder())


def refusal(module: str, name: str, successor: str) -> ModuleNotFoundError:
    """The error for a published module, or a name in one, that has no counterpart.

    It is the kind that programs catch around what is optional. It carries no `name`, by which `from package
    import module` would know it and put a sentence without the successor in its place.
    """
    place = f"`{module}.{name}`" if name else f"The module `{module}`"
    return ModuleNotFoundError(f"{place} of published rLLM has no counterpart here: {successor}")


def _extend(module: ModuleType) -> None:
    """Give a module the names that the table has for it."""
    from rllm.published import table

    name = module.__name__
    rows, refused_rows = table.NAMES.get(name, {}), table.REFUSED_NAMES.get(name, {})
    own = module.__dict__.get("__getattr__")
    if (name in table.PARENTS or refused_rows) and not hasattr(module, "__path__"):
        module.__path__ = []  # of a refused name, too, Python then asks the finder, which has the reason
    announced_names: set[str] = set()

    def find(attribute: str) -> Any:
        if own is not None:
            try:
                return own(attribute)
            except AttributeError:
                if attribute not in rows and attribute not in refused_rows:
                    raise
        if attribute in refused_rows:
            raise AttributeError(str(refusal(name, attribute, refused_rows[attribute])))
        if attribute not in rows:
            raise AttributeError(_unknown(name, attribute, rows))
        home, _, own_name = rows[attribute].partition(":")
        value = getattr(importlib.import_module(home), own_name or attribute)
        if attribute not in announced_names:
            announced_names.add(attribute)
            _announce(name, attribute, home, own_name or attribute)
        return value

    module.__dict__["__getattr__"] = find


def _announce(module: str, name: str, home: str, own_name: str) -> None:
    """Say where a name lives now; nothing where only this room has it."""
    if not home.startswith(_OWN):
        warnings.warn(
            f"`{module}.{name}` is a published name; its home is `from {home} import {own_name}`.",
            DeprecationWarning,
            stacklevel=3,
        )


def _unknown(module: str, name: str, rows: Mapping[str, str]) -> str:
    hint = f"; of the published names it has {', '.join(sorted(rows))}" if rows else ""
    return f"module `{module}` has no attribute `{name}`{hint}"
