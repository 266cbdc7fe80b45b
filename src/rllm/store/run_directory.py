"""One run on disk: where each of its files lies, and who may write them.

    RUN/  config.json     the resolved configuration           written once, when the run starts
          defaults.json   values chosen for the model          rllm.trainer.defaults
          store.sqlite    every episode                        rllm.store.episodes
          metrics.jsonl   one line per training step           rllm.tracking.jsonl
          machine.json    machine, kernels and measured peak   rllm.trainer.machine
          checkpoints/    what a killed run resumes from
          reference/      what `kl_coef` compares with         rllm.trainer.reference
          images/         images that rows have at addresses   rllm.models.vision.fetch
          model/          the trained model; models/NAME where there are several
          stall.txt       stacks of a run that stood still
          rank-N.log      what a rank other than 0 prints       rllm.distributed.launch
          summary.json    the result
          curve.png       the learning curve                   rllm.tracking.picture
          lock            pid of the writer, locked by it

Only its owner may look into a run: what models were asked and answered is there. One process writes, any
number read. The lock belongs to the kernel's table of open files, not to the disk: it
is gone the moment its process is, also after kill -9.
"""

import difflib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rllm.errors import ConfigError, StorageError
from rllm.files.atomic import StorageErrors, remove_leftovers, write_atomic
from rllm.files.foreign import MOST_JSON_BYTES, read_regular
from rllm.files.locks import has_writer, pid_in, release_lock, take_lock

CONFIG, STORE, LOCK = "config.json", "store.sqlite", "lock"


class RunDirectory:
    """The files of one run. `create_or_open` for the one process that writes, `read` for all others."""

    def __init__(
        self,
        path: Path,
        *,
        lock_descriptor: int | None,
        made: Sequence[Path] = (),
        was_empty: bool = False,
    ) -> None:
        self.path = path
        self._made = made
        """Directories that were not there before, the innermost first."""
        self._was_empty = was_empty
        self._lock_descriptor = lock_descriptor
        self._writer_pid = os.getpid()

    @classmethod
    def create_or_open(cls, path: Path) -> "RunDirectory":
        """Take the run for writing, new or to resume, and clear away what a killed writer left behind."""
        new_directories = _make(path)
        with StorageErrors(path):
            contents = {each.name for each in path.iterdir()}
            # A run that was killed before it wrote its configuration has a lock and nothing else.
            if contents and (not contents & {CONFIG, STORE, LOCK} or _is_model(path)):
                raise ConfigError(
                    f"{path} holds files of something else ({', '.join(sorted(contents)[:3])}) and no run; "
                    "choose a new or empty directory with --output."
                )
            if not contents and path.stat().st_uid == os.geteuid():
                path.chmod(0o700)
            lock = take_lock(path / LOCK)
            run = cls(path, lock_descriptor=lock, made=new_directories, was_empty=not contents)
            # Only under the lock: before it, these may be files that another writer is just writing.
            for each in (path, *(each for each in path.iterdir() if each.is_dir())):
                remove_leftovers(each)
        return run

    @classmethod
    def read(cls, path: Path) -> "RunDirectory":
        """Open a run to look at; takes no lock, so a run in progress can be read."""
        if not is_run(path):
            wrong = (
                "is a model directory"
                if _is_model(path)
                else f"has no `{CONFIG}`"
                if path.is_dir()
                else "is not a directory"
                if path.exists()
                else "does not exist"
            )
            raise ConfigError(f"{path} is not a run: it {wrong}.{_did_you_mean(path)}")
        return cls(path, lock_descriptor=None)

    @property
    def config_path(self) -> Path:
        return self.path / CONFIG

    @property
    def choices_path(self) -> Path:
        return self.path / "defaults.json"

    @property
    def store_path(self) -> Path:
        return self.path / STORE

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def machine_path(self) -> Path:
        return self.path / "machine.json"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_path(self) -> Path:
        return self.path / "model"

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    @property
    def curve_path(self) -> Path:
        return self.path / "curve.png"

    @property
    def lock_path(self) -> Path:
        return self.path / LOCK

    @property
    def name(self) -> str:
        return self.path.absolute().name

    @property
    def writer_pid(self) -> int | None:
        """The process that is writing this run now; None when nobody is."""
        pid = pid_in(self.lock_path)
        # The number of a killed writer may be another process's by now: only its lock says that it lives.
        return pid if pid is not None and has_writer(self.lock_path) else None

    @property
    def lost_writer_pid(self) -> int | None:
        """The process that wrote this run last, where it ended without `close`: it was killed, it crashed, or
        code in it called `os._exit`. None after every other end, and while somebody writes."""
        pid = pid_in(self.lock_path)
        return pid if pid is not None and not has_writer(self.lock_path) else None

    def write_config(self, config: dict[str, Any]) -> None:
        self._write_json(self.config_path, config)

    def config(self) -> dict[str, Any]:
        """The resolved configuration; empty while a new run has not written it yet."""
        config = _read_json(self.config_path)
        return {} if config is None else _require_config(self.config_path, config)

    def write_choices(self, choices: dict[str, dict[str, Any]]) -> None:
        self._write_json(self.choices_path, choices)

    def choices(self) -> dict[str, dict[str, Any]]:
        """Return the keys that were chosen for the model, each with value and reason; empty for a run of an
        earlier version."""
        return _read_json(self.choices_path) or {}

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write_json(self.summary_path, summary)

    def summary(self) -> dict[str, Any] | None:
        """The result; None until the run has finished."""
        summary = _read_json(self.summary_path)
        if not isinstance(summary, dict | None):
            raise _foreign_file(self.summary_path, f"it holds a {type(summary).__name__}")
        return summary

    def write_machines(self, machines: list[dict[str, Any]]) -> None:
        self._write_json(self.machine_path, machines)

    def machines(self) -> list[dict[str, Any]]:
        """The machines and kernels that it was computed with, the last ones last; none before it began."""
        return _read_json(self.machine_path) or []

    def close(self) -> None:
        """Let go of the run. Harmless when called twice, by a reader, or in a forked child of the writer."""
        # A forked child has the descriptor too; to release it there would unlock the parent's run.
        if self._lock_descriptor is None or self._writer_pid != os.getpid():
            return
        release_lock(self._lock_descriptor)
        self._lock_descriptor = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._was_empty and not self.config_path.exists():
            with suppress(OSError):  # a disk that refuses writes: then that is what has to be told
                self._leave_nothing()
        self.close()

    def _leave_nothing(self) -> None:
        """A run that was refused before it had a configuration is as if it had never been started."""
        for each in self.path.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
            else:
                each.unlink()
        for each in self._made:
            try:
                each.rmdir()
            except OSError:  # another run has begun in it meanwhile
                return

    def _write_json(self, path: Path, value: object) -> None:
        if self._lock_descriptor is None:
            raise ConfigError(
                f"{self.path} was opened for reading; `RunDirectory.create_or_open` it to write {path.name}."
            )
        write_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def _make(path: Path) -> list[Path]:
    """The directories that had to be made for `path` to be one, the innermost first.

    ConfigError where there can be none; then none of them is left.
    """
    new_directories: list[Path] = []
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; choose a directory for the run with --output.")
        new_directories = [each for each in (path, *path.parents) if not each.exists()]
        with StorageErrors(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, StorageError) as error:
        for each in new_directories:
            with suppress(OSError):  # those further in were never made
                each.rmdir()
        if isinstance(error, StorageError):
            raise
        raise ConfigError(f"{path} cannot be made ({error.strerror}); choose another --output.") from error
    return new_directories


def is_run(path: Path) -> bool:
    """Whether a run was started there. A model directory has a config.json too.

    ConfigError where this user may not look.
    """
    try:
        return (path / CONFIG).is_file() and not _is_model(path)
    except PermissionError as error:
        raise _closed_error(path, error) from error


def _closed_error(path: Path, error: PermissionError) -> ConfigError:
    return ConfigError(
        f"{path} is closed to you ({error.strerror}): only its owner may read a run. Ask for a copy, or for "
        "permission (`chmod`)."
    )


def _is_model(path: Path) -> bool:
    """A model's config.json names its `model_type`; a run's has no such key."""
    config = path / CONFIG
    return config.is_file() and b'"model_type"' in read_regular(config, MOST_JSON_BYTES)


def runs_under(root: Path) -> list[RunDirectory]:
    """The runs that lie directly in `root`, the one that started last first; at the end those that this user
    may not look into, whose `config` raises ConfigError."""
    runs: list[Path] = []
    unreadable: list[Path] = []
    for each in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            os.scandir(each).close()
            if is_run(each):
                runs.append(each)
        except (PermissionError, ConfigError):  # it may be listed, and its configuration not read
            unreadable.append(each)
        except OSError:  # a file, a link to nothing or in a circle, or gone since it was listed
            continue
    runs.sort(key=lambda path: ((path / CONFIG).stat().st_mtime_ns, path.name), reverse=True)
    return [RunDirectory(path, lock_descriptor=None) for path in (*runs, *unreadable)]


def _require_config(path: Path, config: Any) -> dict[str, Any]:
    """`config`, as far as every reader counts on it. Raises ConfigError for what no run wrote."""
    if not isinstance(config, dict):
        raise _foreign_file(path, f"it holds a {type(config).__name__}")
    kinds = {"kind": str, "name": str, "seed": int, "steps": int, "task": dict, "warm_start": dict}
    for name, kind in kinds.items():
        if name in config and not isinstance(config[name], kind):
            raise _foreign_file(
                path, f"`{name}` is {config[name]!r:.60}, of type {type(config[name]).__name__}"
            )
    if config.get("kind") == "eval" and "name" not in config:
        raise _foreign_file(path, "an evaluation without a `name`")
    return config


def _foreign_file(path: Path, fault: str) -> ConfigError:
    return ConfigError(f"{path} is not what a run wrote ({fault}); restore it, or name another directory.")


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _read_json(path: Path) -> Any:
    try:
        content = read_regular(path, MOST_JSON_BYTES)
        return json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise _foreign_file(path, "its JSON is nested too deeply") from None
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _closed_error(path.parent, error) from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid JSON ({error}); restore it, or start the run in a new directory."
        ) from error


def _did_you_mean(path: Path) -> str:
    siblings = [run.name for run in runs_under(path.absolute().parent)]
    if not siblings:
        return " There are no runs beside it; `rllm train` makes one."
    close = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.5)
    if close:
        return f" Did you mean {' or '.join(str(path.parent / name) for name in close)}?"
    return f" Runs beside it, newest first: {', '.join(siblings[:5])}."
