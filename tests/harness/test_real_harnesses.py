"""The harnesses that ship, installed from their registries and played: minutes each, and a network."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from playing import MEND, call, keystrokes, mends, played, turns_in

from rllm.types.episode import Outcome
from rllm.types.messages import Message
from rllm.types.task import Task

pytestmark = pytest.mark.slow
LAST_CALLS = {
    "mini-swe-agent": (
        "bash",
        "command",
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        {},
    ),
    "codex": ("exec_command", "cmd", "Done.", {}),
    "claude-code": ("Bash", "command", "Done.", {}),
    "opencode": ("bash", "command", "Done.", {"description": "Work on the issue."}),
    "openhands": ("terminal", "command", "Done.", {"security_risk": "LOW"}),
}
"""What each is given: the name of its shell, that of the command, how it ends, and what its shell has to be
given beside the command."""


@pytest.mark.parametrize("name", LAST_CALLS)
async def test_a_scripted_model_reaches_gold(name: str, task: Task, tmp_path: Path) -> None:
    tool, key, last, more = LAST_CALLS[name]
    episode = await played(name, task, mends(tool, key, last=last, **more), tmp_path)
    assert (episode.outcome, episode.is_correct) == (Outcome.SCORED, True), episode.info
    assert [len(step.response_ids) > 0 for step in episode.trajectories[0].steps] == [True] * 3


async def test_terminus_2_reaches_gold_in_its_terminal(task: Task, tmp_path: Path) -> None:
    """It asks once more whether the work is done."""
    shown: list[str] = []

    def type_text(messages: Sequence[Message]) -> str:
        shown.append(str(messages[0]["content"]))
        commands = ["cat calc/__init__.py", MEND]
        place = turns_in(shown[-1])
        return keystrokes(commands[place]) if place < len(commands) else keystrokes("", done=True)

    episode = await played("terminus-2", task, type_text, tmp_path)
    assert (episode.outcome, episode.is_correct) == (Outcome.SCORED, True), episode.info
    assert "return a - b" in shown[1], "what the terminal showed"
    assert len(episode.trajectories[0].steps) == 4
