"""docs/swe.md runs, from top to bottom, and so do its commands."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from rllm.build.asked import Asked
from rllm.build.evaluation import prepare
from rllm.build.providers import resolve_model
from rllm.cli.main import rllm
from rllm.rewards.swe_tampering import swe_tamperings

PAGE = Path(__file__).parents[2] / "docs" / "swe.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def played(bubblewrap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which the page's Python has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks("python"):
        exec(compile(block, str(PAGE), "exec"), names)
    return tmp_path


def commands(first: str) -> list[list[str]]:
    """The words of the page's commands that begin with `rllm FIRST`."""
    lines = [shlex.split(line) for block in blocks("sh") for line in block.splitlines()]
    assert {words[0] for words in lines} == {"rllm"}
    return [words[1:] for words in lines if words[1] == first]


def test_the_python_of_the_page_runs_and_its_task_is_sound(played: Path) -> None:
    (words,) = commands("doctor")
    ended = CliRunner().invoke(rllm, words, catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    assert "3 checks" in ended.output
    (played / "deep").mkdir()
    (played / "rows.jsonl").rename(played / "deep" / "rows.jsonl")
    (played / "calculator").rename(played / "deep" / "calculator")
    ready = prepare(Asked(benchmark="deep/rows.jsonl", place=resolve_model("builtin:tiny")))
    assert (ready.plan.name, ready.plan.agent, ready.plan.max_turns) == ("rows", "swe", 50)
    assert [task["task_id"] for task in ready.tasks] == ["calculator-1"]


@pytest.mark.slow
def test_the_page_lets_a_model_work(played: Path) -> None:
    words, _ = commands("train")
    trained = CliRunner().invoke(rllm, [*words, "--json"], catch_exceptions=False)
    assert trained.exit_code == 0, trained.output
    (words,) = commands("eval")
    ended = CliRunner().invoke(rllm, [*words, "--json"], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    parts = json.loads(ended.stdout).values()
    (report,) = [each for each in parts if isinstance(each, dict) and "failed" in each]
    assert (report["attempted"], report["failed"]) == (1, 0)


@pytest.mark.slow
def test_the_page_trains_the_built_in_model_in_the_small(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole run of a few steps: more of them, and what they come to, are what `make learn` measures."""
    monkeypatch.chdir(tmp_path)
    _, words = commands("train")
    few = ("steps=1", "rollout.tasks_per_step=2", "warm_start.steps=3", "evaluation.num_tasks=4")
    settings = [
        word for each in (*few, f"task.environment_args.sandbox={backend}") for word in ("--set", each)
    ]
    trained = CliRunner().invoke(rllm, [*words, *settings, "--json"], catch_exceptions=False)
    assert trained.exit_code == 0, trained.output
    summary = json.loads(trained.stdout)
    assert summary["tasks"]["title"] == "held-out tasks"
    assert set(summary["baselines"]) > {"random", "optimum", "first statement from its comment"}
    assert summary["skill"]["verdict"] in ("gained", "no difference seen", "lost")


def test_the_page_says_how_many_tamperings_there_are() -> None:
    assert "some ninety ways" in PAGE.read_text()
    assert 85 <= len(swe_tamperings()) <= 95
