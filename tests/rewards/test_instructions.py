"""The 25 kinds: one text that follows and one that does not for each, and the readings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError, RewardError
from rllm.rewards.instruction_kinds import sentences
from rllm.rewards.instructions import KINDS, InstructionGrader

ENGLISH = "the quick brown fox jumps over the lazy dog because it wants to reach the other side of the road"
GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, weil er auf die andere Seite will."

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sea", "sky"]}, "The Sea and the SKY.", "The sea."),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "at least"}, "Sea, sea", "sea"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "sea", "sea sea"),
    ("keywords:forbidden_words", {"forbidden_words": ["sea", "c++"]}, "A season.", "The sea."),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "at least"},
        "Eel tree",
        "eel",
    ),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        "One. Two!",
        "A b. C? D!",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First this.\n\nthen, that.",
        "First this.\n\nAfterwards that.",
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[name] at [place]",
        "[name] at [place",
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        "Bye.\nP. P.S Sorry.",
        "Bye.\nP.S. Sorry.",
    ),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Sorry.", "Bye."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n- two\n- three"),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and ** **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nx\nSECTION 2\ny",
        "SECTION 1\nx",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A poem>>\nRoses", "<< >>\nRoses"),
    ("combination:two_responses", {}, "Yes\n******\nNo", "Yes\n******\nYes"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "write a poem. Roses", "Roses"),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'So. that is all."', "That is all. Bye"),
    ("startend:quotation", {}, '"All of it."', '"Part" of it.'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and ESA fly",
        "NASA flies",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH, ENGLISH.capitalize()),
    ("punctuation:no_comma", {}, "no comma here", "one, two"),
]


def graded(answer: str, *asked: tuple[str, dict[str, Any]], **options: Any) -> Any:
    task = {"instructions": [{"id": name, "kwargs": kwargs} for name, kwargs in asked]}
    return InstructionGrader(**options).grade(answer, task)


def test_every_published_kind_is_there_and_tried() -> None:
    assert len(KINDS) == 25
    assert {name for name, *_ in CASES} == set(KINDS)


def test_a_kind_tells_what_follows_it_from_what_does_not(subtests: pytest.Subtests) -> None:
    for name, kwargs, follows, fails in CASES:
        with subtests.test(name=name, kwargs=kwargs, follows=follows, fails=fails):
            assert graded(follows, (name, kwargs)).score == 1.0
            assert graded(f"<think>{fails}</think>{follows}", (name, kwargs)).is_correct
            missed = graded(fails, (name, kwargs))
            assert (missed.score, missed.reason) == (0.0, f"not followed: {name}")
            assert graded("", (name, kwargs)).score == 0.0


def test_the_loose_reading_forgives_a_first_line_and_asterisks() -> None:
    asked = ("startend:quotation", {})
    grade = graded('Sure, here it is:\n**"All of it."**', asked)
    assert (grade.score, grade.metadata["strict"], grade.metadata["loose"]) == (0.0, False, True)
    assert graded('Sure, here it is:\n**"All of it."**', asked, loose=True).score == 1.0


def test_a_share_is_paid_where_that_is_asked() -> None:
    asked = (("punctuation:no_comma", {}), ("startend:quotation", {}))
    grade = graded("no comma", *asked, score="share")
    assert (grade.score, grade.is_correct) == (0.5, False)
    assert graded("no comma", *asked).score == 0.0
    with pytest.raises(ConfigError, match="all, share"):
        InstructionGrader(score="some")


def test_a_published_row_is_read_with_the_nones_of_other_kinds() -> None:
    row = {
        "prompt": "…",
        "instruction_id_list": ["length_constraints:number_words"],
        "kwargs": [{"num_words": 2.0, "relation": "at least", "keywords": None, "language": None}],
    }
    assert InstructionGrader().grade("two words", row).score == 1.0


def test_a_mistake_in_the_task_is_an_error_and_never_followed(subtests: pytest.Subtests) -> None:
    for instruction, said in [
        ({"id": "punctuation:no_coma"}, "did you mean `punctuation:no_comma`"),
        ({"id": "keywords:existence", "kwargs": {}}, "it takes keywords"),
        ({"id": "punctuation:no_comma", "kwargs": {"num_words": 3}}, "it takes none"),
        ({"kwargs": {}}, "has no `id`"),
        (
            {"id": "length_constraints:number_words", "kwargs": {"num_words": 3, "relation": "more"}},
            "one of less than, at least",
        ),
        (
            {"id": "length_constraints:number_words", "kwargs": {"num_words": "3", "relation": "at least"}},
            "a whole number",
        ),
    ]:
        with subtests.test(instruction=instruction, said=said), pytest.raises(RewardError, match=said):
            InstructionGrader().grade("text", {"instructions": [instruction]})


def test_unfinished_thinking_follows_nothing() -> None:
    assert graded("<think>no comma here", ("punctuation:no_comma", {})).score == 0.0


def test_sentences_are_counted_as_people_do(subtests: pytest.Subtests) -> None:
    for text, count in [
        ("Dr. Smith came at 5 p.m. and left. Good!", 2),
        ("See e.g. the sea... It is 3.5 miles wide.", 2),
        ('He said "Go." Then he went.', 2),
        ("A heading\n\nA sentence without end", 2),
        ("你好。再见！", 2),
        ("...", 0),
    ]:
        with subtests.test(text=text, count=count):
            assert len(sentences(text)) == count


@given(st.text())
def test_no_text_breaks_a_check(text: str) -> None:
    asked = [(name, kwargs) for name, kwargs, *_ in CASES if not name.startswith(("language", "change_case"))]
    assert graded(text, *asked, score="share").score <= 1.0


def test_long_noise_takes_no_time_to_speak_of(subtests: pytest.Subtests) -> None:
    for piece in ("[", "<<", "*", "\n", ".", ".x", "A. ", "-", '"', " \n", "p. "):
        with subtests.test(piece=piece):
            asked = [(name, kwargs) for name, kwargs, *_ in CASES]
            assert graded(piece * 100_000, *asked).score == 0.0
