"""`rllm doctor tasks` on task directories, in real sandboxes: sound tasks hold, and each kind of mistake is
named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.environments import task_directory_checks
from rllm.errors import ConfigError
from rllm.rewards.tampering import tamperings, task_tamperings
from rllm.sandbox.backends import require_backend

Rllm = Callable[..., Result]
SORTED = "cmp -s /app/sorted.txt <(sort /app/words.txt)"
PAYS = "then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n"
SUMMARY = (
    "echo '=== short test summary info ==='\n"
    "if {}; then echo 'PASSED a.py::a'; else echo 'FAILED a.py::a'; fi\n"
)
SOLUTION = "sort /app/words.txt > /app/sorted.txt\n"
SOME = ("modules in the working directory", "a reward, and nobody may write beside it", "nobody may enter")


@pytest.fixture(autouse=True)
def few_tamperings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(
        task_directory_checks,
        "task_tamperings",
        lambda workdir: {name: task_tamperings(workdir)[name] for name in SOME},
    )


@pytest.fixture(scope="module")
def backend() -> str:
    for name in ("bubblewrap", "unshare"):
        try:
            require_backend(name)
        except ConfigError:
            continue
        return name
    pytest.skip("no sandbox on this machine")


def task(
    folder: Path, *, test: str = f"if {SORTED}; {PAYS}", solution: str = SOLUTION, toml: str = ""
) -> None:
    files = {
        "task.toml": toml,
        "instruction.md": "Sort the words.",
        "environment/Dockerfile": "FROM debian\nWORKDIR /app\nCOPY words.txt .\n",
        "environment/words.txt": "pear\napple\nfig\n",
        "tests/test.sh": test,
        "solution/solve.sh": solution,
    }
    write(folder, {name: text for name, text in files.items() if text or name == "task.toml"})


def old_task(folder: Path) -> None:
    write(
        folder,
        {
            "task.yaml": "instruction: Sort the words.\n",
            "Dockerfile": "FROM debian\nWORKDIR /app\nCOPY words.txt .\n",
            "words.txt": "pear\napple\nfig\n",
            "run-tests.sh": SUMMARY.format(SORTED),
            "tests/test_outputs.py": "",
            "solution.sh": SOLUTION,
        },
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def report_of(rllm: Rllm, folder: Path, backend: str) -> dict[str, Any]:
    ended = rllm("doctor", "tasks", folder, "--backend", backend, "--timeout-s", 20, "--json")
    report = json.loads(ended.stdout)
    assert ended.exit_code == (0 if report["sound"] else 1)
    return report


def test_sound_tasks_of_both_forms_hold(rllm: Rllm, tmp_path: Path, backend: str) -> None:
    pytest.importorskip("yaml")
    task(tmp_path / "tasks" / "harbor")
    old_task(tmp_path / "tasks" / "old")
    report = report_of(rllm, tmp_path / "tasks", backend)
    assert report["sound"]
    for findings in report["tasks"].values():
        assert [(each["verdict"], each["score"]) for each in findings] == [("held", 1.0)] * 2 + [
            ("held", 0.0)
        ] * (1 + len(SOME))


def test_each_mistake_of_a_task_is_named(rllm: Rllm, tmp_path: Path, backend: str) -> None:
    tasks = tmp_path / "tasks"
    task(tasks / "free", test="echo 1 > /logs/verifier/reward.txt\n")
    task(tasks / "wrong-solution", solution="cp /app/words.txt /app/sorted.txt\n")
    task(tasks / "no-solution", solution="")
    imports = "cd /app; if env -u PYTHONSAFEPATH python3 -c 'import json, sys; sys.exit(1)' ||"
    task(tasks / "imports-what-agents-write", test=f"{imports} {SORTED}; {PAYS}")
    dice = "if cmp -s /app/sorted.txt <(sort /app/words.txt)"
    task(
        tasks / "flaky",
        test=f'{dice}; then echo "{{\\"reward\\": 1, \\"s\\": $(date +%N | sed \'s/^0*//\')}}" '
        "> /logs/verifier/reward.json; else echo 0 > /logs/verifier/reward.txt; fi\n",
    )
    task(tasks / "with-gpus", toml="[environment]\ngpus = 1\n")
    report = report_of(rllm, tasks, backend)
    broken = {
        name: [each["name"] for each in findings if each["verdict"] == "broken"]
        for name, findings in report["tasks"].items()
    }
    gold = [task_directory_checks.GOLD, task_directory_checks.GOLD_AGAIN]
    assert broken.pop("free")[0] == task_directory_checks.EMPTY
    assert broken == {
        "wrong-solution": gold,
        "no-solution": gold,
        "imports-what-agents-write": ["modules in the working directory"],
        "flaky": [task_directory_checks.GOLD_AGAIN],
    }
    assert "environment.gpus" in report["not_made"]["with-gpus"]
    assert len(report["broken"]) == 6


def test_each_step_of_a_task_is_solved_and_attacked(rllm: Rllm, tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "steps-task"
    task(folder, toml='[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n')
    for name, file in (("one", "sorted.txt"), ("two", "again.txt")):
        write(
            folder / "steps" / name,
            {
                "instruction.md": f"Make {file}.",
                "tests/test.sh": f"if {SORTED.replace('sorted.txt', file)}; {PAYS}",
                "solution/solve.sh": SOLUTION.replace("sorted.txt", file),
            },
        )
    report = report_of(rllm, folder, backend)
    assert report["sound"]
    (findings,) = report["tasks"].values()
    assert findings[0]["reason"] == "tests: {'one': 1.0, 'two': 1.0}"
    assert findings[2]["reason"] == "tests: {'one': 0.0, 'two': 0.0}"


def test_most_of_the_corpus_is_tried_on_any_task() -> None:
    assert len(task_tamperings("/work")) >= 30
    assert not any("/app" in script for script in task_tamperings("/work").values())
    assert len(task_tamperings("/work")) < len(tamperings())


@pytest.mark.slow
def test_a_sound_task_holds_against_the_whole_corpus(
    rllm: Rllm, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_directory_checks, "task_tamperings", task_tamperings)
    task(tmp_path / "one")
    report = report_of(rllm, tmp_path / "one", backend)
    assert report["sound"], [each for each in report["tasks"]["one"] if each["verdict"] != "held"]
    assert len(report["tasks"]["one"]) == 3 + len(task_tamperings("/app"))
