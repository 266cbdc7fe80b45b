"""The answer is what a text ends with, and nothing else in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.extraction import Mark, Marked, NoAnswer, final_text, last_assistant_text, marked_answer
from rllm.types import Episode, Step, Trajectory

PROSE = st.text(alphabet=st.characters(exclude_characters="\\<[", exclude_categories=["Cs"]), max_size=60)
"""Free text in which nothing is marked."""
INSIDE = st.text(alphabet="abc123+-=^_ ().,", min_size=1).map(str.strip).filter(bool)


@given(
    PROSE, INSIDE, st.sampled_from(["", ".", "$", "$.", " \n", "\\)", "\\]\n", "**", "</s>", "<|im_end|>\n"])
)
def test_a_box_at_the_end_is_found_whatever_stands_before_it(prose: str, inside: str, end: str) -> None:
    assert marked_answer(f"{prose}\\boxed{{{inside}}}{end}") == Marked(text=inside, mark=Mark.BOXED)


@given(INSIDE, PROSE, st.sampled_from(["\\boxed{%s}", "<answer>%s</answer>"]))
def test_a_word_after_the_mark_takes_it_back(inside: str, prose: str, mark: str) -> None:
    assert marked_answer(mark % inside + f" no {prose}") is NoAnswer.NOT_LAST


@given(PROSE, INSIDE)
def test_nothing_is_found_in_thoughts_that_do_not_end(prose: str, inside: str) -> None:
    for begun in ("<think>", "<think>a</think><think>", "[THINK]", "<thinking>", "<seed:think>"):
        assert marked_answer(f"{begun}{prose}\\boxed{{{inside}}}") is NoAnswer.UNFINISHED


@given(PROSE, INSIDE)
def test_thoughts_are_no_part_of_the_answer(thoughts: str, inside: str) -> None:
    assert marked_answer(f"<think>{thoughts}\\boxed{{0}}</think>\\boxed{{{inside}}}") == Marked(
        text=inside, mark=Mark.BOXED
    )
    assert final_text(f"<think>{thoughts}</think> {inside}") == inside


@given(st.text(max_size=400))
def test_any_text_has_an_answer_or_a_reason(text: str) -> None:
    found = marked_answer(text)
    assert isinstance(found, NoAnswer) or found.text in text


@pytest.mark.parametrize("text", ["\\boxed{" * 20_000, "{" * 50_000, "<answer>" * 20_000, "$" * 90_000 + "x"])
def test_a_flood_is_read_once(text: str) -> None:
    assert marked_answer(text) in (NoAnswer.UNFINISHED, NoAnswer.NOT_MARKED)


def test_braces_in_the_box_are_counted() -> None:
    assert marked_answer(r"\boxed{\frac{1}{\{2\}}}") == Marked(text=r"\frac{1}{\{2\}}", mark=Mark.BOXED)
    assert marked_answer(r"\boxed{\text{a \} b}}") == Marked(text=r"\text{a \} b}", mark=Mark.BOXED)


def test_a_prompt_that_opens_the_thoughts_is_told_of() -> None:
    assert marked_answer(r"so \boxed{5}", thinks_first=True) is NoAnswer.UNFINISHED
    assert marked_answer(r"so</think>\boxed{5}", thinks_first=True) == Marked(text="5", mark=Mark.BOXED)


def test_an_episode_ends_with_its_artifact_its_output_or_its_last_answer() -> None:
    steps = [Step(model_response="first"), Step(model_response="last")]
    assert last_assistant_text(Episode(trajectories=[Trajectory(steps=steps)])) == "last"
    assert last_assistant_text(Episode(trajectories=[Trajectory(steps=steps, output="output")])) == "output"
    assert last_assistant_text(Episode(artifacts={"answer": "artifact"})) == "artifact"
    messages = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    assert (
        last_assistant_text(Episode(trajectories=[Trajectory(steps=[Step(chat_completions=messages)])]))
        == "5"
    )
    two = [Trajectory(steps=[Step(model_response="solver")]), Trajectory(name="judge")]
    assert last_assistant_text(Episode(trajectories=two)) == "solver"


def test_an_answer_of_nothing_is_an_answer_but_an_episode_without_a_step_holds_none() -> None:
    assert last_assistant_text(Episode(trajectories=[Trajectory(steps=[Step(model_response="")])])) == ""
    with pytest.raises(RewardError, match=r"e:0 .*answer"):
        last_assistant_text(Episode(task_id="e", trajectories=[Trajectory()]))
