"""The record of a failed episode, and the number of failures that ends a run.

    exception ──► error_record ──► info["error"]: type, message, place, traceback
        │
        └──► FailureBudget ──► nothing; or it ends the run:
                 every one of the first episodes broke a contract    with that very error
                 more of the latest attempts failed than may         with their number and most frequent cause

A reward of NaN or a wrong type from a user's class fails the episode that met it. Only a budget ends a run:
one bad answer of an environment does not cost hours of work.
"""

import logging
import traceback
from collections import Counter, deque
from typing import Any

from rllm.errors import (
    MAX_SHOWN_CHARS,
    AgentError,
    BrowserError,
    ConfigError,
    InferenceError,
    RewardError,
    RllmError,
    SandboxError,
    error_text,
    shorten,
)
from rllm.errors.machine import MACHINE_ERRNOS
from rllm.types.episode import Episode, Outcome, TerminationReason

log = logging.getLogger(__name__)

CONTRACT_ERRORS = (AgentError, RewardError, ConfigError)
"""A user's class broke its contract, or cannot honour what it was given; it would do so again, so the episode
is not tried again."""

INFRASTRUCTURE_ERRORS = (BrowserError, InferenceError, SandboxError, MemoryError)
"""A service or this machine failed: tried again, and never the policy's failure."""

MAX_INITIAL_FAILURES = 8
"""Episodes from the first on that all broke a contract, or that no judge could judge: the others would as
well."""
WINDOW = 64
"""Attempts, the latest ones, whose failures are counted; a whole batch where that is larger."""
_MAX_FRAMES = 12


def leaves_of(error: BaseException) -> list[BaseException]:
    """The errors in a group of errors, such as a TaskGroup raises; the error itself where it is none."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for each in error.exceptions for leaf in leaves_of(each)]


def broken_contract(error: BaseException | None) -> BaseException | None:
    """The error, or the one in a group of them, that says that a contract was broken."""
    leaves = [] if error is None else leaves_of(error)
    return next((each for each in leaves if isinstance(each, CONTRACT_ERRORS)), None)


def is_infrastructure(error: BaseException) -> bool:
    """Whether a service or this machine failed: by the type of the error or of one that caused it, or because
    the system refused a call for want of descriptors, memory or disk."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return any(
        isinstance(cause, INFRASTRUCTURE_ERRORS)
        or (isinstance(cause, OSError) and cause.errno in MACHINE_ERRNOS)
        for cause in causes
    )


def contract_error_of(error: BaseException, source: str) -> BaseException:
    """The broken contract that the error tells of; where it tells of none, `source` is what broke it."""
    contract_error = broken_contract(error)
    if contract_error is None:
        contract_error = AgentError(f"{source}: {type(error).__name__}: {error_text(error)}")
        contract_error.__cause__ = error
    return contract_error


def error_record(error: BaseException, place: str) -> dict[str, Any]:
    """The content of `info["error"]`: type, message, place and traceback, none longer than people read."""
    frames = traceback.format_exception(error)[-_MAX_FRAMES:]
    return {
        "type": type(error).__name__,
        "message": error_text(error),
        "place": place,
        "traceback": shorten("".join(shorten(frame) for frame in frames), _MAX_FRAMES * MAX_SHOWN_CHARS),
    }


def fail_episode(episode: Episode, error: BaseException, place: str) -> None:
    """Make it one that failed with `error` and is paid nothing; `place`: whose fault it is."""
    episode.outcome, episode.termination_reason = Outcome.INFRASTRUCTURE_FAILURE, TerminationReason.ERROR
    episode.is_correct = False
    episode.info["error"] = error_record(error, place)
    for trajectory in episode.trajectories:
        trajectory.outcome, trajectory.termination_reason = episode.outcome, episode.termination_reason
        trajectory.reward = None


class FailureBudget:
    """Counts what failed through no fault of the policy, over the life of an engine."""

    def __init__(self, max_failed_fraction: float) -> None:
        """Share of the latest attempts that may fail; 0 ends a run with the first failure, 1 with none."""
        if not 0.0 <= max_failed_fraction <= 1.0:
            raise ConfigError(
                f"`max_failed_fraction` is {max_failed_fraction}; it must be a share from 0 (strict: the "
                "first failure ends the run) to 1 (none does)."
            )
        self.max_failed_fraction = max_failed_fraction
        self._num_initial = 0
        """Episodes from the first on that broke a contract; -1 when one has not."""
        self._latest: deque[str] = deque()
        """The causes of the latest attempts; "" for one that did not fail."""
        self._window = WINDOW
        self._num_failed = 0
        self._warned_kinds: set[str] = set()

    def settle(self, episode: Episode, error: BaseException | None, num_attempts: int) -> None:
        """Count an episode that has ended. Raises what ends the run.

        `error` is what made it fail, `num_attempts` how many attempts its run makes.
        """
        if episode.outcome is Outcome.CANCELLED:
            return
        failure = error if episode.outcome is Outcome.INFRASTRUCTURE_FAILURE else None
        self._count(failure, max(WINDOW, num_attempts))
        if failure is None:
            self._num_initial = -1
            return
        contract_error = broken_contract(failure)
        where = f"Episode {episode.id} failed"
        if self.max_failed_fraction == 0.0:
            raise _first_failure(contract_error or failure, where)
        if contract_error is None:
            self._num_initial = -1
        elif self._num_initial >= 0:
            self._num_initial += 1
            if self._num_initial >= min(MAX_INITIAL_FAILURES, num_attempts):
                contract_error.add_note(f"All {self._num_initial} episodes so far failed like this.")
                raise contract_error
        self._warn(failure, where)
        self._require_within_budget(failure)

    def _count(self, failure: BaseException | None, window: int) -> None:
        self._latest.append("" if failure is None else _cause(failure))
        self._num_failed += failure is not None
        while len(self._latest) > window:
            self._num_failed -= bool(self._latest.popleft())
        self._window = window

    def _warn(self, failure: BaseException, where: str) -> None:
        """Once for every kind of failure: the rest are counted."""
        kind = f"{type(failure).__name__} {error_text(failure)[:40]}"
        if kind not in self._warned_kinds and len(self._warned_kinds) < WINDOW:
            self._warned_kinds.add(kind)
            log.warning("%s and is left out: %s", where, _cause(failure))

    def _require_within_budget(self, failure: BaseException) -> None:
        # Of the whole window, however few have ended: one failure of the first two says nothing yet.
        if self._num_failed <= self.max_failed_fraction * self._window:
            return
        (cause, count), *_ = Counter(filter(None, self._latest)).most_common(1)
        kind = AgentError if broken_contract(failure) else InferenceError
        raise kind(
            f"{self._num_failed} of the latest {len(self._latest)} episodes failed, and "
            f"`max_failed_fraction` is {self.max_failed_fraction:g} of {self._window}; mend the cause or "
            f"raise it. {count} of them failed with {cause}"
        ) from failure


def _cause(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {shorten(error_text(failure), 400)}"


def _first_failure(failure: BaseException, where: str) -> BaseException:
    """The exception that strict mode raises: the failure itself, where it is one of ours."""
    if not isinstance(failure, RllmError):
        agent_error = AgentError(f"{where}: {_cause(failure)}")
        agent_error.__cause__ = failure
        failure = agent_error
    failure.add_note(f"{where}; `max_failed_fraction` is 0, so the first failure ends the run.")
    return failure
