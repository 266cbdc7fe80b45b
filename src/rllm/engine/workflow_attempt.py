"""One attempt of a workflow: the only place where what it raises becomes an outcome.

WorkflowSettings ──► WorkflowAttempt(identity, task) ──► workflow.run ──► Episode, None or error ──► Episode
                         └ its own RolloutEngine: calls end with the attempt, environments are closed

Nothing that a workflow does ends more than its attempt: not what it raises or returns, not a cancellation
that it swallows. What it returns after its time was up does not count.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rllm.contracts.contract import Contract
from rllm.engine.attempt_state import Vitals
from rllm.engine.containment import contain
from rllm.engine.contracts import require_episode
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.failures import (
    CONTRACT_ERRORS,
    INFRASTRUCTURE_ERRORS,
    broken_contract,
    contract_error_of,
    error_record,
    is_infrastructure,
    leaves_of,
)
from rllm.engine.rollout import MODEL
from rllm.engine.settings import copy_of
from rllm.engine.step_claims import claim_steps
from rllm.errors import AgentError, ConfigError, error_text, shorten
from rllm.inference.call_retries import CallPatience
from rllm.inference.rollout_engine import Client, RoleSettings, RolloutEngine
from rllm.types.budget import BudgetExceeded, TokenBudget
from rllm.types.episode import Episode, Outcome, Step, TerminationEvent, TerminationReason, Trajectory
from rllm.types.episode_clock import ClockEnd, EpisodeClock, EpisodeLimits, ModelPulse
from rllm.types.judgements import finite_number
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, Task, row_of
from rllm.workflows.workers import (
    WorkerRunner,
    require_workers,
    with_worker_trajectories,
    worker_contracts,
)
from rllm.workflows.workflow import Workflow

AnyTask = Task | Mapping[str, Any]
WORKFLOW = "workflow"
"""Where an attempt failed: `info["error"]["place"]`; else at the model."""
EPISODE_TIMEOUT_S = 3600.0
"""The time of one attempt without its model calls, where no other limit is given."""
UNPAID = (Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE, Outcome.CANCELLED)
"""The ends of an episode that have no reward."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorkflowSettings:
    """The settings that all attempts of an engine share."""

    workflow_cls: type[Workflow]
    workflow_args: dict[str, Any]
    clients: dict[str, Client]
    """By policy; the first is the one of roles that name none."""
    roles: dict[str, RoleSettings] = field(default_factory=dict[str, RoleSettings])
    budget: TokenBudget = field(default_factory=TokenBudget)
    """The budget of each conversation."""
    seed: int = 0
    patience: CallPatience = field(default_factory=CallPatience)
    """With the model, and before another try of an attempt."""
    step_timeout_s: float = 60.0
    """One call in a thread: `Workflow.run_in_executor`."""
    episode_timeout_s: float = EPISODE_TIMEOUT_S
    """An attempt's own time, model calls not counted."""
    wall_timeout_s: float | None = None
    """All of its time; a workflow may set a lower `timeout` itself."""
    model_timeout_s: float | None = None
    """The longest silence of the model."""
    pulse: ModelPulse = field(default_factory=ModelPulse)
    workers: WorkerRunner | None = None
    """Runs the workers of the workflow that have a model or program of their own."""
    contracts: Mapping[str, Contract] | None = None
    """The contracts of those workers and the others; None reads those that the class names."""

    def __post_init__(self) -> None:
        for name in ("step_timeout_s", "episode_timeout_s"):
            limit_s = getattr(self, name)
            if not 0.0 < limit_s < float("inf"):
                raise ConfigError(f"`{name}` is {limit_s}; it must be a finite number above 0.")
        _require_workflow(self.workflow_cls, self.workflow_args)
        if self.contracts is None:
            object.__setattr__(self, "contracts", worker_contracts(self.workflow_cls))
        require_workers(self.workflow_cls.__name__, self.contracts or {}, self.workers)

    @property
    def times(self) -> EpisodeLimits:
        return EpisodeLimits(
            work_s=self.episode_timeout_s, wall_s=self.wall_timeout_s, silence_s=self.model_timeout_s
        )

    def policy_of(self, role: str) -> str:
        settings = self.roles.get(role)
        return (settings.policy if settings is not None else "") or next(iter(self.clients))


@dataclass(kw_only=True, slots=True)
class _End:
    """The end of a run of a workflow."""

    reason: TerminationReason
    outcome: Outcome
    error: BaseException | None = None
    place: str = WORKFLOW
    timed_out: bool = False
    """The engine ended it; a workflow may say of itself that its time was up."""
    is_abandoned: bool = False
    """The workflow did not end when it was told to, and is left behind."""


class WorkflowAttempt:
    """One try of it. `play` closes it; whoever only makes the workflow calls `close`."""

    def __init__(
        self,
        settings: WorkflowSettings,
        identity: EpisodeId,
        task: AnyTask,
        purpose: str,
        sampling: SamplingParams,
        pool: EnvironmentPool,
        vitals: Vitals,
        deadline_at: float | None = None,
        clients: Mapping[str, Client] | None = None,
    ) -> None:
        """`deadline_at`, by the loop's clock, ends it as its own time limit would. `clients` stand in for
        those of the settings."""
        self.settings = settings
        self.identity = identity
        self.vitals = vitals
        self.clock = EpisodeClock(
            settings.times, settings.pulse, deadline_at=deadline_at, on_answer=self._note_answer
        )
        self.task = copy_of(row_of(task))
        self.rollout_engine = RolloutEngine(
            settings.clients if clients is None else clients,
            key=(settings.seed, purpose, identity.task_id, identity.attempt),
            sampling=sampling,
            roles=settings.roles,
            budget=settings.budget,
            patience=settings.patience,
            clock=self.clock,
        )
        self.pool = pool
        self.name = settings.workflow_cls.__name__
        self.workflow: Workflow | None = None
        self._broke_contract = False

    def make(self) -> Workflow:
        """The workflow. Raises AgentError for a class that cannot be made."""
        settings = self.settings
        try:
            self.workflow = settings.workflow_cls(
                rollout_engine=self.rollout_engine,
                executor=_Threads(self.pool, settings.step_timeout_s),
                **copy_of(settings.workflow_args),
            )
        except (*CONTRACT_ERRORS, *INFRASTRUCTURE_ERRORS, OSError):
            # As they are: `_ended_by` tells by the type of an error what the attempt counts as.
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise AgentError(
                f"{self.name} cannot be made: {type(error).__name__}: {error_text(error)}; "
                f"`workflow_args` has {', '.join(settings.workflow_args) or 'nothing'}."
            ) from error
        if not hasattr(self.workflow, "rollout_engine"):
            raise AgentError(
                f"{self.name}.__init__ does not call Workflow.__init__; write "
                "`super().__init__(rollout_engine, **kwargs)` in it."
            )
        self.workflow.worker_steps(settings.workers, settings.contracts)
        return self.workflow

    async def play(self) -> tuple[Episode, BaseException | None]:
        """The episode, and what made it fail."""
        started_at, start_s = time.time(), time.perf_counter()
        result: Episode | None = None
        is_abandoned = False
        try:
            result, end = await self._run()
            is_abandoned = end.is_abandoned
        finally:
            closing = asyncio.ensure_future(self.close(is_abandoned=is_abandoned))
            try:
                close_errors = await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing  # whoever is in a hurry waits for this all the same, or nobody would close
                raise
        # As the rollout engine noted it, whatever the workflow raised or returned: it may have gone on
        # without the answer, and been paid for that.
        failure = self.rollout_engine.failure
        if failure is not None and end.outcome is not Outcome.CANCELLED:
            end = _failed_end(failure, place=MODEL)
        try:
            episode = self._episode(result, end)
            self._account(episode)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  of users' classes
            end = _failed_end(contract_error_of(error, f"The episode of {self.name} cannot be read"))
            episode = self._settle_episode(self._of_calls(), end)
            self._account(episode)
        if close_errors:
            episode.info["close_errors"] = close_errors
        episode.metrics |= {
            "calls": float(len(self.rollout_engine.calls)),
            "retried_calls": float(self.rollout_engine.num_retries),
            "abandoned_attempts": float(is_abandoned),
            "started_at": started_at,
            "duration_s": time.perf_counter() - start_s,
        }
        return episode, end.error

    def may_start_over(self, episode: Episode) -> bool:
        """Whether another try may help: not for a model call, which has been asked again already or was
        waited for long enough, nor for a broken contract."""
        is_infra_failure = episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
        has_model_failed = self.rollout_engine.failure is not None or self.clock.end is ClockEnd.SILENCE
        return is_infra_failure and not has_model_failed and not self._broke_contract

    async def close(self, *, is_abandoned: bool = False) -> list[str]:
        """End its calls and close its environments; what they raise is kept beside the result."""
        await self.rollout_engine.close(is_abandoned=is_abandoned)
        errors: list[str] = []
        for env in [] if self.workflow is None else self.workflow.release_environments():
            try:
                result: Any = await self.pool.call(env.close, timeout_s=self.settings.step_timeout_s)
                if inspect.isawaitable(result):
                    async with asyncio.timeout(self.settings.step_timeout_s):
                        await result
            except Exception as error:  # noqa: BLE001  a user's close() may raise anything
                errors.append(f"{type(error).__name__}: {error_text(error)}")
        return errors

    def _note_answer(self) -> None:
        self.vitals.turn += 1
        self.vitals.counts.turns += 1

    # ---- from what happened to an outcome --------------------------------------------------------------

    async def _run(self) -> tuple[Episode | None, _End]:
        # It may have been stopped while it waited for this try.
        if self.vitals.stop_outcome is not None:
            return None, _End(reason=TerminationReason.UNKNOWN, outcome=self.vitals.stop_outcome)
        try:
            workflow = self.make()
        except Exception as error:  # noqa: BLE001  the one place where it becomes an outcome
            return None, _ended_by(error)
        self.clock.promise(workflow.timeout)
        end = await contain(workflow.run(self.task, str(self.identity)), self.clock, self._let_interrupt)
        self.vitals.interrupt = None
        if self.vitals.stop_outcome is not None:
            return None, _End(
                reason=TerminationReason.UNKNOWN,
                outcome=self.vitals.stop_outcome,
                is_abandoned=end.is_abandoned,
            )
        if (silence := self.clock.silence_error()) is not None:
            failed = _failed_end(silence, place=MODEL)
            failed.is_abandoned = end.is_abandoned
            return None, failed
        if end.timed_out:
            left = ", nor after it was told to end: it is left behind" if end.is_abandoned else ""
            late = TimeoutError(f"{self.name}.run had not returned when its time was up{left}.")
            return None, _End(
                reason=TerminationReason.TIMEOUT,
                outcome=Outcome.TRUNCATED,
                error=late,
                timed_out=True,
                is_abandoned=end.is_abandoned,
            )
        if end.error is not None:
            return None, _ended_by(end.error)
        return self._end_of_return(end.value)

    def _let_interrupt(self, interrupt: Callable[[], None]) -> None:
        self.vitals.interrupt = interrupt

    def _end_of_return(self, value: Any) -> tuple[Episode | None, _End]:
        if value is None:
            return None, _End(reason=TerminationReason.UNKNOWN, outcome=Outcome.SCORED)
        if not isinstance(value, Episode):
            return None, _failed_end(
                AgentError(
                    f"{self.name}.run returned {shorten(repr(value), 200)} (a {type(value).__name__}); "
                    "return an Episode, or None for the episode of what was committed."
                )
            )
        try:
            require_episode(value, f"The episode of {self.name}")
        except Exception as unfit:  # noqa: BLE001  of users' values, which may do anything when looked at
            return None, _failed_end(contract_error_of(unfit, f"The episode of {self.name} cannot be read"))
        if value.termination_reason is TerminationReason.UNKNOWN:
            value.termination_reason = TerminationReason.ENV_DONE
        return value, _end_of(value.termination_reason)

    def _episode(self, result: Episode | None, end: _End) -> Episode:
        """The episode, identified, settled, and paid unless it failed."""
        workflow = self.workflow
        if result is not None:
            episode = result
            if workflow is not None:
                episode.trajectories = with_worker_trajectories(episode.trajectories, workflow.worker_steps())
        elif workflow is None:
            episode = Episode()
        elif end.outcome in UNPAID:
            episode = self._in_hook("collect_trajectories", workflow.collect_trajectories)
        else:
            episode = self._in_hook(
                "postprocess_episode",
                lambda: workflow.postprocess_episode(workflow.collect_trajectories(), end.reason),
            )
        if workflow is not None and (records := workflow.worker_steps().records):
            episode.info["workers"] = records
        require_episode(episode, f"The episode of {self.name}")
        return self._settle_episode(episode, end)

    def _of_calls(self) -> Episode:
        """The sampled calls of a workflow whose own episode cannot be read: one trajectory a role."""
        by_role: dict[str, Trajectory] = {}
        for call in self.rollout_engine.calls:
            role = call.role or Trajectory().name
            trajectory = by_role.setdefault(role, Trajectory(name=role))
            trajectory.steps.append(Step.from_model_output(call.output, call.messages))
        return Episode(trajectories=list(by_role.values()))

    def _settle_episode(self, episode: Episode, end: _End) -> Episode:
        """The same episode, with who and what it is, and how it ended."""
        episode.task, episode.id = self.task, str(self.identity)
        episode.task_id, episode.rollout_idx = self.identity.task_id, self.identity.attempt
        may_be_correct = end.outcome not in UNPAID and not end.timed_out
        episode.is_correct = bool(episode.is_correct) and may_be_correct
        for name, value in episode.metrics.items():
            episode.metrics[name] = finite_number(value, f"{self.name} set", f"the metric {name!r}")
        if end.error is not None:
            episode.info["error"] = error_record(end.error, end.place)
        self._broke_contract = broken_contract(end.error) is not None
        episode.outcome, episode.termination_reason = end.outcome, end.reason
        for trajectory in episode.trajectories:
            self._settle(trajectory, end)
        return episode

    def _settle(self, trajectory: Trajectory, end: _End) -> None:
        trajectory.task, trajectory.outcome = self.task, end.outcome
        if trajectory.termination_reason is TerminationReason.UNKNOWN:
            trajectory.termination_reason = end.reason
        if end.outcome in UNPAID:
            trajectory.reward = None
            return
        where = f"trajectory {trajectory.name!r}"
        for place, step in enumerate(trajectory.steps):
            step.reward = finite_number(
                step.reward, f"{self.name} set", f"the reward of step {place} of {where}"
            )
        if trajectory.reward is None:
            assert self.workflow is not None, "what is paid was made"
            self.workflow.compute_trajectory_reward(trajectory)
        trajectory.reward = finite_number(trajectory.reward, f"{self.name} set", f"the reward of {where}")

    def _account(self, episode: Episode) -> None:
        """Give every step its tokens, and count the calls that no step is."""
        of_step, unclaimed_calls = claim_steps(episode, self.rollout_engine.calls, self.name)
        for trajectory in episode.trajectories:
            policy = self.settings.policy_of(trajectory.name)
            for step in trajectory.steps:
                call = of_step.get(step.id)
                if call is not None and call.policy != policy:
                    raise ConfigError(
                        f"{self.name}: trajectory {trajectory.name!r} is of policy `{policy}`, but policy "
                        f"`{call.policy}` answered one of its calls, which was made with role={call.role!r}; "
                        f"call get_model_response(..., role={trajectory.name!r})."
                    )
        episode.metrics["unclaimed_calls"] = float(len(unclaimed_calls))
        episode.metrics["unclaimed_tokens"] = float(
            sum(len(call.output.completion_ids) for call in unclaimed_calls)
        )

    def _in_hook(self, hook: str, call: Callable[[], Any]) -> Episode:
        try:
            episode = call()
        except CONTRACT_ERRORS:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise AgentError(
                f"{self.name}.{hook} failed on {self.identity} with {type(error).__name__}: "
                f"{error_text(error)}"
            ) from error
        if not isinstance(episode, Episode):
            raise AgentError(
                f"{self.name}.{hook} returned {shorten(repr(episode), 200)}; return the Episode."
            )
        return episode


class _Threads(Executor):
    """The engine's worker threads, as `asyncio` and published programs use an executor."""

    def __init__(self, pool: EnvironmentPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """May be called from any thread."""

        # `pool.call` belongs to the loop's thread, and a workflow may submit from one of its own.
        async def call() -> Any:
            return await self._pool.call(partial(fn, *args, **kwargs), timeout_s=self._timeout_s)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)


def _failed_end(error: BaseException, place: str = WORKFLOW) -> _End:
    return _End(
        reason=TerminationReason.ERROR,
        outcome=Outcome.INFRASTRUCTURE_FAILURE,
        error=error,
        place=place,
    )


def _ended_by(error: BaseException) -> _End:
    """The end of an attempt that an exception stands for."""
    if (contract_error := broken_contract(error)) is not None:
        return _failed_end(contract_error)
    # In a group of errors a service that failed decides: the others may be its consequence, and then they are
    # no fault of the policy.
    causes = leaves_of(error)
    for cause in causes:
        if isinstance(cause, OSError) or is_infrastructure(cause):  # TimeoutError is an OSError
            reason = TerminationReason.TIMEOUT if isinstance(cause, TimeoutError) else TerminationReason.ERROR
            return _End(reason=reason, outcome=Outcome.INFRASTRUCTURE_FAILURE, error=cause)
    for cause in causes:
        if not isinstance(cause, TerminationEvent):
            return _End(reason=TerminationReason.ERROR, outcome=Outcome.POLICY_FAILURE, error=cause)
    event = causes[0]
    assert isinstance(event, TerminationEvent), "nothing else is left"
    end = _end_of(event.reason)
    if isinstance(event, BudgetExceeded) or end.outcome in UNPAID:
        end.error = event  # it has more to say than the reason
    return end


def _end_of(reason: TerminationReason) -> _End:
    if reason is TerminationReason.ERROR:
        error = AgentError("The workflow says that it ended in an error.")
        return _End(reason=reason, outcome=Outcome.POLICY_FAILURE, error=error)
    return _End(reason=reason, outcome=Outcome.TRUNCATED if reason.is_limit else Outcome.SCORED)


def _require_workflow(workflow_cls: Any, workflow_args: dict[str, Any]) -> None:
    """Raises AgentError for a class that cannot be made or run as the engine does it."""
    if not (isinstance(workflow_cls, type) and issubclass(workflow_cls, Workflow)):
        raise AgentError(f"workflow_cls is {workflow_cls!r}; it must be a subclass of rllm.Workflow.")
    name = workflow_cls.__name__
    if inspect.isabstract(workflow_cls):
        missing = ", ".join(sorted(workflow_cls.__abstractmethods__))
        raise AgentError(f"{name} does not define {missing}; write `async def run(self, task, uid)`.")
    if not inspect.iscoroutinefunction(workflow_cls.run):
        raise AgentError(f"{name}.run is no coroutine function; write `async def run(self, task, uid)`.")
    try:
        inspect.signature(workflow_cls.run).bind(None, {}, "")
    except TypeError as error:
        raise AgentError(f"{name}.run cannot be called with (task, uid): {error}.") from error
    try:
        inspect.signature(workflow_cls).bind(rollout_engine=None, executor=None, **workflow_args)
    except TypeError as error:
        raise AgentError(
            f"{name} cannot be made with rollout_engine, executor and the `workflow_args` "
            f"{', '.join(workflow_args) or '(none)'}: {error}. Take **kwargs and hand them on to "
            "Workflow.__init__."
        ) from error
