import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.graders import grader_named

TASK = {"calls": [{"area": {"base": [10, 10.0], "height": [5], "unit": ["units", "Square units", ""]}}]}


def graded(answer: Any, task: dict[str, Any] = TASK, **options: Any) -> bool:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    grade = grader_named("calls", **options).grade(text, task)
    assert grade.score == float(grade.is_correct)
    return grade.is_correct


@pytest.mark.parametrize(
    "answer",
    [
        [{"name": "area", "arguments": {"base": 10, "height": 5}}],
        {"name": "area", "arguments": {"height": 5.0, "base": 10}},
        [{"name": "area", "arguments": {"base": 10, "height": 5, "unit": "square-units"}}],
        '```json\n[{"name": "area", "arguments": {"base": 10, "height": 5}}]\n```',
        'I call it:\n```json\n[{"name": "area", "arguments": {"base": 10, "height": 5}}]\n```\nThat is all.',
        '<think>[{"name": "no"}]</think>\n[{"name": "area", "arguments": {"base": 10, "height": 5}}]',
    ],
)
def test_a_right_call_is_right_however_it_is_written(answer: Any) -> None:
    assert graded(answer)


def test_any_other_call_is_wrong(subtests: pytest.Subtests) -> None:
    for answer in [
        [],
        "",
        "area(10, 5)",
        "[" * 5000,
        [{"name": "area"}],
        [{"name": "Area", "arguments": {"base": 10, "height": 5}}],
        [{"name": "area", "arguments": {"base": 10}}],
        [{"name": "area", "arguments": {"base": "10", "height": 5}}],
        [{"name": "area", "arguments": {"base": 10, "height": True}}],
        [{"name": "area", "arguments": {"base": 10, "height": 5, "colour": "red"}}],
        [{"name": "area", "arguments": {"base": 10, "height": 5, "unit": "miles"}}],
        [{"name": "area", "arguments": {"base": 10, "height": 5}}] * 2,
        [{"name": "area", "arguments": {"base": 10, "height": 5}, "extra": 1}],
        'It is [{"name": "area", "arguments": {"base": 10, "height": 5}}], I think.',
        '<think>[{"name": "area", "arguments": {"base": 10, "height": 5}}]',
    ]:
        with subtests.test(answer=answer):
            assert not graded(answer)


def test_calls_come_in_any_order_unless_one_is_asked_for() -> None:
    task = {"calls": [{"a": {"x": [1]}}, {"b": {}}]}
    answer = [{"name": "b", "arguments": {}}, {"name": "a", "arguments": {"x": 1}}]
    assert graded(answer, task)
    assert not graded(answer, task, in_order=True)
    assert graded(answer[::-1], task, in_order=True)


def test_lists_and_objects_are_compared_by_their_parts() -> None:
    task = {"calls": [{"f": {"places": [["Rome", "Oslo"]], "at": [{"day": [1, 2], "hour": [""]}]}}]}
    assert graded({"name": "f", "arguments": {"places": ["rome", "oslo"], "at": {"day": 2}}}, task)
    assert not graded({"name": "f", "arguments": {"places": ["Oslo", "Rome"], "at": {"day": 2}}}, task)
    assert not graded({"name": "f", "arguments": {"places": ["Rome", "Oslo"], "at": {"day": 3}}}, task)


@pytest.mark.parametrize("calls", [None, [{"a": 1}], [{"a": {"x": 1}}], ["a"], [{"a": {}, "b": {}}]])
def test_a_task_that_cannot_be_read_is_an_error_and_no_zero(calls: Any) -> None:
    with pytest.raises(RewardError):
        grader_named("calls").grade("[]", {"calls": calls})


@given(st.text())
def test_whatever_is_written_has_a_grade(text: str) -> None:
    assert not graded(text)
