"""One agent in one environment, until done: the only place where an exception becomes data.

      ┌────────────── observation, reward, done ◄────────────── environment (worker thread)
      ▼                                                             ▲
agent.update_from_env ─► messages ─► session.respond ─► agent.update_from_model ─► action
                                        │
                                        └─► Step: prompt ids, response ids, log-probabilities, policy versions
"""

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.engine.environment_pool import EnvironmentPool
from rllm.environments.base import BaseEnv, StepResult, reset_env, unpack_step
from rllm.errors import AgentError, ConfigError, ContextLengthError, InferenceError, RewardError
from rllm.inference.client import ModelClient, ModelSession
from rllm.types.draws import draw_seed
from rllm.types.episode import Action, Outcome, Step, TerminationEvent, TerminationReason, Trajectory
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams
from rllm.types.task import EpisodeId

CONTRACT_ERRORS = (AgentError, RewardError, ConfigError)
"""A user's class broke its contract, or was given what it cannot honour: every rollout would fail alike, so
these end the run instead of one episode."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutLimits:
    max_turns: int = 5
    step_timeout_s: float = 60.0
    episode_timeout_s: float = 600.0


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutKey:
    """What every random draw of one rollout is derived from."""

    seed: int = 0
    purpose: str = ""
    """Phase and step, such as `train/17`."""
    episode: EpisodeId = field(default_factory=lambda: EpisodeId(task_id=""))

    def draw(self, turn: int, what: str) -> int:
        return draw_seed(self.seed, self.purpose, self.episode.task_id, self.episode.attempt, turn, what)


class _Ended(Exception):
    def __init__(
        self, reason: TerminationReason, outcome: Outcome, cause: BaseException | None = None
    ) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.outcome = outcome
        self.cause = cause


async def run_trajectory(
    agent: BaseAgent,
    make_env: Callable[[], BaseEnv] | BaseEnv,
    client: ModelClient,
    *,
    pool: EnvironmentPool | None = None,
    limits: RolloutLimits = RolloutLimits(),
    sampling: SamplingParams = SamplingParams(),
    key: RolloutKey = RolloutKey(),
    session: ModelSession | None = None,
) -> Trajectory:
    """Play one rollout and say what it counts as. Always closes the environment, and the session unless it
    was handed in.

    The reward is the sum of the environment's rewards, and None when something failed: a failure is never a
    zero. Raises only what is wrong for every rollout: AgentError, RewardError and ConfigError.
    """
    used_pool = EnvironmentPool(1) if pool is None else pool
    used_session = client.session((key.episode.task_id, key.episode.attempt)) if session is None else session
    rollout = _Rollout(agent, used_session, used_pool, limits, sampling, key)
    started = time.perf_counter()
    try:
        async with asyncio.timeout(limits.episode_timeout_s):
            await rollout.play(make_env)
    except _Ended as end:
        trajectory = rollout.finish(end.reason, end.outcome, end.cause)
    except TimeoutError as error:
        trajectory = rollout.finish(TerminationReason.TIMEOUT, Outcome.TRUNCATED, error)
    else:
        raise AssertionError("play() ends by raising")
    finally:
        if session is None:
            used_session.close()
        closing = asyncio.ensure_future(rollout.close_env())
        try:
            close_error = await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing  # whoever is in a hurry waits for this all the same, or nobody would close it
            raise
        finally:
            if pool is None:
                used_pool.close()
    if close_error is not None:
        trajectory.info["close_error"] = repr(close_error)
    trajectory.info["duration_s"] = time.perf_counter() - started
    return trajectory


class _Rollout:
    """The state of one rollout while it is played."""

    def __init__(
        self,
        agent: BaseAgent,
        session: ModelSession,
        pool: EnvironmentPool,
        limits: RolloutLimits,
        sampling: SamplingParams,
        key: RolloutKey,
    ) -> None:
        self.agent = agent
        self.pool = pool
        self.limits = limits
        self.sampling = sampling
        self.key = key
        self.env: BaseEnv | None = None
        self.over = False
        self.lock = threading.Lock()
        """Between the thread that makes the environment and the loop that may have given it up by then."""
        self.session = session
        self.env_s = 0.0

    async def play(self, make_env: Callable[[], BaseEnv] | BaseEnv) -> None:
        observation, info = await self._in_env(self._open, make_env)
        self._tell(observation, 0.0, False, info)
        for turn in range(self.limits.max_turns):
            action = await self._ask(turn)
            result = await self._in_env(self._move, action)
            self.agent.trajectory.steps[-1].timings["env_s"] = self.env_s
            self._tell(result.observation, result.reward, result.done, result.info)
            if result.truncated:
                raise _Ended(TerminationReason.MAX_TURNS_EXCEEDED, Outcome.TRUNCATED)
            if result.done:
                raise _Ended(TerminationReason.ENV_DONE, Outcome.SCORED)
        raise _Ended(TerminationReason.MAX_TURNS_EXCEEDED, Outcome.TRUNCATED)

    async def _ask(self, turn: int) -> Any:
        sampling = SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            max_tokens=self.sampling.max_tokens,
            stop_token_ids=self.sampling.stop_token_ids,
            seed=self.key.draw(turn, "sample"),
        )
        messages = self._in_agent(lambda: self.agent.chat_completions)
        started = time.perf_counter()
        try:
            output = await self.session.respond(messages, sampling)
        except ContextLengthError as error:
            raise _Ended(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, Outcome.TRUNCATED, error) from error
        except (InferenceError, OSError) as error:
            raise _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, error) from error
        if output.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            cause = InferenceError(
                f"The model call ended as `{output.finish_reason}`, so its answer is not whole."
            )
            raise _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, cause)
        model_s = time.perf_counter() - started
        num_before = len(self.agent.trajectory.steps)
        try:
            action = self._in_agent(lambda: self.agent.update_from_model(output.text))
        except _Ended:
            if (
                len(self.agent.trajectory.steps) == num_before
            ):  # what was sampled is on record, whoever stumbled over it
                self.agent.trajectory.steps.append(Step(model_response=output.text))
            self._record(output, num_before, model_s)
            raise
        self._record(output, num_before, model_s)
        return action.action if isinstance(action, Action) else action

    def _record(self, output: ModelOutput, num_before: int, model_s: float) -> None:
        steps = self.agent.trajectory.steps
        if len(steps) != num_before + 1:
            raise AgentError(
                f"{type(self.agent).__name__}.update_from_model added {len(steps) - num_before} steps to its "
                "trajectory; it must append exactly one, because each model call is one step."
            )
        steps[-1].record_output(output)
        steps[-1].timings["model_s"] = model_s

    def _tell(self, observation: Any, reward: float, done: bool, info: dict[str, Any]) -> None:
        try:
            self._in_agent(lambda: self.agent.update_from_env(observation, reward, done, info))
        finally:
            if self.agent.trajectory.steps:
                step = self.agent.trajectory.steps[-1]
                step.reward, step.done = reward, done

    def _in_agent(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TerminationEvent as event:
            raise _Ended(event.reason, Outcome.TRUNCATED, event) from event
        except CONTRACT_ERRORS:
            raise
        except Exception as error:
            raise _Ended(TerminationReason.ERROR, Outcome.POLICY_FAILURE, error) from error

    async def _in_env(self, fn: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return await self.pool.call(fn, *args, timeout_s=self.limits.step_timeout_s)
        except CONTRACT_ERRORS:
            raise
        except TimeoutError as error:
            raise _Ended(TerminationReason.TIMEOUT, Outcome.INFRASTRUCTURE_FAILURE, error) from error
        except Exception as error:
            raise _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, error) from error
        finally:
            self.env_s = time.perf_counter() - started

    def _open(self, make_env: Callable[[], BaseEnv] | BaseEnv) -> tuple[Any, dict[str, Any]]:
        env = make_env if isinstance(make_env, BaseEnv) else make_env()
        with self.lock:
            self.env, too_late = env, self.over
        if too_late:
            env.close()
            raise TimeoutError(f"{type(env).__name__} was ready only after its rollout had been given up.")
        return reset_env(env, self.key.draw(0, "environment") % 2**31)

    def _move(self, action: Any) -> StepResult:
        assert self.env is not None, "reset came first"
        return unpack_step(self.env, self.env.step(action))

    def finish(self, reason: TerminationReason, outcome: Outcome, cause: BaseException | None) -> Trajectory:
        trajectory = self.agent.trajectory
        trajectory.termination_reason = reason
        trajectory.outcome = outcome
        failed = outcome in (Outcome.INFRASTRUCTURE_FAILURE, Outcome.POLICY_FAILURE)
        trajectory.reward = None if failed else sum(step.reward for step in trajectory.steps)
        if cause is not None:
            trajectory.info["error"] = {
                "type": type(cause).__name__,
                "message": str(cause),
                "step": len(trajectory.steps),
                "traceback": "".join(traceback.format_exception(cause)[-4:]),
            }
        conversation = getattr(self.session, "conversation", None)
        if conversation is not None and conversation.num_segments > 1:
            trajectory.info["segments"] = conversation.num_segments
            trajectory.info["segment_reason"] = str(conversation.segment_reason)
        return trajectory

    async def close_env(self) -> Exception | None:
        """Close the environment; what it raises is kept beside the result that had already been reached."""
        with self.lock:
            self.over = True
        if self.env is None:
            return None
        try:
            await self.pool.call(self.env.close, timeout_s=self.limits.step_timeout_s)
        except Exception as error:  # noqa: BLE001  a user's close() may raise anything
            return error
        return None
