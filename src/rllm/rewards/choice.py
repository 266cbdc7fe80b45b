r"""Was the right one of several choices taken?

    answer ──► \boxed{B}, "Answer: B", "It's B!", "I think **B** is right", "green" ──► the place of a choice
    task["answer"]: a letter, a place from 0 on, or the text of a choice           ──► the place of a choice

A letter somewhere in the text is no answer, and the article "A" is no letter: "A good guess" takes nothing.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.extraction import MAX_ANSWER_CHARS, Mark, NoAnswer, Reading
from rllm.rewards.grade import Grade, require_answer, right, shown_value, task_field, task_has, wrong
from rllm.rewards.phrases import ANSWER_IS, takes_back
from rllm.rewards.readings import (
    AnswerForm,
    Stated,
    as_read,
    require_reading,
    stated_answer,
    unread,
    ways_to_read,
)

MAX_CHOICES = 26
_CHOOSES = re.compile(
    r"(?<![a-z])(?:(?:it(?:'s|’s| is| must be| has to be| should be)|that(?:'s|’s| is)|must be"
    r"|going with|go with|choose|chose|pick(?:ed)?"
    r"|select(?:ed)?|i(?:'d|’d| would)? (?:think|say|believe|vote for|answer)(?: it(?:'s|’s"
    r"| is))?)\s+(?:(?:option|choice|answer|letter)\s+)?"
    r"|(?:correct|right|best)\s+(?:option|choice|answer)\s+)(?=[*_(\\[`\"“$\\]{0,6}[A-Za-z](?![A-Za-z’']))",
    re.IGNORECASE,
)
"""Verbs by which somebody takes a choice without the word "answer"; a letter follows."""
_LETTER = re.compile(
    r"\s*(?:(?:la|el|le|il|die|der|das)\s+)?(?:(?:option|choice|letter|answer|opción|opção|option|antwort|вариант|选项|選項)\s*)?[*(\[{\"“]{0,4}(?P<letter>[A-Za-zＡ-Ｚ])"
    r"(?P<close>[)\]}.:*、,，”\"]*)(?:(?P<gap>\s*[-–—:=]?\s*)(?P<rest>\S.*))?\s*\Z",
    re.DOTALL | re.IGNORECASE,
)
_MAX_NAMED_CHARS = 600
"""The length of a letter with the text of a choice; the patterns would take long over a longer one."""
_LETTER_AND_TEXT = re.compile(
    r"\W*(?:(?:option|choice|answer)\W+)?(?P<letter>[A-Za-z])\W*(?:[(.:)\]}=–—-]|\bis\b)\s*(?P<text>\S.*?)[)\]]*\Z",
    re.DOTALL | re.IGNORECASE,
)
_TEXT_AND_LETTER = re.compile(
    r"(?P<text>.*\S)\s*[(:–—,=-]\s*[*([{]*(?:(?:option|choice|answer)\s+)?(?P<letter>[A-Za-z])\W*\Z",
    re.DOTALL | re.IGNORECASE,
)
_QUOTED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|boxed)\s*\{([^{}]*)\}")
_SEVERAL = re.compile(
    r"\s*(?:,|/|&|and|or|und|oder|et|ou|y|o|или|и|或|和)?\s*\(?[A-Za-z]\)?(?![A-Za-z'’])|\s*(?:and|or|&|/|,)\s*\Z",
    re.IGNORECASE,
)
_ALONE = re.compile(
    r"(?<![A-Za-z0-9'’!~¬])(?<!Plan )(?<!Table )(?<!Type )(?<!Figure )(?<!itamin )(?<!Part )(?<!Team )"
    r"(?:\((?P<round>[A-Z])\)|\*\*\(?(?P<bold>[A-Z])\)?[.:]?\*\*|(?P<bare>[B-HJ-Z](?!\s+(?!(?:is|because|since|as|fits|matches|seems|must|would|has|was|are|remains|works|here|for|by|in|and|or)\b)[a-z])|A(?=\s*(?:or\b|and\b|[,/&.:*!?]|\Z))))(?![A-Za-z0-9'’])"
)
"""A letter in a sentence that is no article and no pronoun."""
_DISMISSED = re.compile(
    r",\s*(?:not|no|nicht|pas|non|não|не)\s[^,.;]+|(?:\bnot|\brather than|\bunlike|\binstead of|\bover"
    r"|\bthan)\s+(?:option |choice )?[*(]{0,3}[A-Z][*)]{0,3}(?![A-Za-z])"
)


class ChoiceGrader:
    """A `Grader`: 1 where the letter, or the text, of the right choice is the answer.

    The task's `choices`, where it has them, bound the letters and make their texts answers as well.
    """

    name = "choice"
    task_fields = ("answer",)

    def __init__(self, *, reading: str = Reading.STRICT, thinks_first: bool = False) -> None:
        self.reading = require_reading(reading)
        self.thinks_first = thinks_first

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row whose answer is none of its choices."""
        require_answer(answer, self.name)
        choices = _choices(task)
        gold = _gold_place(task_field(task, "answer", self.name), choices)
        form = AnswerForm(
            is_answer=lambda text: _place_of((text,), choices) is not None,
            words_follow=True,
            phrases=(ANSWER_IS, _CHOOSES),
        )
        statement = stated_answer(answer, form, thinks_first=self.thinks_first)
        if isinstance(statement, NoAnswer):
            return unread(statement)
        if statement.mark is Mark.WHOLE and (
            _is_list_of_choices(statement.texts[0]) or _disagrees(statement.texts[0], choices)
        ):
            return unread(NoAnswer.UNDECIDED)
        if statement.mark is Mark.WHOLE and "\n" not in statement.texts[0]:
            statement = replace(statement, texts=(*statement.texts, *ways_to_read(statement.texts[0])))
        places = [_place_of(texts, choices) for texts in (statement.texts, *statement.restatements)]
        if places[0] is None and statement.mark is Mark.WHOLE:
            statement, places = _in_prose(statement, choices)
        if places[0] is None:
            is_prose = statement.mark in (Mark.WHOLE, Mark.PROSE)
            return (
                unread(NoAnswer.NOT_MARKED)
                if is_prose
                else as_read(wrong("no_choice", statement.texts[0]), statement, self.reading)
            )
        letter = chr(ord("A") + places[0])
        is_right = all(place in (None, gold) for place in places) and places[0] == gold
        grade = right("equal", letter) if is_right else wrong("different", letter)
        return as_read(grade, statement, self.reading)

    def close(self) -> None:
        """Nothing is held."""


def _in_prose(statement: Stated, choices: Sequence[str]) -> tuple[Stated, list[int | None]]:
    """The choice that the first line is, or else the one that the last sentence names."""
    first, _, rest = statement.texts[0].partition("\n")
    if rest and (place := _place_of((first,), choices)) is not None and not takes_back(rest):
        return replace(statement, mark=Mark.PROSE, reading=Reading.LENIENT), [place]
    if statement.alternative is None:
        return statement, [None]
    if any(_disagrees(text, choices) for text in statement.alternative.texts):
        return statement, [None]
    sentence = _DISMISSED.sub(" ", statement.alternative.texts[-1])
    if _DENIES.search(sentence):
        return statement, [None]
    if _LISTED.match(sentence) and len(_LISTED.findall(statement.texts[0])) > 1:
        return statement, [None]  # the last of the choices, gone through one by one
    letters = {match[match.lastgroup or 0] for match in _ALONE.finditer(sentence)}
    named_places = {place for place, choice in enumerate(choices) if _names(sentence, choice)}
    places = {ord(letter) - ord("A") for letter in letters} | named_places
    # A sentence that names two choices does not say which of them it means.
    choice_place = places.pop() if len(places) == 1 else None
    if choice_place is not None and choice_place >= (len(choices) or MAX_CHOICES):
        choice_place = None
    return statement.alternative, [choice_place]


_DENIES = re.compile(
    r"\b(?:wrong|incorrect|false|tempting|except|(?:all|any|anything|everything) but|other than|apart from"
    r"|rule[sd]? out|eliminat\w+|opposite|none|trap)\b",
    re.IGNORECASE,
)
_LISTED = re.compile(r"^\W*[A-Z][).:]\s", re.MULTILINE)
_LEAVES_NO_BLANKS = re.compile("[\u3040-\u30ff\u4e00-\u9fff\u0e00-\u0e7f]")


def _is_list_of_choices(text: str) -> bool:
    """Whether each of several lines is a choice, so that none of them is taken."""
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) > 1 and all(map(_LISTED.match, lines))


def _names(sentence: str, choice: str) -> bool:
    plain, words = _plain(choice), " ".join(sentence.casefold().split())
    if _LEAVES_NO_BLANKS.search(plain):
        return plain in words
    return bool(plain) and re.search(rf"(?<!\w){re.escape(plain)}(?!\w)", words) is not None


def _place_of(texts: Sequence[str], choices: Sequence[str]) -> int | None:
    """Which choice the first of these ways names; None for none, or where letter and text disagree."""
    plain_texts = [
        _QUOTED.sub(r"\1", _QUOTED.sub(r"\1", text[: 2 * MAX_ANSWER_CHARS])).strip(" $*\n") for text in texts
    ]
    if any(_disagrees(plain, choices) for plain in plain_texts):
        return None
    for plain in plain_texts:
        place = _place_of_text(plain, choices)
        if place is None:
            place = _place_of_letter(plain, choices)
        if place is not None:
            return place
    return None


def _disagrees(text: str, choices: Sequence[str]) -> bool:
    """Whether a letter stands beside the text of another choice: "A: Paris", "Paris (A)"."""
    if len(text) > _MAX_NAMED_CHARS:
        return False
    for pattern in (_LETTER_AND_TEXT, _TEXT_AND_LETTER):
        match = pattern.match(text)
        place = _place_of_text(match["text"], choices) if match else None
        if match and place is not None and place != ord(match["letter"].upper()) - ord("A"):
            return True
    return False


def _place_of_letter(text: str, choices: Sequence[str]) -> int | None:
    match = _LETTER.match(text)
    if match is None:
        return None
    letter = unicodedata.normalize("NFKC", match["letter"])
    place = ord(letter.upper()) - ord("A")
    rest = match["rest"] or ""
    if (
        place >= (len(choices) or MAX_CHOICES)
        or _SEVERAL.match(rest)
        or (match["close"][-1:] == "," and rest)
    ):
        return None
    if not rest:
        return place
    other = _place_of_text(rest, choices)
    if other is not None:
        return place if other == place else None
    if not (set(match["close"]) & set(")]}.:*、") or match["gap"].strip()):
        return None  # "A good guess", "B movies"
    places = {each for each, choice in enumerate(choices) if _names(rest, choice)}
    if (places and place not in places) or takes_back(_without_choices(rest, choices)):
        return None
    return place


def _without_choices(text: str, choices: Sequence[str]) -> str:
    """The words beside the texts of choices, which may begin "No, …"."""
    left = text.casefold()
    for plain in filter(None, map(_plain, choices)):
        left = re.sub(rf"(?<!\w){re.escape(plain)}(?!\w)", " ", left)
    return left


def _place_of_text(text: str, choices: Sequence[str]) -> int | None:
    """The one choice with this text."""
    plain_text = _plain(text)
    places = [place for place, choice in enumerate(choices) if _plain(choice) == plain_text]
    return places[0] if plain_text and len(places) == 1 else None


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
