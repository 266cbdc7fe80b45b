"""`rllm grade`: one answer in, one grade out, and what the exit codes mean."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.errors import ConfigError
from rllm.sandbox.backends import require_backend

Rllm = Callable[..., Result]


@pytest.fixture
def files(tmp_path: Path) -> Callable[[Any, str], list[str]]:
    """Writes task and answer, and gives the words that name them."""

    def write(task: Any, answer: str) -> list[str]:
        (tmp_path / "task.json").write_text(task if isinstance(task, str) else json.dumps(task))
        (tmp_path / "answer.txt").write_bytes(answer.encode("utf-8", "surrogateescape"))
        return ["--task", "task.json", "--answer", "answer.txt"]

    return write


Files = Callable[[Any, str], list[str]]
NO_COMMA = {"instructions": [{"id": "punctuation:no_comma", "kwargs": {}}]}


@pytest.mark.parametrize(("answer", "score"), [("no comma", 1.0), ("one, two", 0.0)])
def test_the_exit_code_is_0_whatever_the_score(rllm: Rllm, files: Files, answer: str, score: float) -> None:
    result = rllm("grade", "instructions", *files(NO_COMMA, answer), "--json")
    assert result.exit_code == 0, result.stderr
    grade = json.loads(result.stdout)
    assert (grade["score"], grade["is_correct"], grade["extracted"]) == (score, score == 1.0, answer)
    assert {"reason", "metadata", "grader"} <= set(grade)


def test_code_is_graded_by_a_row(rllm: Rllm, files: Files) -> None:
    try:
        require_backend("unshare")
    except ConfigError as error:
        pytest.skip(str(error))
    task = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}]}
    words = ["--option", "sandbox=unshare", "--option", "score=share", "--json"]
    good = "```python\ndef add(a, b):\n    return a + b\n```"
    grade = json.loads(rllm("grade", "code", *files(task, good), *words).stdout)
    assert (grade["score"], grade["is_correct"]) == (1.0, True)
    grade = json.loads(rllm("grade", "code", *files(task, good.replace("+", "-")), *words).stdout)
    assert (grade["score"], grade["reason"]) == (0.0, "test 1 of 1, add(1, 2): gave -1")


@pytest.mark.parametrize(
    ("grader", "task", "answer", "facts"),
    [
        ("math", {"answer": "3:4"}, r"So \boxed{6:8}.", [r"the last \boxed{…}", "6:8", "a ratio"]),
        (
            "math",
            {"answer": "12"},
            "The answer is twelve.",
            ["says what the answer is", "twelve", "the number 12"],
        ),
        ("choice", {"answer": "B"}, "It must be B.", ["B"]),
        ("schema", {"schema": {}}, "So:\n```json\n[1]\n```", ["the last fenced block", "[1]"]),
    ],
)
def test_people_see_which_rule_read_which_part(
    rllm: Rllm, files: Files, grader: str, task: Any, answer: str, facts: list[str]
) -> None:
    output = " ".join(rllm("grade", grader, *files(task, answer)).stdout.split())
    assert [fact for fact in facts if fact not in output] == []


def test_people_see_score_reason_and_what_comes_next(rllm: Rllm, files: Files) -> None:
    result = rllm("grade", "instructions", *files(NO_COMMA, "\x1b[2Jno comma\x07"))
    assert result.exit_code == 0
    assert "followed all 1" in result.stdout
    assert "rllm doctor grader instructions" in result.stdout
    assert "\x1b[2J" not in result.stdout
    assert "\x07" not in result.stdout


def test_an_answer_may_come_through_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.json").write_text(json.dumps(NO_COMMA))
    words = ["grade", "instructions", "--task", "task.json", "--answer", "-", "--json"]
    result = CliRunner().invoke(front_door, words, prog_name="rllm", input=b"no comma \xff")
    assert json.loads(result.stdout)["score"] == 1.0


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"instructions": [{"id": "punctuation:no_coma"}]}, "did you mean `punctuation:no_comma`"),
        ({"question": "?"}, "instructions"),
    ],
)
def test_a_task_that_cannot_be_graded_ends_with_exit_code_1(
    rllm: Rllm, files: Files, task: dict[str, Any], said: str
) -> None:
    result = rllm("grade", "instructions", *files(task, "text"), "--json")
    assert result.exit_code == 1
    error = json.loads(result.stderr)["error"]
    assert error["type"] == "RewardError"
    assert said in error["message"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["instruction"], "did you mean `instructions`"),
        (["instructions", "--option", "lose=true"], "did you mean `loose`"),
        (["instructions", "--option", "score"], "write --option key=value"),
        (["instructions", "--option", "score=most"], "all, share"),
        (["code", "--option", "sandbox=chroot"], "does not exist"),
        (["nowhere.py:Grader"], "There is no file nowhere.py"),
        (["mine.py:number"], "no grader"),
    ],
)
def test_bad_usage_ends_with_exit_code_2(
    rllm: Rllm, files: Files, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "mine.py").write_text("number = 3\n")
    result = rllm("grade", *words, *files(NO_COMMA, "text"))
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


@pytest.mark.parametrize(("task", "said"), [("{", "no JSON"), ("[1]", "must be one JSON object")])
def test_a_task_file_that_is_none_ends_with_exit_code_2(
    rllm: Rllm, files: Files, task: str, said: str
) -> None:
    result = rllm("grade", "instructions", *files(task, "text"))
    assert (result.exit_code, said in result.stderr) == (2, True)
    missing = rllm("grade", "instructions", "--task", "nowhere.json", "--answer", "answer.txt")
    assert (missing.exit_code, "cannot be read" in missing.stderr) == (2, True)


def test_a_grader_of_ones_own_is_named_by_its_file(rllm: Rllm, files: Files, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rllm.rewards.grade import right, wrong\n"
        "class Loud:\n"
        "    name = 'loud'\n"
        "    task_fields = ()\n"
        "    def __init__(self, word='yes'): self.word = word\n"
        "    def grade(self, answer, task):\n"
        "        return right('said') if self.word in answer else wrong('silent')\n"
        "    def close(self): pass\n"
    )
    said = rllm("grade", "mine.py:Loud", *files({}, "no"), "--option", "word=no", "--json")
    assert json.loads(said.stdout)["score"] == 1.0
    assert json.loads(rllm("grade", "mine.py:Loud", *files({}, "no"), "--json").stdout)["score"] == 0.0


@pytest.mark.parametrize(
    ("body", "said"),
    [("return task['gold'] == answer", "KeyError: 'gold'"), ("return 1.0", "returned 1.0 (a float)")],
)
def test_a_grader_of_ones_own_that_fails_is_named_with_task_and_mend(
    rllm: Rllm, files: Files, tmp_path: Path, body: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Own:\n"
        "    name = 'own'\n"
        "    task_fields = ()\n"
        f"    def grade(self, answer, task): {body}\n"
        "    def close(self): pass\n"
    )
    result = rllm("grade", "mine.py:Own", *files({}, "no"), "--json")
    assert result.exit_code == 1
    error = json.loads(result.stderr)["error"]
    assert error["type"] == "RewardError"
    for words in (said, "mine.py:Own", "task.json", "it must return a Grade"):
        assert words in error["message"], words
