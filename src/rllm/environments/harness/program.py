"""A harness as a program of the engine: a row of a software-engineering task in, a patch out.

    task ──► its world (repository, environment) + /opt/harness ──► files, then `command` in /testbed
                 │ every model call: Door ──► the session of the gateway, which captures and counts
                 └─ when it has ended ──► patch_of ──► Episode.artifacts["patch"] ──► the row's hidden tests

What it prints, how it ended and what it wanted to reach are in `Episode.info["harness"]`. One that crashed,
that ran until it was stopped, or that a limit of the sandbox ended says so as the cause of its episode. One
that ends without any answer says nothing of the policy: that is a failure of what was set up.
"""

import time
from dataclasses import replace
from typing import Any

from rllm.data.swe_repository import PLACE
from rllm.environments.harness.door import Door
from rllm.environments.harness.installing import mounts_of
from rllm.environments.harness.spec import HOME, HarnessSpec
from rllm.environments.swe.patches import PATCH, world_of_row
from rllm.errors import AgentError, SandboxError
from rllm.rewards.swe_world import SWEWorld, patch_of
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import ExecResult, Status
from rllm.types.episode import Episode, TerminationReason
from rllm.types.task import AgentConfig, Task

LIMITS = {"output_kb": 16_384, "processes": 512}
CPU_PER_WALL_S = 2.0
"""Processors that it may keep busy all the time."""
PATCH_S = 20.0
"""The part of an episode's time that is kept for taking the patch out."""
_TAIL_CHARS = 2000
_REFUSAL_CHARS = 400


class Harness:
    """Runs the harness on tasks; any number of threads may do so at a time."""

    def __init__(self, spec: HarnessSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self._mounts: tuple[tuple[str, str], ...] | None = None
        """The directories that sandboxes are shown, looked up once: files that it copies may be edited while
        a run goes on, and all episodes of the run are of one harness."""

    def install(self) -> None:
        """Have it in the cache. Raises ConfigError where it cannot be installed."""
        if self._mounts is None:
            self._mounts = mounts_of(self.spec)

    def run(self, task: Task, config: AgentConfig) -> Episode:
        """Raises ConfigError for a task that is no row, or one that cannot be set up; AgentError for a
        program that ended without an answer of its model."""
        started_s = time.monotonic()
        self.install()
        assert self._mounts is not None, "`install` has set them"
        world = world_of_row(task.metadata, memory_mb=self.spec.memory_mb, **LIMITS)
        with world.open(mounts=self._mounts) as sandbox:
            left_s = config.metadata.get("timeout_s", self.spec.wall_s) - (time.monotonic() - started_s)
            if left_s <= PATCH_S:
                raise AgentError(
                    f"Setting up the world of {world.task.instance_id} left {left_s:.0f} s of the episode's "
                    "time."
                )
            with Door(sandbox, config.base_url, work_s=left_s - PATCH_S) as door:
                result, wall_s = self._run(sandbox, door, world, config, started_s)
                if door.failure is not None:
                    raise SandboxError(
                        f"The sandbox of {world.task.instance_id} did not reach its model: {door.failure}"
                    ) from door.failure
                if door.is_out_of_time:
                    result, wall_s = replace(result, status=Status.TIMEOUT), left_s - PATCH_S
            if door.num_calls == door.num_refused_calls:
                cause = self._cause(world, result, door.refused_places, wall_s)
                refusal = f"All its calls were refused ({door.first_refusal[:_REFUSAL_CHARS]})"
                what = refusal if door.num_calls else "Nothing was asked of the model"
                raise AgentError(f"{what}, so this is no failure of the model: {cause}")
            patch = patch_of(sandbox, world)
        return self._episode(world, result, patch, door.refused_places, wall_s)

    def _run(
        self, sandbox: Sandbox, door: Door, world: SWEWorld, config: AgentConfig, started_s: float
    ) -> tuple[ExecResult, float]:
        """Run the command in the sandbox. Returns its result and the seconds that it had."""
        wall_s = self.spec.wall_s
        if limit_s := config.metadata.get("wall_timeout_s"):
            wall_s = max(1.0, min(wall_s, limit_s - (time.monotonic() - started_s) - PATCH_S))
        processes = self.spec.with_values(
            {
                "task": self.spec.prompt.replace("{issue}", world.task.problem_statement),
                "model": config.model,
                "base_url": f"{door.root_url}/v1",
                "root_url": door.root_url,
                "harness": HOME,
            }
        )
        for path, text in processes.files.items():
            sandbox.write(path, text)
        result = sandbox.exec(
            processes.command,
            stdin=processes.stdin,
            cwd=PLACE,
            env=world.variables | {"TERM": "dumb"} | processes.environment,
            limits=replace(sandbox.limits, wall_s=wall_s, cpu_s=wall_s * CPU_PER_WALL_S),
        )
        return result, wall_s

    def _episode(
        self, world: SWEWorld, result: ExecResult, patch: str, refused_places: list[str], wall_s: float
    ) -> Episode:
        about: dict[str, Any] = {
            "status": str(result.status),
            "exit_code": result.exit_code,
            "wall_s": result.wall_s,
            "refused": refused_places,
            "output": result.stdout[-_TAIL_CHARS:],
            "errors": result.stderr[-_TAIL_CHARS:],
        }
        episode = Episode(artifacts={PATCH: patch}, info={"harness": about})
        if result.status is Status.TIMEOUT:
            episode.termination_reason = TerminationReason.TIMEOUT
        elif result.status is not Status.OK:
            episode.termination_reason = TerminationReason.ERROR
        if result.status is not Status.OK:
            episode.info["cause"] = self._cause(world, result, refused_places, wall_s)
        return episode

    def _cause(self, world: SWEWorld, result: ExecResult, refused_places: list[str], wall_s: float) -> str:
        end = {
            Status.OK: "ended with exit code 0",
            Status.ERROR: f"ended with exit code {result.exit_code}",
            Status.TIMEOUT: f"had not ended after {wall_s:.0f} s",
            Status.OUT_OF_MEMORY: f"needed more than {world.limits.memory_mb} MiB (`memory_mb`)",
        }.get(result.status, f"was ended by the sandbox: {result.status}")
        network = (
            f"; it asked for {', '.join(refused_places[:5])}, and reaches its model alone"
            if refused_places
            else ""
        )
        output = (result.stderr.strip() or result.stdout.strip())[-400:]
        return f"{self.name} {end}{network}. " + (
            f"Its last output: {output}" if output else "It printed nothing."
        )
