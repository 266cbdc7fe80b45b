"""`make demo` installs requirements/demo.txt and nothing else; the tests' environment has far more."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]

ONLY_LISTED = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from pathlib import Path

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

lines = Path({requirements!r}).read_text().splitlines()
listed = {{canonical(re.split(r"[=; ]", line)[0]) for line in lines if line and line[0] not in " #"}}
listed |= {{"torch", "rllm"}}
hidden = {{
    module
    for module, packages in packages_distributions().items()
    if not listed & {{canonical(each) for each in packages}}
}}
assert {{"aiohttp", "pytest", "openai"}} <= hidden

class Listed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Listed
"""
"""Hides every package that the list does not name, in each process that starts."""

COMMANDS = """
from importlib.util import find_spec
from pathlib import Path
from rllm.cli.main import rllm

assert find_spec("pytest") is None

small = "steps=1 warm_start.steps=1 evaluation.num_tasks=4 evaluation.every_steps=0 threads=1"
small += " rollout.tasks_per_step=2 rollout.group_size=2 rollout.max_turns=4"
small += " task.num_train_tasks=50 warm_start.episodes_per_step=4"
settings = [word for each in small.split() for word in ("--set", each)]
Path("chats.jsonl").write_text('{"prompt": "A", "completion": "B"}\\n' * 20)
for words in (
    ["train", "frozenlake", *settings, "--output", "run", *MORE],
    ["train", "frozenlake", *settings, "--output", "run"],
    ["eval", "frozenlake", "--model", "run", "--num-tasks", "4"],
    ["runs", "show", "run", "--episode", "1"],
    ["runs", "replay", "run"],
    ["sft", "chats.jsonl", "--set", "epochs=1", "--set", "threads=1", "--output", "imitated"],
    ["model", "info", "run/model"],
):
    try:
        rllm(words, prog_name="rllm")
    except SystemExit as end:
        assert not end.code, words
"""


@pytest.mark.parametrize("more", [[], pytest.param(["--nproc", "2"], marks=pytest.mark.slow)])
def test_a_built_in_world_is_trained_measured_and_replayed_with_the_extra_train_alone(
    checkout: Path, run_python: RunPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    program = ONLY_LISTED.format(requirements=str(checkout / "requirements" / "demo.txt"))
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_python("-c", COMMANDS.replace("MORE", repr(more)), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    for run in ("run", "imitated"):
        assert (tmp_path / run / "curve.png").read_bytes().startswith(b"\x89PNG")
