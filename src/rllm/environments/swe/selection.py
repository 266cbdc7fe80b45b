"""Test-time scaling: of several attempts at a task one is handed in, and hidden tests have no say in which.

    attempts ──► their patches ──► tests:    those that the repository shows, and those of the patch itself
                              ├──► majority: patches that say the same vote together
                              └──► model:    a model reads the issue and the patches, and names one
                 chosen attempt ──► what it was paid: beside pass@1 and pass@N, which an oracle would reach

Attempts that failed are never chosen while another did not, nor are empty patches while another is not.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.data.swe_rows import SWETask
from rllm.environments.swe.patches import PATCH
from rllm.errors import ConfigError, choices_of
from rllm.rewards.extraction import final_text
from rllm.rewards.swe_visible import run_visible_tests
from rllm.rewards.swe_world import SWEWorld
from rllm.sandbox.types import Limits
from rllm.tools.clipping import clip
from rllm.types.episode import Episode
from rllm.types.messages import Message

SELECTORS = ("tests", "majority", "model")
MAX_PATCH_CHARS = 12_000
"""The length of one patch, as the model that chooses reads it."""
_HUNK = re.compile(r"^@@ -\S+ \+\S+ @@.*$", re.MULTILINE)
_LIMITS = Limits(wall_s=300.0, cpu_s=300.0, memory_mb=2048, disk_mb=1024, output_kb=4096, processes=256)

Ask = Callable[[list[Message], tuple[str | int, ...]], Awaitable[str]]
"""(messages, key of the draws) -> the answer of the model that chooses."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PatchAttempt:
    """One attempt that may be handed in."""

    attempt: int
    patch: str
    has_failed: bool


@dataclass(kw_only=True, slots=True, frozen=True)
class Selection:
    """The attempt that is handed in."""

    attempt: int
    reason: str
    """The reason: number of votes, number of tests that pass, or the model's words."""
    is_settled: bool = True
    """False where the selector did not tell the candidates apart, so that the first of them was taken."""


def require_selector(name: str, attempts: int) -> str:
    """Raises ConfigError for a name that is none, and for a single attempt."""
    if name not in SELECTORS:
        raise ConfigError(f"`--select` is {name!r}; {choices_of(name, SELECTORS)}.")
    if attempts < 2:
        raise ConfigError(f"`--select {name}` chooses among attempts; set --attempts to 2 or more.")
    return name


def candidate_of(episode: Episode) -> PatchAttempt:
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    patch = str(steps[-1].info.get(PATCH, "")) if steps else ""
    return PatchAttempt(attempt=episode.episode_id.attempt, patch=patch, has_failed=episode.reward is None)


def eligible(candidates: Sequence[PatchAttempt]) -> list[PatchAttempt]:
    """Those with a patch; else those that did not fail; else all."""
    by_attempt = sorted(candidates, key=lambda each: each.attempt)
    sound = [each for each in by_attempt if not each.has_failed]
    return [each for each in sound if each.patch.strip()] or sound or by_attempt


async def choose(
    by: str, row: Mapping[str, Any], candidates: Sequence[PatchAttempt], *, backend: str, ask: Ask | None
) -> Selection:
    """The attempt that the selector `by` hands in. `row`: the task's; `ask` is for `model` alone.

    Raises ConfigError and SandboxError where the visible tests cannot be run.
    """
    left = eligible(candidates)
    if len({normalized_patch(each.patch) for each in left}) == 1:
        return Selection(attempt=left[0].attempt, reason="the only patch", is_settled=len(left) == 1)
    if by == "majority":
        return _by_majority(left)
    # One of each patch: the earliest attempt that made it.
    earliest: dict[str, PatchAttempt] = {}
    for each in left:
        earliest.setdefault(normalized_patch(each.patch), each)
    left = list(earliest.values())
    if by == "tests":
        return await asyncio.to_thread(_by_tests, SWETask.from_row(row), left, backend)
    assert ask is not None, "who chooses by a model has one"
    return await _by_model(SWETask.from_row(row), left, ask)


def normalized_patch(patch: str) -> str:
    """A patch without what does not change a program: hashes, line numbers, blanks at ends of lines, and the
    order of its files."""
    files: list[str] = []
    for part in re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE):
        lines = [
            line.rstrip()
            for line in _HUNK.sub("@@", part).splitlines()
            if not line.startswith(("index ", "new file mode", "old mode", "new mode"))
        ]
        if any(lines):
            files.append("\n".join(lines))
    return "\n".join(sorted(files))


def _by_majority(candidates: Sequence[PatchAttempt]) -> Selection:
    """The first of those whose patch was made most often."""
    texts = [normalized_patch(each.patch) for each in candidates]
    votes = Counter(texts)
    most = max(votes.values())
    winner = next(each for each, text in zip(candidates, texts, strict=True) if votes[text] == most)
    is_settled = sum(count == most for count in votes.values()) == 1
    return Selection(attempt=winner.attempt, reason=f"{most} of {len(texts)} votes", is_settled=is_settled)


def _by_tests(task: SWETask, candidates: Sequence[PatchAttempt], backend: str) -> Selection:
    """The first of those with the fewest failures among visible tests; of equals, that with more tests."""
    world = SWEWorld.of(task, backend=backend, limits=_LIMITS)
    runs = [run_visible_tests(world, each.patch) for each in candidates]
    best = max(run.rank for run in runs)
    place = next(place for place, run in enumerate(runs) if run.rank == best)
    reason = (
        runs[place].fault or f"{runs[place].num_passed} visible tests pass, {runs[place].num_failed} fail"
    )
    is_settled = sum(run.rank == best for run in runs) == 1
    return Selection(attempt=candidates[place].attempt, reason=reason, is_settled=is_settled)


async def _by_model(task: SWETask, candidates: Sequence[PatchAttempt], ask: Ask) -> Selection:
    """The one that a model names; where it names none, the first, which is not settled."""
    patch_texts = [
        f"Patch {number}:\n{clip(each.patch, MAX_PATCH_CHARS)}" for number, each in enumerate(candidates, 1)
    ]
    question = (
        f"The issue:\n\n{task.problem_statement}\n\n" + "\n\n".join(patch_texts) + "\n\n"
        f"Which patch resolves the issue? Answer with its number alone, from 1 to {len(candidates)}."
    )
    answer = await ask([{"role": "user", "content": question}], ("select", task.instance_id))
    numbers = [int(each[:6]) for each in re.findall(r"\d+", final_text(answer) or "")]
    if not numbers or not 1 <= numbers[-1] <= len(candidates):
        return Selection(
            attempt=candidates[0].attempt, reason=f"unread: {answer.strip()[:80]!r}", is_settled=False
        )
    return Selection(attempt=candidates[numbers[-1] - 1].attempt, reason=f"the model named it: {numbers[-1]}")
