"""Tasks as workflows read them, and what their reward functions say.

task ──messages_of──► messages                reward_function(task, answer) ──judge_answer──► EvalOutput
"""

from collections.abc import Callable, Mapping
from typing import Any

from rllm.errors import AgentError, ConfigError, InferenceError, RewardError
from rllm.types.callables import is_async, name_of, require_call
from rllm.types.evaluation import EvalOutput
from rllm.types.judgements import judgement
from rllm.types.messages import Message
from rllm.workflows.workflow import Workflow

RewardFunction = Callable[[dict[str, Any], Any], Any]
"""(task, answer) -> a number, a bool, (reward, is_correct), or an object with `reward` and `is_correct`; sync
or async."""

QUESTION_FIELDS = ("question", "prompt", "problem", "instruction")


def question_of(task: Mapping[str, Any]) -> str:
    """The question of a task. Raises AgentError for a task without one."""
    question = next((task[name] for name in QUESTION_FIELDS if task.get(name)), None)
    if not isinstance(question, str):
        raise AgentError(
            f"The task has the fields {', '.join(map(str, task)) or 'none'}; it needs a text under one of "
            f"{', '.join(QUESTION_FIELDS)}."
        )
    return question


def messages_of(task: Mapping[str, Any]) -> list[Message]:
    """The conversation that a task begins with: its `messages`, or its question as a user message."""
    messages = task.get("messages")
    if messages:
        return [dict(message) for message in messages]
    return [{"role": "user", "content": question_of(task)}]


def reward_function_checked(reward_function: Any, workflow: Workflow) -> RewardFunction:
    """Raises ConfigError for what is no function of a task and an answer."""
    name = name_of(reward_function)
    require_call(
        reward_function,
        name,
        ("task", "answer"),
        f"reward function of {type(workflow).__name__}",
        "write it as `def reward(task: dict, answer: str) -> float`",
    )
    return reward_function


async def judge_answer(
    workflow: Workflow, reward_function: RewardFunction, task: dict[str, Any], answer: Any
) -> EvalOutput:
    """The reward function's judgement of an answer. It runs in a thread, unless it is async.

    Raises RewardError, naming function and task, for what is no judgement and for what the function raises;
    InferenceError and OSError, of a judge that is a model or a server, pass.
    """
    name = name_of(reward_function)
    try:
        if is_async(reward_function):
            result = await reward_function(task, answer)
        else:
            result = await workflow.run_in_executor(reward_function, task, answer)
    except (RewardError, ConfigError, InferenceError, OSError):
        raise
    except Exception as error:
        raise RewardError(
            f"The reward function {name} failed on task {workflow.uid} with {type(error).__name__}: {error}"
        ) from error
    if not isinstance(result, EvalOutput) and hasattr(result, "reward"):
        is_correct = getattr(result, "is_correct", None)
        result = result.reward if is_correct is None else (result.reward, is_correct)
    return judgement(result, name)
