import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))


def run(*words: str) -> Result:
    return CliRunner().invoke(rllm, ["benchmark", *words])


def listed(*words: str) -> list[dict[str, Any]]:
    done = run("list", "--json", *words)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["benchmarks"]


def test_the_catalogue_has_a_hundred_entries_with_what_one_chooses_by() -> None:
    found = listed()
    assert len(found) >= 100
    assert len({each["name"] for each in found}) == len(found)
    for each in found:
        assert list(each) == [
            "name",
            "category",
            "offline",
            "splits",
            "size",
            "agent",
            "evaluator",
            "published_reading",
            "licence",
        ]
    assert sum(each["offline"] for each in found) >= 60


def test_filters_narrow_it_down_together() -> None:
    everything, offline, hosted = listed(), listed("--offline"), listed("--hosted")
    assert len(offline) + len(hosted) == len(everything)
    assert all(each["offline"] for each in offline)
    some = listed("--category", "math", "--hosted", "--search", "AIME")
    assert [each["name"] for each in some] == ["aime24", "aime25", "aime26", "deepscaler"]
    assert listed("--search", "no such thing at all") == []


def test_an_unknown_category_says_which_there_are() -> None:
    done = run("list", "--category", "maths")
    assert done.exit_code == 2
    assert "`maths` is none of" in done.stderr
    assert "math" in done.stderr


def test_the_list_is_for_people_too() -> None:
    done = run("list", "--category", "games")
    assert "frozenlake" in done.stdout
    assert "run without a network" in done.stdout
    assert "rllm benchmark info" in done.stdout
    assert "Nothing" in run("list", "--search", "xyzzyx").stdout


def test_info_says_all_there_is_to_know() -> None:
    done = run("info", "gsm8k")
    for told in (
        "test (1319), train (7473)",
        "MIT",
        "arXiv:2110.14168",
        r"\boxed{}",
        "rllm dataset pull gsm8k",
    ):
        assert told in done.stdout
    told = json.loads(run("info", "gsm8k", "--json").stdout)
    assert told["source"] == "https://huggingface.co/datasets/openai/gsm8k"
    assert told["rows"] == {"test": 1319, "train": 7473}
    assert told["pulled"] == []
    assert len(told["sha256"]) == 64


def test_info_counts_the_instances_of_a_world_and_warns_of_few() -> None:
    for name, is_small in (("2048", True), ("frozenlake", False)):
        counted = json.loads(run("info", name, "--json").stdout)["instances"]
        assert counted["few"] == is_small == (counted["distinct"] < 200)
        assert (counted["reported"], counted["split"]) == (256, "test")
        shown = " ".join(run("info", name).stdout.split())
        assert f"{counted['distinct']} in 256 test tasks" in shown
        assert ("an interval is" in shown) == is_small
    assert json.loads(run("info", "gsm8k", "--json").stdout)["instances"] is None


def test_info_of_what_cannot_be_trained_on_does_not_offer_it() -> None:
    assert "rllm train" not in run("info", "aime24").stdout
    assert "pip install 'rllm[games]'" in run("info", "reasoning-gym/chain_sum").stdout


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    done = run("info", "gsm9k")
    assert done.exit_code == 2
    assert "did you mean `gsm8k`?" in done.stderr


def test_filters_that_contradict_each_other_are_refused() -> None:
    refused = CliRunner().invoke(rllm, ["benchmark", "list", "--offline", "--hosted"])
    assert refused.exit_code == 2
    assert "both --offline and --hosted" in refused.output
