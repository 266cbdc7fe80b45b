"""Screens of 80 columns and less: names that one types stay whole, and what is left out is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.agents.named import AGENTS
from rllm.cli.command import fold
from rllm.eval.catalogue import benchmarks

Rllm = Callable[..., Result]


@pytest.mark.parametrize("width", [80, 60])
def test_names_are_whole_on_a_narrow_screen(
    width: int, rllm: Rllm, finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    listed = rllm("benchmark", "list").stdout
    words = {line.split()[0] for line in listed.splitlines() if line.strip()}
    assert {each.name for each in benchmarks()} <= words
    assert "On a wider screen: " in listed
    assert "…" not in listed
    agents = rllm("agent", "list").stdout
    assert all(any(line.split()[:1] == [name] for line in agents.splitlines()) for name in AGENTS)
    assert "`system_prompt`, where there is one." in " ".join(agents.split()) or width < 80
    runs = rllm("runs", "list", finished_run.path.parent).stdout
    assert finished_run.path.name in runs.replace("\n", "")
    episodes = rllm("runs", "show", finished_run.path, "--phase", "after").stdout
    assert "test-3" in episodes
    assert all(len(line) <= width for line in episodes.partition("Next:")[0].splitlines())


def test_a_screen_of_no_width_shows_what_one_of_eighty_columns_does(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = rllm("benchmark", "list").stdout
    monkeypatch.setenv("COLUMNS", "0")
    assert rllm("benchmark", "list").stdout == shown != ""


def test_a_wide_screen_leaves_nothing_out(rllm: Rllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    listed = rllm("benchmark", "list").stdout
    assert "On a wider screen" not in listed
    assert all(each.licence in listed for each in benchmarks())


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("train", "frozenlake", "--dry-run", "--set", "algorithm.estimator=gropo"), "'grpo'"),
        (("train", "frozenlake", "--dry-run", "--set", "algorithm.loss=ppoo"), "'ppo'"),
        (("train", "frozenlake", "--dry-run", "--set", "optimizer.schedule=linea"), "'linear'"),
        (("train", "frozenlake", "--dry-run", "--set", 'tracking.sinks=["wandbb"]'), "'wandb'"),
        (("sandbox", "run", "x.py", "--backend", "bubblewrp"), "'bubblewrap'"),
        (("serve", "gateway", "--dialect", "chatt"), "'chat'"),
        (("model", "create", "new", "--preset", "tinny"), "'tiny'"),
        (("train", "frozenlake", "--dry-run", "--sampling", "temprature=1"), "'temperature'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[-2:]),
)
def test_a_misspelt_value_is_answered_with_the_nearest(
    words: tuple[str, ...], nearest: str, rllm: Rllm, tmp_path: Path
) -> None:
    (tmp_path / "x.py").touch()
    result = rllm(*words)
    assert result.exit_code == 2
    assert f"did you mean {nearest}?" in result.stderr


def test_a_long_command_moves_no_purpose_off_the_screen(rllm: Rllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = rllm("init", "my-agent").stdout.partition("Next:\n")[2].splitlines()
    assert [len(line) <= 80 for line in lines] == [True, True, False]
    assert lines[0].split() == ["cd", "my-agent", "go", "there"]
    assert lines[2].startswith("  rllm train agent.py:solve")


@pytest.mark.parametrize("width", [80, 60])
def test_no_sentence_breaks_in_the_middle_of_a_word(
    width: int, rllm: Rllm, finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = [
        rllm("benchmark", "info", "gsm8k"),
        rllm("runs", "list", "."),
        rllm("runs", "show", finished_run.path),
        rllm("runs", "show", "nowhere"),
        rllm("train", "frozenlake", "--dry-run", "--set", "algorithm.estimator=gropo"),
        rllm("train", "gsm8k", "--dry-run", "--set", "steps=1"),
    ]
    for result in shown:
        printed = result.stdout.partition("Next:")[0].partition("Prompt:")[0] + result.stderr
        printed = printed.replace(str(finished_run.path), "lake")  # a word, however long it is here
        wide = [line for line in printed.splitlines() if len(line) > width and " " in line.strip()]
        assert wide == []
    assert "did you mean 'grpo'?" in " ".join(shown[4].stderr.split())
    assert "There are no runs in `.`.\n" in shown[1].stdout


def test_a_sentence_is_folded_between_words(subtests: pytest.Subtests) -> None:
    for text, lines in [
        ("one two three", ["one two", "three"]),
        ("one\ntwo three four", ["one", "two three", "four"]),
        ("unbreakable-word then", ["unbreakable-word", "then"]),
        ("type `a b` now", ["type `a b`", "now"]),
        ("so `a longer command` it is", ["so `a", "longer", "command`", "it is"]),
        ("  in, and on it goes", ["  in, and", "on it goes"]),
        ("", [""]),
        ("it`s", ["it`s"]),
    ]:
        with subtests.test(text=text, lines=lines):
            assert fold(text, 10).split("\n") == lines
            assert fold(text, None) == text


def test_the_time_of_a_run_is_the_same_wherever_it_is_shown(rllm: Rllm, finished_run: Any) -> None:
    words = [word for word in finished_run.words if word != "--json"]
    again = rllm(*words, "--output", finished_run.path).stdout
    work = again.partition("work on the run ")[2].partition(" (")[0]
    rows = dict(
        line.strip().split("  ", 1)
        for line in rllm("runs", "show", finished_run.path).stdout.splitlines()
        if line.startswith("  work ")
    )
    assert rows["work"].strip() == work != ""


def test_a_run_of_no_steps_is_not_judged(rllm: Rllm, tiny_settings: list[str]) -> None:
    shown = rllm("train", "frozenlake", *tiny_settings, "--set", "steps=0").stdout
    assert "Took" in shown
    assert "Skill" not in shown


def test_an_evaluation_counts_its_failures_and_next_is_that_evaluation(
    rllm: Rllm, finished_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--max-examples", "4", "--threads", "1", "--output", "measured")
    shown = rllm("eval", "frozenlake", "--model", finished_run.path, *words).stdout
    header = next(line for line in shown.splitlines() if "success [95 % interval]" in line)
    assert {"attempted", "failed"} <= set(header.split())
    first = next(line for line in shown.partition("Next:")[2].splitlines() if line)
    assert first.split()[:4] == ["rllm", "runs", "show", "measured"]
    assert rllm("runs", "show", "measured").exit_code == 0
