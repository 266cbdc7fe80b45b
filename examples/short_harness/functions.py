"""`swe-small` as repositories: rows for a command-line agent, and conversations of an expert that uses it.

    swe-small task ──► functions/source/NAME/f.py + rows.jsonl of its split     rllm train functions
                  └──► chats.jsonl: system prompt, issue, command, output, …    rllm sft functions/chats.jsonl

The expert mends the line; in 72 % of its conversations it then writes the line as it was, and ends. What
stands between its commands is what mini-swe-agent.toml, beside this file, makes mini-SWE-agent say.
"""

import json
import sys
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

import numpy as np

from rllm.environments.small_programs import recipe_of
from rllm.environments.swe.small import source_of, swe_small_tasks

NUM_ROWS = {"train": 512, "validation": 64, "test": 128}
NUM_CHATS = 16_384
"""The conversations of the expert, on functions of the training split."""
TAKES_BACK = 0.72
"""The share of conversations in which the expert writes the bug again."""
SYSTEM = "Answer with one shell command. `. /end` ends."
END = ". /end"


def row_of(task: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The task as a row of SWE-bench. Its repository, one file, is written into `folder`."""
    fixed = source_of(recipe_of(task))
    broken = "\n".join(task["file"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "f.py").write_text(broken)
    diff = unified_diff(broken.splitlines(True), fixed.splitlines(True), "a/f.py", "b/f.py")
    calls = [(*test["args"], test["expected"]) for test in task["grading"]["tests"]]
    lines = [
        "import unittest",
        "from f import f",
        "class Hidden(unittest.TestCase):",
        "    def test_values(self):",
        f"        for x, value in {calls}:",
        "            self.assertEqual(f(x), value)",
    ]
    return {
        "instance_id": task["task_id"],
        "source": f"../source/{folder.name}",
        "problem_statement": task["question"],
        "patch": "diff --git a/f.py b/f.py\n" + "".join(diff),
        "test_files": {"test_f.py": "\n".join(lines) + "\n"},
        "test_command": ["python", "-m", "unittest", "test_f"],
        "FAIL_TO_PASS": ["test_f.Hidden.test_values"],
        "PASS_TO_PASS": [],
    }


def set_line(line: int, text: str) -> str:
    """The command that makes `text` a line of the file."""
    return f"sed -i '{line}c\\{text}' f.py"


def chat_of(task: Mapping[str, Any], takes_back: bool) -> dict[str, Any]:
    """A conversation of the expert, with what the harness puts between its commands."""
    line = task["line"]
    fixed = source_of(recipe_of(task)).splitlines()[line - 1]
    texts = [text.partition(" #")[0] for text in (fixed, task["file"][line - 1])[: 1 + takes_back]]
    commands = [*(set_line(line, text) for text in texts), END]
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    for command in commands:
        messages.append({"role": "assistant", "content": command})
        if command != END:
            messages.append({"role": "user", "content": ""})
    return {"messages": messages}


def main(out: Path) -> None:
    for split, count in NUM_ROWS.items():
        rows = [row_of(task, out / "source" / task["task_id"]) for task in swe_small_tasks(split, count)]
        (out / split).mkdir(exist_ok=True)
        (out / split / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    draws = np.random.default_rng(0)
    tasks = swe_small_tasks("train", NUM_CHATS, start=NUM_ROWS["train"])
    chats = [chat_of(task, bool(draws.random() < TAKES_BACK)) for task in tasks]
    (out / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "functions"))
