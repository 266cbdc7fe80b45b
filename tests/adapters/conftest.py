"""Libraries of others in `make test-adapters`: elsewhere their tests are skipped."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from rllm.build.program_player import gateway_before, local_policy
from rllm.engine.traced import TracedEngine
from rllm.inference.scripted import Script, ScriptedClient
from rllm.integrations.task_program import PAYS_ITSELF, TaskProgram
from rllm.types.episode import Episode
from rllm.types.task import Task

sys.path.insert(0, str(Path(__file__).parent / "environments"))
Play = Callable[..., Awaitable[list[Episode]]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    async def play_tasks(
        program: TaskProgram, tasks: Sequence[Task], script: Script, **options: object
    ) -> list[Episode]:
        policy = local_policy(ScriptedClient(script), "m")
        async with (
            gateway_before(policy, tmp_path / "gateway") as gateway,
            TracedEngine(
                program.flow, PAYS_ITSELF, gateway, model="m", requires_ids=True, stored=True, **options
            ) as engine,
        ):
            episodes = [episode async for episode in engine.run(tasks)]
        return sorted(episodes, key=lambda each: [task.id for task in tasks].index(each.task_id))

    return play_tasks
