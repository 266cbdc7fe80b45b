"""The world of a software-engineering task: its repository at /testbed in a writable root.

    task ──► repository_of ──► /testbed          (rllm.data.swe_repository)
      └────► environment_of ──► /opt/venv         (rllm.data.swe_environment; or this machine's Python)
    with docker: the task's image, which has both; its history, and hidden tests that it brings, are taken out

    agent's world ──patch_of──► its files of /testbed, without `.git` ──► a fresh world with the same
                                repository ──► `git diff` there: nothing that the agent's world says is asked

What an agent changed in its world outside of /testbed (the interpreter, packages, hooks) is not in the patch.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rllm.data.swe_environment import VENV, Environment, environment_of
from rllm.data.swe_repository import AUTHOR, PLACE, Repository, repository_of
from rllm.data.swe_rows import SWETask
from rllm.errors import ConfigError, SandboxError
from rllm.errors.machine import MACHINE_ERRNOS
from rllm.sandbox.backends import open_sandbox
from rllm.sandbox.base import Sandbox
from rllm.sandbox.packages import PLACE as PACKAGES
from rllm.sandbox.pool import SandboxPool
from rllm.sandbox.types import Limits, Root, Scope, Snapshot, Status, machine_memory_mb
from rllm.sandbox.verifier import GIT_VARIABLES

MAX_PATCH_BYTES: Final = 16 << 20
_PATCH = "/tmp/model.patch"
_CONDA, _IMAGE_PROGRAMS = "/opt/miniconda3/envs/testbed/bin", {"r2e-gym": f"{PLACE}/.venv/bin"}
"""Where published images have the programs of their environment, by the form of the row."""
_IMAGE_TESTS = {"r2e-gym": ("/r2e_tests", f"{PLACE}/r2e_tests", f"{PLACE}/run_tests.sh")}
"""The places in which they have hidden tests."""
_OTHER_IMAGES = {"swe-smith": "have no bug of a row in them", "multi-swe": f"have no repository at {PLACE}"}
"""Forms of rows whose published images are not used, each with the reason."""
_BEGIN_ANEW = """\
set -e
git ls-files -s -z > /tmp/.tracked
for each; do
    if [ -d "$each" ] && [ ! -L "$each" ]; then find "$each" -mindepth 1 -delete; else rm -f "$each"; fi
done
rm -rf .git
git init -q .
mkdir -p .git/info
echo /.venv/ >> .git/info/exclude
sed -zn '/^160000 /!s/^[^\t]*\t//p' /tmp/.tracked > /tmp/.files
git update-index -z --add --remove --stdin < /tmp/.files
git add -A .
git commit -q --allow-empty -m base
rm -rf .git/hooks .git/logs /tmp/.tracked /tmp/.files
"""
"""A script that makes the repository of an image one of a single commit, and removes the files of its
arguments. The image's environment, where it lies in the repository, is none of the repository."""
GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    **GIT_VARIABLES,
}
_IGNORE_FILES = "--cached --name-only --no-renames -z HEAD -- ':(glob)**/.gitignore'"
# A repository inside of this one would be added as the name of its commit, without its files. A file that an
# agent's own ignore rules hide is its work as well, so all is added twice: by its rules, which may bring in
# what the repository ignores, and by those of the repository. A `.gitignore` that hides itself stays, and so
# does what it hides: tools keep their caches and environments out of a repository so.
_DIFF = f"""\
printf '%s\\n' __pycache__/ '*.py[co]' .pytest_cache/ >> .git/info/exclude
find . -mindepth 2 -name pyvenv.cfg -printf '%h/\\n' | sed 's/^[.]//' >> .git/info/exclude
find . -mindepth 2 -name .git -prune -exec rm -rf {{}} +
set -e
git add -A .
git diff --diff-filter=A {_IGNORE_FILES} | xargs -0 -r rm -f --
git diff --diff-filter=a {_IGNORE_FILES} | xargs -0 -r git --literal-pathspecs restore -s HEAD --worktree --
git add -A . ':(exclude,glob)**/.gitignore'
git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv HEAD > {_PATCH}
"""


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

        Raises ConfigError, naming the row, for a source or an install step that fails, and for more memory
        than this machine has.
        """
        if limits.memory_mb > (here_mb := machine_memory_mb()):
            raise ConfigError(
                f"{task.instance_id}: `memory_mb` is {limits.memory_mb:,}; this machine has {here_mb:,} MiB."
            )
        if backend == "docker":
            if task.form in _OTHER_IMAGES:
                raise ConfigError(
                    f"{task.instance_id}: images of {task.form} rows {_OTHER_IMAGES[task.form]}; give a "
                    "`source`, and leave `backend` docker out."
                )
            return cls(
                task=task,
                repository=Repository(path=Path(), hidden_files=task.test_files, gold=task.patch),
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
        """The environment variables of the agent's programs."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        common = {"PAGER": "cat", "GIT_PAGER": "cat", "PATH": f"{self.environment.programs}:{path}"}
        if self.environment.has_venv:
            return common | {"VIRTUAL_ENV": VENV, "PYTHONPATH": f"{PLACE}/src"}
        return common | {"PYTHONPATH": f"{PLACE}/src:{PACKAGES}"}

    def open(self, *, mounts: tuple[tuple[str, str], ...] = ()) -> Sandbox:
        """A new world as an agent gets it. `mounts`: see `Root`."""
        return self._open_sandbox(self.environment.packages, mounts)

    def pool(self) -> SandboxPool:
        """One world that is ready before anybody asks, again and again. Not of an image."""
        packages = self.environment.packages
        return SandboxPool(self.backend, size=1, limits=self.limits, root=self.root(), packages=packages)

    def open_for_git(self) -> Sandbox:
        """A new world in which nothing but git is run, with room for an agent's files and what git makes of
        them."""
        return self._open_sandbox((), disk_mb=2 * self.limits.disk_mb + 64)

    def _open_sandbox(
        self,
        packages: tuple[str, ...],
        mounts: tuple[tuple[str, str], ...] = (),
        *,
        disk_mb: float | None = None,
    ) -> Sandbox:
        sandbox = open_sandbox(
            self.backend,
            limits=replace(self.limits, disk_mb=disk_mb or self.limits.disk_mb),
            root=self.root(mounts),
            packages=packages,
            image=self.image or None,
        )
        try:
            if self.image:
                self._begin_anew(sandbox)
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def _begin_anew(self, sandbox: Sandbox) -> None:
        """Take out of an image what an agent must not find: later commits and hidden tests."""
        hidden_files = [
            f"{PLACE}/{name}"
            for name, text in self.task.test_files.items()
            if _text_at(sandbox, f"{PLACE}/{name}") == text
        ]
        words = ["sh", "-c", _BEGIN_ANEW, "sh", *hidden_files, *_IMAGE_TESTS.get(self.task.form, ())]
        done = sandbox.exec(words, cwd=PLACE, env=GIT | AUTHOR)
        if done.status is not Status.OK:
            raise ConfigError(
                f"{self.task.instance_id}: its image {self.image} has no git repository at {PLACE} that an "
                f"agent could begin with ({done.status}): {done.stderr[-300:].strip()}"
            )

    def root(self, mounts: tuple[tuple[str, str], ...] = ()) -> Root:
        image_tests = [each for each in _IMAGE_TESTS.get(self.task.form, ()) if not each.startswith(PLACE)]
        folders = (
            PLACE,
            *((VENV,) if self.environment.has_venv else ()),
            *(image_tests if self.image else ()),
        )
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


def _text_at(sandbox: Sandbox, path: str) -> str | None:
    """The text of a plain file; None for anything else."""
    try:
        return sandbox.read(path, most_bytes=MAX_PATCH_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def patch_of(agent: Sandbox, world: SWEWorld) -> str:
    """The agent's changes of /testbed as a diff; empty where there are none.

    Raises OSError where what it left is larger than its disk, or its patch than MAX_PATCH_BYTES, or where git
    cannot read it, twice; SandboxError where a sandbox or git itself fails.
    """
    apart = [".git", *([".venv"] if world.image else [])]
    left_out = tuple(f"{PLACE}/{name}" for name in apart)
    left = agent.snapshot(Scope(folders=(PLACE,), left_out=left_out, changes=True))
    others = " ".join(f"! -name {name}" for name in apart)
    # A whole snapshot does not say which files the agent removed.
    clear = f"find . -mindepth 1 -maxdepth 1 {others} -exec rm -rf {{}} +" if left.is_whole else "true"
    try:
        return _diff_of(left, clear, world)
    except _NoDiffError:
        # A machine without memory ends git as well, and what was left would be blamed.
        try:
            return _diff_of(left, clear, world)
        except _NoDiffError as fault:
            try:
                _diff_of(None, "true", world)
            except _NoDiffError as own:
                raise SandboxError(f"git fails in the repository as it was given: {own}") from own
            raise OSError(f"no diff can be made of what was left: {fault}") from fault


class _NoDiffError(Exception):
    """Raised where git gives no diff."""


def _diff_of(left: Snapshot | None, clear: str, world: SWEWorld) -> str:
    """The diff of `left` in a new world, whose files `clear` removes before; without `left` of no change."""
    with world.open_for_git() as fresh:
        removal = fresh.exec(clear, cwd=PLACE)
        try:
            if left is not None:
                fresh.restore(left)
        except OSError as error:
            if error.errno in MACHINE_ERRNOS:  # ENOSPC: there is room for more than a snapshot holds
                raise SandboxError(f"What was left cannot be put back: {error}") from error
            raise
        done = fresh.exec(_DIFF, cwd=PLACE, env=GIT)
        for each in (removal, done):
            if each.status is not Status.OK:
                raise _NoDiffError(f"{each.status}: {each.stderr[-300:]}")
        return fresh.read(_PATCH, most_bytes=MAX_PATCH_BYTES).decode("utf-8", "surrogateescape")
