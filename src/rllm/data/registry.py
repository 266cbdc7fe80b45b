"""Data sets by name, in `RLLM_HOME/datasets`.

    register_dataset(name, rows, split) ──► NAME/SPLIT-<sha256>.jsonl, then registry.json, each whole
    load_dataset(name, split) ──sha256 compared──► Dataset

Files are named by their content and written before the registry names them; what no entry names any more is
removed after. So a process that is killed at any point leaves the old data set or the new one. Writers wait
for each other at a lock.
"""

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rllm.data.dataset import Dataset
from rllm.data.published_names import own_name
from rllm.data.rows import jsonl_bytes, read_rows
from rllm.errors import ConfigError
from rllm.files.atomic import StorageErrors, write_atomic
from rllm.files.home import rllm_home

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
VERSION = 1


class DatasetRegistry:
    """The data sets of this person on this machine. All methods may be called from several processes."""

    @classmethod
    def register_dataset(
        cls,
        name: str,
        data: Iterable[Mapping[str, Any]],
        split: str = "default",
        *,
        source: str = "",
        description: str = "",
        category: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> Dataset:
        """Keep rows under a name; a split that was there is replaced.

        `details` are facts about this split that `get_dataset_info` gives back, such as the revision it is
        of.
        """
        _require_name("name", name)
        _require_name("split", split)
        rows = [dict(row) for row in Dataset(data, name)]
        if not rows:
            raise ConfigError(
                f"The data set `{name}` has no rows in split `{split}`; there is nothing to keep."
            )
        content = jsonl_bytes(rows)
        digest = hashlib.sha256(content).hexdigest()
        file = _folder() / name / f"{split}-{digest[:16]}.jsonl"
        with _lock():
            with StorageErrors(file):
                file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, content)
            registry = _read()
            entry = registry.setdefault(name, {"description": "", "category": "", "source": "", "splits": {}})
            for key, value in (("description", description), ("category", category), ("source", source)):
                entry[key] = value or entry[key]
            entry["splits"][split] = {
                "file": file.relative_to(_folder()).as_posix(),
                "rows": len(rows),
                "bytes": len(content),
                "sha256": digest,
                "columns": list(dict.fromkeys(column for row in rows for column in row)),
                "registered_at": datetime.now(UTC).isoformat(timespec="seconds"),
                **(details or {}),
            }
            _write(registry)
            _remove_unnamed(name, registry)
        return Dataset(rows, name, split, path=file)

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset | None:
        """The rows as they were registered; None where there is no such data set or split.

        Raises ConfigError when the file is not what it was when it was registered.
        """
        file = _folder()
        for _ in range(3):  # the file of an entry that was replaced meanwhile is gone
            entry = _entry(name).get("splits", {}).get(split)
            if entry is None:
                return None
            file = _folder() / entry["file"]
            if file.is_file():
                return Dataset(_verify(file, entry, name), name, split, path=file)
        raise ConfigError(f"The data set `{name}` lost its file {file}; register or pull it again.")

    @classmethod
    def get_dataset_names(cls) -> list[str]:
        return sorted(_read())

    @classmethod
    def get_dataset_splits(cls, name: str) -> list[str]:
        """Empty for a data set that is not there."""
        return list(_entry(name).get("splits", {}))

    @classmethod
    def get_dataset_info(cls, name: str) -> dict[str, Any] | None:
        """The registry's entry: description, category, source, and of each split rows, bytes, sha256."""
        return _entry(name) or None

    @classmethod
    def dataset_exists(cls, name: str, split: str | None = None) -> bool:
        splits = _entry(name).get("splits", {})
        return bool(splits) if split is None else split in splits

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Forget a data set and delete its files; False when there is none of that name."""
        with _lock():
            registry = _read()
            if registry.pop(name, None) is None:
                return False
            # The registry first: a kill before the next line leaves
            # files without an entry, and no entry without files.
            _write(registry)
            shutil.rmtree(_folder() / name, ignore_errors=True)
        return True

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """The same for one split; a data set without splits is gone."""
        with _lock():
            registry = _read()
            splits = registry.get(name, {}).get("splits", {})
            if splits.pop(split, None) is None:
                return False
            if not splits:
                del registry[name]
            _write(registry)
            _remove_unnamed(name, registry)
        return True


def require_dataset(name: str, split: str = "") -> Dataset:
    """A registered data set; without `split` its only one, or `test`, or the first.

    Raises ConfigError with the nearest name, or the splits there are.
    """
    splits = DatasetRegistry.get_dataset_splits(name)
    if not splits:
        raise ConfigError(f"There is no data set `{name}` here; {_mend_of_name(name)}")
    split_name = split or ("test" if "test" in splits else splits[0])
    rows = DatasetRegistry.load_dataset(name, split_name)
    if rows is None:
        raise ConfigError(f"The data set `{name}` has no split `{split}`; it has {', '.join(splits)}.")
    return rows


def _mend_of_name(name: str) -> str:
    names = DatasetRegistry.get_dataset_names()
    nearest = difflib.get_close_matches(name, names, n=1)
    if nearest:
        return f"did you mean `{nearest[0]}`?"
    return f"register a file with `rllm dataset register {name} FILE`, or pull one of the catalogue."


def _require_name(what: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"The {what} of a data set is {name!r}; use letters, digits, `.`, `_` and `-`, and begin "
            "with a letter "
            "or digit."
        )


def _folder() -> Path:
    return rllm_home() / "datasets"


def _read() -> dict[str, Any]:
    file = _folder() / "registry.json"
    try:
        registry = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(
            f"{file} is broken ({error}); move it away and register your data sets again."
        ) from error
    if not isinstance(registry, dict) or registry.get("version") != VERSION:
        raise ConfigError(
            f"{file} is of version {registry.get('version') if isinstance(registry, dict) else None}, this "
            f"is {VERSION}; move it away, or set RLLM_HOME to another directory."
        )
    return registry["datasets"]


def _entry(name: str) -> dict[str, Any]:
    """The entry of a data set, in whichever of its spellings it is asked for; empty where there is none."""
    registry = _read()
    return registry.get(name) or registry.get(own_name(name, registry) or "", {})


def _write(registry: dict[str, Any]) -> None:
    text = json.dumps({"version": VERSION, "datasets": registry}, indent=1, allow_nan=False)
    write_atomic(_folder() / "registry.json", text + "\n")


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One writer at a time; readers need no lock because every file is replaced whole."""
    with StorageErrors(_folder()):
        _folder().mkdir(parents=True, exist_ok=True)
        descriptor = os.open(_folder() / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _verify(file: Path, entry: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != entry["sha256"]:
        raise ConfigError(
            f"{file} of the data set `{name}` is not what was registered (sha256 {digest[:16]}… instead of "
            f"{entry['sha256'][:16]}…); register or pull it again."
        )
    return read_rows(file)


def _remove_unnamed(name: str, registry: Mapping[str, Any]) -> None:
    """Files of a data set that no entry names: of replaced splits, and of writers that were killed."""
    folder = _folder() / name
    named_files = {_folder() / each["file"] for each in registry.get(name, {}).get("splits", {}).values()}
    for path in folder.iterdir() if folder.is_dir() else []:
        if path not in named_files and path.is_file():
            path.unlink(missing_ok=True)
