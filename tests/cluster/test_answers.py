"""Exceptions of Ray, and what a run makes of them."""

import pytest
from ray.exceptions import ActorUnschedulableError

from rllm.integrations.ray.answers import WorkerEnded, answer


async def test_a_worker_whose_process_could_not_be_started_is_one_that_has_ended() -> None:
    """Ray gives up on a node that is too crowded to start a process in time; the pool makes another one."""

    async def unstarted() -> None:
        raise ActorUnschedulableError("node-7")

    with pytest.raises(WorkerEnded, match="node-7"):
        await answer(unstarted())
