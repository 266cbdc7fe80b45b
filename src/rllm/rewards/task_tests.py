"""A reward from tests that are run on what an agent left in its sandbox.

    sandbox ──rllm.sandbox.verifier──► reward.json, else reward.txt ──► named rewards
                                           └── none, or none that is a number within the task's range: the
                                               same tests on what the task brings, then on its own solution,
                                               say whose fault

Tests that give a reward there are in order: that they gave none here was the agent's doing, and earns
nothing. Tests that give none anywhere are the task's fault: a RewardError. A test's exit status says nothing
(as in Harbor).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rllm.errors import RewardError, SandboxError
from rllm.sandbox.base import Sandbox
from rllm.sandbox.types import Snapshot, Status
from rllm.sandbox.verifier import Examination, Examined, examine, snapshot_of

RESULTS = ("reward.json", "reward.txt")
"""The first that is there counts."""
UNIT_RANGE = (0.0, 1.0)
"""The lowest and the highest reward of a task that does not say otherwise."""
LIMITS = (Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.OUTPUT_LIMIT)
EXCEEDED = (*LIMITS, Status.KILLED)


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskReward:
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    """By name; none where the agent is why there are none."""
    reason: str


def task_reward(
    agent: Sandbox,
    examination: Examination,
    *,
    where: str,
    solve: Callable[[], Snapshot | None],
    bounds: tuple[float, float] = UNIT_RANGE,
) -> TaskReward:
    """The reward that the tests pay for the files in `agent`.

    `where` names the task in errors; `solve` makes what the task's own solution leaves, None where it has
    none; `bounds` are the lowest and the highest reward that the task may pay. Raises RewardError for tests
    that never give a reward, SandboxError where a sandbox fails.
    """
    try:
        left = snapshot_of(agent, examination)
    except OSError as error:
        return TaskReward(reason=f"what was left is too much to keep: {error}")
    result = examine(examination, left)
    if _fault(result, bounds) and result.test_run is not None and result.test_run.status not in LIMITS:
        # A machine without memory for a moment cuts tests off as well: only an agent does it twice.
        result = examine(examination, left)
    fault = _fault(result, bounds)
    if not fault and _has_both(result) and _is_planted(examination, solve):
        return TaskReward(reason=f"both {' and '.join(RESULTS)} were left; the tests leave one of them")
    if not fault:
        return TaskReward(rewards=rewards_of(result, bounds), reason="tests")
    if result.test_run is None or result.test_run.status in LIMITS:
        return TaskReward(reason=fault)
    control = examine(examination, None)
    if control.test_run is not None and control.test_run.status is Status.KILLED:
        raise SandboxError(f"{where}: {fault}, and on the task as it was given: this machine ends them")
    if not _fault(control, bounds):
        return TaskReward(reason=f"{fault}; on the task as it was given they leave one")
    solution = solve()
    if solution is not None and not _fault(examine(examination, solution), bounds):
        return TaskReward(reason=f"{fault}; on the task's own solution they leave one")
    raise RewardError(
        f"{where}: {fault}, nor on the task as it was given: its tests need mending.{_end(result)}"
    )


def _has_both(result: Examined) -> bool:
    return all(name in result.results or name in result.faults for name in RESULTS)


def _is_planted(examination: Examination, solve: Callable[[], Snapshot | None]) -> bool:
    """Whether one of two results is of a program of the agent's that the tests started: neither on the task
    as it was given nor on its own solution do they leave both. Unknown, and so no, without a solution."""
    if _has_both(examine(examination, None)):
        return False
    solution = solve()
    return solution is not None and not _has_both(examine(examination, solution))


def rewards_of(result: Examined, bounds: tuple[float, float]) -> dict[str, float]:
    """The rewards of reward.json, else of reward.txt, whose number is the `reward` of a JSON without one.

    Raises RewardError for what is no reward, or outside `bounds`.
    """
    rewards: dict[str, float] = {}
    read_files: list[str] = []
    for name in RESULTS:
        if name in result.faults and not rewards:
            raise RewardError(f"/logs/verifier/{name} is {result.faults[name]}")
        if name in result.results and "reward" not in rewards:
            rewards |= _parse_reward(result.results[name], f"/logs/verifier/{name}")
            read_files.append(f"/logs/verifier/{name}")
    if not rewards:
        raise RewardError(f"the tests left neither {' nor '.join(RESULTS)} in /logs/verifier")
    _require_within(rewards, bounds, " and ".join(read_files))
    return rewards


def total_reward(rewards: Mapping[str, float]) -> float:
    """Return the `reward`, else the mean of what there is; 0 where there is none."""
    return rewards.get("reward", sum(rewards.values()) / len(rewards)) if rewards else 0.0


def _require_within(rewards: Mapping[str, float], bounds: tuple[float, float], files: str) -> None:
    """Raises RewardError for a paid value outside the bounds; beside a `reward` others are only shown."""
    low, high = bounds
    paid_values = {"reward": rewards["reward"]} if "reward" in rewards else rewards
    for name, value in paid_values.items():
        if not low <= value <= high:
            raise RewardError(
                f"{files} pays {name:.40} = {value:g}, which is outside {low:g} to {high:g}, the "
                "`metadata.reward_range` of task.toml (0 to 1 where it has none)"
            )


def _fault(result: Examined, bounds: tuple[float, float]) -> str:
    """The reason that there is no reward; empty where there is one."""
    if result.test_run is None:
        return result.refusal
    if result.test_run.status in EXCEEDED:
        return f"the tests ended by {result.test_run.status}"
    try:
        rewards_of(result, bounds)
    except RewardError as error:
        return str(error)
    return ""


def _end(result: Examined) -> str:
    if result.test_run is None:
        return ""
    output = (result.test_run.stdout + result.test_run.stderr)[-500:]
    return f" They ended with {result.test_run.status} and wrote: {output!r}"


def _parse_reward(content: bytes, where: str) -> dict[str, float]:
    text = content.decode("utf-8", "replace").strip()
    try:
        rewards = json.loads(text) if where.endswith(".json") else {"reward": float(text)}
    except (ValueError, RecursionError) as error:
        raise RewardError(f"{where} holds {text[:80]!r}, which is no reward: {error}") from error
    if not isinstance(rewards, dict) or not rewards:
        raise RewardError(f"{where} holds {text[:80]!r}; it must be an object of names and numbers.")
    for name, value in rewards.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise RewardError(f"{where} says {name:.40} = {value!r:.40}; a reward is a finite number.")
    return {str(name): float(value) for name, value in rewards.items()}
