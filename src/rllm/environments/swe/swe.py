"""A repository, an issue, and tools to mend it with; paid by tests that the agent never sees.

row ──reset──► a sandbox with the repository at /testbed ──► the issue
calls (see `scaffolds`) ──► tools ──► their output           … until `submit`, or `max_steps`
what changed in /testbed ──► a fresh world with the hidden tests (rllm.rewards.swe_grading) ──► reward
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllm.data.swe_rows import SWETask, read_swe_rows, swe_splits
from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.swe.patches import judge_patch
from rllm.environments.swe.ready_worlds import ReadyWorlds
from rllm.environments.swe.scaffolds import (
    DEFAULT_SCAFFOLD,
    SCAFFOLDS,
    SUBMIT,
    TOOLS,
    SWECall,
    call_as_answer,
    read_calls,
    require_scaffold,
    steps_left,
    submit_of,
)
from rllm.environments.swe.tools import SWETools
from rllm.environments.world import Turns, World
from rllm.errors import AgentError, ConfigError
from rllm.rewards.clock import grading
from rllm.rewards.grade import Grade, wrong
from rllm.rewards.runner_logs import runner_of
from rllm.rewards.swe_grading import grade_patch
from rllm.rewards.swe_world import SWEWorld, patch_of
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import FileState, Limits
from rllm.types.episode import Action

MAX_STEPS = 50
"""The number of steps of an episode, unless an argument says otherwise."""
SWE_BACKENDS = ("bubblewrap", "unshare", "docker")
_WORLDS = ReadyWorlds()
_NO_CALL = "Error: your answer makes no call that can be read. Make exactly one, in the form you were told."
_ARGUMENTS = ("step_timeout", "reward_timeout", "backend", "scaffold", "max_steps", "memory_mb", "disk_mb")
_NAMING_KEYS = ("task_id", "uid", "path")
"""Keys of a task beside its row: its name, and the file that the row is from."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SWEState:
    """A moment of an episode, for branches from it."""

    files: FileState
    steps: int
    undo: Mapping[str, Sequence[bytes | None]]
    """Path -> what the editor can take back there, the latest last."""


class SWEEnv(BaseEnv):
    """One task in one sandbox; `close` ends it with everything in it.

    The task is a row (`entry`), or row `idx` of a `dataset`. `step_timeout` and `reward_timeout` are seconds
    for one call and for the tests. With `backend` docker the world is the row's container image.
    """

    def __init__(
        self,
        entry: Mapping[str, Any] | None = None,
        dataset: Sequence[Mapping[str, Any]] | None = None,
        idx: int | None = None,
        step_timeout: float = 90.0,
        reward_timeout: float = 300.0,
        backend: str = "bubblewrap",
        delete_image: bool = False,
        scaffold: str = DEFAULT_SCAFFOLD,
        *,
        max_steps: int = MAX_STEPS,
        memory_mb: int = 2048,
        disk_mb: int = 1024,
    ) -> None:
        if delete_image or backend not in SWE_BACKENDS:
            what = "`delete_image` is true" if delete_image else f"`backend` is {backend!r}"
            raise ConfigError(
                f"SWEEnv: {what}; images are never deleted here, and `backend` is one of "
                f"{', '.join(SWE_BACKENDS)}: docker takes a row's image, the others its `source`."
            )
        if max_steps < 1:
            raise ConfigError(f"`max_steps` is {max_steps}; it must be at least 1.")
        self.task = SWETask.from_row(_row(entry, dataset, idx))
        runner_of(self.task.test_command, self.task.instance_id)
        self.scaffold = require_scaffold(scaffold)
        self.backend, self.max_steps, self.reward_timeout = backend, max_steps, reward_timeout
        self.step_timeout = step_timeout
        self.grade: Grade | None = None
        """The tests' verdict on the last episode."""
        self._limits = Limits(
            wall_s=step_timeout,
            cpu_s=step_timeout,
            memory_mb=memory_mb,
            disk_mb=disk_mb,
            output_kb=4096,
            processes=256,
        )
        self._world: SWEWorld | None = None
        self._sandbox: Sandbox | None = None

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """A fresh world and the issue. Nothing is drawn, so the seed changes nothing."""
        self.close()
        if self._world is None:
            self._world = SWEWorld.of(self.task, backend=self.backend, limits=self._limits)
        self._sandbox = _WORLDS.open(self._world)
        self._tools = SWETools(self._sandbox, self._world.variables, timeout_s=self.step_timeout)
        self._steps, self.grade = 0, None
        return self.task.problem_statement, {"task": self.task.instance_id, "max_steps": self.max_steps}

    def step(self, action: Any) -> Moved:
        if self._sandbox is None:
            raise AgentError("SWEEnv.step: there is no world; call reset first.")
        calls = read_calls(action.action if isinstance(action, Action) else action)
        self._steps += 1
        reply, is_submitted = self._answers(calls)
        is_late = self._steps >= self.max_steps
        info: dict[str, Any] = {"max_steps": self.max_steps}
        if not (is_submitted or is_late):
            return reply, 0.0, False, info
        reward = self.compute_final_reward()
        grade = self.grade
        assert grade is not None, "compute_final_reward made it"
        patch = grade.extracted or ""
        info |= {"is_correct": grade.is_correct, "reason": grade.reason, **grade.metadata, "patch": patch}
        self.close()
        is_ended = is_submitted or grade.is_correct  # solved with the last step is solved
        return moved(reply, reward, info, terminated=is_ended, truncated=not is_ended)

    def compute_final_reward(self) -> float:
        """1 where the hidden tests pass on what is in the repository now, else 0; `grade` says why.

        Raises RewardError where the row's own solution fails them too, SandboxError where a sandbox fails.
        """
        if self._sandbox is None or self._world is None:
            raise AgentError("SWEEnv.compute_final_reward: there is no world; call reset first.")
        try:
            patch = patch_of(self._sandbox, self._world)
        except OSError as error:
            self.grade = wrong(f"what was left cannot be kept: {error}")
        else:
            with grading():
                self.grade = grade_patch(self._world, patch, timeout_s=self.reward_timeout)
        return self.grade.score

    def keep_state(self) -> SWEState:
        """The files and the number of steps as they are now, to return to any number of times until `close`.

        Processes are not kept. Raises ConfigError where this machine has no overlays.
        """
        if self._sandbox is None:
            raise AgentError("SWEEnv.keep_state: there is no world; call reset first.")
        return SWEState(files=self._sandbox.keep_state(), steps=self._steps, undo=self._tools.undo)

    def return_to(self, state: SWEState) -> None:
        """Go on from a state that was kept since `reset`, as if what came after it had not been done."""
        if self._sandbox is None:
            raise AgentError("SWEEnv.return_to: the world of that state is closed.")
        self._sandbox.return_to(state.files)
        self._steps, self._tools.undo, self.grade = state.steps, state.undo, None

    def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None and self._world is not None:
            _WORLDS.close(self._world, sandbox)

    def _answers(self, calls: list[SWECall]) -> tuple[Any, bool]:
        """The outputs of the calls, and whether one of them ends the episode; those after it are not made."""
        tool_names = (*SCAFFOLDS[self.scaffold], "submit")
        texts: dict[str, str] = {}
        for call in calls:
            if call.name in tool_names and TOOLS[call.name] == SUBMIT:
                return "Submitted.", True
            texts[call.call_id] = self._tools.answer(call, tool_names)
        if not calls:
            return _NO_CALL, False
        return ({"tool_outputs": texts} if calls[0].call_id else texts[""]), False

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "SWEEnv":
        """The environment of a task: its row under `entry`, or as the task itself; beside it, arguments."""
        arguments = {name: info[name] for name in _ARGUMENTS if name in info}
        if "entry" in info:
            unknown = info.keys() - {"entry", *_ARGUMENTS, *_NAMING_KEYS}
            if unknown:
                raise ConfigError(
                    f"SWEEnv does not know `{min(unknown)}`; it takes entry, {', '.join(_ARGUMENTS)}."
                )
            return SWEEnv(entry=info["entry"], **arguments)
        return SWEEnv(entry={name: info[name] for name in info if name not in _ARGUMENTS}, **arguments)


def swe_tasks(
    split: str, count: int, *, start: int = 0, path: str = "", **arguments: Any
) -> list[dict[str, Any]]:
    """The rows of a split: of a directory with one folder a split, those of its folder. A single file has no
    splits: `train` and `test` are all of its rows, and nothing of it validates."""
    if not path:
        raise ConfigError("`task.path` is empty; give the file of rows, or the directory that holds it.")
    splits = swe_splits(Path(path))
    if split == "validation" and split not in splits:
        return []
    if split not in splits:
        raise ConfigError(f"{path} has no split `{split}`; it has {', '.join(splits)}.")
    rows = read_swe_rows(splits[split])[start : start + count]
    return [{"task_id": row["instance_id"], "entry": row, **arguments} for row in rows]


def demonstration(task: Mapping[str, Any], *, noise: float, rng: np.random.Generator) -> Turns:
    """The row's own solution, applied by one command, and submitted. Raises ConfigError without one."""
    if noise:
        raise ConfigError("Nobody strays from a row's own solution; set `warm_start.noise` to 0.")
    row = SWETask.from_row(task["entry"])
    patch, words = (row.bug_patch, "git apply -R") if row.bug_patch else (row.patch, "git apply")
    if not patch:
        raise ConfigError(
            f"{row.instance_id} has no `patch` to imitate; set `warm_start.steps` to 0, or give its row one."
        )
    # The last line of a here-document is a line of its own, also behind a patch that lacks its line end.
    patch = patch if patch.endswith("\n") else f"{patch}\n"
    command = f"{words} <<'END_OF_PATCH'\n{patch}END_OF_PATCH"
    scaffold = task.get("scaffold", DEFAULT_SCAFFOLD)
    answers = [
        call_as_answer(SWECall(name="execute_bash", arguments={"command": command}), scaffold),
        call_as_answer(SWECall(name=submit_of(scaffold), arguments={}), scaffold),
    ]
    left = int(task.get("max_steps", MAX_STEPS)) - 1
    return [(row.problem_statement, answers[0]), (f"[exit code 0]{steps_left(left)}", answers[1])]


def _row(
    entry: Mapping[str, Any] | None, dataset: Sequence[Mapping[str, Any]] | None, idx: int | None
) -> Mapping[str, Any]:
    if entry is not None:
        if dataset is not None:
            raise ConfigError("SWEEnv: both `entry` and `dataset` are given; give one of them.")
        return entry
    if dataset is None or idx is None:
        raise ConfigError("SWEEnv: give the task's row as `entry`, or a `dataset` and the `idx` of its row.")
    if not 0 <= idx < len(dataset):
        raise ConfigError(f"SWEEnv: `idx` is {idx}; the data set has {len(dataset)} rows.")
    return dataset[idx]


WORLD = World(env_class=SWEEnv, tasks=swe_tasks, demonstrate=demonstration, evaluator=judge_patch)
