"""What is held back while an answer is streamed, and what of it is forgotten in later prompts."""

from typing import Any

import pytest

from rllm.rendering.answers import longest_overlap, without_thoughts


@pytest.mark.parametrize(
    ("text", "tag", "num_held"),
    [
        ("so <", "<tag>", 1),
        ("so <tag", "<tag>", 4),
        ("<tag>", "<tag>", 0),  # whole, so nothing has to be waited for
        ("<ta <t", "<tag>", 2),
        ("<ta ", "<tag>", 0),
        ("aab", "aabaac", 3),
        ("<", "<", 0),
        ("", "<tag>", 0),
    ],
)
def test_only_what_may_become_a_tag_is_held_back(text: str, tag: str, num_held: int) -> None:
    assert longest_overlap(text, tag) == num_held


@pytest.mark.parametrize(
    ("message", "later"),
    [
        ({"content": "<think>a</think>\n\nb </think>\nc"}, {"content": "c"}),
        ({"content": "b", "reasoning": "a"}, {"content": "b"}),
        ({"content": "b", "reasoning_content": "a"}, {"content": "b"}),
        ({"content": None, "tool_calls": []}, {"content": None, "tool_calls": []}),
        ({"content": "never <think>done"}, {"content": "never <think>done"}),
    ],
)
def test_the_thoughts_of_an_assistant_are_forgotten_and_nobody_elses_words(
    message: dict[str, Any], later: dict[str, Any]
) -> None:
    assert without_thoughts({"role": "assistant", **message}) == {"role": "assistant", **later}
    assert without_thoughts({"role": "user", **message}) == {"role": "user", **message}
