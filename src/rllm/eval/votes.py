r"""Which of several answers are the same, so that they can be voted on.

    "0.5", r"\frac12", "3", "1/2"  ──same_answers──► 0, 0, 2, 0

They are read as the math grader reads them, and as words without case and blanks where they are no
mathematics. Formulas whose meaning alone could tell stay apart, right ones and wrong ones alike: merging the
right ones, which the grader knows to be the same, would favour them in the vote.
"""

from collections.abc import Sequence

from rllm.rewards.math_comparison import ask_none, same
from rllm.rewards.math_reading import UnreadableError, plain_words, read
from rllm.rewards.math_values import Value, Words

_LONGEST = 300
"""Characters; a longer answer is a text, and no formula is looked for in it."""


def same_answers(texts: Sequence[str]) -> list[int]:
    """For each text the place of the first one that says the same."""
    read_texts = [_read(text) for text in texts]
    firsts: list[int] = []
    classes: list[int] = []
    for place, value in enumerate(read_texts):
        first = next((each for each in firsts if same(read_texts[each], value, ask_none)), place)
        if first == place:
            firsts.append(place)
        classes.append(first)
    return classes


def _read(text: str) -> Value:
    if len(text) > _LONGEST:
        return Words(text=plain_words(text))
    try:
        return read(text)
    except UnreadableError:
        return Words(text=plain_words(text))
