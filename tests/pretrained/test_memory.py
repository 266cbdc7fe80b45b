"""What whole processes take at most is within 15 % of their plans, and not above them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from openai import OpenAI
import rllm

client = OpenAI(base_url="http://unused", api_key="any")

@rllm.rollout
def solve(task, config) -> None:
    client.with_options(base_url=config.base_url).chat.completions.create(
        model=config.model, messages=[{"role": "user", "content": task.instruction}], max_tokens=48
    )

@rllm.evaluator
def score(task, episode) -> bool:
    return len(episode.trajectories[0].steps[0].model_response) % 2 == 0
"""
QUESTION = "Write three long sentences about the numbers {}, {}, {} and {}."
SUM = "The sum of the two numbers is computed digit by digit, from the right to the left. "
GRPO = (
    *("train", "program.py:solve", "--evaluator", "program.py:score", "--dataset", "questions.jsonl"),
    *("--set", "steps=1", "--set", "rollout.tasks_per_step=8", "--set", "rollout.group_size=8"),
    *("--set", "evaluation.num_tasks=1", "--set", "inference.max_context=128"),
)
TINY = ("steps=2", "warm_start.steps=2", "evaluation.num_tasks=16")
RUNS = {
    "tiny": ("train", "frozenlake", *(word for key in TINY for word in ("--set", key))),
    "grpo": GRPO,
    "grpo, adapter": (*GRPO, "--set", "lora.rank=16"),
    "grpo, Gemma 3": (*GRPO, "--chat-template", "chatml"),
    "sft": ("sft", "chats.jsonl", "--set", "max_steps=2", "--set", "evaluation.num_rows=2"),
    "dpo": ("dpo", "pairs.jsonl", "--set", "max_steps=2", "--set", "evaluation.num_rows=2"),
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    numbers = [tuple((37 * row + 211 * place) % 899 + 100 for place in range(4)) for row in range(64)]
    rows = {
        "questions": [{"question": QUESTION.format(*four)} for four in numbers],
        "chats": [
            {"prompt": f"What is {a} + {b}?", "completion": f"{a} + {b} = {a + b}. {3 * SUM}"}
            for a, b, _, _ in numbers
        ],
        "pairs": [
            {"prompt": f"What is {a} + {b}?", "chosen": f"{a} + {b} = {a + b}. {SUM}", "rejected": SUM}
            for a, b, _, _ in numbers
        ],
    }
    for name, lines in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_what_its_plan_says(name: str, data: Path, request: pytest.FixtureRequest) -> None:
    words = [sys.executable, "-m", "rllm", *RUNS[name], "--set", "threads=1", "--output", "run"]
    if name != "tiny":
        words += ["--model", str(request.getfixturevalue("gemma3" if "Gemma" in name else "smollm2"))]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    planned = subprocess.run([*words, "--dry-run", "--json"], capture_output=True, text=True, env=alone)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)["memory"]["peak"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=alone)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert 0.85 * plan <= 1024 * usage.ru_maxrss <= plan
