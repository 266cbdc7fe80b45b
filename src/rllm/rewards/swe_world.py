"""The world of a software-engineering task: its repository at /testbed in a writable root.

    task ──► repository_of ──► /testbed          (rllm.data.swe_repository)
      └────► environment_of ──► /opt/venv         (rllm.data.swe_environment; or this machine's Python)
    with docker: the task's image, which has both

    agent's world ──patch_of──► its files of /testbed, without `.git` ──► a fresh world with the same
                                repository ──► `git diff` there: nothing that the agent's world says is asked

What an agent changed in its world outside of /testbed (the interpreter, packages, hooks) is not in the patch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rllm.data.swe_environment import VENV, Environment, environment_of
from rllm.data.swe_repository import PLACE, Repository, repository_of
from rllm.data.swe_rows import SWETask
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.packages import PLACE as PACKAGES
from rllm.sandbox.pool import SandboxPool
from rllm.sandbox.types import Limits, Root, Scope, Status
from rllm.sandbox.verifier import GIT_VARIABLES

MAX_PATCH_BYTES: Final = 16 << 20
_PATCH = "/tmp/model.patch"
_CONDA, _IMAGE_PROGRAMS = "/opt/miniconda3/envs/testbed/bin", {"r2e-gym": f"{PLACE}/.venv/bin"}
"""Where published images have the programs of their environment, by the form of the row."""
GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    **GIT_VARIABLES,
}
_DIFF = (
    "printf '%s\\n' __pycache__/ '*.py[co]' .pytest_cache/ >> .git/info/exclude; "
    "find . -mindepth 2 -name .git -prune -exec rm -rf {} + ; "
    "git add -A . && git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv HEAD "
    f"> {_PATCH}"
)


@dataclass(kw_only=True, slots=True, frozen=True)
class SWEWorld:
    """The parts that every world of one task has."""

    task: SWETask
    repository: Repository
    environment: Environment
    backend: str = "bubblewrap"
    image: str = ""
    """The container that has repository and environment; of docker alone."""
    limits: Limits

    @classmethod
    def of(cls, task: SWETask, *, backend: str = "bubblewrap", limits: Limits) -> "SWEWorld":
        """Make, or take from the cache, what the worlds need.

        Raises ConfigError, naming the row, for a source or an install step that fails.
        """
        if backend == "docker":
            return cls(
                task=task,
                repository=Repository(path=Path(), hidden=task.test_files, gold=task.patch),
                environment=Environment(path=Path(), image_programs=_IMAGE_PROGRAMS.get(task.form, _CONDA)),
                backend=backend,
                image=_image_of(task),
                limits=limits,
            )
        repository = repository_of(task)
        environment = environment_of(task, repository, backend=backend)
        return cls(task=task, repository=repository, environment=environment, backend=backend, limits=limits)

    @property
    def variables(self) -> dict[str, str]:
        """Of the agent's programs."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        common = {"PAGER": "cat", "GIT_PAGER": "cat", "PATH": f"{self.environment.programs}:{path}"}
        if self.environment.has_venv:
            return common | {"VIRTUAL_ENV": VENV, "PYTHONPATH": f"{PLACE}/src"}
        return common | {"PYTHONPATH": f"{PLACE}/src:{PACKAGES}"}

    def open(self, *, mounts: tuple[tuple[str, str], ...] = ()) -> Sandbox:
        """A new world as an agent gets it. `mounts`: see `Root`."""
        packages = self.environment.packages
        return open_sandbox(
            self.backend,
            limits=self.limits,
            root=self.root(mounts),
            packages=packages,
            image=self.image or None,
        )

    def pool(self) -> SandboxPool:
        """One world that is ready before anybody asks, again and again."""
        packages = self.environment.packages
        return SandboxPool(self.backend, size=1, limits=self.limits, root=self.root(), packages=packages)

    def open_for_git(self) -> Sandbox:
        """A new world in which nothing but git is run."""
        return open_sandbox(self.backend, limits=self.limits, root=self.root(), image=self.image or None)

    def root(self, mounts: tuple[tuple[str, str], ...] = ()) -> Root:
        folders = (PLACE, *((VENV,) if self.environment.has_venv else ()))
        return Root(folders=folders, layers=self.layers, mounts=mounts)

    @property
    def layers(self) -> tuple[str, ...]:
        """Repository and environment: no world writes to them, so all have the same. An image has its own."""
        if self.image:
            return ()
        return str(self.environment.layer), str(self.repository.layer)


def _image_of(task: SWETask) -> str:
    """The row's image, or the one that was published for its name."""
    name = task.instance_id.replace("__", "_1776_").lower()
    return task.image or f"swebench/sweb.eval.x86_64.{name}:latest"


def patch_of(agent: Sandbox, world: SWEWorld) -> str:
    """The agent's changes of /testbed as a diff; empty where there are none.

    Raises OSError where what it left is larger than its disk, or its patch than MAX_PATCH_BYTES; SandboxError
    where a sandbox fails.
    """
    left = agent.snapshot(Scope(folders=(PLACE,), left_out=(f"{PLACE}/.git",), changes=True))
    clear = "find . -mindepth 1 -maxdepth 1 ! -name .git -exec rm -rf {} +" if left.is_whole else "true"
    with world.open_for_git() as fresh:
        removed = fresh.exec(clear, cwd=PLACE)
        fresh.restore(left)
        done = fresh.exec(_DIFF, cwd=PLACE, env=GIT)
        for each in (removed, done):
            if each.status is not Status.OK:
                raise OSError(f"no diff can be made of what was left ({each.status}): {each.stderr[-300:]}")
        return fresh.read(_PATCH, most_bytes=MAX_PATCH_BYTES).decode("utf-8", "surrogateescape")
