"""docs/first_session.md, typed as it stands: a model is served, set up, measured, trained, compared.

The server has a process of its own, as on the page; the other commands run in this one.
"""

import json
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "first_session.md").read_text()
PORT = "8719"
FEW = ("warm_start.steps=2", "evaluation.num_tasks=8", "rollout.tasks_per_step=2", "rollout.group_size=2")
SMALL = {
    "rllm serve": ["--threads", "1"],
    "rllm train": ["--threads", "1", *(word for setting in FEW for word in ("--set", setting))],
    "rllm eval countdown": ["--threads", "1", "--max-examples", "8"],
}
"""What makes it a matter of seconds; nothing is learned then."""

Rllm = Callable[..., Result]


def commands() -> list[str]:
    shown = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
    return [line for line in shown.splitlines() if line]


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def played(rllm: Rllm, start_rllm: Callable[..., subprocess.Popen[str]], *, small: bool) -> dict[str, str]:
    """Every command of the page in order; what each printed."""
    port, told = str(free_port()), {}
    server: subprocess.Popen[str] | None = None
    try:
        for line in commands():
            words = shlex.split(line.removesuffix("&").replace(PORT, port))[1:]
            if small:
                words = ["steps=1" if word == "steps=60" else word for word in words]
                words += next((more for start, more in SMALL.items() if line.startswith(start)), [])
            if line.endswith("&"):
                server = start_rllm(*words, cwd=Path.cwd())
                continue
            done = rllm(*words)
            assert done.exit_code == 0, f"{line}\n{done.output}"
            told[line] = done.stdout
    finally:
        if server is not None:
            server.terminate()
            server.communicate(timeout=60)
    return told


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_every_command_of_the_page_works(
    rllm: Rllm, start_rllm: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    told = played(rllm, start_rllm, small=True)
    assert "mcnemar" in told["rllm eval --compare evals/before evals/after"]
    before = json.loads((tmp_path / "evals/before/summary.json").read_text())
    after = json.loads((tmp_path / "evals/after/summary.json").read_text())
    assert before["stamp"]["dataset_hash"] == after["stamp"]["dataset_hash"]
    assert before["reports"]["sampled"]["attempted"] == after["reports"]["sampled"]["attempted"] == 8


@pytest.mark.slow
def test_the_model_of_the_page_gets_better_beyond_doubt(
    rllm: Rllm, start_rllm: Callable[..., subprocess.Popen[str]]
) -> None:
    played(rllm, start_rllm, small=False)
    compared = rllm("eval", "--compare", "evals/before", "evals/after", "--json")
    found = json.loads(compared.stdout)["comparisons"]["sampled"]
    assert found["tasks"] == 256
    assert found["difference_interval"][0] > 0.2  # measured: 0.30 to 0.45
    assert found["p_value"] < 1e-6
