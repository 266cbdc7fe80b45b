"""The interface of a workflow: the agents of one attempt at one task, and the order in which they speak.

    task ──► run ──► rollout_engine.get_model_response(messages, role="solver") ──► Step ──► Trajectory
              │         └ as many at a time, in whatever order, as the workflow likes
              └──► Episode, or None: the episode is made of the trajectories that were committed

Each attempt gets an instance of its own. `run` ends by returning, or by raising `TerminationEvent(reason)`;
what else it raises is turned into an outcome by the engine, and by nobody before.
"""

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rllm.agents.base import BaseAgent
from rllm.contracts.contract import Contract
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError, ConfigError
from rllm.inference.rollout_engine import RolloutEngine
from rllm.types.episode import Episode, TerminationEvent, TerminationReason, Trajectory
from rllm.workflows.workers import (
    WorkerRunner,
    WorkerStep,
    WorkerSteps,
    with_worker_trajectories,
    worker_contracts,
)

__all__ = ["TerminationEvent", "TerminationReason", "Workflow"]

T = TypeVar("T")
_DEFAULT_ROLE = Trajectory().name


@dataclass(slots=True)
class _Members:
    """The agents of an attempt, and what they have done."""

    agents: dict[str, BaseAgent] = field(default_factory=dict[str, BaseAgent])
    """By role."""
    committed: list[Trajectory] = field(default_factory=list[Trajectory])
    environments: list[BaseEnv] = field(default_factory=list[BaseEnv])
    workers: WorkerSteps | None = None
    over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Between a thread that makes an environment and the engine, which may have given it up by then."""
    closings: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    """Those of environments that were ready too late; a loop itself keeps no task alive."""

    def close(self, env: BaseEnv) -> None:
        """In a thread of the workflow, or in the loop, where an async `close` goes on by itself."""
        closing: Any = env.close()
        if not inspect.isawaitable(closing):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(_wait_for(closing))
        else:
            self.closings.append(loop.create_task(_wait_for(closing)))


class Workflow(ABC):
    """Agents that work on one task together.

    An agent or environment that becomes an attribute is registered under the attribute's name: the steps of
    registered agents are collected when `run` returns None, registered environments are closed at the end.
    """

    workers: ClassVar[Mapping[str, str | Path | Contract]] = {}
    """The workers that it calls, by name: paths of their worker.md files, from the class's own file on."""

    __members: "_Members"  # two underscores: whatever a subclass calls its own is its own

    def __new__(cls, *args: Any, **kwargs: Any) -> "Workflow":
        workflow = super().__new__(cls)
        workflow.__members = _Members()  # not in __init__: a subclass may set attributes before it calls that
        return workflow

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        executor: Executor | None = None,
        timeout: float = inf,
        gamma: float = 0.0,
        reward_bonus_coeff: float = 0.0,
        store: Any = None,
        broken_contract_reward: float | None = None,
        **kwargs: Any,
    ) -> None:
        """`timeout`: seconds for one attempt, model calls included; none unless given. `gamma` discounts each
        step's `mc_return`, and no reward: what training credits turns with is `algorithm.credit`.
        `reward_bonus_coeff`: see `adjust_step_rewards`.
        `store`: kept as it is, for workflows that remember something across attempts.
        `broken_contract_reward`: of a policy whose answer as a worker breaks the contract; None makes that a
        failure of the policy.
        """
        if kwargs:
            raise ConfigError(
                f"{type(self).__name__} passes `{next(iter(kwargs))}` on to Workflow, which does not know "
                "it; take it in the workflow's own __init__, or leave it out of `workflow_args`."
            )
        if not timeout > 0.0:
            raise ConfigError(f"`timeout` is {timeout}; it must be a number of seconds above 0.")
        if not 0.0 <= gamma <= 1.0:
            raise ConfigError(f"`gamma` is {gamma}; it must be a discount from 0 to 1.")
        if not isfinite(reward_bonus_coeff):
            raise ConfigError(f"`reward_bonus_coeff` is {reward_bonus_coeff}; it must be a finite number.")
        if broken_contract_reward is not None and not isfinite(broken_contract_reward):
            raise ConfigError(
                f"`broken_contract_reward` is {broken_contract_reward}; it must be a finite number."
            )
        self.broken_contract_reward = broken_contract_reward
        self.rollout_engine = rollout_engine
        self.executor = executor
        self.timeout = timeout
        self.gamma = gamma
        self.reward_bonus_coeff = reward_bonus_coeff
        self.store = store
        self.task: Any = None
        self.uid = ""

    @abstractmethod
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        """Work on the task. `uid` names the attempt, for logs."""

    def reset(self, task: dict[str, Any] | None = None, uid: str | None = None) -> Any:
        """Begin an attempt: forget what was committed, and let the registered agents forget theirs."""
        self.task = task
        self.uid = uid or ""
        self.__members.committed.clear()
        if self.__members.workers is not None:
            self.__members.workers.trajectories.clear()
        for agent in self.__members.agents.values():
            agent.reset()

    async def run_in_executor(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """`fn(*args, **kwargs)` in a worker thread: for whatever would hold up the other attempts."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, partial(fn, *args, **kwargs))

    async def worker(self, name: str, inputs: Mapping[str, Any]) -> WorkerStep:
        """Run a worker of `workers` on inputs that fit its contract; the step's outputs fit it too.

        A contract that names nobody is played by this workflow's own policy, as the role `name`, under the
        contract's limits; the step's trajectory joins the episode by itself. Where the policy breaks the
        contract, the episode ends here: as its failure, or paid `broken_contract_reward`.
        """
        return await self.worker_steps().run(name, inputs)

    def worker_steps(
        self, runner: WorkerRunner | None = None, contracts: Mapping[str, Contract] | None = None
    ) -> WorkerSteps:
        """The worker steps of the attempt. The engine hands the runner of workers that are not the policy,
        and the contracts, which it has read."""
        if self.__members.workers is None:
            self.__members.workers = WorkerSteps(
                contracts=worker_contracts(type(self)) if contracts is None else contracts,
                rollout_engine=self.rollout_engine,
                runner=runner,
                penalty=self.broken_contract_reward,
            )
        return self.__members.workers

    # ---- who takes part --------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if isinstance(value, BaseAgent):
            self.register(agent=value, name=name)
        elif isinstance(value, BaseEnv):
            self.register(env=value)

    def register(
        self, agent: BaseAgent | None = None, name: str | None = None, env: BaseEnv | None = None
    ) -> None:
        """Let an agent's steps be collected under the role `name`, or an environment be closed at the end.

        For agents and environments in lists and dicts; attributes are registered by themselves.
        """
        if agent is not None:
            if not name:
                raise AgentError(
                    f"{type(self).__name__}.register needs the `name` of the agent: it is its role, within "
                    "which attempts are compared."
                )
            self.__members.agents[name] = agent
        if env is not None:
            members = self.__members
            with members.lock:
                over = members.over
                # Once, also where it is registered and then becomes an attribute, or it would be closed
                # twice.
                if not over and not any(env is each for each in members.environments):
                    members.environments.append(env)
            # Outside the lock, because `close` is a user's code and may take long.
            if over:
                members.close(env)
                raise TimeoutError(f"{type(env).__name__} was ready only after its attempt had ended.")

    def release_environments(self) -> list[BaseEnv]:
        """The environments to close now that the attempt is over. Later ones are closed as they come."""
        members = self.__members
        with members.lock:
            members.over = True
            environments, members.environments = members.environments, []
        return environments

    # ---- what came of it -------------------------------------------------------------------------------

    def commit(
        self,
        name: str | None = None,
        agent: BaseAgent | None = None,
        trajectory: Trajectory | None = None,
        reset: bool = False,
    ) -> None:
        """Put a trajectory as it is now, or that of `agent`, into the episode, under the role `name`.

        `reset` lets the agent begin another one afterwards.
        """
        new_trajectory = agent.trajectory if agent is not None else trajectory
        if new_trajectory is None:
            raise AgentError(f"{type(self).__name__}.commit needs an `agent` or a `trajectory`.")
        if new_trajectory.steps:
            self.__members.committed.append(_copy(new_trajectory, name or new_trajectory.name))
        if reset and agent is not None:
            agent.reset()

    def collect_trajectories(self) -> Episode:
        """The episode of what was committed, and of registered agents that have steps and were not."""
        trajectories = list(self.__members.committed)
        uids = {trajectory.uid for trajectory in trajectories}
        for name, agent in self.__members.agents.items():
            trajectory = agent.trajectory
            if trajectory.steps and trajectory.uid not in uids:
                own_name = trajectory.name if trajectory.name != _DEFAULT_ROLE else name
                trajectories.append(_copy(trajectory, own_name))
                uids.add(trajectory.uid)
        if self.__members.workers is not None:
            trajectories = with_worker_trajectories(trajectories, self.__members.workers)
        return Episode(id=self.uid, task=self.task, trajectories=trajectories)

    def compute_trajectory_reward(self, trajectory: Trajectory) -> None:
        """Set `trajectory.reward`: the sum of its steps' rewards."""
        trajectory.reward = sum(step.reward for step in trajectory.steps)

    def adjust_step_rewards(self, trajectory: Trajectory) -> None:
        """Shape the rewards of the steps, after the trajectory's own was computed.

        r_i += c (r_i - r_{i-1}) with c = `reward_bonus_coeff`.
        """
        steps = trajectory.steps
        # A copy: each difference is one of rewards that were paid, not of shaped ones.
        rewards = [step.reward for step in steps]
        for place in range(1, len(steps)):
            steps[place].reward += self.reward_bonus_coeff * (rewards[place] - rewards[place - 1])

    def assign_episode_correctness(self, episode: Episode) -> None:
        """Set `episode.is_correct`: whether its trajectories earned more than 0 together."""
        episode.is_correct = episode.reward > 0.0

    def collect_metrics(self, episode: Episode) -> None:
        """Add the mean reward of each role as `NAME_acc`."""
        rewards: dict[str, list[float]] = {}
        for trajectory in episode.trajectories:
            rewards.setdefault(trajectory.name, []).append(trajectory.reward or 0.0)
        episode.metrics |= {f"{name}_acc": sum(values) / len(values) for name, values in rewards.items()}

    def postprocess_episode(
        self,
        episode: Episode,
        termination_reason: TerminationReason | None = None,
        error: dict[str, Any] | None = None,
    ) -> Episode:
        """Judge an episode that `run` did not return itself: rewards, correctness, metrics, and why it
        ended."""
        episode.id, episode.task = self.uid, self.task
        for trajectory in episode.trajectories:
            self.compute_trajectory_reward(trajectory)
            if len(trajectory.steps) > 1:
                self.adjust_step_rewards(trajectory)
            _sum_up(trajectory, self.gamma)
        self.assign_episode_correctness(episode)
        self.collect_metrics(episode)
        if error is not None:
            episode.info["error"] = error
        episode.termination_reason = termination_reason or TerminationReason.UNKNOWN
        return episode


def _sum_up(trajectory: Trajectory, gamma: float) -> None:
    """Set each step's `mc_return`: r_i + gamma r_{i+1} + … The rewards stay: they are what was paid."""
    running = 0.0
    for step in reversed(trajectory.steps):
        running = step.reward + gamma * running
        step.mc_return = running


def _copy(trajectory: Trajectory, name: str) -> Trajectory:
    """As it is now: the agent may go on with its own."""
    return replace(trajectory, name=name, steps=[replace(step) for step in trajectory.steps])


async def _wait_for(awaitable: Awaitable[None]) -> None:
    await awaitable
