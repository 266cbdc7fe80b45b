"""Grades an answer that is a patch: by the hidden tests of its row, as everything an agent does is graded.

answer ──► patch ──► the world of the row (rllm.rewards.swe_world) ──► rllm.rewards.swe_grading ──► Grade
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.data.swe_rows import SWETask
from rllm.errors import ConfigError, RewardError
from rllm.rewards.extraction import final_text
from rllm.rewards.grade import Grade, require_answer, task_field, task_has, wrong
from rllm.rewards.swe_grading import grade_patch
from rllm.rewards.swe_world import SWEWorld
from rllm.rewards.swebench import patch_of
from rllm.sandbox.backends import require_backend
from rllm.sandbox.types import Limits


@dataclass(kw_only=True, slots=True)
class SWEGrader:
    """A `Grader`: 1 for a patch that resolves a row's issue in full, else 0.

    The repository is the row's `source`; `source` here wins over it, and `{instance_id}`, `{repo}` in it
    stand for the row's. `install` is for rows that have none. With docker it is the container image of the
    row; a row of the classic form names none, and then it is the published one of its `instance_id`.
    """

    backend: str = "bubblewrap"
    source: str = ""
    install: tuple[str, ...] = ()
    image: str = ""
    timeout_s: float = 1800.0
    memory_mb: int = 4096
    disk_mb: int = 8192
    name: str = field(default="swebench", init=False)
    task_fields: tuple[str, ...] = field(default=("instance_id", "FAIL_TO_PASS", "PASS_TO_PASS"), init=False)

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"`timeout_s` is {self.timeout_s}; tests take more than 0 seconds.")
        if self.backend == "docker" and (self.source or self.install):
            raise ConfigError(
                "`source` and `install` are for bubblewrap and unshare; docker takes an `image`."
            )
        if self.backend != "docker" and self.image:
            raise ConfigError(f"`image` is for docker; with {self.backend} give a `source`.")

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises ConfigError where there is no sandbox or no repository, RewardError for a row or run that
        is broken."""
        row = self._row(task)
        text = final_text(require_answer(answer, self.name))
        if text is None:
            return wrong("unfinished")
        patch = patch_of(text)
        if patch is None:
            return wrong("no patch")
        require_backend(self.backend)
        limits = Limits(
            wall_s=self.timeout_s,
            cpu_s=self.timeout_s,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            output_kb=65_536,
            processes=1024,
        )
        world = SWEWorld.of(row, backend=self.backend, limits=limits)
        return grade_patch(world, patch, timeout_s=self.timeout_s)

    def close(self) -> None:
        """Holds nothing."""

    def _row(self, task: Mapping[str, Any]) -> SWETask:
        """The row with what the options say; who asked the question has its text elsewhere."""
        for name in self.task_fields:
            task_field(task, name, self.name)
        fields = {"problem_statement": str(task.get("question") or "(elsewhere)"), **task}
        if self.source:
            fields["source"] = self.source.replace("{instance_id}", str(task["instance_id"])).replace(
                "{repo}", str(task.get("repo", ""))
            )
        if self.install and not task_has(task, "install"):
            fields["install"] = list(self.install)
        if self.image:
            fields["image"] = self.image
        try:
            return SWETask.from_row(fields)
        except ConfigError as error:
            raise RewardError(str(error)) from error
