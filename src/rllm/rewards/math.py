r"""Is a mathematical answer right?

    answer ──► marked_answer ──► read ──► same? ──┬─ decided by plain numbers, words, structure
    task["answer"] ──► read, once ────────────────┴─ by the meaning of formulas: a worker process with sympy

The answer is what a text ends with: `\boxed{…}`, `<answer>…</answer>`, or the text itself where it is nothing
but an answer. Numbers are compared exactly: 50\% is 0.5, 0.33 is not 1/3. A formula that keeps the worker
busy beyond the limit is wrong.
"""

import importlib.util
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from rllm.errors import ConfigError, MissingExtraError, RewardError
from rllm.rewards.extraction import Mark, NoAnswer, Reading, marked_answer
from rllm.rewards.grade import Grade, gold_texts, require_answer, right, wrong
from rllm.rewards.math_comparison import ask_none, same
from rllm.rewards.math_reading import UnreadableError, read
from rllm.rewards.math_units import is_another_than_asked
from rllm.rewards.math_values import (
    EMPTY_SET,
    Equation,
    Scalar,
    Several,
    SolutionFamily,
    Value,
    Words,
    describe_value,
)
from rllm.rewards.number_words import number_in_words, numbers_in_words, plain_digits
from rllm.rewards.phrases import ANSWER_IS, CONCLUSION
from rllm.rewards.readings import (
    CHANGES_NUMBER,
    UNIT_BEHIND,
    AnswerForm,
    as_read,
    require_reading,
    stated_answer,
    unread,
)
from rllm.rewards.workers import WorkerReply, WorkerStatus, shared_pool

CHECK = "rllm.rewards.math_symbols:check"
STARVED_CPU_S = 0.5
"""A check that timed out with less processor time than this was not slow: the machine was busy."""
_KEPT_GOLDS = 4096
_FORMULA_LIKE = re.compile(r"[0-9\\∞π√∅½]|(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])")
_NUMBER = re.compile(
    r"(?<![0-9A-Za-z.,])[-−]?(?:\\?[$€£])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?(?:\s?:\s?[0-9]+)*(?:\s?[ap]\.?m\b\.?)?(?:\s?\\?%)?(?:π|√[0-9]+)*"
    r"|[-−]?(?:π|√[0-9]+)(?![A-Za-z])"
)
_CONCLUDES = re.compile(
    r"(?:=|は|が|为|是|共|得|(?<![a-z])(?:is|are|was|were|equals?|totals?|makes?|costs?|pays?|earns?|gets?|gives?|needs?|takes?|has|have|left|of))\s*$",
    re.IGNORECASE,
)
_MAX_WORDS = 6
"""The number of words of a stated answer to a question whose right answer is words."""


@dataclass(kw_only=True, slots=True, frozen=True)
class _AnswerKind:
    """The kind of answer that the row asks for."""

    words: bool
    percent: bool
    """Whether 25 and 25 % are the same."""


class MathGrader:
    r"""A `Grader`: 1 for an answer that says what the task's `answer` (or one of `answers`) says, else 0.

    `tolerance`: how far a plain number may be off, as a share of the right one. `percent="either"` also takes
    50 for 50\%. `thinks_first`: the prompt opened the thoughts, so a text without `</think>` is all thoughts.
    """

    name = "math"
    task_fields = ("answer|answers",)

    def __init__(
        self,
        *,
        reading: str = Reading.STRICT,
        tolerance: float = 0.0,
        percent: str = "hundredth",
        thinks_first: bool = False,
        workers: int = 2,
        timeout_s: float = 5.0,
    ) -> None:
        self.reading = require_reading(reading)
        if percent not in ("hundredth", "either"):
            raise ConfigError(f"`percent` is {percent!r}; there are hundredth (50% is 0.5) and either.")
        if not 0.0 <= tolerance < 1.0:
            raise ConfigError(f"`tolerance` is {tolerance}; it must be from 0 (exact) to below 1.")
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("math-verify", "grading")
        self.tolerance = tolerance
        self.percent = percent
        self.thinks_first = thinks_first
        self.pool = shared_pool(CHECK, workers=workers, timeout_s=timeout_s)
        self._golds: OrderedDict[str, Value] = OrderedDict()
        self._lock = Lock()

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row whose answer is missing or cannot be read."""
        require_answer(answer, self.name)
        golds = [
            (each, self._gold(each)) for text in gold_texts(task, self.name) for each in _ways_of_gold(text)
        ]
        wants_percent = self.percent == "either" or _asks_for_percent(task.get("question"))
        wants_words = any(_has_words(gold) or gold == EMPTY_SET for _, gold in golds)
        kind = _AnswerKind(words=wants_words, percent=wants_percent)

        def is_answer(text: str) -> bool:
            is_value = _FORMULA_LIKE.search(text) or number_in_words(text)
            return bool(is_value) or (wants_words and len(text.split()) <= _MAX_WORDS)

        form = AnswerForm(
            is_answer=is_answer, is_list=True, words_follow=True, phrases=(ANSWER_IS, CONCLUSION)
        )
        answer = _SIGN_IN_WORDS.sub("-", _RUPEES.sub("₹", plain_digits(answer)))
        if any(isinstance(gold, Several) and gold.brackets == ":" for _, gold in golds):
            answer = _RATIO_IN_WORDS.sub(":", answer)
        final = stated_answer(answer, form, thinks_first=self.thinks_first)
        if isinstance(final, NoAnswer):
            return unread(final)
        if final.mark is Mark.WHOLE and not any(self._is_answer(each, wants_words) for each in final.texts):
            if final.alternative is None:
                return unread(NoAnswer.NOT_MARKED)
            final = replace(final.alternative, texts=_numbers_last(final.alternative.texts))
        is_prose = final.mark in (Mark.WHOLE, Mark.PROSE)
        texts = tuple(each for each in final.texts if wants_words or not is_prose or not _VERB.search(each))
        if not texts:
            return as_read(wrong("different", final.texts[0]), final, self.reading)
        grade = self._of_ways(texts, golds, kind)
        if grade.is_correct and _in_another_unit(grade.extracted or "", golds, task.get("question")):
            grade = wrong("another_unit", grade.extracted)
        reading = final.reading
        if not grade.is_correct and (digits := _without_asked_base(golds, task.get("question"))):
            in_base = self._of_ways(final.texts, digits, kind)
            if in_base.is_correct:
                grade, golds, reading = in_base, [*golds, *digits], Reading.LENIENT
        # All that is restated has to be right too, and the first that is not is the grade.
        for texts in final.restatements:
            if grade.is_correct:
                grade = self._of_ways(texts, golds, kind)
        return as_read(grade, replace(final, reading=reading), self.reading)

    def close(self) -> None:
        """Nothing: the workers are shared by all math graders of the process, and end with it."""

    def prepare(self, task: Mapping[str, Any]) -> None:
        """Begin to start the workers, where the right answer is a formula: what they import takes seconds.

        Returns at once. Answers wait for the workers, and their limit begins when one is ready.
        """
        with suppress(RewardError, UnreadableError):  # the answer's grade says what is wrong with the row
            golds = [way for text in gold_texts(task, self.name) for way in _ways_of_gold(text)]
            if any(_has_formula(read(gold)) for gold in golds):
                self.pool.warm()

    def _judge(self, text: str, value: Value, golds: list[tuple[str, Value]], kind: _AnswerKind) -> Grade:
        pairs = [(text, value, gold) for gold in golds]
        if kind.percent:
            bare = _without_percent(text)
            bare_golds = [_without_percent(gold) for gold, _ in golds]
            pairs += [(bare, read(bare), (gold, self._gold(gold))) for gold in bare_golds]
        if _DECIMAL_COMMA.fullmatch(text):
            decimal = text.replace(",", ".")
            pairs += [(decimal, read(decimal), gold) for gold in golds if isinstance(gold[1], Scalar)]
        # Asked of a worker only when no right answer is met without one.
        open_pairs: list[tuple[str, str]] = []
        for way, reading, (gold_text, gold) in pairs:
            verdict = same(gold, reading, ask_none, tolerance=self.tolerance)
            if verdict is True:
                return right("equal", text, read_as=describe_value(reading))
            if verdict is None:
                open_pairs.append((gold_text, way))
        reason = "different"
        for gold_text, way in open_pairs:
            reason = self._worker_reason(gold_text, way)
            if reason == "equal":
                break
        grade = right if reason == "equal" else wrong
        return grade(reason, text, read_as=describe_value(value))

    def _worker_reason(self, gold: str, answer: str) -> str:
        """A worker's comparison of two formulas: "equal", "different" or another fault of the answer."""
        reply = self.pool.call(gold, answer, self.tolerance)
        if reply.status is WorkerStatus.OK:
            if reply.value.get("unreadable") == "gold":
                raise _unreadable_gold(gold, reply.value.get("why", ""))
            return "unreadable" if "unreadable" in reply.value else _verdict(reply.value.get("same"))
        if reply.status is WorkerStatus.TIMEOUT and not _was_starved(reply):
            return "too_slow"
        if reply.status is WorkerStatus.RAISED:
            return "too_large" if reply.detail in ("MemoryError", "RecursionError") else "unreadable"
        # A SIGKILL comes from outside, as when the machine has no
        # memory left. Other signals are caused by the formula.
        if reply.status is WorkerStatus.CRASHED and reply.detail != "SIGKILL":
            return "too_large"
        raise RewardError(
            f"The math grader could not check {answer!r:.200}: its worker ended with {reply.status} "
            f"({reply.detail}). The machine may be short of memory or processor time."
        )

    def _gold(self, text: str) -> Value:
        """The right answer, read once. Raises RewardError where it cannot be."""
        with self._lock:
            if text in self._golds:
                self._golds.move_to_end(text)
                return self._golds[text]
        try:
            value = read(text)
        except UnreadableError as error:
            raise _unreadable_gold(text, str(error)) from error
        if _has_formula(value):
            # A right answer that a worker cannot compare with itself would make every answer wrong.
            reason = self._worker_reason(text, text)
            if reason != "equal":
                raise _unreadable_gold(text, reason)
        # Not held while the answer is read: a worker may take seconds,
        # and it does no harm when two threads read the same answer.
        with self._lock:
            self._golds[text] = value
            if len(self._golds) > _KEPT_GOLDS:
                self._golds.popitem(last=False)
        return value

    def _is_answer(self, text: str, wants_words: bool) -> bool:
        """Whether a whole text is nothing but an answer: one formula, or one line."""
        if len(text.strip("$\\[]() \n").splitlines()) > 1 and r"\begin" not in text:
            return False
        if not wants_words and _VERB.search(text):
            return False
        try:
            return wants_words or not _has_words(read(text))
        except UnreadableError:
            return False

    def _of_ways(self, texts: Sequence[str], golds: list[tuple[str, Value]], kind: _AnswerKind) -> Grade:
        """Grade of the first way to read a statement that gives a value; words count where they are right."""
        why = ""
        for text in texts:
            try:
                value = read(text)
            except UnreadableError as error:
                why = why or str(error)
                continue
            if not _has_words(value):
                return self._judge(text, value, golds, kind)
            if kind.words and (grade := self._judge(text, value, golds, kind)).is_correct:
                return grade
        return wrong("unreadable", texts[0], why=why) if why else wrong("different", texts[0])


def _in_another_unit(text: str, golds: list[tuple[str, Value]], question: Any) -> bool:
    """Whether a right number without a unit was answered in one that the question does not ask for."""
    if not isinstance(question, str) or any(isinstance(gold, Scalar) and gold.unit for _, gold in golds):
        return False
    value = read(text)
    return isinstance(value, Scalar) and is_another_than_asked(value.unit, question)


def _without_asked_base(golds: list[tuple[str, Value]], question: Any) -> list[tuple[str, Value]]:
    """The digits of golds such as 2516_8, where the question itself asks for base 8: an answer then needs not
    say it again."""
    digits: list[tuple[str, Value]] = []
    for _, gold in golds:
        number = _IN_BASE.fullmatch(gold.text) if isinstance(gold, Words) else None
        if number and isinstance(question, str) and re.search(rf"\bbase[- ]\$?{number[2]}\b", question):
            digits.append((number[1], read(number[1])))
    return digits


def _numbers_last(texts: tuple[str, ...]) -> tuple[str, ...]:
    """With the number of a sentence that has one alone, or the one that it concludes with."""
    for sentence in (texts[-1], _ASIDES.sub(" ", texts[-1])):
        tuples = [*_TUPLE.finditer(sentence)]
        if len(tuples) == 1 and not _NUMBER.search(_TUPLE.sub(" ", sentence)):
            return (*texts, tuples[0].group())
        numbers = [
            number
            for number in _NUMBER.finditer(sentence)
            if not _NUMBERED.search(sentence[: number.start()])
        ]
        if not numbers:
            word_numbers = [
                digits for begin, digits in numbers_in_words(sentence) if _counts(sentence, begin, digits)
            ]
            if len(word_numbers) == 1:
                return (*texts, word_numbers[0])
        if len(numbers) > 1:
            numbers = [each for each in numbers if _CONCLUDES.search(sentence[: each.start()])][-1:]
        if len(numbers) == 1:
            number = numbers[0].group()
            if _IS_PART.match(texts[-1], texts[-1].rfind(number) + len(number)):
                return texts
            unit = UNIT_BEHIND.match(sentence[numbers[0].end() :])
            if unit is None:
                return (*texts, number)
            is_other_number = CHANGES_NUMBER.match(unit[1]) is not None
            return (
                (*texts, f"{number} {unit[1]}")
                if is_other_number
                else (*texts, f"{number} {unit[1]}", number)
            )
    return texts


def _counts(sentence: str, begin: int, digits: str) -> bool:
    """Whether a sentence says a number in words; a small one stands in many, such as "the two sides"."""
    before = sentence[:begin]
    if _BOUNDS_NUMBER.search(before):
        return False
    return not digits.isdigit() or int(digits) > 12 or _CONCLUDES.search(before) is not None


_IN_BASE = re.compile(r"(-?[0-9A-Fa-f]+)_([0-9]+)")
_VERB = re.compile(r"(?<![A-Za-z\\{])(?:is|are|was|were|has|have|equals|makes|gives)(?![A-Za-z])")
"""The sign of a sentence: its words could be read as products of letters."""
_SIGN_IN_WORDS = re.compile(
    r"(?<![0-9)}$]\s)(?:(?<![A-Za-zÀ-ÿ])(?:minus|negative|moins|menos|meno|минус)\s+|(?:负|負|マイナス)\s*)(?=\$?[0-9])",
    re.IGNORECASE,
)
"""A sign that is written out; behind a number it would be a subtraction."""
_TUPLE = re.compile(r"\([^(),]*[0-9][^(),]*(?:,[^(),]*[0-9][^(),]*)+\)")
_DECIMAL_COMMA = re.compile(r"-?[0-9]+,(?![0-9]{3}\Z)[0-9]+")
"""A list of two numbers, or one number as much of the world writes it."""
_RUPEES = re.compile(r"(?<![A-Za-z])Rs\.?\s*(?=[0-9])")
_RATIO_IN_WORDS = re.compile(r"(?<=[0-9])\s+to\s+(?=[0-9])")
_PERCENT_QUESTION = re.compile(
    r"\b(?:what|which|how many)\s+(?:\w+\s+)?percent|\b(?:in|as a|the) percent", re.IGNORECASE
)
_NUMBERED = re.compile(
    r"\b(?:step|part|problem|question|line|figure|table|equation|page|case|example|chapter|section|item|option"
    r"|choice|no\.|number|#)\s*\Z",
    re.IGNORECASE,
)
"""Before a number that only says which one."""
_BOUNDS_NUMBER = re.compile(
    r"\b(?:than|at least|at most|over|under|almost|nearly|the|these|those|both|first|last)\s+\Z",
    re.IGNORECASE,
)
"""Before a number in words that is not the one that is asked for."""
_IS_PART = re.compile(
    r"\s+and\s+(?:an?|one|two|three|[0-9]+)\s+(?:half|halves|thirds?|quarters?|fourths?|fifths?)\b|[A-Za-z]{0,2}\s*(?:[-+−*/×÷^]\s*[$\\(]{0,3}[0-9a-z]|(?:plus|minus|times)\b|(?:to\b|[,:])\s*[0-9])",
    re.IGNORECASE,
)
"""Behind a number: it is a part of a sum, a range, a list or a ratio."""
_ASIDES = re.compile(r"\([^()]*\)|[,;:]\s.*\Z", re.DOTALL)


_LABELLED = re.compile(
    r"\s*\$?\s*\\(?:text|textbf|mathbf|mathrm"
    r"|textrm)\s*\{\s*\(?(?P<letter>[A-H])\)?[.)]?\s*\}\s*(?:\\[ ,;:!]|\\q?quad|~|\s|[.):])*"
    r"(?P<rest>[^\s$].*?)\s*\$?\s*\Z",
    re.DOTALL,
)
r"""A choice with its letter, as competitions write it: `\textbf{(C)}\ 12`."""


def _ways_of_gold(gold: str) -> tuple[str, ...]:
    r"""Data sets write the right answer with its solution, boxed, or with the letter of its choice."""
    gold = _without_box(gold)
    if match := _LABELLED.match(gold):
        return match["rest"], match["letter"], f"({match['letter']}) {match['rest']}"
    return (gold,)


def _without_box(gold: str) -> str:
    r"""Data sets write the right answer with its solution, or boxed: `… so it is \boxed{5}.`"""
    if "\\boxed" not in gold and "\\fbox" not in gold:
        return gold
    answer = marked_answer(gold)
    if isinstance(answer, NoAnswer):
        raise _unreadable_gold(gold, answer.value)
    return answer.text


def _unreadable_gold(text: str, why: str) -> RewardError:
    return RewardError(
        f"The math grader cannot read the task field `answer`, which is {text!r:.300}: {why}. "
        "Mend the row, or grade it with the `exact` grader."
    )


def _asks_for_percent(question: Any) -> bool:
    return isinstance(question, str) and _PERCENT_QUESTION.search(question) is not None


def _without_percent(text: str) -> str:
    return re.sub(r"\s*(?:\\?%|\\text\{\s*percent\s*\}|percent\b)", "", text)


def _has_words(value: Value) -> bool:
    return isinstance(value, Words) or (isinstance(value, Several) and any(map(_has_words, value.items)))


def _has_formula(value: Value) -> bool:
    if isinstance(value, Scalar):
        return value.value is None and r"\infty" not in value.text
    if isinstance(value, Several):
        return any(map(_has_formula, value.items))
    return isinstance(value, Equation | SolutionFamily)


def _verdict(is_same: Any) -> str:
    if not isinstance(is_same, bool):
        raise RewardError(f"The math worker said {is_same!r:.100}; it must say True or False.")
    return "equal" if is_same else "different"


def _was_starved(reply: WorkerReply) -> bool:
    return reply.cpu_s is not None and reply.cpu_s < STARVED_CPU_S
