"""The example of a short prompt: its expert talks as its harness does, and its recipe runs."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner
from playing import played, turns_in

from rllm.cli.main import rllm
from rllm.inference.scripted import END_ID, ScriptedClient
from rllm.trainer.chat_rows import ChatEncoder, chat_of
from rllm.types.messages import Message
from rllm.types.task import Task

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "short_harness"


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example in a directory of its own, which is the working directory; its script."""
    shutil.copytree(EXAMPLE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("functions")
    del sys.modules["functions"]


@pytest.mark.parametrize("takes_back", [False, True])
async def test_the_experts_conversation_is_the_one_that_the_harness_has(
    takes_back: bool, functions: ModuleType, task: Task, tmp_path: Path
) -> None:
    """Token by token; and it is paid where the bug stays mended."""
    (small,) = functions.swe_small_tasks("test", 1)
    row = functions.row_of(small, tmp_path / "source")
    row["source"] = str(tmp_path / "source")
    chat = functions.chat_of(small, takes_back)
    commands = [each["content"] for each in chat["messages"] if each["role"] == "assistant"]

    def say(messages: Sequence[Message]) -> str:
        return commands[turns_in(str(messages[0]["content"]))]

    client = ScriptedClient(say)
    function = Task(id="f", metadata={"entry": row, "backend": task.metadata["backend"]})
    episode = await played("mini-swe-agent.toml", function, client, tmp_path)
    assert episode.is_correct is not takes_back, episode.info
    steps = ChatEncoder(client.renderer, (END_ID,), END_ID, None).steps(chat_of(chat, "expert"))
    (trajectory,) = episode.trajectories
    assert [(each.prompt_ids, each.response_ids) for each in trajectory.steps] == [
        (each.prompt_ids, each.response_ids) for each in steps
    ]


def test_the_recipe_of_the_page_runs(
    functions: ModuleType, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows and one update of each: more of them, and what they come to, are what the page reports."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    _, script, imitate, train = map(shlex.split, block.splitlines())
    monkeypatch.setattr(functions, "NUM_ROWS", {"train": 1, "validation": 1, "test": 1})
    monkeypatch.setattr(functions, "NUM_CHATS", 8)
    functions.main(Path(script[2]))
    few = ("steps=1", "rollout.tasks_per_step=1", "rollout.group_size=2", "evaluation.num_tasks=1")
    for words, settings in ((imitate, ("max_steps=1", "data.heldout_fraction=0.5")), (train, few)):
        options = [word for each in settings for word in ("--set", each)]
        ended = CliRunner().invoke(rllm, [*words[1:], *options, "--json"], catch_exceptions=False)
        assert ended.exit_code == 0, ended.output
    phases = [json.loads(line) for line in Path("trained/metrics.jsonl").read_text().splitlines()]
    ends = {each["phase"]: each["failed"] for each in phases}
    assert ends == {"before": 0, "train": 0, "after": 0}
