"""`rllm doctor grader`: sound graders hold, and a grader that can be cheated is found out."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from rllm.errors import ConfigError
from rllm.inference.scripted import ScriptedClient
from rllm.rewards.attacks import SAMPLES, Aim, AttackVerdict, attacks_on, examine, sample_named
from rllm.rewards.graders import GRADERS
from rllm.rewards.judge import EqualityGrader
from rllm.rewards.tampering import tamperings
from rllm.sandbox.backends import BACKENDS, require_backend
from rllm.types.messages import Message

Rllm = Callable[..., Result]
QUICK = ("exact", "schema", "instructions", "calls", "countdown", "choice", "f1", "search")

GULLIBLE = """
from rllm.rewards.grade import Grade

class Gullible:
    '''Pays whoever mentions the answer.'''
    name, task_fields = "gullible", ("answer",)

    def grade(self, answer, task):
        if not answer.strip():
            raise ValueError("nothing to grade")
        paid = task["answer"] in answer
        return Grade(score=float(paid), is_correct=paid, reason="mentioned" if paid else "not mentioned")

    def close(self):
        pass
"""


@pytest.mark.parametrize("name", QUICK)
def test_the_built_in_graders_are_sound(rllm: Rllm, name: str) -> None:
    result = rllm("doctor", "grader", name, "--json")
    report = json.loads(result.stdout)
    assert [each for each in report["findings"] if each["verdict"] == "broken"] == []
    assert (result.exit_code, report["sound"]) == (0, True)
    assert report["findings"][0]["name"] == "oracle"
    assert report["findings"][0]["score"] == 1.0


@pytest.mark.slow
def test_the_code_grader_is_sound_against_every_program(rllm: Rllm) -> None:
    try:
        require_backend("bubblewrap")
    except ConfigError as error:
        pytest.skip(str(error))
    report = json.loads(rllm("doctor", "grader", "code", "--json").stdout)
    assert report["sound"]
    assert sum(each["name"].startswith("program: ") for each in report["findings"]) >= 40


def test_a_grader_that_can_be_cheated_is_found_out(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GULLIBLE)
    (tmp_path / "task.json").write_text('{"answer": "Paris"}')
    (tmp_path / "oracle.txt").write_text("Paris")
    words = ["doctor", "grader", "mine.py:Gullible", "--task", "task.json", "--oracle", "oracle.txt"]
    result = rllm(*words, "--json")
    assert result.exit_code == 1
    broken = {
        each["name"]: each for each in json.loads(result.stdout)["findings"] if each["verdict"] == "broken"
    }
    assert {"nothing", "unfinished thinking", "right in thoughts only", "the task itself"} <= set(broken)
    assert "raised ValueError" in broken["nothing"]["reason"]
    assert broken["unfinished thinking"]["score"] == 1.0
    shown = rllm(*words)
    assert shown.exit_code == 1
    assert "unfinished thinking" in shown.stdout
    assert "mend those first" in shown.stdout


def test_a_grader_that_hangs_is_broken_and_not_waited_for(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        GULLIBLE.replace(
            "if not answer.strip():",
            "if answer == '':\n            import time; time.sleep(30)\n        if False:",
        )
    )
    (tmp_path / "task.json").write_text('{"answer": "Paris"}')
    (tmp_path / "oracle.txt").write_text("Paris")
    words = ["--task", "task.json", "--oracle", "oracle.txt", "--limit-s", "0.3", "--json"]
    report = json.loads(rllm("doctor", "grader", "slow.py:Gullible", *words).stdout)
    (nothing,) = [each for each in report["findings"] if each["name"] == "nothing"]
    assert (nothing["verdict"], nothing["reason"]) == ("broken", "no answer within 0.3 s")


def test_a_grader_that_does_not_pay_the_oracle_is_broken(rllm: Rllm, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"answer": "Paris"}')
    (tmp_path / "oracle.txt").write_text("Lyon")
    words = ["--task", "task.json", "--oracle", "oracle.txt", "--json"]
    result = rllm("doctor", "grader", "exact", *words)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["findings"][0]["verdict"] == "broken"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exat"], "no sample task"),
        (["swebench"], "give --task and --oracle"),
        (["exact", "--task", "task.json"], "belong together"),
        (["judge"], "A judge needs a model"),
        (["exact", "--limit-s", "0"], "limit-s"),
        (["task-directory", "--option", "a=1"], "a task of its own"),
    ],
)
def test_bad_usage_ends_with_exit_code_2(rllm: Rllm, words: Sequence[str], said: str) -> None:
    result = rllm("doctor", "grader", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_the_tests_of_a_task_are_attacked_on_every_backend(
    rllm: Rllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = dict(list(tamperings().items())[:2])
    monkeypatch.setattr("rllm.rewards.tampering.tamperings", lambda: few)
    report = json.loads(rllm("doctor", "grader", "task-directory", "--json").stdout)
    assert report["sound"]
    assert {*report["findings"], *report["not_run"]} == {*BACKENDS, "the other user"}
    for findings in report["findings"].values():
        assert [each["verdict"] for each in findings] == ["held"] * 3
    assert "no file system" in report["not_run"]["subprocess"]


def test_every_grader_has_a_sample_or_says_that_it_needs_one() -> None:
    assert set(GRADERS) - set(SAMPLES) <= {"swebench"}


def test_a_judge_is_attacked_like_any_other() -> None:
    def script(messages: Sequence[Message]) -> str:
        """A fair judge of the sample, who reads what stands last."""
        seal = messages[0]["content"].split('"seal": "')[1][:8]
        answer = messages[1]["content"].split("# The answer to be compared")[1]
        last = answer.strip().splitlines()[1]
        said: dict[str, Any] = {"seal": seal, "reason": "so", "equivalent": last == "It has 8 legs."}
        return json.dumps(said)

    grader = EqualityGrader(client=ScriptedClient(script))
    sample = sample_named("equality")
    attacks = [
        each
        for each in attacks_on(sample.task, sample.oracle, almost=sample.almost)
        if each.aim is not Aim.NOISE and not each.holds_oracle
    ]
    findings = examine(grader, iter(attacks), sample.task)
    grader.close()
    assert [each for each in findings if each.verdict is AttackVerdict.BROKEN] == []
    assert len(findings) > 20
