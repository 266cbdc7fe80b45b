from collections.abc import Callable
from typing import Any

import pytest

from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.inference import ScriptedClient
from rllm.types.episode import Episode
from rllm.workflows import Workflow

Play = Callable[..., Any]


@pytest.fixture
def play() -> Play:
    """One attempt of a workflow at one task, answered by a script."""

    async def played(
        workflow: type[Workflow], script: Any, task: dict[str, Any], retry_limit: int = 1, **args: Any
    ) -> Episode:
        client = script if isinstance(script, ScriptedClient) else ScriptedClient(script)
        engine = AgentWorkflowEngine(workflow, args, client, retry_limit=retry_limit, raise_on_error=False)
        (episode,) = await engine.execute_tasks([task])
        return episode

    return played
