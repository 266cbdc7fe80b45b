"""Many rollouts side by side: tasks in, episodes out as they finish.

tasks × group_size ──► queue ──► num_parallel workers ──► run_trajectory ──► Episode
                                     │ infrastructure failed? the same attempt again, up to retry_limit tries
                                     └ submitted = scored + truncated + failed + cancelled + in flight, always
"""

from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.engine.attempts import EpisodeCounts, Finished, attempts_at, played
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.rollout import RolloutKey, RolloutLimits, run_trajectory
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError, ConfigError
from rllm.inference.client import ModelClient, ModelSession
from rllm.types.episode import Episode, Outcome, Trajectory
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId, task_id_of


class AgentExecutionEngine:
    """Runs `agent_class` in `env_class` against a model.

    Each attempt gets a fresh agent and a fresh environment; nothing is shared between rollouts but the model
    client and the threads that environments run in.
    """

    def __init__(
        self,
        agent_class: type[BaseAgent],
        env_class: type[BaseEnv],
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        *,
        rollout_engine: ModelClient,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        n_parallel_agents: int = 128,
        max_steps: int = 5,
        trajectory_timeout: float = 600.0,
        step_timeout_s: float = 60.0,
        retry_limit: int = 3,
        max_workers: int = 4,
        gamma: float = 1.0,
        seed: int = 0,
    ) -> None:
        if not (isinstance(agent_class, type) and issubclass(agent_class, BaseAgent)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise AgentError(f"agent_class is {agent_class!r}; it must be a subclass of rllm.BaseAgent.")
        if not (isinstance(env_class, type) and issubclass(env_class, BaseEnv)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise AgentError(f"env_class is {env_class!r}; it must be a subclass of rllm.BaseEnv.")
        for name, value in (
            ("n_parallel_agents", n_parallel_agents),
            ("max_steps", max_steps),
            ("retry_limit", retry_limit),
        ):
            if value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1.")
        self.agent_class = agent_class
        self.env_class = env_class
        self.agent_args = dict(agent_args or {})
        self.env_args = dict(env_args or {})
        self.client = rollout_engine
        self.sampling = (
            sampling_params
            if isinstance(sampling_params, SamplingParams)
            else SamplingParams(**(sampling_params or {}))
        )
        self.num_parallel = n_parallel_agents
        self.limits = RolloutLimits(
            max_turns=max_steps, step_timeout_s=step_timeout_s, episode_timeout_s=trajectory_timeout
        )
        self.retry_limit = retry_limit
        self.env_workers = max_workers if env_class.is_multithread_safe() else 1
        self.gamma = gamma
        self.seed = seed
        self.counts = EpisodeCounts()

    async def run(
        self,
        tasks: Sequence[Mapping[str, Any]],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
    ) -> AsyncGenerator[Episode, None]:
        """Episodes in the order in which they finish: `group_size` attempts at each task.

        A task is a mapping with the arguments of the environment; its `task_id` names it (its position, if it
        has none). `purpose` enters every random draw, so that two runs over the same tasks differ. Leaving
        the iteration early cancels what is in flight and closes it.
        """
        pending = attempts_at(tasks, group_size)
        pool = EnvironmentPool(self.env_workers)

        def work(finished: Finished) -> Coroutine[Any, Any, None]:
            return self._work(pending, finished, pool, purpose, sampling or self.sampling)

        try:
            async with aclosing(played(pending, work, self.num_parallel, self.counts)) as episodes:
                async for episode in episodes:
                    yield episode
        finally:
            pool.close()

    async def execute_tasks(self, tasks: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
        """One attempt at each task; trajectories in the order of the tasks."""
        order = {task_id_of(task, position): position for position, task in enumerate(tasks)}
        async with aclosing(self.run(tasks)) as episodes:
            done = [episode async for episode in episodes]
        done.sort(key=lambda episode: order[episode.task_id])
        return [episode.trajectories[0] for episode in done]

    async def trajectory_generator(
        self, tasks: Sequence[Mapping[str, Any]], *, group_size: int = 1
    ) -> AsyncGenerator[Trajectory, None]:
        """Trajectories as they finish."""
        async with aclosing(self.run(tasks, group_size=group_size)) as episodes:
            async for episode in episodes:
                yield episode.trajectories[0]

    async def _work(
        self,
        pending: list[tuple[EpisodeId, Mapping[str, Any]]],
        finished: Finished,
        pool: EnvironmentPool,
        purpose: str,
        sampling: SamplingParams,
    ) -> None:
        """Play episodes until none is pending.

        The next session opens before the last one closes, so a lockstep engine never sees a gap between two
        episodes and its batches do not depend on thread timing.
        """
        session: ModelSession | None = None
        try:
            while pending:
                identity, task = pending.pop()
                following = self.client.session((identity.task_id, identity.attempt))
                if session is not None:
                    session.close()
                session = following
                key = RolloutKey(seed=self.seed, purpose=purpose, episode=identity)
                tries = 1
                while True:
                    trajectory = await self._play(task, key, pool, sampling, session)
                    if trajectory.outcome is not Outcome.INFRASTRUCTURE_FAILURE or tries >= self.retry_limit:
                        break
                    tries += 1
                    self.counts.retries += 1
                    following = self.client.session((identity.task_id, identity.attempt))
                    session.close()
                    session = following
                finished.put_nowait(_episode(identity, task, trajectory, tries))
        finally:
            if session is not None:
                session.close()

    async def _play(
        self,
        task: Mapping[str, Any],
        key: RolloutKey,
        pool: EnvironmentPool,
        sampling: SamplingParams,
        session: ModelSession,
    ) -> Trajectory:
        trajectory = await run_trajectory(
            self.agent_class(**self.agent_args),
            lambda: self.env_class.from_dict({**task, **self.env_args}),
            self.client,
            pool=pool,
            limits=self.limits,
            sampling=sampling,
            key=key,
            session=session,
        )
        running = 0.0
        for step in reversed(trajectory.steps):
            running = step.reward + self.gamma * running
            step.mc_return = running
        return trajectory


def _episode(identity: EpisodeId, task: Mapping[str, Any], trajectory: Trajectory, tries: int) -> Episode:
    trajectory.task = dict(task)
    return Episode(
        task=dict(task),
        task_id=identity.task_id,
        rollout_idx=identity.attempt,
        trajectories=[trajectory],
        is_correct=trajectory.outcome is Outcome.SCORED and (trajectory.reward or 0.0) > 0.0,
        termination_reason=trajectory.termination_reason,
        outcome=trajectory.outcome,
        info={"tries": tries},
    )
