r"""Was the right one of several choices taken?

    answer ──► \boxed{B}, <answer>B</answer>, a last line "Answer: B", or "B" alone ──► the place of a choice
    task["answer"]: a letter, a place from 0 on, or the text of a choice            ──► the place of a choice

A letter somewhere in the text is no answer: "A good choice is C" takes nothing.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.extraction import MAX_ANSWER_CHARS, Mark, Marked, NoAnswer, marked_answer
from rllm.rewards.grade import Grade, require_answer, right, shown_value, task_field, task_has, wrong

MAX_CHOICES = 26
MAX_LINE_CHARS = 200
_LAST_LINE = re.compile(
    r"\W{0,8}(?:(?:so|thus|therefore|hence),? )?(?:the )?(?:final |correct |best |right )?"
    r"(?:answer|choice|option)(?: is)?[\s:*]{1,8}\W{0,4}?"
    r"(?P<taken>\(?[A-Za-z]\)?[.)]?(?:[ :].*?)?)[\s*.!]{0,8}\Z",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"[\s*]{0,4}\(?(?P<letter>[A-Za-z])(?P<close>[).:*]*)(?:\s+(?P<rest>\S.*))?\s*\Z", re.DOTALL
)
_QUOTED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")


class ChoiceGrader:
    """A `Grader`: 1 where the letter, or the text, of the right choice is the answer.

    The task's `choices`, where it has them, bound the letters and make their texts answers as well.
    """

    name = "choice"
    task_fields = ("answer",)

    def __init__(self, *, thinks_first: bool = False) -> None:
        self.thinks_first = thinks_first

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row whose answer is none of its choices."""
        require_answer(answer, self.name)
        choices = _choices(task)
        gold = _gold_place(task_field(task, "answer", self.name), choices)
        found = self._found(answer)
        if isinstance(found, NoAnswer):
            return wrong(found.value)
        taken = _place_of(found, choices)
        if taken is None:
            reason = NoAnswer.NOT_MARKED.value if found.mark is Mark.WHOLE else "no_choice"
            return wrong(reason, None if found.mark is Mark.WHOLE else found.text)
        letter = chr(ord("A") + taken)
        return right("equal", letter) if taken == gold else wrong("different", letter)

    def close(self) -> None:
        """Nothing is held."""

    def _found(self, answer: str) -> Marked | NoAnswer:
        found = marked_answer(answer, thinks_first=self.thinks_first, max_chars=len(answer))
        if isinstance(found, NoAnswer) or found.mark is not Mark.WHOLE:
            return found
        lines = found.text[-2 * MAX_LINE_CHARS :].splitlines()
        line = lines[-1] if len(lines[-1]) > 4 else " ".join(lines[-2:])  # "Answer:" may have its own line
        if len(line) <= MAX_LINE_CHARS and (match := _LAST_LINE.match(line)):
            return Marked(text=match["taken"], mark=Mark.TAGGED)
        return found


def _place_of(found: Marked, choices: Sequence[str]) -> int | None:
    """Which choice is taken; None for none, or where letter and text contradict each other."""
    said = _QUOTED.sub(r"\1", found.text[: 2 * MAX_ANSWER_CHARS]).strip(" $*")
    match = _LETTER.match(said)
    place = ord(match["letter"].upper()) - ord("A") if match else MAX_CHOICES
    if match is None or place >= (len(choices) or MAX_CHOICES):
        return _place_of_text(said, choices)
    if not match["rest"]:
        return None if found.mark is Mark.WHOLE and match["letter"].islower() else place
    if _place_of_text(match["rest"], choices) == place:
        return place
    return _place_of_text(said, choices)


def _place_of_text(said: str, choices: Sequence[str]) -> int | None:
    """The one choice with this text."""
    wanted = _plain(said)
    places = [place for place, choice in enumerate(choices) if _plain(choice) == wanted]
    return places[0] if wanted and len(places) == 1 else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,;:!\"'`*$")


def _choices(task: Mapping[str, Any]) -> list[str]:
    if not task_has(task, "choices"):
        return []
    choices = task["choices"]
    if isinstance(choices, Mapping):
        choices = list(choices.values())
    if not isinstance(choices, list | tuple) or not 2 <= len(choices) <= MAX_CHOICES:
        raise RewardError(
            f"The choice grader was given {shown_value(choices)} as the task field `choices`; it must be a "
            f"list of 2 to {MAX_CHOICES} texts."
        )
    try:
        return [str(choice) for choice in choices]
    except ValueError as error:  # a number with more digits than Python writes out
        raise RewardError(f"The choice grader cannot read the task's `choices`: {error}") from error


def _gold_place(answer: Any, choices: Sequence[str]) -> int:
    """Raises RewardError for what names no choice."""
    place: int | None = None
    if isinstance(answer, int) and not isinstance(answer, bool):
        place = answer if choices else None
    elif isinstance(answer, str):
        match = re.fullmatch(r"\s*\(?([A-Za-z])\)?[.)]?\s*", answer)
        place = ord(match[1].upper()) - ord("A") if match else None
        if place is None or place >= (len(choices) or MAX_CHOICES):
            place = _place_of_text(answer, choices)
    if place is None or not 0 <= place < (len(choices) or MAX_CHOICES):
        have = f"one of the {len(choices)} `choices`" if choices else "a letter (the row has no `choices`)"
        raise RewardError(
            f"The choice grader was given {shown_value(answer)} as the task field `answer`; it must "
            f"name {have}."
        )
    return place
