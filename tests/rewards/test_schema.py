"""JSON that fits a schema, and everything that only looks like it."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.schema import SchemaGrader

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GOOD = '{"name": "Ada", "age": 36}'


@pytest.fixture(scope="module")
def grader() -> Iterator[SchemaGrader]:
    made = SchemaGrader(timeout_s=1.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        f"  {GOOD}\n",
        f"Here it is:\n```json\n{GOOD}\n```\nAs asked.",
        f"<think>{{}}</think>\n```\n{GOOD}\n```",
        f"Here it is: ```json\n{GOOD}\n``` As asked.",
        f"Here it is: ```json {GOOD}``` As asked.",
        f"Here it is: ```{GOOD}```, as asked.",
        f"```json\n{GOOD}\n``` As asked.",
        f"~~~json\n{GOOD}\n~~~\nAs asked.",
        f"- The person:\n  ```json\n  {GOOD}\n  ```",
        f"```json\n{GOOD}",
        f"```json\n{GOOD}\n```\nTo read it:\n```python\njson.loads(text)\n```",
        f'```json\n{{"name": 1}}\n```\nNo, better:\n```json\n{GOOD}\n```',
    ],
)
def test_json_that_fits_is_right(grader: SchemaGrader, answer: str) -> None:
    grade = grader.grade(answer, {"schema": PERSON})
    assert (grade.score, grade.is_correct, grade.extracted) == (1.0, True, GOOD)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "empty"),
        (f"<think>{GOOD}", "unfinished thinking"),
        (f"The answer is {GOOD}", "no JSON"),
        (f"{GOOD} {GOOD}", "no JSON"),
        (f"```json\n{GOOD}\n```\nNo, better:\n```json\n{{", "no JSON"),
        (f"```json {GOOD}``` or ```json {{}}```", "required property"),
        (f"```python\n{GOOD}\n```", "no JSON"),
        ('{"name": "Ada", "age": 36,}', "no JSON"),
        ('{"name": "Ada", "age": NaN}', "NaN is no JSON number"),
        ('{"name": "Ada", "age": -1, "age": 36}', "'age' is there twice"),
        ('{"name": "Ada", "age": 36.5}', "$.age"),
        ('{"name": "Ada"}', "'age' is a required property"),
        ('{"name": "Ada", "age": 36, "is_correct": true}', "is_correct"),
        ("[" * 100_000, "no JSON"),
        ('{"age": ' + "9" * 10_000 + "}", "no JSON"),
        ("null", "None is not of type 'object'"),
    ],
)
def test_what_does_not_fit_is_wrong_and_says_why(grader: SchemaGrader, answer: str, reason: str) -> None:
    grade = grader.grade(answer, {"schema": PERSON})
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert reason in grade.reason


@pytest.mark.parametrize(
    "schema", [{"type": "objekt"}, {"$ref": "https://example.com/x.json"}, "{", 3, {"$ref": "#/$defs/none"}]
)
def test_a_schema_that_is_none_is_the_tasks_mistake(grader: SchemaGrader, schema: Any) -> None:
    with pytest.raises(RewardError, match="schema"):
        grader.grade(GOOD, {"schema": schema})
    with pytest.raises(RewardError, match="schema"):
        grader.grade(GOOD, {})


def test_a_schema_may_be_written_as_text(grader: SchemaGrader) -> None:
    assert grader.grade("3", {"schema": '{"type": "integer"}'}).score == 1.0


def test_a_pattern_that_never_ends_is_stopped_and_the_next_answer_is_graded(grader: SchemaGrader) -> None:
    schema = {"type": "string", "pattern": "^(a+)+$"}
    stopped = grader.grade('"' + "a" * 40 + '!"', {"schema": schema})
    assert (stopped.score, "patterns" in stopped.reason) == (0.0, True)
    assert grader.grade('"aaa"', {"schema": schema}).score == 1.0


@given(st.text())
def test_every_text_gets_one_grade(text: str) -> None:
    assert SchemaGrader().grade(text, {"schema": PERSON}).score == 0.0
