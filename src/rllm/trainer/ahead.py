"""Steps that are sampled while another is learned from.

    step s     ──sample──►│learn│publish ─► s + 1
    step s + 1 ──sample───────────►│learn│publish ─► s + 2
    step s + K ──sample───────────────────────►│ ...

With K = `schedule.steps_ahead`, the attempts of step s begin once the updates before step s - K are
published, and are learned from in the order of their steps. So each row's oldest token is at most K publishes
old, every attempt that began is waited for however slow it is, and which tasks a step learns from does not
depend on time. Bounding what is admitted, instead of throwing away what came late, keeps long episodes as
frequent as they are (AReaL bounds admission as well: Fu et al. 2025, arXiv:2505.24298). With K = 0 nothing
overlaps.
"""

import asyncio
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rllm.config.schema import TrainConfig
from rllm.errors import CountError
from rllm.trainer.policies import Policies
from rllm.trainer.rollouts import Rollouts
from rllm.types.episode import LEARNABLE, Episode
from rllm.types.sample import NOT_SAMPLED

SampleStep = Callable[[int], Awaitable[Rollouts]]


class StepsAhead:
    """The steps that are being sampled, or wait to be learned from."""

    def __init__(self, sample: SampleStep, *, steps_ahead: int, num_steps: int) -> None:
        """`sample` plays a step of `num_steps`."""
        self._sample = sample
        self._steps_ahead = steps_ahead
        self._num_steps = num_steps
        self._tasks: dict[int, asyncio.Task[tuple[Rollouts, float, float]]] = {}
        self.metrics: dict[str, float] = {}
        """Times of the step that was handed out last: `rollout_s`, how long the trainer waited for it;
        `sampling_s`, from its first attempt to its last; `waited_s`, how long it waited itself; and the
        number of steps beyond it."""

    async def step(self, step: int) -> Rollouts:
        """The rollouts of a step; asked for in order, once the weights of the step before are published."""
        # Not earlier: the weights of the step before are published now, so the age of these rows is bounded.
        for each in range(step, min(step + self._steps_ahead + 1, self._num_steps)):
            if each not in self._tasks:
                self._tasks[each] = asyncio.create_task(self._sample_with_times(each))
        asked_at = time.perf_counter()
        rollouts, began_at, ended_at = await self._tasks.pop(step)
        now = time.perf_counter()
        self.metrics = {"rollout_s": now - asked_at}
        if self._steps_ahead:
            self.metrics |= {
                "sampling_s": ended_at - began_at,
                "waited_s": max(0.0, asked_at - ended_at),
                "steps_waiting": float(sum(each.done() for each in self._tasks.values())),
                "steps_under_way": float(sum(not each.done() for each in self._tasks.values())),
            }
        return rollouts

    async def close(self) -> None:
        """Cancel what is being sampled; a run that goes on begins it anew."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        # What else they raise is dropped: the run is ending for a reason of its own.
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample_with_times(self, step: int) -> tuple[Rollouts, float, float]:
        began_at = time.perf_counter()
        return await self._sample(step), began_at, time.perf_counter()


class PublishedVersions:
    """Which versions of each policy its sampler has had."""

    def __init__(self, policies: Policies, config: TrainConfig) -> None:
        self._policies = policies
        self._config = config
        self._versions = {name: [backend.policy_version] for name, backend in policies.trainable()}

    def note(self) -> None:
        """Add what the samplers have now."""
        for name, backend in self._policies.trainable():
            if self._versions[name][-1] != backend.policy_version:
                self._versions[name].append(backend.policy_version)

    def staleness(self, episode: Episode) -> list[int]:
        """Publishes since the oldest token of each trajectory that is trained on was sampled."""
        ages: list[int] = []
        for trajectory in episode.trajectories:
            if not self._policies.is_trained(trajectory.name):
                continue
            policy_versions = self._versions[self._config.policy_of(trajectory.name)]
            sampled_versions = [
                version
                for step in trajectory.steps
                for version in step.policy_versions
                if version != NOT_SAMPLED
            ]
            if sampled_versions:
                # Versions ascend: what stands behind that of the oldest token was published after it.
                ages.append(len(policy_versions) - bisect_right(policy_versions, min(sampled_versions)))
        return ages

    def require_fresh(self, episodes: Sequence[Episode], limit: int) -> dict[str, Any]:
        """Mean and most of their staleness. Raises CountError for an episode beyond the limit."""
        learnable = [each for each in episodes if each.outcome in LEARNABLE]
        ages = [age for episode in learnable for age in self.staleness(episode)]
        if max(ages, default=0) > limit:
            raise CountError(
                f"A row was sampled {max(ages)} publishes before the step that would train on it; "
                f"`schedule.max_staleness` is {limit}."
            )
        return {"staleness_mean": sum(ages) / max(1, len(ages)), "staleness_max": max(ages, default=0)}
