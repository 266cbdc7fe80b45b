"""The harnesses that ship, installed from their registries and played: minutes each, and a network."""

from pathlib import Path

import pytest
from playing import call, mends, played

from rllm.types.episode import Outcome
from rllm.types.task import Task

pytestmark = pytest.mark.slow
MODELS = {
    "mini-swe-agent": mends(
        "bash", "command", last=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    ),
    "codex": mends("exec_command", "cmd", last="Done."),
    "claude-code": mends("Bash", "command", last="Done."),
}
"""What each wants to be told: the name of its shell, that of the command, and how it ends."""


@pytest.mark.parametrize("name", MODELS)
async def test_a_scripted_model_reaches_gold(name: str, task: Task, tmp_path: Path) -> None:
    episode = await played(name, task, MODELS[name], tmp_path)
    assert (episode.outcome, episode.is_correct) == (Outcome.SCORED, True), episode.info
    assert [len(step.response_ids) > 0 for step in episode.trajectories[0].steps] == [True] * 3
