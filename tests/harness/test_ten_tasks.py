"""Ten tasks through each harness: every one is solved, and every token that the model gave is counted."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from playing import call, keystrokes, played_all, turns_in
from swe_projects import row
from test_harness import block
from test_real_harnesses import LAST_CALLS

from rllm.inference.scripted import ScriptedClient
from rllm.trainer.samples import training_batch
from rllm.types.episode import Outcome
from rllm.types.messages import Message
from rllm.types.task import Task

NUM_TASKS = 10
TERMINAL = "terminus-2"
HARNESSES = {
    "my_agent": ("bash", "command", "Done.", {}),
    **LAST_CALLS,
    TERMINAL: ("", "", keystrokes("", done=True), {}),
}


def ten_tasks(folder: Path, backend: str) -> list[Task]:
    """One package with ten functions, of which each task has another to mend."""
    source = folder / "shifts"
    (source / "calc").mkdir(parents=True)
    functions = [f"def shift_{place}(a):\n    return a - {place}\n" for place in range(1, NUM_TASKS + 1)]
    (source / "calc" / "__init__.py").write_text("\n\n".join(functions))
    tasks: list[Task] = []
    for place in range(1, NUM_TASKS + 1):
        name = f"shift_{place}"
        test = f"from calc import {name}\n\n\ndef test_{name}():\n    assert {name}(5) == {5 + place}\n"
        entry = row(
            source,
            instance_id=f"shifts__shifts-{place}",
            problem_statement=f"`{name}(5)` gives {5 - place} and not {5 + place}.",
            patch="",
            test_files={f"tests/test_{name}.py": test},
            FAIL_TO_PASS=[f"tests/test_{name}.py::test_{name}"],
            PASS_TO_PASS=[],
        )
        tasks.append(Task(id=name, metadata={"entry": entry, "backend": backend}))
    return tasks


@pytest.mark.slow
@pytest.mark.parametrize("name", HARNESSES)
async def test_ten_tasks_are_solved_and_all_tokens_add_up(
    name: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, key, last, more = HARNESSES[name]
    answers: list[str] = []

    def say(messages: Sequence[Message]) -> str:
        text = str(messages[0]["content"])
        (function,) = set(re.findall(r"`(shift_\d+)\(", text))
        mend = f"sed -i '/def {function}(/,+1 s/a - /a + /' calc/__init__.py"
        commands = ["cat calc/__init__.py", mend]
        is_terminal = name == TERMINAL
        num_results = turns_in(text) if is_terminal else text.count("\ntool:")
        if num_results >= len(commands):
            answers.append(last)
        elif is_terminal:
            answers.append(keystrokes(commands[num_results]))
        else:
            answers.append(call(tool, **{key: commands[num_results]}, **more))
        return answers[-1]

    if name == "my_agent":
        (tmp_path / "my_agent.py").write_text(block("python"))
        (tmp_path / "my_agent.toml").write_text(block("toml"))
        name = str(tmp_path / "my_agent.toml")
    client = ScriptedClient(say)
    episodes = await played_all(name, ten_tasks(tmp_path, task.metadata["backend"]), client, tmp_path)
    failed = [each.info for each in episodes if (each.outcome, each.is_correct) != (Outcome.SCORED, True)]
    assert (len(episodes), failed) == (NUM_TASKS, [])
    trajectories = [trajectory for each in episodes for trajectory in each.trajectories]
    advantages = {each.uid: np.ones(len(each.steps)) for each in trajectories}
    cut_off = trajectories[0]
    batch = training_batch(episodes, advantages, exclusion_reasons={cut_off.uid: "truncated"})
    counts = batch.token_counts
    num_given = sum(len(client.tokenizer.encode(each)) + 1 for each in answers)
    assert counts["sampled"] == num_given, "one more of each answer ends it"
    assert counts["dropped.truncated"] == sum(len(step.response_ids) for step in cut_off.steps) > 0
    assert counts["trained"] == num_given - counts["dropped.truncated"]
