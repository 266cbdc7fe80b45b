"""Programs in the published style as their users start them: rows, training script, tests of their own.

    python prepare_data.py ──► python train.py rllm/backend=tinker model.name=… ──► python -m pytest test.py

Hydra composes their configuration, so this wants an environment of its own: `make test-published`. What a
program imports besides is in one of three such environments; in the others it is skipped.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
FRAMEWORKS = {
    "langgraph_program": "langgraph",
    "openai_agents_program": "agents",
    "smolagents_program": "smolagents",
    "strands_program": "strands",
    "google_adk_program": "google.adk",
}
"""Program -> the package that it needs beside Hydra."""
NAMES = sorted(each.name for each in PROGRAMS.iterdir() if (each / "train.py").is_file())
TINY = (
    *("rllm/backend=tinker", "model.name=builtin:tiny", "model.lora_rank=0", "training.group_size=2"),
    *("training.learning_rate=1e-4", "data.train_batch_size=2", "rllm.trainer.total_batches=2"),
    *(
        "rllm.trainer.test_freq=-1",
        "rllm.trainer.project_name=published",
        "rllm.trainer.experiment_name=tiny",
    ),
)
LENGTHS = {
    "lake_agent": (),
    "smolagents_program": ("model.name=builtin:tiny-8k",),
    "solver_judge_flow": ("data.max_prompt_length=192",),
}
"""What is set of the lengths, where a program's own configuration has some of it."""
LONGEST_S = 1200.0
pytestmark = pytest.mark.slow


def is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def run(directory: Path, home: Path, *words: str) -> str:
    """What a Python of this environment prints for these words, in the program's directory."""
    environment = {
        **os.environ,
        "RLLM_HOME": str(home),
        "RLLM_BACKEND": "local",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def test_there_is_one_program_for_each_pattern() -> None:
    assert len(NAMES) == 13
    for name in NAMES:
        assert (PROGRAMS / name / "test.py").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_a_program_starts_as_its_users_start_it(name: str, tmp_path: Path) -> None:
    for module in ("hydra", *([FRAMEWORKS[name]] if name in FRAMEWORKS else [])):
        if not is_importable(module):
            pytest.skip(f"{module} is not installed; run: make test-published")
    directory, home = PROGRAMS / name, tmp_path / "home"
    for script in sorted(directory.glob("prepare_*.py")):
        run(directory, home, script.name)
    lengths = LENGTHS.get(name, ("data.max_prompt_length=600", "data.max_response_length=8"))
    printed = run(
        directory, home, "train.py", *TINY, *lengths, f"hydra.run.dir={tmp_path}", "hydra.job.chdir=true"
    )
    assert "RLLM_BACKEND=local runs in its place" in printed
    (output,) = tmp_path.glob("runs/published-tiny*")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["phase"] == "train"] == [0, 1]
    assert (output / "model" / "config.json").is_file()
    plain = ("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(directory))
    assert " passed" in run(directory, home, "-m", "pytest", "-q", *plain, "test.py")
