"""Many answers in, as many results out, in their order, whatever happens to one of them.

    [(answer, task)] ──► numbered ──► threads ──► grader ──► [Grade | GradeFailure]
                                         └ one that hangs is left behind and replaced

A failure says nothing about the answer, and is never a score.
"""

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError, RewardError
from rllm.rewards.grade import Grade, Grader


@dataclass(kw_only=True, slots=True, frozen=True)
class GradeFailure:
    """An answer that could not be judged: of the data or of the grader, never a score."""

    error: BaseException
    """The grader's exception, or a RewardError with what else went wrong."""

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


def grade_many(
    grader: Grader,
    answers: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    threads: int = 4,
    timeout_s: float = 120.0,
) -> list[Grade | GradeFailure]:
    """One result for each (answer, task), in their order.

    What a grader raises, and what it returns that is no Grade, becomes a GradeFailure in its place. So does
    an answer that takes longer than `timeout_s` from when its grading began; its thread is left behind.
    """
    if threads < 1 or not timeout_s > 0:
        raise ConfigError(f"`threads` is {threads} and `timeout_s` {timeout_s}; both must be above 0.")
    batch = _Batch(grader, answers, timeout_s)
    for _ in range(min(threads, len(answers))):
        batch.start_thread()
    while batch.missing():
        batch.wait()
    return [batch.results[index] for index in range(len(answers))]


class _Batch:
    def __init__(
        self, grader: Grader, answers: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float
    ) -> None:
        self.grader = grader
        self.answers = answers
        self.timeout_s = timeout_s
        self.results: dict[int, Grade | GradeFailure] = {}
        self._todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Grade | GradeFailure]] = queue.SimpleQueue()
        self._running: dict[int, float] = {}
        """Index -> when its grading began."""
        self._left_behind: set[int] = set()
        for index in range(len(answers)):
            self._todo.put(index)

    def missing(self) -> bool:
        return len(self.results) < len(self.answers)

    def start_thread(self) -> None:
        threading.Thread(target=self._work, name="rllm-grading", daemon=True).start()

    def wait(self) -> None:
        """Takes the next result, or gives up on the answers whose time is over."""
        now = time.monotonic()
        # A copy, because the threads add to it meanwhile.
        oldest = min(self._running.copy().values(), default=now)
        try:
            index, result = self._done.get(timeout=min(max(oldest + self.timeout_s - now, 0.0), 1.0))
        except queue.Empty:
            self._give_up(time.monotonic())
        else:
            self._running.pop(index, None)
            # An answer that was given up keeps its failure, although its thread may still come to an end.
            self.results.setdefault(index, result)

    def _give_up(self, now: float) -> None:
        for index, start_time in self._running.copy().items():
            if now - start_time >= self.timeout_s:
                del self._running[index]
                self._left_behind.add(index)
                self.results[index] = GradeFailure(
                    error=RewardError(
                        f"The {self.grader.name} grader did not answer within {self.timeout_s:g} s; "
                        "its thread was left behind."
                    )
                )
                self.start_thread()

    def _work(self) -> None:
        while True:
            try:
                index = self._todo.get_nowait()
            except queue.Empty:
                return
            self._running[index] = time.monotonic()
            self._done.put((index, self._grade(index)))
            if index in self._left_behind:
                return  # another thread has taken this one's place

    def _grade(self, index: int) -> Grade | GradeFailure:
        try:
            answer, task = self.answers[index]
            grade = self.grader.grade(answer, task)
        except BaseException as error:  # noqa: BLE001  a grader may raise anything, SystemExit included
            return GradeFailure(error=error)
        if isinstance(grade, Grade):  # pyright: ignore[reportUnnecessaryIsInstance]
            return grade
        return GradeFailure(
            error=RewardError(
                f"The {self.grader.name} grader returned {grade!r:.200} (a {type(grade).__name__}); "
                "it must return a Grade."
            )
        )
