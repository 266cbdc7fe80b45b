"""Many programs side by side, each behind a session of the gateway: tasks in, episodes out as they finish.

    attempt ──► gateway session ──► program(task, AgentConfig) ──► Episode, Trajectory or None
                     │ every model call captured                          │
                     └────────── tokens of its Steps ─────────────────────┴──► evaluator ──► Episode, judged

What a program raises is an outcome with its cause; so is its time being up. A failure of the engine behind
the gateway is tried again in a new session, also when the program swallowed it: it says nothing about the
policy. What the program returned and nobody can read, and a judgement that is no number, fail one episode.
"""

import asyncio
import copy
import re
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from rllm.agents.flow import AgentFlow, as_flow, require_result
from rllm.engine.attempt_state import LiveRollout, Vitals, live_of
from rllm.engine.attempts import EpisodeCounts, Finished, ParallelLimit, attempts_at, play_all
from rllm.engine.captured import BrokenOffCall, Captured, join
from rllm.engine.contracts import require_episode
from rllm.engine.failures import (
    CONTRACT_ERRORS,
    INFRASTRUCTURE_ERRORS,
    FailureBudget,
    broken_contract,
    contract_error_of,
    error_record,
    is_infrastructure,
)
from rllm.engine.program_threads import OutOfTime, ProgramRunner, hush_late_closes
from rllm.engine.records import Records
from rllm.engine.rollout import MODEL
from rllm.errors import (
    AgentError,
    ConfigError,
    InferenceError,
    RewardError,
    error_text,
)
from rllm.rewards.evaluator import Evaluator, as_evaluator
from rllm.types.call_budget import REASONS, CallBudget
from rllm.types.draws import draw_seed
from rllm.types.episode import Episode, Outcome, TerminationEvent, TerminationReason
from rllm.types.episode_clock import (
    MODEL_TIMEOUT_S,
    ClockEnd,
    EpisodeClock,
    EpisodeLimits,
    ModelPulse,
)
from rllm.types.evaluation import EvalOutput
from rllm.types.judgements import finite_number
from rllm.types.messages import SamplingParams
from rllm.types.task import AgentConfig, EpisodeId, Task, task_of
from rllm.types.wire import CallRecord

PROGRAM, EVALUATOR = "program", "evaluator"
"""Where an episode failed: `info["error"]["place"]`; else at the model."""
TRAINING = "train"
"""The prefix of the purpose of a run whose episodes are trained on."""


class TracedSession(Protocol):
    """One program's access to the model; see `rllm.gateway.server.GatewaySession`.

    Its `tell`, where it has one, tells an EpisodeClock of its calls.
    """

    id: str

    @property
    def base_url(self) -> str: ...

    def traces(self) -> list[CallRecord]: ...

    async def close(self) -> None: ...


class SessionSource(Protocol):
    """Where sessions come from: a `rllm.gateway.server.Gateway` that has been started."""

    def open_session(
        self,
        session: str,
        *,
        seed: int | None = None,
        sampling: dict[str, Any] | None = None,
        budget: CallBudget | None = None,
    ) -> TracedSession: ...


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """A program and what judges it."""

    flow: AgentFlow
    evaluator: Evaluator

    @classmethod
    def of(cls, flow: Any, evaluator: Any) -> "Program":
        """Make one of what the decorators made, plain functions, objects or names. Raises ConfigError."""
        return cls(flow=as_flow(flow), evaluator=as_evaluator(evaluator))


class TracedEngine:
    """Runs `flow` on tasks against the model behind `gateway`, and judges it by `evaluator`.

    `flow` and `evaluator` are what the decorators made, plain functions, objects, or names. Thousands of
    programs may run at once: async ones share an event loop, others have a thread each. Close it when it is
    no longer used.
    """

    def __init__(
        self,
        flow: Any,
        evaluator: Any,
        gateway: SessionSource,
        *,
        model: str,
        n_parallel_tasks: int = 128,
        episode_timeout_s: float = 600.0,
        wall_timeout_s: float | None = None,
        model_timeout_s: float | None = MODEL_TIMEOUT_S,
        evaluator_timeout_s: float = 60.0,
        retry_limit: int = 3,
        seed: int = 0,
        sets_max_tokens: bool = True,
        requires_ids: bool = False,
        max_failed_fraction: float = 1.0,
        stored: bool = False,
        budget: CallBudget | None = None,
    ) -> None:
        """`sets_max_tokens`: the `max_tokens` of `sampling` wins over what the program asks for; otherwise
        the program's own counts. `requires_ids`: a call without token ids fails its episode, because it
        cannot be trained on. `max_failed_fraction`, `stored`: see `AgentExecutionEngine`. `budget`: of the
        calls of each try; the program's own counts as well. Who reaches it is cut off, and judged.

        Time, in seconds: `episode_timeout_s` is of a program without its model calls, `wall_timeout_s` of one
        with them. A server that answers no call for `model_timeout_s` has failed; None, for the built-in
        engine, waits for ever.
        """
        for name, value in (("n_parallel_tasks", n_parallel_tasks), ("retry_limit", retry_limit)):
            if value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1.")
        for name, limit_s in (
            ("episode_timeout_s", episode_timeout_s),
            ("evaluator_timeout_s", evaluator_timeout_s),
        ):
            if not 0.0 < limit_s < float("inf"):
                raise ConfigError(f"`{name}` is {limit_s}; it must be a finite number above 0.")
        program = Program.of(flow, evaluator)
        self.flow, self.evaluator = program.flow, program.evaluator
        self.gateway = gateway
        self.model = model
        self.num_parallel = min(n_parallel_tasks, self.flow.max_concurrent or n_parallel_tasks)
        self.limits = EpisodeLimits(
            work_s=episode_timeout_s, wall_s=wall_timeout_s, silence_s=model_timeout_s
        )
        self.pulse = ModelPulse()
        self.evaluator_timeout_s = evaluator_timeout_s
        self.retry_limit = retry_limit
        self.seed = seed
        self.sets_max_tokens = sets_max_tokens
        self.requires_ids = requires_ids
        self.budget = (budget or CallBudget()).tightest(self.flow.budget)
        self.counts = EpisodeCounts()
        self.failures = FailureBudget(max_failed_fraction)
        self.stored = stored
        self.rollouts: dict[tuple[str, EpisodeId], Vitals] = {}
        """The programs that run, by the purpose of their run."""
        self._places = ParallelLimit(self.num_parallel)
        self._runner = ProgramRunner()
        self._number = 0
        # A ledger outlives engines, and the numbers of each begin anew.
        self._name = uuid.uuid4().hex[:8]

    @property
    def abandoned_threads(self) -> int:
        """Programs and evaluators that did not end when their time was up, and were left behind."""
        return self._runner.num_abandoned

    def live(self) -> list[LiveRollout]:
        """The attempts that are under way, the oldest first."""
        return live_of(list(self.rollouts.values()))

    async def run(
        self,
        tasks: Sequence[Task | Mapping[str, Any]],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """Episodes in the order in which they finish: `group_size` attempts at each task.

        `purpose` enters every random draw, so that two runs over the same tasks differ. `sampling` is set for
        the whole session and wins over what the program asks for; None leaves everything to the program.
        Attempts to `skip` were made before. Leaving the iteration early cancels what is in flight.
        """
        hush_late_closes()
        pending = attempts_at(
            [task_of(task, place) for place, task in enumerate(tasks)], group_size, skip=skip
        )
        session_sampling, num_attempts = self._session_sampling(sampling), len(pending)
        # In a thread: it may take long, and the gateway answers from this loop.
        if self.flow.prepare is not None:
            await asyncio.to_thread(self.flow.prepare)
        records = Records(PROGRAM, is_stored=self.stored)

        def work(results: Finished) -> Coroutine[Any, Any, None]:
            return self._work(pending, num_attempts, records, results, purpose, session_sampling)

        async with aclosing(play_all(pending, work, self._places, self.counts)) as episodes:
            async for episode in episodes:
                yield episode

    async def close(self) -> None:
        """End what still runs."""
        await self._runner.close()

    async def __aenter__(self) -> "TracedEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _session_sampling(self, sampling: SamplingParams | None) -> dict[str, Any]:
        if sampling is None:
            return {}
        settings = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
        }
        if not self.sets_max_tokens:
            del settings["max_tokens"]
        return settings

    async def _work(
        self,
        pending: list[tuple[EpisodeId, Task]],
        num_attempts: int,
        records: Records,
        results: Finished,
        purpose: str,
        sampling: dict[str, Any],
    ) -> None:
        """Play attempts until none is pending."""
        while pending:
            identity, task = pending.pop()
            tries = 1
            vitals = self.rollouts[purpose, identity] = Vitals(identity, self.counts)
            try:
                while True:
                    attempt = _Attempt(
                        self, identity, task, purpose, sampling, self._session_id(identity, purpose), vitals
                    )
                    episode = await attempt.play(self._runner)
                    if tries >= self.retry_limit or not attempt.may_start_over(episode):
                        break
                    tries += 1
                    self.counts.retries += 1
            finally:
                del self.rollouts[purpose, identity]
            episode.info["tries"] = tries
            episode, failure = records.keep(episode, vitals.failure)
            self.failures.settle(episode, failure, num_attempts)
            results.put_nowait(episode)

    def _session_id(self, identity: EpisodeId, purpose: str) -> str:
        """Never used before; with words in it for whoever reads the ledger."""
        self._number += 1
        words = f"{purpose}-{identity.task_id[:40]}-{identity.attempt}-{self._name}-{self._number}"
        return re.sub(r"[^A-Za-z0-9]+", "-", words).strip("-")


class _Attempt:
    """One try of one attempt."""

    def __init__(
        self,
        engine: TracedEngine,
        identity: EpisodeId,
        task: Task,
        purpose: str,
        sampling: dict[str, Any],
        session_id: str,
        vitals: Vitals,
    ) -> None:
        self.engine = engine
        self.vitals = vitals
        self.identity = identity
        # Its own copy: what a program does to its task is nobody else's business.
        self.task = Task(
            id=task.id,
            instruction=copy.deepcopy(task.instruction),
            metadata=copy.deepcopy(_without_answers(task.metadata)),
            dataset_dir=task.dataset_dir,
            sub_dir=task.sub_dir,
        )
        # For the evaluator, so with the answers: taken here, where the program cannot change it.
        self.row = copy.deepcopy(task.to_row())
        self.clock = EpisodeClock(engine.limits, engine.pulse, on_answer=self._note_answer)
        self.session = engine.gateway.open_session(
            session_id,
            seed=draw_seed(engine.seed, purpose, identity.task_id, identity.attempt, "program"),
            sampling=dict(sampling),
            budget=engine.budget,
        )
        # Sessions of a gateway in another process tell nothing, and then waiting is the program's own time.
        tell: Callable[[EpisodeClock], None] | None = getattr(self.session, "tell", None)
        if tell is not None:
            tell(self.clock)
        self.config = AgentConfig(
            base_url=self.session.base_url,
            model=engine.model,
            session_uid=self.session.id,
            metadata={
                "task_id": identity.task_id,
                "attempt": identity.attempt,
                "purpose": purpose,
                "timeout_s": engine.limits.work_s,
                "wall_timeout_s": engine.limits.wall_s,
            },
            is_validation=bool(purpose) and not purpose.startswith(TRAINING),
            # `top_k` is set for the session and no keyword of OpenAI's client, which programs pass these to.
            sampling_params={name: value for name, value in sampling.items() if name != "top_k"},
        )

    async def play(self, runner: ProgramRunner) -> Episode:
        """The episode; what made it fail is in `vitals.failure`."""
        flow = self.engine.flow
        started_at, start_s = time.time(), time.perf_counter()
        result, error, num_abandoned = None, None, 0
        self.vitals.waits_for = f"its program, {flow.name}"
        try:
            end = await runner.run(
                flow.run,
                self.task,
                self.config,
                is_async=flow.is_async,
                clock=self.clock,
                give_up=self.session.close,  # its calls fail at once, so that it may end by itself
            )
            result, error = end.value, end.error
        except OutOfTime as late:
            error, num_abandoned = late, int(late.is_abandoned)
        finally:
            # Before the calls are read: what is still on its way is then on record as broken off.
            await self.session.close()
        program_s = time.perf_counter() - start_s
        calls = Captured(self.session.traces())
        # One `vitals` serves all tries, and may hold the failure of the one before.
        self.vitals.failure = None
        try:
            episode = await self._episode(result, error, calls, runner)
        except Exception as unreadable:  # noqa: BLE001  what users return may hold anything
            contract_error = contract_error_of(unreadable, f"What {flow.name} returned cannot be read")
            episode = self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, contract_error, PROGRAM)
        episode.metrics |= calls.counts() | {
            "abandoned_threads": float(num_abandoned),
            "program_s": program_s,
            "started_at": started_at,
            "duration_s": time.perf_counter() - start_s,
        }
        return episode

    def may_start_over(self, episode: Episode) -> bool:
        """Whether another try may help: not where the model was waited for long enough, nor for a broken
        contract."""
        return (
            episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
            and self.clock.end is not ClockEnd.SILENCE
            and not broken_contract(self.vitals.failure)
        )

    def _note_answer(self) -> None:
        self.vitals.turn += 1
        self.vitals.counts.turns += 1

    async def _episode(
        self, value: Any, error: BaseException | None, calls: Captured, runner: ProgramRunner
    ) -> Episode:
        role = self.engine.flow.name
        if (silence := self.clock.silence_error()) is not None:
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, silence, MODEL)
        infrastructure = calls.infrastructure_error()
        cut_off = error.reason if isinstance(error, TerminationEvent) else None
        # Before all else: a program that caught its client's error went on without an answer of the policy.
        if infrastructure is not None:
            cause = InferenceError(
                f"A model call failed with status {infrastructure.get('status')}: "
                f"{infrastructure.get('message')}"
            )
            cause.__cause__ = error
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, cause, MODEL)
        if (contract_error := broken_contract(error)) is not None:
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, contract_error, PROGRAM)
        limit, refusal = calls.budget_end(self.engine.budget)
        if limit:  # whatever the program made of the refusal
            cut_off, value = REASONS[limit], None if error is not None else value
        elif error is not None and is_infrastructure(error):
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, error, PROGRAM)
        elif error is not None and cut_off is None:
            return self._failed_episode(calls, Outcome.POLICY_FAILURE, error, PROGRAM)
        if (missing := self._missing_ids(calls)) is not None:
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, missing, MODEL)
        result = require_result(self.engine.flow, value)
        if result is not None:
            whole = result if isinstance(result, Episode) else Episode(trajectories=[result])
            require_episode(whole, f"What {role} returned")
        try:
            episode, unclaimed_ids = join(result, calls, role)
        except BrokenOffCall as broken_off:
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, broken_off, MODEL)
        self._identify(episode)
        if unclaimed_ids:
            episode.info["unclaimed_calls"] = unclaimed_ids
        episode.metrics["unclaimed_calls"] = float(len(unclaimed_ids))
        if limit:
            episode.info["cause"] = refusal
        outcome = _outcome_of(episode, cut_off)
        if outcome is Outcome.POLICY_FAILURE:
            cause = episode.info.get("cause", f"{role} says that it ended in an error.")
            ended_in_error = AgentError(str(cause))
            failed = self._failed_episode(calls, outcome, ended_in_error, PROGRAM)
            # The program's own notes stay, but `error` is the engine's record.
            failed.info = {**episode.info, **failed.info}
            failed.artifacts = episode.artifacts
            return failed
        _settle(episode, outcome)
        try:
            began_s = time.perf_counter()
            self._pay(episode, await self._judge(episode, runner))
            _note_grading(episode, time.perf_counter() - began_s)
        except (*CONTRACT_ERRORS, *INFRASTRUCTURE_ERRORS, OSError, OutOfTime) as judge_failed:
            # An OSError is what the judge's own server caused; TimeoutError is one.
            return self._failed_episode(calls, Outcome.INFRASTRUCTURE_FAILURE, judge_failed, EVALUATOR)
        return episode

    async def _judge(self, episode: Episode, runner: ProgramRunner) -> EvalOutput:
        evaluator = self.engine.evaluator
        self.vitals.waits_for = f"its evaluator, {evaluator.name}"
        end = await runner.run(
            evaluator.evaluate,
            self.row,
            episode,
            is_async=evaluator.is_async,
            timeout_s=self.engine.evaluator_timeout_s,
        )
        error = end.error
        if error is None:
            return end.value
        if isinstance(error, (*CONTRACT_ERRORS, *INFRASTRUCTURE_ERRORS, OSError)):
            raise error
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in place)
        raise RewardError(
            f"The evaluator {evaluator.name} failed on task {self.task.id!r} with "
            f"{type(error).__name__}: {error_text(error)}{where}"
        ) from error

    def _pay(self, episode: Episode, output: EvalOutput) -> None:
        """Rewards and signals, where neither the program nor the evaluator set them itself."""
        for trajectory in episode.trajectories:
            if trajectory.reward is None:
                trajectory.reward = output.reward
            trajectory.reward = finite_number(
                trajectory.reward,
                f"{self.engine.flow.name} or {self.engine.evaluator.name} set",
                f"the reward of trajectory {trajectory.name!r}",
            )
            for signal in output.signals:
                trajectory.signals.setdefault(signal.name, signal.value)
        episode.metrics |= {signal.name: signal.value for signal in output.signals}
        episode.is_correct = output.is_correct and episode.outcome is Outcome.SCORED
        if output.metadata:
            episode.info["evaluation"] = output.metadata

    def _failed_episode(self, calls: Captured, outcome: Outcome, cause: BaseException, place: str) -> Episode:
        """An episode without a reward, with all that was sampled and the cause."""
        self.vitals.failure = cause
        episode, _ = join(None, calls, self.engine.flow.name)
        self._identify(episode)
        episode.termination_reason = _reason_of(cause, calls)
        episode.info["error"] = error_record(cause, place)
        _settle(episode, outcome)
        episode.trajectories[0].info["error"] = episode.info["error"]
        return episode

    def _identify(self, episode: Episode) -> None:
        episode.task, episode.session_id = self.row, self.session.id
        episode.task_id, episode.rollout_idx = self.identity.task_id, self.identity.attempt
        episode.id = str(self.identity)
        for trajectory in episode.trajectories:
            trajectory.task = self.row

    def _missing_ids(self, calls: Captured) -> ConfigError | None:
        for record in calls.answers if self.engine.requires_ids else ():
            if record.no_ids_because:
                return ConfigError(f"Call {record.id} cannot be trained on: {record.no_ids_because}")
        return None


def _note_grading(episode: Episode, grader_s: float) -> None:
    """The time of an evaluator, with the last answer that it has read."""
    steps = [step for trajectory in episode.trajectories for step in trajectory.steps]
    if steps:
        steps[-1].timings["grader_s"] = grader_s


def _without_answers(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part that a program may see of a task that names its grader: without what the grader compares
    with."""
    hidden_fields = ("grader_args", "grading", "oracle") if "grader" in metadata else ()
    return {name: value for name, value in metadata.items() if name not in hidden_fields}


def _outcome_of(episode: Episode, cut_off: TerminationReason | None) -> Outcome:
    """The outcome of an episode that did not fail; its program may have set the reason itself."""
    if cut_off is not None:
        episode.termination_reason = cut_off
    elif episode.termination_reason is TerminationReason.UNKNOWN:
        reasons = {each.termination_reason for each in episode.trajectories} - {TerminationReason.UNKNOWN}
        episode.termination_reason = reasons.pop() if len(reasons) == 1 else TerminationReason.ENV_DONE
    if episode.termination_reason is TerminationReason.ERROR:
        return Outcome.POLICY_FAILURE
    return Outcome.TRUNCATED if episode.termination_reason.is_limit else Outcome.SCORED


def _settle(episode: Episode, outcome: Outcome) -> None:
    episode.outcome = outcome
    for trajectory in episode.trajectories:
        trajectory.outcome = outcome
        if trajectory.termination_reason is TerminationReason.UNKNOWN:
            trajectory.termination_reason = episode.termination_reason


def _reason_of(cause: BaseException, calls: Captured) -> TerminationReason:
    if isinstance(cause, OutOfTime):
        return TerminationReason.TIMEOUT
    if (calls.last_error or {}).get("code") == "context_length_exceeded":
        return TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    return TerminationReason.ERROR
