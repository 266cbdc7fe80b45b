"""Grades patches for issues by the project's own tests, in the container that was published for them.

    answer ──► patch ──git apply──► /testbed ──eval script──► log ──rllm.rewards.swebench──► Grade

The test files are put back before the tests run, so that a patch cannot change what it is measured by. An
empty patch, or one that does not apply, is a score of 0; a container that fails, or a run that never
reached its end for another reason than the patch, is a RewardError.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import ConfigError, RewardError
from rllm.rewards.extraction import final_text
from rllm.rewards.grade import Grade, require_answer, right, task_field, task_has, wrong
from rllm.rewards.swebench import END, START, Resolution, ids_of, patch_of, statuses_of, verdict_of
from rllm.sandbox.backends import open_sandbox, require_backend
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import ExecResult, Limits, Status

APPLY = (
    "git apply --verbose {patch}",
    "git apply --verbose --3way {patch}",
    "git apply --verbose --reject {patch}",
    "patch --batch --forward --fuzz=5 -p1 -i {patch}",
)
"""Tried in this order; the tree is put back between them."""
_RESET = "git checkout -- . && git clean -fdq"
_PATCH, _SCRIPT = "/tmp/model.patch", "/tmp/eval.sh"


@dataclass(kw_only=True, slots=True)
class SweBenchGrader:
    """A `Grader`: 1 for an issue that is resolved in full, else 0.

    `image` is the container to use instead of the row's own; a row of the classic form names none, and then
    it is the published one of its `instance_id`.
    """

    backend: str = "docker"
    image: str = ""
    repository: str = "/testbed"
    timeout_s: float = 1800.0
    memory_mb: int = 4096
    disk_mb: int = 8192
    name: str = field(default="swebench", init=False)
    task_fields: tuple[str, ...] = field(
        default=("instance_id", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"), init=False
    )

    def __post_init__(self) -> None:
        if self.timeout_s <= 0:
            raise ConfigError(f"`timeout_s` is {self.timeout_s}; tests take more than 0 seconds.")

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises ConfigError where there is no container engine, RewardError for a row or run that is
        broken."""
        fail_to_pass = ids_of(task_field(task, "FAIL_TO_PASS", self.name), "FAIL_TO_PASS")
        pass_to_pass = ids_of(task_field(task, "PASS_TO_PASS", self.name), "PASS_TO_PASS")
        script = eval_script_of(task, self.repository)
        said = final_text(require_answer(answer, self.name))
        if said is None:
            return wrong("unfinished")
        patch = patch_of(said)
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
        with open_sandbox(self.backend, limits=limits, image=self._image(task)) as sandbox:
            self._require_writable(sandbox)
            if not self._applies(sandbox, patch):
                return wrong("the patch does not apply", patch)
            sandbox.write(_SCRIPT, script)
            ran = sandbox.exec(["bash", _SCRIPT], cwd=self.repository)
        if ran.status in (Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.OUTPUT_LIMIT):
            return wrong(f"the tests ended by {ran.status}", patch)
        statuses = statuses_of(_log(ran))
        if statuses is None:
            return wrong("the tests did not run to their end", patch, log=_log(ran)[-2000:])
        verdict = verdict_of(
            statuses, fail_to_pass, pass_to_pass, fail_only=task.get("eval_type") == "fail_only"
        )
        make = right if verdict.resolution is Resolution.FULL else wrong
        return make(
            f"resolved: {verdict.resolution}",
            patch,
            fail_to_pass=verdict.fail_to_pass,
            pass_to_pass=verdict.pass_to_pass,
            failing=verdict.failing[:20],
        )

    def close(self) -> None:
        """Holds nothing."""

    def _image(self, task: Mapping[str, Any]) -> str | None:
        if self.backend != "docker":
            return None
        if self.image or task_has(task, "image"):
            return self.image or str(task["image"])
        instance = str(task_field(task, "instance_id", self.name)).replace("__", "_1776_").lower()
        return f"swebench/sweb.eval.x86_64.{instance}:latest"

    def _require_writable(self, sandbox: Sandbox) -> None:
        """Raises RewardError where no patch could ever be applied: that would say nothing about this one."""
        if sandbox.exec("test -w .", cwd=self.repository).status is not Status.OK:
            raise RewardError(
                f"The sandbox `{self.backend}` cannot write to {self.repository}, so that no patch could be "
                "applied: containers have a read-only system here, and programs are user 1000. Use an image "
                "whose project lies in a volume that this user owns, and name it with `repository`."
            )

    def _applies(self, sandbox: Sandbox, patch: str) -> bool:
        sandbox.write(_PATCH, patch)
        for command in APPLY:
            done = sandbox.exec(command.format(patch=_PATCH), cwd=self.repository)
            if done.status is Status.OK:
                return True
            sandbox.exec(_RESET, cwd=self.repository)
        return False


def eval_script_of(task: Mapping[str, Any], repository: str) -> str:
    """The row's own script, or one that runs the files of the test patch through pytest.

    Raises RewardError for a row whose tests are none of pytest's and that brings no script.
    """
    if task_has(task, "eval_script"):
        return str(task["eval_script"])
    commit, test_patch = (
        str(task_field(task, "base_commit", "swebench")),
        str(task_field(task, "test_patch", "swebench")),
    )
    files = sorted(set(re.findall(r"^diff --git a/\S+ b/(\S+)", test_patch, re.MULTILINE)))
    python = [each for each in files if each.endswith(".py")]
    if not python:
        raise RewardError(
            f"The row {task.get('instance_id')} brings no `eval_script`, and its test patch has no "
            "Python file to "
            "run through pytest."
        )
    old = " ".join(map(shlex.quote, files))
    restore = f"git checkout {shlex.quote(commit)} -- {old} 2>/dev/null || true"
    return "\n".join(
        (
            "set -u",
            f"cd {shlex.quote(repository)}",
            restore,
            "git apply -v - <<'RLLM_TEST_PATCH'",
            test_patch.rstrip("\n"),
            "RLLM_TEST_PATCH",
            "if [ $? -ne 0 ]; then exit 97; fi",
            f"echo '{START}'",
            f"python -m pytest -rA -p no:cacheprovider {' '.join(map(shlex.quote, python))}",
            "code=$?",
            f"echo '{END}'",
            'echo "EXIT_CODE=$code"',
            restore,
            "",
        )
    )


def _log(ran: ExecResult) -> str:
    return f"{ran.stdout}\n{ran.stderr}" if START in ran.stdout else f"{ran.stderr}\n{ran.stdout}"
