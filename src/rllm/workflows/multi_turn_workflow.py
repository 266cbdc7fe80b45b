"""One agent in one environment, as a workflow.

task ──► env_cls.from_dict ──► reset ──► agent ──► model ──► action ──► env.step ──► agent ──► …
                                           ends: environment done, answer cut off, turns used up
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.environments.base import BaseEnv, call_reset, unpack_reset, unpack_step
from rllm.errors import ActionError, AgentError, ConfigError, RewardError
from rllm.types.episode import Action, Episode, TerminationEvent, TerminationReason
from rllm.types.messages import FinishReason, ModelOutput
from rllm.workflows.workflow import Workflow


class EnvironmentFailure(OSError):
    """An environment raised. That says nothing about the policy, so the attempt starts over."""


class MultiTurnWorkflow(Workflow):
    """Up to `max_steps` turns. The reward is the sum of what the environment pays."""

    def __init__(
        self,
        rollout_engine: Any,
        agent_cls: type[BaseAgent],
        env_cls: type[BaseEnv],
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        max_steps: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(rollout_engine, **kwargs)
        for name, cls, base in (("agent_cls", agent_cls, BaseAgent), ("env_cls", env_cls, BaseEnv)):
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise AgentError(f"`{name}` is {cls!r}; it must be a subclass of {base.__name__}.")
        if max_steps < 1:
            raise ConfigError(f"`max_steps` is {max_steps}; it must be at least 1.")
        self.env_cls = env_cls
        self.env_args = dict(env_args or {})
        self.max_steps = max_steps
        self.agent = agent_cls(**dict(agent_args or {}))

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        self.reset(task, uid)
        await self._in_env("from_dict", lambda: self._make(task))
        # 31 bits: environments hand their seed to generators such as NumPy's RandomState, which take 32.
        seed = self.rollout_engine.draw("environment") % 2**31
        observation, info = unpack_reset(
            self.env, await self._in_env("reset", lambda: call_reset(self.env, seed))
        )
        self.agent.update_from_env(observation, 0.0, False, info)
        for _ in range(self.max_steps):
            output = await self.ask()
            action = self._take_in(output)
            result = unpack_step(self.env, await self._in_env("step", partial(self.env.step, action)))
            step = self.agent.trajectory.steps[-1]
            self.agent.update_from_env(result.observation, result.reward, result.done, result.info)
            step.reward, step.done = result.reward, result.done
            if output.finish_reason is FinishReason.LENGTH:
                raise TerminationEvent(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
            if result.truncated:
                break
            if result.done:
                raise TerminationEvent(TerminationReason.ENV_DONE)
        raise TerminationEvent(TerminationReason.MAX_TURNS_EXCEEDED)

    async def ask(self) -> ModelOutput:
        """The model's answer to what the agent says."""
        return await self.rollout_engine.get_model_response(
            self.agent.chat_completions, tools=self.agent.tool_schemas
        )

    def _take_in(self, output: ModelOutput) -> Any:
        steps = self.agent.trajectory.steps
        num_before = len(steps)
        read = {"output": output} if self.agent.tool_schemas else {}
        action = self.agent.update_from_model(output.text, **read)
        steps = self.agent.trajectory.steps
        if len(steps) != num_before + 1:
            raise AgentError(
                f"{type(self.agent).__name__}.update_from_model added {len(steps) - num_before} steps to its "
                "trajectory; it must append exactly one, because each model call is one step."
            )
        steps[-1].record_output(output)
        steps[-1].share_history(steps[-2] if len(steps) > 1 else None)
        return action.action if isinstance(action, Action) else action

    def _make(self, task: dict[str, Any]) -> None:
        self.env = self.env_cls.from_dict({**task, **self.env_args})

    async def _in_env(self, method: str, call: Callable[[], Any]) -> Any:
        """The return value of `call` in a worker thread; for an async method that of its awaitable, in this
        loop."""
        try:
            result = await self.run_in_executor(call)
            return await result if inspect.isawaitable(result) else result
        except (ActionError, AgentError, RewardError, ConfigError):
            raise
        except Exception as error:
            raise EnvironmentFailure(
                f"{self.env_cls.__name__}.{method} failed with {type(error).__name__}: {error}"
            ) from error
