"""Many rollouts side by side: tasks in, episodes out as they finish.

tasks × group_size ──► queue ──► n_parallel_agents workers ──► run_trajectory ──► Episode
                                     │ the environment failed? the same attempt again, up to retry_limit tries
                                     │ a class broke its contract? this episode fails, against a budget
                                     │ the model failed? asked again in the rollout, up to api_retries times
                                     └ submitted = scored + truncated + failed + cancelled + in flight, always
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from numbers import Integral
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.engine.attempt_state import LiveRollout, Vitals, live_of
from rllm.engine.attempts import EpisodeCounts, Finished, ParallelLimit, Quota, attempts_at, play_all
from rllm.engine.contracts import require_agent_class, require_env_class
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.failures import FailureBudget, broken_contract, contract_error_of
from rllm.engine.records import Records
from rllm.engine.rollout import (
    AGENT,
    ENVIRONMENT,
    GRADE,
    MODEL,
    RolloutKey,
    failed_trajectory,
    run_trajectory,
)
from rllm.engine.settings import (
    client_for,
    copy_of,
    limit_patience,
    limits_of,
    require_settings,
    sampling_of,
    silence_limit_s,
    task_list,
)
from rllm.engine.supervision import LoopWatchdog
from rllm.engine.turnstile import Turnstile
from rllm.engine.world import made_of
from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError
from rllm.inference.client import ModelClient, ModelSession
from rllm.types.episode import Episode, Outcome, Trajectory
from rllm.types.episode_clock import MODEL_TIMEOUT_S, ModelPulse
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, row_of, task_id_of


class AgentExecutionEngine:
    """Runs `agent_class` in `env_class` against a model.

    Each attempt gets a fresh agent and a fresh environment; nothing is shared between rollouts but the model
    client, the threads that environments run in, and what `agent_args` and `env_args` hold beside plain lists
    and dicts, which are copied.
    """

    def __init__(
        self,
        agent_class: type[BaseAgent],
        env_class: type[BaseEnv],
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        *,
        rollout_engine: Any = None,
        engine_name: str = "",
        rollout_engine_args: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        chat_parser: Any = None,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        n_parallel_agents: int = 128,
        max_steps: int = 5,
        max_response_length: int = 8192,
        max_prompt_length: int = 1024,
        enforce_max_prompt_length: bool = False,
        trajectory_timeout: float | None = None,
        episode_timeout_s: float | None = None,
        model_timeout_s: float | None = MODEL_TIMEOUT_S,
        step_timeout_s: float = 60.0,
        call_timeout_s: float = 600.0,
        deadline_s: float | None = None,
        api_retries: int = 3,
        retry_limit: int = 3,
        retry_wait_s: float = 0.5,
        oversampling: float = 1.0,
        max_workers: int = 64,
        gamma: float = 1.0,
        seed: int = 0,
        overlong_filter: bool = False,
        requires_ids: bool = False,
        max_failed_fraction: float = 1.0,
        stored: bool = False,
        config: Any = None,
    ) -> None:
        """The model is `rollout_engine`, a client, or is made by `engine_name` (`openai`, `vllm` or `local`)
        from `rollout_engine_args` and `tokenizer`; what the engine made it also closes.

        Tokens: `max_prompt_length` limits the first prompt and `max_response_length` all that follows it;
        with `enforce_max_prompt_length` they limit every prompt and every answer. 0 is no limit.

        Time, in seconds: `step_timeout_s` is of one environment call, `call_timeout_s` of one call to a
        server, `episode_timeout_s` of an episode without its model calls, `trajectory_timeout` of an episode
        with them, `deadline_s` of a whole `run`; None is no limit. A server that answers no call for
        `model_timeout_s` has failed. `retry_wait_s` is the wait before the first retry of anything, and
        doubles with each.

        `oversampling` starts that many times `group_size` attempts at each task: the first `group_size` that
        finish count, the others are cancelled. Which ones those are depends on timing. `overlong_filter`
        marks truncated trajectories (`info["masked_out"]`). `requires_ids`: an answer without token ids fails
        its episode, because it cannot be trained on.

        `max_failed_fraction`: share of the latest attempts that may fail through no fault of the policy
        before the run ends; 0 is strict. Whatever it is, a run whose first episodes all break a contract
        ends. `stored`: a store is to hold the episodes, so one with a value that JSON cannot hold fails.
        """
        self.agent_args = dict(agent_args or {})
        self.env_args = dict(env_args or {})
        require_agent_class(agent_class, self.agent_args)
        require_env_class(env_class)
        require_settings(
            n_parallel_agents=n_parallel_agents,
            max_steps=max_steps,
            retry_limit=retry_limit,
            max_workers=max_workers,
            oversampling=oversampling,
            deadline_s=deadline_s,
            chat_parser=chat_parser,
            config=config,
        )
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"`gamma` is {gamma}; it must be a discount from 0 to 1.")
        if not isinstance(seed, Integral):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"`seed` is {seed!r}; it must be a whole number.")
        self.agent_class = agent_class
        self.env_class = env_class
        limits = limits_of(
            max_steps=max_steps,
            max_prompt_length=max_prompt_length,
            max_response_length=max_response_length,
            enforce_max_prompt_length=enforce_max_prompt_length,
            step_timeout_s=step_timeout_s,
            trajectory_timeout=trajectory_timeout,
            episode_timeout_s=episode_timeout_s,
            model_timeout_s=model_timeout_s,
            call_timeout_s=call_timeout_s,
            api_retries=api_retries,
            retry_wait_s=retry_wait_s,
        )
        self.sampling, model = sampling_of(sampling_params, max_response_length)
        self.owns_client = rollout_engine is None
        self.client: ModelClient = client_for(
            rollout_engine, engine_name, dict(rollout_engine_args or {}), tokenizer, model
        )
        self.limits = replace(
            limits,
            patience=limit_patience([self.client], limits.patience),
            model_timeout_s=silence_limit_s([self.client], model_timeout_s),
        )
        self.pulse = ModelPulse()
        self.num_parallel = n_parallel_agents
        self.retry_limit = retry_limit
        self.oversampling = oversampling
        self.deadline_s = deadline_s
        self.env_workers = max_workers if env_class.is_multithread_safe() else 1
        self.gamma = gamma
        self.seed = seed
        self.overlong_filter = overlong_filter
        self.requires_ids = requires_ids
        self.counts = EpisodeCounts()
        self.failures = FailureBudget(max_failed_fraction)
        self.stored = stored
        self.rollouts: dict[tuple[str, EpisodeId], Vitals] = {}
        """That are being played, by the purpose of their run."""
        self._places = ParallelLimit(n_parallel_agents)
        self._blocking_places: set[str] = set()

    def live(self) -> list[LiveRollout]:
        """The rollouts that are under way, the oldest first."""
        # Copied: a watchdog asks from a thread of its own, while the loop adds and removes rollouts.
        return live_of(list(self.rollouts.values()))

    async def run(
        self,
        tasks: Sequence[Mapping[str, Any]],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        oversampling: float | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """Episodes in the order in which they finish: `group_size` attempts at each task.

        A task is a mapping with the arguments of the environment; its `task_id` names it (its position, if it
        has none). `purpose` enters every random draw, so that two runs over the same tasks differ. Attempts
        to `skip` were made before. Leaving the iteration early cancels what is in flight and closes it.
        """
        many = self.oversampling if oversampling is None else oversampling
        tasks = task_list(tasks)
        rows: list[Mapping[str, Any]] = [row_of(each) for each in tasks]
        pending = attempts_at(rows, group_size, many, skip)
        run = _Run(self, pending, purpose, sampling or self.sampling, group_size if many > 1.0 else 0)
        try:
            with LoopWatchdog(known_places=self._blocking_places):
                # Closed at once where the iteration is left early: else its workers would play on until the
                # garbage collector came.
                async with aclosing(
                    play_all(pending, run.work, self._places, self.counts, run.quota)
                ) as episodes:
                    async for episode in episodes:
                        yield episode
        finally:
            run.close()
            if self.owns_client and not self.rollouts and (release := getattr(self.client, "release", None)):
                await release()  # nobody may ever close the engine, and the loop may end now

    async def execute_tasks(self, tasks: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
        """One attempt at each task; trajectories in the order of the tasks.

        A task that the deadline left no time for has none.
        """
        tasks = task_list(tasks)
        order = {task_id_of(task, position): position for position, task in enumerate(tasks)}
        async with aclosing(self.run(tasks)) as episodes:
            results = [episode async for episode in episodes]
        results.sort(key=lambda episode: order[episode.task_id])
        return [episode.trajectories[0] for episode in results]

    async def trajectory_generator(
        self, tasks: Sequence[Mapping[str, Any]], *, group_size: int = 1
    ) -> AsyncGenerator[Trajectory, None]:
        """Trajectories as they finish."""
        async with aclosing(self.run(tasks, group_size=group_size)) as episodes:
            async for episode in episodes:
                yield episode.trajectories[0]

    async def close(self) -> None:
        """Close the model client, if the engine made it."""
        if self.owns_client:
            await self.client.close()

    async def __aenter__(self) -> "AgentExecutionEngine":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Run:
    """The shared state of the workers of one `run`."""

    def __init__(
        self,
        engine: AgentExecutionEngine,
        pending: list[tuple[EpisodeId, Mapping[str, Any]]],
        purpose: str,
        sampling: SamplingParams,
        num_wanted: int,
    ) -> None:
        """`num_wanted`: attempts at each task that are enough; 0 wants all."""
        self.engine = engine
        self.pending = pending
        self.num_attempts = len(pending)
        self.purpose = purpose
        self.sampling = sampling
        self.pool = EnvironmentPool(engine.env_workers)
        self.turnstile = Turnstile()
        self.records = Records(AGENT, is_stored=engine.stored)
        self.quota = Quota(num_wanted, self._stop) if num_wanted else None
        self._num_workers = 0
        self._loop = asyncio.get_running_loop()
        self._deadline_at = None if engine.deadline_s is None else self._loop.time() + engine.deadline_s

    def close(self) -> None:
        self.pool.close()

    async def work(self, results: Finished) -> None:
        """Play attempts until none is pending.

        The next session opens before the last one closes, so a lockstep engine never sees a gap between two
        episodes and its batches do not depend on thread timing.
        """
        slot, self._num_workers = self._num_workers, self._num_workers + 1
        session: ModelSession | None = None
        try:
            while self.pending:
                identity, task = self.pending.pop()
                # Handed over all the same: each attempt that was submitted is settled exactly once.
                if self._is_needless(identity):
                    results.put_nowait(
                        Episode(
                            task_id=identity.task_id, rollout_idx=identity.attempt, outcome=Outcome.CANCELLED
                        )
                    )
                    continue
                following = self.engine.client.session((identity.task_id, identity.attempt))
                if session is not None:
                    session.close()
                session = following
                vitals = Vitals(identity, self.engine.counts)
                self.engine.rollouts[self.purpose, identity] = vitals
                try:
                    await self.turnstile.wait_to_pass()
                    tries = 1
                    while True:
                        # A task of its own: what one rollout sets in its context is not seen by the next.
                        trajectory = await asyncio.create_task(
                            self._play(identity, task, session, vitals, slot)
                        )
                        if not self._again(trajectory, tries, vitals):
                            break
                        await self._wait(vitals, tries)
                        tries += 1
                        self.engine.counts.retries += 1
                        # A new session: the old one's conversation holds the turns of the try that failed.
                        following = self.engine.client.session((identity.task_id, identity.attempt))
                        session.close()
                        session = following
                finally:
                    del self.engine.rollouts[self.purpose, identity]
                self.engine.counts.call_retries += vitals.call_retries
                episode = _episode(identity, task, trajectory, tries)
                episode, failure = self.records.keep(episode, vitals.failure)
                self.engine.failures.settle(episode, failure, self.num_attempts)
                results.put_nowait(episode)
        finally:
            if session is not None:
                session.close()

    def _stop(self, task_id: str) -> None:
        for (purpose, identity), vitals in self.engine.rollouts.items():
            if purpose == self.purpose and identity.task_id == task_id:
                vitals.stop(Outcome.CANCELLED)

    def _late(self) -> bool:
        return self._deadline_at is not None and self._loop.time() >= self._deadline_at

    def _is_needless(self, identity: EpisodeId) -> bool:
        """Whether its group is complete without it, or there is no time left to begin it."""
        return self._late() or (self.quota is not None and self.quota.is_full(identity.task_id))

    def _again(self, trajectory: Trajectory, tries: int, vitals: Vitals) -> bool:
        """Whether the attempt starts over: only where the environment failed, and did not break its
        contract."""
        return (
            trajectory.outcome is Outcome.INFRASTRUCTURE_FAILURE
            and trajectory.info["error"]["place"] == ENVIRONMENT
            and broken_contract(vitals.failure) is None
            and tries < self.engine.retry_limit
            and vitals.stop_outcome is None
            and not self._late()
        )

    async def _wait(self, vitals: Vitals, tries: int) -> None:
        wait_s = self.engine.limits.patience.doubled_wait_s(tries - 1)
        vitals.waits_for = f"another try in {wait_s:.1f} s"
        await asyncio.sleep(wait_s)

    async def _play(
        self,
        identity: EpisodeId,
        task: Mapping[str, Any],
        session: ModelSession,
        vitals: Vitals,
        slot: int,
    ) -> Trajectory:
        engine = self.engine
        try:
            agent = engine.agent_class(**copy_of(engine.agent_args))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  a user's class may raise anything
            contract_error = contract_error_of(error, f"{engine.agent_class.__name__} cannot be made")
            return failed_trajectory(Trajectory(), contract_error, AGENT, vitals)
        trajectory = await run_trajectory(
            agent,
            # A function, because making an environment may block: it is called in a thread of the pool.
            lambda: made_of(engine.env_class, copy_of({**task, **engine.env_args})),
            engine.client,
            pool=self.pool,
            limits=engine.limits,
            sampling=self.sampling,
            key=RolloutKey(seed=engine.seed, purpose=self.purpose, episode=identity),
            session=session,
            vitals=vitals,
            deadline_at=self._deadline_at,
            pulse=engine.pulse,
            slot=slot,
            turnstile=self.turnstile,
        )
        if trajectory.reward is None:
            return trajectory
        return self._settle(trajectory, vitals)

    def _settle(self, trajectory: Trajectory, vitals: Vitals) -> Trajectory:
        """One that is paid; failed, where it cannot be trained on and is to be."""
        engine = self.engine
        if engine.requires_ids and (missing := _missing_ids(engine.client, trajectory)) is not None:
            return failed_trajectory(trajectory, missing, MODEL, vitals)
        if engine.overlong_filter and trajectory.outcome is Outcome.TRUNCATED:
            trajectory.info["masked_out"] = str(trajectory.termination_reason)
        running = 0.0
        for step in reversed(trajectory.steps):
            running = step.reward + engine.gamma * running
            step.mc_return = running
        return trajectory


def _missing_ids(client: ModelClient, trajectory: Trajectory) -> ConfigError | None:
    for number, step in enumerate(trajectory.steps):
        if not step.response_ids:
            return ConfigError(
                f"{type(client).__name__} answered turn {number + 1} without token ids, so it cannot be "
                "trained on; use the built-in engine, or a server that returns them (vLLM with "
                "`return_token_ids`)."
            )
    return None


def _is_correct(trajectory: Trajectory) -> bool:
    """As the environment said; a reward above zero, where it said nothing of it."""
    return trajectory.info.get(GRADE, {}).get("is_correct", (trajectory.reward or 0.0) > 0.0)


def _episode(identity: EpisodeId, task: Mapping[str, Any], trajectory: Trajectory, tries: int) -> Episode:
    trajectory.task = copy_of(dict(task))
    return Episode(
        task=copy_of(dict(task)),
        task_id=identity.task_id,
        rollout_idx=identity.attempt,
        trajectories=[trajectory],
        is_correct=trajectory.outcome is Outcome.SCORED and _is_correct(trajectory),
        termination_reason=trajectory.termination_reason,
        outcome=trajectory.outcome,
        info={"tries": tries},
    )
