"""README.md, docs/tour.md behind it, and docs/first_session.md, typed as they stand, in a fresh directory.

```sh blocks ──► lines ──► rllm …     in this process, with flags that make it a matter of seconds (SMALL)
                      ├──► rllm … &   in a process of its own, until the page ends
                      ├──► echo …     in a shell
                      └──► make, pip  make and change the environment: INSTALLS
"""

import json
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import Result

CHECKOUT = Path(__file__).resolve().parents[2]
INSTALLS = ("make ", "source ", "pip install ")
"""What a fresh clone is tried with."""
PORTS = ("8719", "8000", "8001")
FEW = (
    "warm_start.steps=2",
    "evaluation.num_tasks=8",
    "rollout.tasks_per_step=2",
    "rollout.group_size=2",
    "task.num_train_tasks=100",
    "evaluation.every_steps=0",
)
ENOUGH = (
    "warm_start.steps=12",
    "warm_start.episodes_per_step=16",
    "steps=1",
    "rollout.tasks_per_step=8",
    "task.environment_args.size=3",
    "task.train_args.size=3",
    "evaluation.num_tasks=8",
    "task.num_train_tasks=100",
    "evaluation.every_steps=0",
)
"""For a run that succeeds now and then, so that others can learn from it."""


def settings(assignments: tuple[str, ...]) -> list[str]:
    return ["--threads", "1", *(word for each in assignments for word in ("--set", each))]


SMALL = {
    "rllm serve model": ["--threads", "1"],
    "rllm train frozenlake": settings(ENOUGH),
    "rllm train examples/": settings(("steps=1", *FEW[1:4])),
    "rllm train countdown --": settings(FEW),  # says itself how many steps
    "rllm train": settings((*FEW, "steps=1")),
    "rllm eval --compare": [],
    "rllm eval mine": [],
    "rllm eval": ["--threads", "1", "--max-examples", "8"],
    "rllm sft": ["--set", "threads=1", "--set", "epochs=1"],
    "rllm dpo": ["--set", "threads=1", "--set", "epochs=1"],
    "rllm distill": [
        *("--set", "threads=1", "--set", "steps=1", "--set", "rollout.tasks_per_step=2"),
        *("--set", "evaluation.num_tasks=8", "--set", "evaluation.every_steps=0"),
    ],
}
"""By how a line begins, the first that fits; nothing is learned then."""

Rllm = Callable[..., Result]
StartRllm = Callable[..., subprocess.Popen[str]]


def lines_of(page: str) -> list[str]:
    shown = "".join(re.findall(r"^```sh\n(.*?)^```", (CHECKOUT / page).read_text(), re.MULTILINE | re.DOTALL))
    lines = (re.sub(r"\s+#.*", "", line) for line in shown.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


def free_ports() -> dict[str, str]:
    """Of each port that a page names, one that is free here."""
    with ExitStack() as reserved:
        sockets = {port: reserved.enter_context(socket.socket()) for port in PORTS}
        for each in sockets.values():
            each.bind(("127.0.0.1", 0))
        return {port: str(each.getsockname()[1]) for port, each in sockets.items()}


def stopped(server: subprocess.Popen[str]) -> None:
    server.terminate()
    server.communicate(timeout=60)


def typed(page: str, rllm: Rllm, start_rllm: StartRllm, *, small: bool) -> dict[str, str]:
    """Type every line of the page; returns what each printed."""
    ports, printed = free_ports(), dict[str, str]()
    with ExitStack() as servers:
        for line in lines_of(page):
            if line.startswith(INSTALLS):
                continue
            here = re.sub("|".join(PORTS), lambda port: ports[port[0]], line.removesuffix("&"))
            words = shlex.split(here)
            if words[0] != "rllm":
                subprocess.run(["bash", "-ec", here], check=True)
                continue
            if small:
                words = ["steps=1" if word == "steps=60" else word for word in words]
                words += next((more for start, more in SMALL.items() if line.startswith(start)), [])
            if line.endswith("&"):
                server = start_rllm(*words[1:], cwd=Path.cwd())
                servers.callback(stopped, server)
                continue
            done = rllm(*words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}"
            printed[line] = done.stdout
    return printed


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_every_command_of_readme_and_tour_works_where_the_one_before_left_off(
    rllm: Rllm, start_rllm: StartRllm, tmp_path: Path
) -> None:
    (tmp_path / "examples").symlink_to(CHECKOUT / "examples")
    printed = typed("README.md", rllm, start_rllm, small=True)
    printed |= typed("docs/tour.md", rllm, start_rllm, small=True)
    assert any(line.startswith("rllm train frozenlake") and "--dry-run" in line for line in printed)
    assert "rllm eval mine --model mine" in printed


def test_every_command_of_the_first_session_works(rllm: Rllm, start_rllm: StartRllm, tmp_path: Path) -> None:
    printed = typed("docs/first_session.md", rllm, start_rllm, small=True)
    assert "mcnemar" in printed["rllm eval --compare evals/before evals/after"]
    before = json.loads((tmp_path / "evals/before/summary.json").read_text())
    after = json.loads((tmp_path / "evals/after/summary.json").read_text())
    assert before["stamp"]["dataset_hash"] == after["stamp"]["dataset_hash"]
    assert before["reports"]["sampled"]["attempted"] == after["reports"]["sampled"]["attempted"] == 8


@pytest.mark.slow
def test_readme_and_tour_work_as_they_stand(rllm: Rllm, start_rllm: StartRllm, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(CHECKOUT / "examples")
    typed("README.md", rllm, start_rllm, small=False)
    typed("docs/tour.md", rllm, start_rllm, small=False)


@pytest.mark.slow
def test_the_model_of_the_first_session_gets_better_beyond_doubt(rllm: Rllm, start_rllm: StartRllm) -> None:
    typed("docs/first_session.md", rllm, start_rllm, small=False)
    compared = rllm("eval", "--compare", "evals/before", "evals/after", "--json")
    found = json.loads(compared.stdout)["comparisons"]["sampled"]
    assert found["tasks"] == 256
    assert found["difference_interval"][0] > 0.2  # measured: 0.30 to 0.45
    assert found["p_value"] < 1e-6
