"""An environment and an agent of rLLM as an environment of verifiers, for `vf-eval` and trainers on it.

task ──► env_class.from_dict ──► reset ──► agent's messages ──► the client of verifiers ──► answer
                                  step ◄── agent's action ◄──────────────────────────────────┘
                                    └─ rewards, summed ──► its rubric

# vf_frozenlake.py
def load_environment(num_train: int = 1000, num_test: int = 100):
    return as_environment(FrozenLakeEnv, train, test, agent_class=FrozenLakeAgent)
"""
# pyright: reportMissingImports=false

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.agents.conversation import ConversationAgent
from rllm.environments.base import BaseEnv, call_reset, unpack_reset, unpack_step
from rllm.errors import ActionError, MissingExtraError

try:
    import verifiers
    from datasets import Dataset
except ModuleNotFoundError as error:
    raise MissingExtraError(error.name or "verifiers", "verifiers") from error

_TASK = "rllm_task"
"""Key of a row's `info`: the task as JSON. verifiers takes `task` for its own."""
_PLAYED = "rllm_attempt"
"""Key of a rollout's state: the environment and agent that play it."""


@dataclass(slots=True)
class _Attempt:
    env: BaseEnv
    agent: BaseAgent
    reward: float = 0.0

    def shows(self) -> list[Any]:
        """All messages that the agent would ask its model with."""
        kinds = {
            "system": verifiers.SystemMessage,
            "user": verifiers.UserMessage,
            "assistant": verifiers.AssistantMessage,
        }
        return [kinds[each["role"]](content=each["content"]) for each in self.agent.chat_completions]


class _Offered(verifiers.MultiTurnEnv):
    """One rollout is one episode: `max_turns` answers at most, paid with the sum of its rewards."""

    def __init__(
        self, env_class: type[BaseEnv], make_agent: Callable[[], BaseAgent], **settings: Any
    ) -> None:
        async def reward(state: Any) -> float:
            return state[_PLAYED].reward

        super().__init__(rubric=verifiers.Rubric(funcs=[reward]), **settings)
        self._env_class, self._make_agent = env_class, make_agent

    async def setup_state(self, state: Any) -> Any:
        task = json.loads(state["info"][_TASK])
        env = await asyncio.to_thread(self._env_class.from_dict, task)
        state[_PLAYED] = attempt = _Attempt(env, self._make_agent())
        observation, info = unpack_reset(env, await _result(call_reset, env, None))
        attempt.agent.update_from_env(observation, 0.0, False, info)
        state["prompt"] = attempt.shows()
        return state

    async def get_prompt_messages(self, state: Any) -> Any:
        """The messages that the agent shows next, which need not begin with those it showed before."""
        attempt: _Attempt = state[_PLAYED]
        if not state["trajectory"]:
            return attempt.shows()
        answer = state["trajectory"][-1]["completion"][-1].content
        try:
            action = attempt.agent.update_from_model(answer if isinstance(answer, str) else "")
            step = unpack_step(attempt.env, await _result(attempt.env.step, action))
        except ActionError as error:
            state["final_env_response"] = [verifiers.UserMessage(content=str(error))]
            return attempt.shows()
        attempt.reward += step.reward
        attempt.agent.update_from_env(step.observation, step.reward, step.done, step.info)
        if step.done:
            state["final_env_response"] = [verifiers.UserMessage(content=str(step.observation))]
        return attempt.shows()

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("`get_prompt_messages` says what follows an answer.")

    @verifiers.cleanup
    async def close_attempt(self, state: Any) -> None:
        if _PLAYED in state:
            await _result(state[_PLAYED].env.close)


def as_environment(
    env_class: type[BaseEnv],
    train: Sequence[Mapping[str, Any]],
    test: Sequence[Mapping[str, Any]] = (),
    *,
    agent_class: type[BaseAgent] = ConversationAgent,
    agent_args: Mapping[str, Any] | None = None,
    max_turns: int = 20,
) -> Any:
    """A `verifiers.MultiTurnEnv` whose rows are tasks of `env_class`: plain JSON, as `from_dict` takes them.

    The agent makes messages of observations and actions of answers, as in a rollout of rLLM.
    """

    def make_agent() -> BaseAgent:
        agent = agent_class(**(agent_args or {}))
        agent.reset()
        return agent

    return _Offered(
        env_class,
        make_agent,
        dataset=_rows(train),
        eval_dataset=_rows(test) if test else None,
        max_turns=max_turns,
    )


def _rows(tasks: Sequence[Mapping[str, Any]]) -> Any:
    """The first observation is known when the episode begins; until then a row shows its task's id."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": str(task.get("task_id", place))}],
                "answer": "",
                "info": {_TASK: json.dumps(dict(task))},
            }
            for place, task in enumerate(tasks)
        ]
    )


async def _result(function: Any, *args: Any) -> Any:
    """The result of a method of an environment: async ones here, others in a thread, where they may block."""
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await asyncio.to_thread(function, *args)
    return await result if inspect.isawaitable(result) else result
