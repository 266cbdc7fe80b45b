"""Plays a harness on tasks: gateway, sandbox and grading are real, the model is what the caller gives."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rllm.build.actors import program_named
from rllm.engine.traced import TracedEngine
from rllm.environments.harness.spec import PREFIX
from rllm.environments.swe.patches import judge_patch
from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.client import TokenClient
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode
from rllm.types.messages import Message
from rllm.types.task import Task

MEND = "sed -i 's/a - b/a + b/' calc/__init__.py"
"""What mends the tiny project."""


def call(name: str, **arguments: Any) -> str:
    """A call as a model writes it whose template is Hermes'."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def keystrokes(text: str, *, done: bool = False) -> str:
    """An answer as Terminus-2 reads it."""
    commands = [{"keystrokes": f"{text}\n", "duration": 2.0}] if text else []
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})


def turns_in(prompt: str) -> int:
    """Answers of the model that a prompt holds; the last word of it is who speaks next."""
    return prompt.count("\nassistant:") - 1


def mends(tool: str, key: str, *, last: str, **more: str) -> Callable[[Sequence[Message]], str]:
    """A model that looks, mends and says `last`; it counts the results that it has seen. `more`: what else
    its tool has to be given."""

    def answer(messages: Sequence[Message]) -> str:
        commands = ["cat calc/__init__.py", MEND]
        num_results = str(messages[0]["content"]).count("\ntool:")
        return call(tool, **{key: commands[num_results]}, **more) if num_results < len(commands) else last

    return answer


Model = Callable[[Sequence[Message]], str] | TokenClient
"""What answers: a script, or a client."""


async def played(name: str, task: Task, model: Model, folder: Path, **engine_args: Any) -> Episode:
    """One attempt at the task by the harness of that name or file."""
    (episode,) = await played_all(name, [task], model, folder, **engine_args)
    return episode


async def played_all(
    name: str, tasks: Sequence[Task], model: Model, folder: Path, **engine_args: Any
) -> list[Episode]:
    """One attempt at each of the tasks, in the order in which they end."""
    async with engine_of(name, model, folder, **engine_args) as engine:
        return [each async for each in engine.run(list(tasks))]


@asynccontextmanager
async def engine_of(name: str, model: Model, folder: Path, **engine_args: Any) -> AsyncIterator[TracedEngine]:
    """What plays the harness of that name or file."""
    flow = program_named(f"{PREFIX}{name}").flow
    policy = LocalPolicy(ScriptedClient(model) if callable(model) else model, "scripted")
    settings: dict[str, Any] = {"evaluator_timeout_s": 300, "retry_limit": 1, "requires_ids": True}
    async with (
        Gateway(policy, folder / "calls", require_session=True) as gateway,
        TracedEngine(flow, judge_patch, gateway, model="scripted", **settings | engine_args) as engine,
    ):
        yield engine
