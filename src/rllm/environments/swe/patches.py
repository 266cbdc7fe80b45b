"""The judgement of a patch in an episode of a software-engineering task, by hidden tests."""

from collections.abc import Mapping
from typing import Any

from rllm.data.swe_rows import SWETask
from rllm.errors import ConfigError, RewardError
from rllm.rewards.swe_grading import grade_patch
from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox.types import Limits
from rllm.types.episode import Episode
from rllm.types.evaluation import EvalOutput

PATCH = "patch"
"""The artifact of an episode that is judged: a diff of the repository."""
_LIMITS = {"memory_mb": 2048, "disk_mb": 1024, "output_kb": 4096, "processes": 256}


def world_of_row(row: Mapping[str, Any], **limits: Any) -> SWEWorld:
    """The world of a task's row, which is its field `entry`; beside it `backend`, `memory_mb` and `disk_mb`
    may stand. `limits` win over what it says.

    Raises ConfigError for a task that has no such row.
    """
    entry = row.get("entry")
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"Task {row.get('task_id', '')!r} is no row of a software-engineering task (it has no `entry`); "
            "give a file of such rows, as in docs/swe.md."
        )
    own = {name: row[name] for name in ("memory_mb", "disk_mb") if name in row}
    return SWEWorld.of(
        SWETask.from_row(entry),
        backend=row.get("backend", "bubblewrap"),
        limits=Limits(**{**_LIMITS, **own, **limits}),
    )


def judge_patch(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
    """1 where the hidden tests pass on the episode's patch, else 0.

    Raises RewardError for an episode without one, and where the tests say nothing.
    """
    patch = episode.artifacts.get(PATCH)
    if not isinstance(patch, str):
        raise RewardError(
            f"The episode has no artifact `{PATCH}`; who works on this task returns "
            f"Episode(artifacts={{{PATCH!r}: diff}})."
        )
    grade = grade_patch(world_of_row(task), patch, timeout_s=task.get("reward_timeout", 300.0))
    return EvalOutput(
        reward=grade.score,
        is_correct=grade.is_correct,
        metadata={"grader": "hidden tests", "reason": grade.reason, **grade.metadata},
    )
