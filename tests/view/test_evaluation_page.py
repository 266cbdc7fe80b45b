"""The page of an evaluation, and pages as files."""

import json
import math
import re
from pathlib import Path

import pytest
from tests.view.conftest import answers_in, conversation, episode, write_evaluation, write_run

from rllm.errors import ConfigError
from rllm.eval.statistics import wilson_interval
from rllm.store.episodes import EpisodeStore
from rllm.view.export import default_address, exported_page, requests_of
from rllm.view.pages import answer
from rllm.view.sources import Sources

TASKS: dict[str, list[bool | None]] = {
    **{f"sum-{number}": [True, False] for number in range(1, 12)},
    "sum-0": [None, True],
}


@pytest.fixture
def evals(tmp_path: Path, home: Path) -> Path:
    write_evaluation(tmp_path / "evals" / "a", TASKS)
    write_evaluation(
        tmp_path / "evals" / "b", {"sum-0": [True, True], "sum-3": [False, False]}, model="other"
    )
    return tmp_path / "evals"


def test_tasks_stand_in_the_order_of_their_numbers_with_an_interval_beside_each_mean(evals: Path) -> None:
    page = answer(Sources([evals]), "evaluation?run=a&limit=3&offset=9")
    assert [row["task_id"] for row in page["rows"]] == ["sum-9", "sum-10", "sum-11"]
    assert page["total"] == 12
    assert {tuple(row["success_interval"]) for row in page["rows"]} == {wilson_interval(1, 2)}
    assert page["report"]["attempted"] == 24
    assert sum(page["report"]["endings"].values()) == 24
    assert page["report"]["success"] == 0.5
    low, high = page["report"]["success_interval"]
    assert low < 0.5 < high or low == high == 0.5
    backwards = answer(Sources([evals]), "evaluation?run=a&descending=1&limit=1")
    assert backwards["rows"][0]["task_id"] == "sum-11"
    failing = answer(Sources([evals]), "evaluation?run=a&order=failed&descending=1&limit=1")
    assert failing["rows"][0] | {"first_id": 0} == {
        "task_id": "sum-0",
        "attempts": 2,
        "successes": 1,
        "failed": 1,
        "mean_reward": 1.0,
        "first_id": 0,
        "success": 0.5,
        "success_interval": wilson_interval(1, 2),
        "reward_interval": wilson_interval(1, 1),
    }
    (paid_twice,) = answer(Sources([evals]), "evaluation?run=a&limit=1&offset=1")["rows"]
    assert paid_twice["reward_interval"] == wilson_interval(1, 2)


def test_rewards_of_any_size_have_students_interval(tmp_path: Path, home: Path) -> None:
    episodes = [episode("t", attempt, conversation(["x"], reward=float(attempt))) for attempt in (3, 4, 8)]
    episodes += [episode("u", attempt, conversation(["x"], reward=5.0)) for attempt in range(2)]
    write_run(tmp_path / "r", {("after", 0): episodes})
    first, second = answer(Sources([tmp_path / "r"]), "evaluation?run=r")["rows"]
    margin = 4.30265273 * math.sqrt(7.0 / 3.0)  # of two degrees of freedom; the variance of 3, 4, 8 is 7
    assert first["reward_interval"] == pytest.approx((5.0 - margin, 5.0 + margin))
    assert second["reward_interval"] is None, "equal rewards say nothing of how much they vary"


def test_attempts_say_how_they_went_and_why(evals: Path) -> None:
    sources = Sources([evals])
    counts = {
        verdict: answer(sources, f"evaluation?run=a&by=attempt&verdict={verdict}")["total"]
        for verdict in ("", "right", "wrong", "failed")
    }
    assert counts == {"": 24, "right": 12, "wrong": 11, "failed": 1}
    (failed,) = answer(sources, "evaluation?run=a&by=attempt&verdict=failed")["rows"]
    assert (failed["verdict"], failed["reason"], failed["reward"]) == (
        "failed",
        "the server answered 500",
        None,
    )
    assert answer(sources, "evaluation?run=a&by=attempt&outcome=infrastructure_failure")["total"] == 1
    wrong = answer(sources, "evaluation?run=a&by=attempt&verdict=wrong&limit=1")["rows"][0]
    assert (wrong["reason"], wrong["extracted"]) == ("because sum-1", "False")
    full = answer(sources, f"answer?run=a&id={wrong['id']}")
    assert (full["prompt"], full["answer"]) == ("user: What is sum-1?", "It is False.")
    with pytest.raises(ConfigError, match=r"`verdict`.*'good'.*right, wrong, failed"):
        answer(sources, "evaluation?run=a&verdict=good")


def test_text_is_searched_by_task_and_by_attempt(evals: Path) -> None:
    sources = Sources([evals])
    while (page := answer(sources, 'evaluation?run=a&by=attempt&q="sum-7"'))["progress"]["steps"] < 1:
        pass
    assert {row["task_id"] for row in page["rows"]} == {"sum-7"}
    assert "\x02sum-7\x03" in page["rows"][0]["hit"] or "\x02sum\x03" in page["rows"][0]["hit"]
    assert answer(sources, 'evaluation?run=a&q="sum-7"')["total"] == 1


def test_an_attempt_that_was_made_again_counts_once(evals: Path) -> None:
    with EpisodeStore.open(evals / "a" / "store.sqlite") as store:
        store.save_episodes("sampled", 1, [episode("sum-0", 0, conversation(["It is True."]))])
    sources = Sources([evals])
    assert answer(sources, "evaluation?run=a&by=attempt&verdict=failed")["total"] == 0
    (row,) = (row for row in answer(sources, "evaluation?run=a")["rows"] if row["task_id"] == "sum-0")
    assert (row["attempts"], row["successes"]) == (2, 2)


def test_the_same_task_is_one_link_away_in_other_evaluations(evals: Path) -> None:
    write_run(evals / "c", {("after", 0): [episode("sum-3", 0, conversation(["x"]))]})
    sources = Sources([evals])
    page = answer(sources, "evaluation?run=a&beside=b")
    assert page["elsewhere"] == ["b"], "a run on another world has other tasks under its names"
    beside = {row["task_id"]: row["beside"]["success"] for row in page["rows"] if "beside" in row}
    assert beside == {"sum-0": 1.0, "sum-3": 0.0}
    rows = answer(sources, "elsewhere?run=a&task=sum-3")["rows"]
    assert {(row["run"], row["success"]) for row in rows} == {("a", 0.5), ("b", 0.0)}


def test_measured_phases_of_a_training_run_have_the_page_too(runs: Path) -> None:
    with EpisodeStore.open(runs / "lake" / "store.sqlite") as store:
        store.save_episodes("after", 0, [episode("t", 0, conversation(["x"], reward=0.0))])
    page = answer(Sources([runs]), "evaluation?run=lake")
    assert (page["phase"], page["phases"], page["report"]["success"]) == ("after", ["after"], 0.0)
    assert page["report"]["success_interval"] == wilson_interval(0, 1)
    with pytest.raises(ConfigError, match=r"'none'; .*train, after"):
        answer(Sources([runs]), "evaluation?run=lake&phase=none")


def test_a_page_as_a_file_holds_its_answers_and_loads_nothing(evals: Path) -> None:
    sources = Sources([evals / "a"])
    assert default_address(sources) == "evaluation?run=a"
    html = exported_page(sources, "evaluation?run=a", requests_of(sources, "evaluation?run=a"))
    answers = answers_in(html)
    assert answers["evaluation?limit=50&run=a"]["total"] == 12
    reasons = {each["reason"] for name, each in answers.items() if name.startswith("answer?")}
    assert len(reasons) == 13
    assert not re.search(r"(src|href)=.?https?:", html)
    assert not re.search(r"url\(|@import", html.partition("<style>")[2].partition("</style>")[0])
    assert str(evals) not in html
    assert "default-src 'none'" in html.replace("&#x27;", "'")


def test_what_models_write_cannot_leave_the_data_of_a_file(tmp_path: Path, home: Path) -> None:
    attack = "</script><script>alert(1)</script><!--<script>"
    write_run(tmp_path / "r", {("after", 0): [episode(attack, 0, conversation([attack], asked=attack))]})
    sources = Sources([tmp_path / "r"])
    for address in ("evaluation?run=r", "episode?run=r&id=1", "episodes?run=r", "run?run=r", "runs"):
        html = exported_page(sources, address, requests_of(sources, address))
        assert "alert(1)</script>" not in html
        assert html.count("<script") == 3
    assert attack in json.dumps(answers_in(exported_page(sources, "x", ["episode?run=r&id=1"]))).replace(
        "\\", ""
    )


def test_a_page_that_is_too_large_for_a_file_is_refused(evals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.view.export.MAX_REQUESTS", 3)
    sources = Sources([evals / "a"])
    with pytest.raises(ConfigError, match="3 answers"):
        exported_page(sources, "evaluation?run=a", requests_of(sources, "evaluation?run=a"))
