"""Many workflows side by side: tasks in, episodes out as they finish.

    attempt ──► Workflow, RolloutEngine: new ones ──► run(task, uid) ──► Episode, None or an exception
                     │ every model call recorded                              │
                     └───────── tokens of its steps ──────────────────────────┴──► Episode with its outcome
                                                                                     │
      infrastructure failed? the same attempt again, up to retry_limit tries ◄───────┘

What a workflow raises is an outcome with its cause; so is its time being up. A model call that failed for
good is an infrastructure failure, also where the workflow went on without its answer. A workflow that breaks
its contract, say by a reward of NaN, fails one episode, against a budget.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any

from rllm.contracts.contract import Contract
from rllm.engine.attempt_state import LiveRollout, Vitals, live_of
from rllm.engine.attempts import EpisodeCounts, Finished, ParallelLimit, Quota, attempts_at, play_all
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.failures import FailureBudget, contract_error_of
from rllm.engine.published_client import PublishedClient
from rllm.engine.records import Records
from rllm.engine.settings import limit_patience, require_settings, silence_limit_s, task_list
from rllm.engine.supervision import LoopWatchdog
from rllm.engine.workflow_attempt import (
    EPISODE_TIMEOUT_S,
    UNPAID,
    WORKFLOW,
    AnyTask,
    WorkflowAttempt,
    WorkflowSettings,
)
from rllm.errors import ConfigError
from rllm.inference.call_retries import CallPatience
from rllm.inference.rollout_engine import (
    DEFAULT_POLICY,
    Client,
    RoleSettings,
    clients_by_policy,
    roles_checked,
    takes_ids,
    takes_messages,
)
from rllm.types.budget import TokenBudget
from rllm.types.episode import Episode, Outcome
from rllm.types.episode_clock import MODEL_TIMEOUT_S
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, task_id_of
from rllm.workflows.workers import WorkerRunner
from rllm.workflows.workflow import Workflow

if TYPE_CHECKING:
    from rllm.inference.local.waves import Waves


class AgentWorkflowEngine:
    """Runs `workflow_cls` on tasks.

    Each attempt gets a workflow of its own, made with `rollout_engine`, `executor` and the `workflow_args`;
    nothing is shared between attempts but the model clients and the threads.
    """

    def __init__(
        self,
        workflow_cls: type[Workflow],
        workflow_args: Mapping[str, Any] | None = None,
        rollout_engine: Client | Mapping[str, Client] | None = None,
        config: None = None,
        n_parallel_tasks: int = 128,
        retry_limit: int = 3,
        raise_on_error: bool = True,
        episode_logger: Callable[[Episode], object] | None = None,
        *,
        clients: Mapping[str, Client] | None = None,
        roles: Mapping[str, RoleSettings] | None = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        budget: TokenBudget | None = None,
        seed: int = 0,
        api_retries: int = 3,
        retry_wait_s: float = 0.5,
        call_timeout_s: float = 600.0,
        step_timeout_s: float = 60.0,
        episode_timeout_s: float = EPISODE_TIMEOUT_S,
        wall_timeout_s: float | None = None,
        model_timeout_s: float | None = MODEL_TIMEOUT_S,
        deadline_s: float | None = None,
        oversampling: float = 1.0,
        max_workers: int = 64,
        max_failed_fraction: float = 1.0,
        stored: bool = False,
        waves: "Waves | None" = None,
        workers: WorkerRunner | None = None,
        contracts: Mapping[str, Contract] | None = None,
    ) -> None:
        """`rollout_engine` is a model client, or `clients` has one for each policy; `roles` says of which
        policy a role is and how it samples. `raise_on_error` is for `execute_tasks`; `run` raises where the
        failures are beyond the budget: for it, `max_failed_fraction`, `oversampling` and `stored` see
        `AgentExecutionEngine`.

        Time, in seconds: `call_timeout_s` is of one call to a server, `step_timeout_s` of one call in a
        thread (`Workflow.run_in_executor`), `episode_timeout_s` of an attempt without its model calls,
        `wall_timeout_s` (or the workflow's own `timeout`) of an attempt with them, `deadline_s` of a whole
        `run`. A server that answers no call for `model_timeout_s` has failed; None waits for ever.
        `retry_wait_s` is the wait before the first retry of anything, and doubles with each.

        `waves` send the calls of all attempts to the built-in engine together. `workers` runs those that the
        workflow calls and that have a model or program of their own; `contracts` are those of all of them,
        by default read from the files that the class names.
        """
        require_settings(
            n_parallel_tasks=n_parallel_tasks,
            retry_limit=retry_limit,
            max_workers=max_workers,
            oversampling=oversampling,
            deadline_s=deadline_s,
            chat_parser=None,
            config=config,
        )
        if episode_logger is not None and not callable(episode_logger):
            raise ConfigError(
                f"`episode_logger` is {episode_logger!r:.80}; give a function that takes an Episode."
            )
        client_or_clients = rollout_engine if clients is None else clients
        if client_or_clients is None or (rollout_engine is not None and clients is not None):
            raise ConfigError("Give either `rollout_engine`, a model client, or `clients`, one a policy.")
        policy_clients = (
            client_or_clients
            if isinstance(client_or_clients, Mapping)
            else {DEFAULT_POLICY: client_or_clients}
        )
        by_policy = clients_by_policy({policy: _client(each) for policy, each in policy_clients.items()})
        self.settings = WorkflowSettings(
            workflow_cls=workflow_cls,
            workflow_args=dict(workflow_args or {}),
            clients=by_policy,
            roles=roles_checked(roles or {}, by_policy),
            budget=budget or TokenBudget(),
            seed=seed,
            patience=limit_patience(
                by_policy.values(),
                CallPatience(retries=api_retries, call_timeout_s=call_timeout_s, first_wait_s=retry_wait_s),
            ),
            step_timeout_s=step_timeout_s,
            episode_timeout_s=episode_timeout_s,
            wall_timeout_s=wall_timeout_s,
            model_timeout_s=silence_limit_s(by_policy.values(), model_timeout_s),
            workers=workers,
            contracts=contracts,
        )
        self.sampling = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams(**(sampling_params or {}))
        )
        self.num_parallel = n_parallel_tasks
        self.retry_limit = retry_limit
        self.raise_on_error = raise_on_error
        self.episode_logger = episode_logger
        self.max_workers = max_workers
        self.deadline_s = deadline_s
        self.oversampling = oversampling
        self.counts = EpisodeCounts()
        self.failures = FailureBudget(max_failed_fraction)
        self.stored = stored
        self.waves = waves
        self.rollouts: dict[tuple[str, EpisodeId], WorkflowAttempt] = {}
        """That are being played, by the purpose of their run."""
        self._places = ParallelLimit(n_parallel_tasks)
        self._blocking_places: set[str] = set()

    def live(self) -> list[LiveRollout]:
        """The attempts that are under way, the oldest first."""
        # Copied: a watchdog asks from a thread of its own, while the loop adds and removes attempts.
        for attempt in list(self.rollouts.values()):
            attempt.vitals.waits_for = attempt.rollout_engine.waits_for or "workflow"
        return live_of(attempt.vitals for attempt in list(self.rollouts.values()))

    async def run(
        self,
        tasks: Sequence[AnyTask],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        oversampling: float | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """Episodes in the order in which they finish: `group_size` attempts at each task.

        A task without `task_id` is named by its position. `purpose` enters every random draw, so that two
        runs over the same tasks differ. Attempts to `skip` were made before. Leaving the iteration early
        cancels what is in flight and closes it.
        """
        tasks = task_list(tasks)
        many = self.oversampling if oversampling is None else oversampling
        run = _Run(self, attempts_at(tasks, group_size, many, skip), purpose, sampling or self.sampling)
        if many > 1.0:
            run.quota = Quota(group_size, run.stop)
        async with aclosing(run.episodes()) as episodes:
            async for episode in episodes:
                yield episode

    async def execute_tasks(
        self, tasks: Sequence[AnyTask], task_ids: Sequence[str] | None = None
    ) -> list[Episode]:
        """One attempt at each task; episodes in the order of the tasks.

        A task id that is there several times stands for several attempts. With `raise_on_error`, what made an
        attempt fail is raised after its last try; otherwise the episode says it in `info["error"]`.
        """
        tasks = task_list(tasks)
        if task_ids is not None and len(task_ids) != len(tasks):
            raise ConfigError(
                f"`task_ids` has {len(task_ids)} ids for {len(tasks)} tasks; give each its own."
            )
        names = task_ids or [task_id_of(task, place) for place, task in enumerate(tasks)]
        attempts: Counter[str] = Counter()
        order: dict[EpisodeId, int] = {}
        for place, name in enumerate(names):
            order[EpisodeId(task_id=str(name), attempt=attempts[name])] = place
            attempts[name] += 1
        # Workers take from the end, so the first task stands last.
        pending = [(identity, tasks[place]) for identity, place in reversed(order.items())]
        run = _Run(self, pending, "", self.sampling, raise_on_error=self.raise_on_error)
        async with aclosing(run.episodes()) as episodes:
            results = [episode async for episode in episodes]
        return sorted(results, key=lambda episode: order[episode.episode_id])

    async def initialize_pool(self) -> None:
        """Make one workflow and throw it away: what is wrong with its arguments is said before the first
        task."""
        pool = EnvironmentPool(1)
        identity = EpisodeId(task_id="")
        attempt = WorkflowAttempt(self.settings, identity, {}, "", self.sampling, pool, Vitals(identity))
        try:
            attempt.make()
        finally:
            await attempt.close()
            pool.close()

    def shutdown(self) -> None:
        """Nothing is left to end: threads, calls and environments end with the run that began them."""


class _Run:
    """The shared state of the workers of one `run`."""

    def __init__(
        self,
        engine: AgentWorkflowEngine,
        pending: list[tuple[EpisodeId, AnyTask]],
        purpose: str,
        sampling: SamplingParams,
        *,
        raise_on_error: bool = False,
    ) -> None:
        self.engine = engine
        self.pending = pending
        self.num_attempts = len(pending)
        self.purpose = purpose
        self.sampling = sampling
        self.raise_on_error = raise_on_error
        self.quota: Quota | None = None
        self.records = Records(WORKFLOW, is_stored=engine.stored)
        self.pool = EnvironmentPool(engine.max_workers)
        self._loop = asyncio.get_running_loop()
        self._deadline_at = None if engine.deadline_s is None else self._loop.time() + engine.deadline_s

    async def episodes(self) -> AsyncGenerator[Episode, None]:
        engine = self.engine
        try:
            with LoopWatchdog(known_places=engine._blocking_places):
                async with aclosing(
                    play_all(self.pending, self._work, engine._places, engine.counts, self.quota)
                ) as episodes:
                    async for episode in episodes:
                        if engine.episode_logger is not None:
                            engine.episode_logger(episode)
                        yield episode
        finally:
            self.pool.close()

    def stop(self, task_id: str) -> None:
        """End what still plays a task whose group is complete."""
        for (purpose, identity), attempt in self.engine.rollouts.items():
            if purpose == self.purpose and identity.task_id == task_id:
                attempt.vitals.stop(Outcome.CANCELLED)

    async def _work(self, results: Finished) -> None:
        """Play attempts until none is pending."""
        rollouts, counts = self.engine.rollouts, self.engine.counts
        while self.pending:
            identity, task = self.pending.pop()
            if self._is_needless(identity):
                results.put_nowait(
                    Episode(task_id=identity.task_id, rollout_idx=identity.attempt, outcome=Outcome.CANCELLED)
                )
                continue
            vitals = Vitals(identity, counts)
            tries = 1
            waves = self.engine.waves
            try:
                # A member through all its tries: no wave leaves before its next try has asked.
                with nullcontext() if waves is None else waves.member() as clients:
                    while True:
                        attempt = WorkflowAttempt(
                            self.engine.settings,
                            identity,
                            task,
                            self.purpose,
                            self.sampling,
                            self.pool,
                            vitals,
                            self._deadline_at,
                            clients,
                        )
                        rollouts[self.purpose, identity] = attempt
                        episode, error = await attempt.play()
                        counts.call_retries += attempt.rollout_engine.num_retries
                        if not attempt.may_start_over(episode) or not self._has_time_for_another(
                            tries, vitals
                        ):
                            break
                        await asyncio.sleep(self._wait_s(tries))
                        tries += 1
                        counts.retries += 1
            finally:
                # An attempt that could not be made was never listed.
                rollouts.pop((self.purpose, identity), None)
            episode.info["tries"] = tries
            episode, error = self.records.keep(episode, error)
            if self.raise_on_error and error is not None and episode.outcome in UNPAID:
                if not isinstance(error, Exception):  # sys.exit() would end the program
                    error = contract_error_of(error, attempt.name)
                error.add_note(
                    f"Attempt {identity}, try {tries}; with raise_on_error=False this is an episode."
                )
                raise error
            self.engine.failures.settle(episode, error, self.num_attempts)
            results.put_nowait(episode)

    def _late(self) -> bool:
        return self._deadline_at is not None and self._loop.time() >= self._deadline_at

    def _is_needless(self, identity: EpisodeId) -> bool:
        """Whether its group is complete without it, or there is no time left to begin it."""
        return self._late() or (self.quota is not None and self.quota.is_full(identity.task_id))

    def _has_time_for_another(self, tries: int, vitals: Vitals) -> bool:
        return tries < self.engine.retry_limit and vitals.stop_outcome is None and not self._late()

    def _wait_s(self, tries: int) -> float:
        return self.engine.settings.patience.doubled_wait_s(tries - 1)


def _client(client: Any) -> Client:
    """A rollout engine of the published kind, without sessions, as a client."""
    return client if takes_ids(client) or takes_messages(client) else PublishedClient(client)
