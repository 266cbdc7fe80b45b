"""A task directory under attack: its own solution is paid, nothing is not, and no tampering earns more.

    TASK/ ──► solution, solution again, nothing, each tampering: in a machine of its own each ──► findings

`rllm doctor tasks` prints the findings. In a task of several steps each is done at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.environments.task_directory import TaskDirectoryEnv
from rllm.errors import RllmError
from rllm.rewards.attacks import Aim, AttackVerdict, Finding
from rllm.rewards.tampering import task_tamperings

GOLD, GOLD_AGAIN, EMPTY = "the task's own solution", "the task's own solution again", "nothing done"


@dataclass(kw_only=True, slots=True, frozen=True)
class _Attempt:
    reward: float
    info: dict[str, Any]

    @property
    def rewards(self) -> Any:
        return self.info.get("steps", self.info["rewards"])


def examine_task_directory(
    path: Path, *, backend: str = "bubblewrap", timeout_s: float = 300.0, tampering: bool = True
) -> list[Finding]:
    """Two findings for the task's own solution, one for nothing done, and one for each tampering.

    A solution is paid in full, with the same rewards both times; nothing done is not paid in full, and a
    tampering earns no more than that. `timeout_s` is of one command. Raises ConfigError for a task that
    cannot be run here.
    """
    environment = TaskDirectoryEnv(path, backend=backend, command_timeout_s=timeout_s)
    workdir = environment.image.workdir
    attempts: list[_Attempt] = []

    def play(act: Callable[[TaskDirectoryEnv], None]) -> _Attempt:
        attempts.append(_play_through(environment, act))
        return attempts[-1]

    findings = [
        _finding(GOLD, Aim.ORACLE, lambda: play(TaskDirectoryEnv.play_solution), _is_paid),
        _finding(
            GOLD_AGAIN,
            Aim.ORACLE,
            lambda: play(TaskDirectoryEnv.play_solution),
            lambda again: _is_paid(again) and again.rewards == attempts[0].rewards,
        ),
    ]
    nothing: list[_Attempt] = []

    def is_unpaid(attempt: _Attempt) -> bool:
        nothing.append(attempt)
        return not _is_paid(attempt)

    findings.append(_finding(EMPTY, Aim.ATTACK, lambda: play(_do("true")), is_unpaid))
    most = nothing[0].reward if nothing else 0.0
    for name, script in task_tamperings(workdir).items() if tampering else ():
        findings.append(
            _finding(
                name,
                Aim.ATTACK,
                lambda script=script: play(_do(script)),
                lambda attempt: attempt.reward <= most and not _is_paid(attempt),
            )
        )
    return findings


def _is_paid(attempt: _Attempt) -> bool:
    return bool(attempt.info["is_correct"])


def _do(script: str) -> Callable[[TaskDirectoryEnv], None]:
    def act(environment: TaskDirectoryEnv) -> None:
        environment.step(f"```sh\n{script}\n```")

    return act


def _play_through(environment: TaskDirectoryEnv, act: Callable[[TaskDirectoryEnv], None]) -> _Attempt:
    environment.reset()
    try:
        while True:
            act(environment)
            _, reward, is_done, info = environment.step("Done.")
            if is_done:
                return _Attempt(reward=reward, info=info)
    finally:
        environment.close()


def _finding(name: str, aim: Aim, play: Callable[[], _Attempt], holds: Callable[[_Attempt], bool]) -> Finding:
    try:
        attempt = play()
    except RllmError as error:
        return Finding(
            name=name, aim=aim, verdict=AttackVerdict.BROKEN, score=None, reason=f"not scored: {error}"
        )
    verdict = AttackVerdict.HELD if holds(attempt) else AttackVerdict.BROKEN
    reason = f"{attempt.info['reason']}: {attempt.rewards}"
    return Finding(name=name, aim=aim, verdict=verdict, score=attempt.reward, reason=reason)
