"""A task directory as a world: a machine to work on, commands to run, tests that come afterwards.

    TASK/ ──► sandbox: files of environment/ ──► instruction
    ```sh block ──► run in the sandbox ──► its output      … until an answer without a block, or `max_turns`:
                                                             truncated then, unless the tests say solved
    tests/ ──► into the sandbox only now ──► test.sh ──► reward.json, else reward.txt ──► reward

The sandbox lets programs write below its working directory alone, so the places of a task (/app, /tests,
/logs and what its Dockerfile names) lie there: paths are rewritten in commands and text files, and back in
outputs. Rewards follow Harbor's rules: test.sh's exit status says nothing, reward.json wins, a missing or
broken file is an error.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rllm.data.task_directory import TaskDirectory, read_task_directory, task_directories
from rllm.environments.base import BaseEnv
from rllm.environments.world import World
from rllm.errors import AgentError, ConfigError, RewardError
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import ExecResult, Limits, Status
from rllm.types.episode import Action

MAX_OUTPUT_CHARS = 8_000
"""Of one command, shown to the model."""
_BLOCK = re.compile(r"```(?:sh|bash|shell)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_HOW = (
    "Work on the machine by writing one ```sh block an answer; you are shown what it prints. When you "
    "are done, "
    "answer without a block."
)
_ALWAYS = ("app", "tests", "logs", "solution")
_REWARDS = ("reward.json", "reward.txt")
_KEYS = ("path", "backend", "max_turns", "command_timeout_s", "disk_mb")
_NAMING_KEYS = ("task_id", "uid", "oracle", "category")


class TaskDirectoryEnv(BaseEnv):
    """One task in one sandbox; `close` ends it with everything in it."""

    def __init__(
        self,
        path: str | Path,
        *,
        backend: str = "bubblewrap",
        max_turns: int = 20,
        command_timeout_s: float = 120.0,
        disk_mb: int = 512,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"`max_turns` is {max_turns}; it must be at least 1.")
        self.task: TaskDirectory = read_task_directory(Path(path), os.environ)
        self.backend = backend
        self.max_turns = max_turns
        self._limits = Limits(
            wall_s=min(command_timeout_s, self.task.agent_timeout_s or command_timeout_s),
            cpu_s=command_timeout_s,
            memory_mb=self.task.memory_mb or 1024,
            disk_mb=disk_mb,
        )
        self._places = _places(self.task)
        self._sandbox: Sandbox | None = None
        self._turns = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """A fresh machine and the instruction. Nothing is drawn, so the seed changes nothing."""
        self.close()
        self._sandbox = open_sandbox(self.backend, limits=self._limits)
        self._turns = 0
        setup = self.task.setup
        for place in (setup.workdir, *setup.directories, "/logs/verifier", "/logs/agent", "/logs/artifacts"):
            self._run(f"mkdir -p '{place}'", workdir="")
        for source, target in setup.copies:
            self._copy(source, target)
        return f"{self.task.instruction}\n\n{_HOW}", {"task": self.task.name}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._sandbox is None:
            raise AgentError("TaskDirectoryEnv.step: there is no machine; call reset first.")
        answer = action.action if isinstance(action, Action) else action
        blocks = _BLOCK.findall(str(answer))
        self._turns += 1
        shown = self._shown(self._run(blocks[-1], workdir=self.task.setup.workdir)) if blocks else ""
        is_done, is_late = not blocks, self._turns >= self.max_turns
        if not (is_done or is_late):
            return shown, 0.0, False, False, {}
        rewards, reason = self.verify()
        self.close()
        reward = rewards.get("reward", sum(rewards.values()) / len(rewards)) if rewards else 0.0
        is_correct = reward >= 1.0
        is_done = is_done or is_correct  # solved with the last turn is solved: nothing was cut off
        info = {"rewards": rewards, "reason": reason, "is_correct": is_correct}
        return shown, reward, is_done, not is_done, info

    def verify(self) -> tuple[dict[str, float], str]:
        """(named rewards, why). None of them where the tests ran into a limit.

        Raises RewardError where test.sh ended and left no reward, or one that is no finite number.
        """
        assert self._sandbox is not None, "step made sure of it"
        self._run("rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier", workdir="")
        self._copy(self.task.tests, "/tests")
        limits = Limits(
            wall_s=self.task.verifier_timeout_s,
            cpu_s=self.task.verifier_timeout_s,
            memory_mb=self._limits.memory_mb,
            disk_mb=self._limits.disk_mb,
        )
        ran = self._run(
            "chmod +x /tests/test.sh; bash /tests/test.sh",
            workdir=self.task.setup.workdir,
            limits=limits,
            variables=self.task.verifier_variables,
        )
        if ran.status in (Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.OUTPUT_LIMIT, Status.KILLED):
            return {}, f"the tests ended by {ran.status}"
        for name in _REWARDS:
            try:
                written = self._sandbox.read(f"{self._root}/logs/verifier/{name}")
            except OSError:
                continue
            return _rewards(written, name, self.task), "tests"
        raise RewardError(
            f"{self.task.path}: tests/test.sh ended ({ran.status}) and left neither "
            f"{' nor '.join(_REWARDS)} in "
            f"/logs/verifier. It said: {(ran.stdout + ran.stderr)[-500:]!r}"
        )

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    @property
    def _root(self) -> str:
        assert self._sandbox is not None, "there is a machine"
        return self._sandbox.workdir.rstrip("/")

    def _run(
        self,
        command: str,
        *,
        workdir: str,
        limits: Limits | None = None,
        variables: dict[str, str] | None = None,
    ) -> ExecResult:
        assert self._sandbox is not None, "there is a machine"
        given = {**self.task.setup.variables, **(variables or {})}
        return self._sandbox.exec(
            ["bash", "-c", self._moved(command)],
            env={name: self._moved(value) for name, value in given.items()},
            cwd=self._moved(workdir),
            limits=limits,
        )

    def _copy(self, source: Path, target: str) -> None:
        """A file or a directory, with the paths in its texts rewritten."""
        assert self._sandbox is not None, "there is a machine"
        files = [source] if source.is_file() else sorted(each for each in source.rglob("*") if each.is_file())
        for file in files:
            inside = (
                PurePosixPath(target)
                if file == source
                else PurePosixPath(target, *file.relative_to(source).parts)
            )
            data = file.read_bytes()
            with contextlib.suppress(UnicodeDecodeError):  # what is no text stays as it is
                data = self._moved(data.decode()).encode()
            self._sandbox.write(self._moved(str(inside)), data)

    def _moved(self, text: str) -> str:
        return self._places.sub(lambda match: f"{self._root}{match[0]}", text)

    def _shown(self, ran: ExecResult) -> str:
        said = (ran.stdout + ran.stderr).replace(f"{self._root}/", "/")
        if len(said) > MAX_OUTPUT_CHARS:
            half = MAX_OUTPUT_CHARS // 2
            said = f"{said[:half]}\n[… {len(said) - 2 * half} characters left out …]\n{said[-half:]}"
        return f"{said}\n[{ran.status}{'' if ran.exit_code is None else f', exit code {ran.exit_code}'}]"

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "TaskDirectoryEnv":
        """The environment of a task with a `path`; the others of its arguments have defaults."""
        unknown = info.keys() - {*_KEYS, *_NAMING_KEYS}
        if unknown:
            raise ConfigError(
                f"TaskDirectoryEnv does not know `{min(unknown)}`; it takes {', '.join(_KEYS)}."
            )
        if "path" not in info:
            raise ConfigError("A task directory's task has no `path`.")
        return TaskDirectoryEnv(**{name: info[name] for name in _KEYS if name in info})


def directory_tasks(
    split: str, count: int, *, start: int = 0, path: str = "", **arguments: Any
) -> list[dict[str, Any]]:
    """The task directories under `path` by name. They have no splits: `test` is all of them."""
    if not path:
        raise ConfigError("`task.path` is empty; give the directory that holds the tasks.")
    if split != "test":
        raise ConfigError(f"Task directories have no split `{split}`; they are all `test`.")
    found = task_directories(Path(path))[start : start + count]
    return [{"task_id": each.name, "path": str(each), **arguments} for each in found]


def demonstration(task: dict[str, Any], *, noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    """The task's own solution, as one command. Raises ConfigError for a task without one."""
    if noise:
        raise ConfigError("Nobody strays from a task's own solution; set `warm_start.noise` to 0.")
    found = read_task_directory(Path(task["path"]), os.environ)
    script = found.solution / "solve.sh"
    if not script.is_file():
        raise ConfigError(f"{found.path} has no solution/solve.sh to demonstrate.")
    return [
        (f"{found.instruction}\n\n{_HOW}", f"```sh\n{script.read_text('utf-8').rstrip()}\n```"),
        ("", "Done."),
    ]


def _places(task: TaskDirectory) -> re.Pattern[str]:
    """Finds the absolute paths that lie below the working directory here."""
    setup = task.setup
    named: Iterable[str] = (setup.workdir, *setup.directories, *(target for _, target in setup.copies))
    tops = {PurePosixPath(each).parts[1] for each in named if len(PurePosixPath(each).parts) > 1}
    kept = {"usr", "bin", "lib", "lib64", "etc", "proc", "dev", "sys", "tmp"}
    if taken := tops & kept:
        raise ConfigError(
            f"{task.path}: the Dockerfile writes to /{min(taken)}, which is read-only in the sandbox; "
            "leave this "
            "task out."
        )
    listed = "|".join(sorted(map(re.escape, {*tops, *_ALWAYS})))
    return re.compile(rf"(?<![\w./-])/(?:{listed})(?![\w-])")


def _rewards(written: bytes, name: str, task: TaskDirectory) -> dict[str, float]:
    where = f"{task.path}: /logs/verifier/{name}"
    text = written.decode("utf-8", "replace").strip()
    try:
        found = json.loads(text) if name == "reward.json" else {"reward": float(text)}
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{where} holds {text[:80]!r}, which is no reward: {error}") from error
    if not isinstance(found, dict) or not found:
        raise RewardError(f"{where} holds {text[:80]!r}; it must be an object of names and numbers.")
    for each, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"{where} says {each} = {value!r:.40}; a reward is a finite number.")
    return {str(each): float(value) for each, value in found.items()}


WORLD = World(env_class=TaskDirectoryEnv, tasks=directory_tasks, demonstrate=demonstration)
