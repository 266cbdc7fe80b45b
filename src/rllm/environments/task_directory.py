"""A task directory as a world: a machine to work on, commands to run, tests that come afterwards.

    TASK/ ──► sandbox: files of environment/ ──► instruction
    ```sh block ──► run in the sandbox ──► its output      … until an answer without a block, or `max_turns`:
                                                             truncated then, unless the tests say solved
    tests/ ──► a fresh sandbox with what was left ──► test.sh ──► reward.json, else reward.txt ──► reward

A task of several steps goes on in the same sandbox: where a step ends it is judged, and the next one begins.

Every path of a task is a real one: each attempt has a writable root. The tests run in another world, which
has what the agent left in its folders and nothing else of it (`rllm.sandbox.verifier`); what their reward
means says `rllm.rewards.task_tests`.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from rllm.data.image import Image, user_of
from rllm.data.task_directory import SETTINGS, TaskDirectory, read_task_directory, task_directories
from rllm.data.task_images import PATH
from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.world import World
from rllm.errors import AgentError, ConfigError, SandboxError
from rllm.rewards.clock import grading
from rllm.rewards.task_tests import RESULTS, TaskReward, task_reward, total_reward
from rllm.sandbox.archive import pack_links_and_all
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import ExecResult, Limits, Root, Snapshot
from rllm.sandbox.verifier import Examination, snapshot_of
from rllm.types.episode import Action

MAX_OUTPUT_CHARS = 8_000
"""The length of the output of one command, as the model sees it."""
MAX_ARTIFACT_BYTES = 64 << 10
"""The size of a file that is collected."""
_BLOCK = re.compile(r"```(?:sh|bash|shell)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_HOW = (
    "Work on the machine by writing one ```sh block an answer; you are shown what it prints. When you "
    "are done, "
    "answer without a block."
)
_MCP, _MCP_SETTINGS = "/run/mcp", "/run/mcp.json"
"""Where the program lies that calls tools of the task's MCP servers, and what it reads."""
_MCP_HOW = (
    f"Beside the shell there are tools. `{_MCP} SERVER TOOL JSON` calls one, such as\n"
    f"{_MCP} {{call}}\nEach call starts its server anew."
)
_LOGS = ("/logs/verifier", "/logs/agent", "/logs/artifacts")
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
            wall_s=command_timeout_s,
            cpu_s=command_timeout_s,
            memory_mb=self.task.memory_mb or 1024,
            disk_mb=self.task.storage_mb or disk_mb,
            processes=256,
        )
        self._image: Image | None = None
        self._sandbox: Sandbox | None = None
        self._steps = self.task.steps or (self.task,)
        self._step = self._steps[0]
        self._results: list[TaskReward] = []
        self._artifacts: dict[str, str] = {}
        self._turns = 0
        self._left_s = 0.0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """A fresh machine and the instruction. Nothing is drawn, so the seed changes nothing."""
        self.close()
        self._results, self._artifacts = [], {}
        self._step = self._steps[0]
        self._sandbox = self._open_world()
        self._begin_step(self._sandbox)
        tools = self._tools(self._sandbox) if self.task.mcp_servers else {}
        info = {"task": self.task.name} | ({"mcp_tools": tools} if tools else {})
        parts = [self._step.instruction, _HOW, *([_tools_text(tools)] if tools else [])]
        return "\n\n".join(parts), info

    def _tools(self, sandbox: Sandbox) -> dict[str, list[dict[str, Any]]]:
        """Tools by server, as the servers describe them. Raises SandboxError where one does not start."""
        result = self._run(sandbox, _MCP)
        try:
            return json.loads(result.stdout)
        except ValueError:
            self.close()
            raise SandboxError(
                f"{self.task.path}: an MCP server of its does not answer: {_output_text(result)[-400:]}"
            ) from None

    def _begin_step(self, sandbox: Sandbox) -> None:
        self._turns = 0
        self._left_s = self._step.agent_timeout_s or float("inf")
        try:
            self._bring_step(sandbox, self._step)
            self._require_health(sandbox)
        except BaseException:
            self.close()
            raise

    def _bring_step(self, sandbox: Sandbox, step: TaskDirectory) -> None:
        """Prepare a step. Raises SandboxError where its `setup.sh` fails."""
        if step.step_files is None:
            return
        sandbox.upload(step.step_files, self.image.workdir)
        if (step.step_files / "setup.sh").is_file():
            result = self._run(sandbox, "bash setup.sh && rm -f setup.sh")
            if result.exit_code != 0:
                raise SandboxError(f"{step.path}: setup.sh of {step.name}: {_output_text(result)[-400:]}")

    def step(self, action: Any) -> Moved:
        if self._sandbox is None:
            raise AgentError("TaskDirectoryEnv.step: there is no machine; call reset first.")
        answer = action.action if isinstance(action, Action) else action
        blocks = _BLOCK.findall(str(answer))
        self._turns += 1
        output = _output_text(self._act(self._sandbox, blocks[-1])) if blocks else ""
        is_done, is_late = not blocks, self._turns >= self.max_turns or self._left_s <= 0
        if not (is_done or is_late):
            return output, 0.0, False, {}
        with grading():
            verdict = self.verify()
        self._results.append(verdict)
        self._collect(self._sandbox)
        if len(self._results) < len(self._steps) and not _is_below(verdict, self._step.min_rewards):
            self._step = self._steps[len(self._results)]
            self._begin_step(self._sandbox)
            return f"{output}\n\n{self._step.instruction}".lstrip(), 0.0, False, {}
        self.close()
        reward, info = self._outcome()
        is_done = is_done or info["is_correct"]  # solved with the last turn is solved: nothing was cut off
        return moved(output, reward, info, terminated=is_done, truncated=not is_done)

    def _outcome(self) -> tuple[float, dict[str, Any]]:
        """The reward of all steps, those that were not reached with 0, and what is known of them."""
        last = self._results[-1]
        rewards = [total_reward(each.rewards) for each in self._results]
        missing = [0.0] * (len(self._steps) - len(rewards))
        if self.task.strategy == "final":
            reward = rewards[-1] if not missing else 0.0
        else:
            reward = sum(rewards) / len(self._steps)
        info: dict[str, Any] = {
            "rewards": last.rewards,
            "reason": last.reason,
            "is_correct": not missing and min(reward, *rewards) >= 1.0,
        }
        if self.task.steps:
            names = [each.name.rpartition("/")[2] for each in self._steps]
            info["steps"] = dict(zip(names, [*rewards, *missing], strict=True))
        if self._artifacts:
            info["artifacts"] = self._artifacts
        return reward, info

    def _collect(self, sandbox: Sandbox) -> None:
        """The texts that the task names as artifacts."""
        for path, name in self._step.artifacts.items():
            try:
                text = sandbox.read(path, most_bytes=MAX_ARTIFACT_BYTES).decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # not there, a directory, or no text of that size: the tests see it all the same
            self._artifacts[name] = text

    def verify(self) -> TaskReward:
        """The reward that the tests pay for the present files. No rewards where the agent is the reason that
        there are none.

        Raises RewardError for tests that leave no reward whatever they are run on.
        """
        assert self._sandbox is not None, "step made sure of it"
        return task_reward(
            self._sandbox,
            self._examination(),
            where=f"{self.task.path}: tests/test.sh",
            solve=self._solve,
            bounds=self.task.reward_range,
        )

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    @property
    def image(self) -> Image:
        """The image of the task's Dockerfile, from the cache or made now. Raises ConfigError that names the
        line."""
        if self._image is None:
            image = self.task.image()
            if self.backend == "docker" and image.runs:
                raise ConfigError(
                    f"{image.runs[0]}: RUN lines are run for `bubblewrap` and `unshare` alone; name "
                    f"one of them as "
                    "`backend`."
                )
            self._image = image
        return self._image

    def _open_world(self) -> Sandbox:
        """The task's machine as it is given to an agent."""
        folders = tuple(dict.fromkeys(each for each in (*self._folders, *_LOGS) if each.strip("/")))
        root = Root(folders=folders, layers=self._layers, owner=self._owner(self._steps[0].agent_user))
        sandbox = open_sandbox(self.backend, limits=self._limits, root=root)
        try:
            self._prepare(sandbox, lambda path: True)
            if self.task.mcp_servers:
                client = resources.files("rllm.sandbox.inside") / "mcp_client.py"
                sandbox.write(_MCP, client.read_text("utf-8"))
                sandbox.write(_MCP_SETTINGS, json.dumps(self.task.mcp_servers))
                sandbox.exec(["chmod", "755", _MCP])
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    @property
    def _folders(self) -> tuple[str, ...]:
        """Every path that the task names for the agent to work in."""
        folders = [self.image.workdir, *self.image.folders]
        for artifact in (path for step in self._steps for path in step.artifacts):
            if not any(PurePosixPath(artifact).is_relative_to(each) for each in folders):
                is_file = "." in PurePosixPath(artifact).name[1:]
                folders.append(str(PurePosixPath(artifact).parent) if is_file else artifact)
        return tuple(folders)

    @property
    def _layers(self) -> tuple[str, ...]:
        return () if self.backend == "docker" else tuple(map(str, self.image.layers))

    def _owner(self, user: str) -> int:
        """The user id of a phase: its own, or the image's."""
        where = str(self.task.path / SETTINGS)
        return user_of(self.image, user, where)[0] if user else self.image.user

    def _prepare(self, sandbox: Sandbox, brings: Callable[[str], bool]) -> None:
        """Bring what lines of the Dockerfile copied where there are no layers."""
        # The topmost layer comes first in the image, and has to be written last.
        for layer in reversed(self.image.layers if self.backend == "docker" else ()):
            tar = pack_links_and_all(layer, "", keeps=brings)
            sandbox.restore(Snapshot(tar=tar, base="/"))

    def _prepare_tests(self, sandbox: Sandbox, brings: Callable[[str], bool]) -> None:
        self._prepare(sandbox, brings)
        for path, source in self._step.test_files.items():
            sandbox.upload(source, path)

    def _require_health(self, sandbox: Sandbox) -> None:
        """Raises SandboxError where the task's health check does not succeed."""
        health = self._step.health
        if health is None:
            return
        limits = replace(self._limits, wall_s=health.timeout_s)
        start_s = time.monotonic()
        result = self._run(sandbox, health.command, limits)
        while result.exit_code != 0 and time.monotonic() - start_s < health.start_period_s:
            time.sleep(health.start_interval_s)
            result = self._run(sandbox, health.command, limits)
        for _ in range(health.retries):
            if result.exit_code == 0:
                return
            time.sleep(health.interval_s)
            result = self._run(sandbox, health.command, limits)
        if result.exit_code == 0:
            return
        self.close()
        raise SandboxError(
            f"{self.task.path}: its health check `{health.command:.120}` failed {health.retries + 1} times: "
            f"{_output_text(result)[-400:]}"
        )

    def _act(self, sandbox: Sandbox, command: str) -> ExecResult:
        """Run a command of the agent's, within what is left of its time."""
        result = self._run(
            sandbox, command, replace(self._limits, wall_s=min(self._limits.wall_s, self._left_s))
        )
        self._left_s -= result.wall_s
        return result

    def _examination(self) -> Examination:
        task = self._step
        return Examination(
            backend=self.backend,
            tests=task.tests,
            command=task.test_command,
            workdir=self.image.workdir,
            variables=self.image.variables,
            own_variables=task.verifier_variables,
            folders=self._folders,
            layers=self._layers,
            owner=self._owner(task.verifier_user),
            packages=task.test_packages,
            limits=replace(self._limits, wall_s=task.verifier_timeout_s, cpu_s=task.verifier_timeout_s),
            prepare=self._prepare_tests,
            results=RESULTS,
        )

    def play_solution(self) -> None:
        """Run the task's own solution of this step in the agent's machine.

        Raises ConfigError for a step without one.
        """
        if self._sandbox is None:
            raise AgentError("TaskDirectoryEnv.play_solution: there is no machine; call reset first.")
        if not self._step.solution.is_file():
            missing = self._step.solution.relative_to(self.task.path)
            raise ConfigError(f"{self.task.path} has no {missing}, so nobody knows that it can be solved.")
        self._play_solution(self._sandbox, self._step)

    def _solve(self) -> Snapshot | None:
        """The files after the task's own solution of this step and of those before it; None without one."""
        steps = self._steps[: len(self._results) + 1]
        if not all(each.solution.is_file() for each in steps):
            return None
        with self._open_world() as sandbox:
            for step in steps:
                self._bring_step(sandbox, step)
                self._play_solution(sandbox, step)
            return snapshot_of(sandbox, self._examination())

    def _play_solution(self, sandbox: Sandbox, step: TaskDirectory) -> None:
        script = step.solution
        if script.parent == step.path:
            sandbox.upload(script, f"/solution/{script.name}")
        else:
            sandbox.upload(script.parent, "/solution")
        limits = replace(self._limits, wall_s=step.verifier_timeout_s, cpu_s=step.verifier_timeout_s)
        self._run(sandbox, f"bash /solution/{script.name}", limits, step.solution_variables)

    def _run(
        self, sandbox: Sandbox, command: str, limits: Limits | None = None, variables: Mapping[str, str] = {}
    ) -> ExecResult:
        image = self.image
        env = {"PATH": PATH, **image.variables, **variables}
        return sandbox.exec(["bash", "-c", command], env=env, cwd=image.workdir, limits=limits)

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
    """The task directories under `path` by name, but those that cannot be run here. They have no splits:
    `test` is all of them."""
    if not path:
        raise ConfigError("`task.path` is empty; give the directory that holds the tasks.")
    if split != "test":
        raise ConfigError(f"Task directories have no split `{split}`; they are all `test`.")
    directories = task_directories(Path(path))
    skip = skipped_directories(split, path=path, **arguments)
    if len(skip) == len(directories):
        first = skip[directories[0].name]
        raise ConfigError(f"None of the {len(directories)} tasks in {path} can be run here. {first}")
    selection = [each for each in directories if each.name not in skip][start : start + count]
    return [{"task_id": each.name, "path": str(each), **arguments} for each in selection]


def skipped_directories(
    split: str, *, path: str = "", backend: str = "bubblewrap", **_: Any
) -> dict[str, str]:
    """The reasons that tasks under `path` cannot be run here, by name. Their images are built for that, but
    those that are in the cache."""
    reasons: dict[str, str] = {}
    for each in task_directories(Path(path)):
        try:
            read_task_directory(each, os.environ)
        except ConfigError as error:
            reasons[each.name] = str(error)
            continue
        reason = _build_failure(
            each, backend, _written_ns(each / "environment" / "Dockerfile", each / "Dockerfile")
        )
        if reason:
            reasons[each.name] = reason
    return reasons


@cache
def _build_failure(path: Path, backend: str, written_ns: int) -> str:
    """The reason that a task's image cannot be made; empty where it can. A failure is not tried again."""
    try:
        task_environment = TaskDirectoryEnv(path, backend=backend)
        image = task_environment.image
        for user in (task_environment.task.agent_user, task_environment.task.verifier_user):
            if user:
                user_of(image, user, str(path / SETTINGS))
    except (ConfigError, SandboxError) as error:
        return str(error)
    return ""


def _written_ns(*paths: Path) -> int:
    return max((path.stat().st_mtime_ns for path in paths if path.is_file()), default=0)


def demonstration(task: dict[str, Any], *, noise: float, rng: np.random.Generator) -> list[tuple[str, str]]:
    """The task's own solution, as one command. Raises ConfigError for a task without one."""
    if noise:
        raise ConfigError("Nobody strays from a task's own solution; set `warm_start.noise` to 0.")
    directory = read_task_directory(Path(task["path"]), os.environ)
    turns: list[tuple[str, str]] = []
    for step in directory.steps or (directory,):
        script = step.solution
        if not script.is_file():
            raise ConfigError(f"{directory.path} has no {script.relative_to(directory.path)} to demonstrate.")
        prompt = step.instruction if turns else f"{step.instruction}\n\n{_HOW}"
        turns += [(prompt, f"```sh\n{script.read_text('utf-8').rstrip()}\n```"), ("", "Done.")]
    return turns


def _is_below(verdict: TaskReward, least: Mapping[str, float]) -> bool:
    """Whether a step did too badly for the next one to be asked for."""
    rewards = verdict.rewards | {"reward": total_reward(verdict.rewards)}
    return any(rewards.get(name, 0.0) < value for name, value in least.items())


def _tools_text(tools: Mapping[str, list[dict[str, Any]]]) -> str:
    """The tools of MCP servers as an agent reads of them."""
    lines = [
        f"- {server} {tool['name']} {json.dumps(tool.get('inputSchema', {}).get('properties', {}))}: "
        f"{tool.get('description', '')}"
        for server in tools
        for tool in tools[server]
    ]
    first = next(
        ((server, tools[server][0]["name"]) for server in tools if tools[server]), ("SERVER", "TOOL")
    )
    return "\n".join([_MCP_HOW.format(call=f"{first[0]} {first[1]} '{{}}'"), *lines])


def _output_text(result: ExecResult) -> str:
    text = result.stdout + result.stderr
    if len(text) > MAX_OUTPUT_CHARS:
        half = MAX_OUTPUT_CHARS // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
    return f"{text}\n[{result.status}{'' if result.exit_code is None else f', exit code {result.exit_code}'}]"


WORLD = World(
    env_class=TaskDirectoryEnv,
    tasks=directory_tasks,
    skipped=skipped_directories,
    demonstrate=demonstration,
)
