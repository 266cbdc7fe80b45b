"""Does an agent keep the contract? Run once while it is written; engines do not pay for it.

agent, sample observation and answer ──► two turns, a reset, one more ──► every problem ──► one AgentError
"""

import inspect
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.environments.checks import lost_in_json, raise_problems
from rllm.errors import AgentError
from rllm.types.episode import Action, Step

_ROLES = ("system", "developer", "user", "assistant", "tool")
_CALLED = ("reset", "update_from_env", "update_from_model")
_REWARD = 0.25


def check_agent(agent: BaseAgent, *, observation: Any = "observation", answer: str = "answer") -> None:
    """Drive `agent` through two episodes and raise an AgentError that lists what is wrong.

    `observation` and `answer` are samples of what its environment shows and its model writes. What the agent
    itself raises is not caught: its own traceback says more.
    """
    name = type(agent).__name__
    if not isinstance(agent, BaseAgent):
        raise AgentError(f"{name} is not an agent; derive it from rllm.agents.BaseAgent.")
    coroutine_methods = [each for each in _CALLED if inspect.iscoroutinefunction(getattr(agent, each))]
    raise_problems(
        name, [f"{each} is async, but agents are called: write a plain `def`" for each in coroutine_methods]
    )
    problems: list[str] = []
    agent.reset()
    if agent.trajectory.steps:
        problems.append(
            f"reset() leaves {len(agent.trajectory.steps)} step(s) in `trajectory`; it must be empty"
        )
    agent.update_from_env(observation, 0.0, False, {})
    problems += _message_problems(agent)
    first_prompt = list(agent.chat_completions)

    problems += _answer_problems(agent, answer, num_steps=1)
    first_step = agent.trajectory.steps[0] if agent.trajectory.steps else None
    first_length = 0 if first_step is None else len(first_step.chat_completions)
    agent.update_from_env(observation, _REWARD, False, {"checked": True})
    problems += _message_problems(agent)
    problems += _answer_problems(agent, answer, num_steps=2)
    agent.update_from_env(observation, _REWARD, True, {})
    if len(agent.trajectory.steps) != 2:
        problems.append(
            f"`trajectory` holds {len(agent.trajectory.steps)} steps after two answers and the end of the "
            "episode; each answer is one step, and an observation is none"
        )
    if first_step is not None:
        problems += _kept_problems(first_step, first_length)

    agent.reset()
    agent.update_from_env(observation, 0.0, False, {})
    if agent.trajectory.steps or agent.chat_completions != first_prompt:
        problems.append(
            "reset() does not forget: a second episode with the same observation begins with another prompt"
        )
    raise_problems(name, list(dict.fromkeys(problems)))


def _message_problems(agent: BaseAgent) -> list[str]:
    messages = agent.chat_completions
    if not isinstance(messages, list) or not messages:  # pyright: ignore[reportUnnecessaryIsInstance]
        return [f"`chat_completions` is {messages!r} after update_from_env; make it a list of messages"]
    problems = [
        f"`chat_completions` holds {message!r}; a message is a dict with a `role` out of {', '.join(_ROLES)}"
        for message in messages
        if not isinstance(message, dict) or message.get("role") not in _ROLES  # pyright: ignore[reportUnnecessaryIsInstance]
    ]
    problems += [
        f"`chat_completions` holds a message with the content {message['content']!r:.80}; "
        "it must be text, or a list of parts"
        for message in messages
        if not problems and not isinstance(message.get("content"), str | list | None)
    ]
    if not problems and messages[-1]["role"] == "assistant":
        problems.append(
            "`chat_completions` ends with an assistant message after update_from_env; append the observation"
        )
    if (problem := lost_in_json(messages)) is not None:
        problems.append(f"`chat_completions` {problem}")
    return problems


def _answer_problems(agent: BaseAgent, answer: str, *, num_steps: int) -> list[str]:
    """The faults in how the agent takes in an answer."""
    action = agent.update_from_model(answer)
    problems: list[str] = []
    if not isinstance(action, Action):  # pyright: ignore[reportUnnecessaryIsInstance]
        problems.append(f"update_from_model returned {action!r}; return an rllm.types.Action")
    steps = agent.trajectory.steps
    if len(steps) != num_steps:
        return [
            *problems,
            f"`trajectory` holds {len(steps)} step(s) after answer {num_steps}; append one per answer",
        ]
    if agent.get_current_state() is not steps[-1]:
        problems.append("get_current_state() is not the last step of `trajectory`")
    last_message = steps[-1].chat_completions[-1:]
    if not last_message or last_message[0].get("role") != "assistant":
        problems.append("a step's `chat_completions` does not end with the assistant's answer; append it")
    return problems


def _kept_problems(first_step: Step, first_length: int) -> list[str]:
    """Problems of a later turn that changed the first step, which it must not."""
    problems: list[str] = []
    if len(first_step.chat_completions) != first_length:
        problems.append(
            f"`chat_completions` of step 1 went from {first_length} to {len(first_step.chat_completions)} "
            "messages with the second turn; give each step its own list: list(messages)"
        )
    if first_step.reward not in (0.0, _REWARD):  # engines write the reward themselves, so 0 is fine
        problems.append(f"the first step has reward {first_step.reward} where the environment paid {_REWARD}")
    return problems
