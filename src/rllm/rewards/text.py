"""Is a text the one that was asked for, or how much of it is there?

    answer ──► marked answer, or all of the final text ──► beside each right answer ──► the best score
                                                            exact | token F1 | ROUGE-1, -2, -L

Each formula is a pure function of two texts. The right answers are the task's `answer` or `answers`.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rllm.errors import ConfigError, choices_of
from rllm.rewards.extraction import Mark, NoAnswer, Reading, final_text
from rllm.rewards.grade import Grade, gold_texts, require_answer, wrong
from rllm.rewards.readings import (
    AnswerForm,
    as_read,
    marked_statement,
    require_reading,
    stated_answer,
    unread,
)
from rllm.rewards.stated_numbers import (
    StatedBefore,
    answered_equation,
    is_plain_number,
    only_number,
    result_of_equation,
)

MAX_TEXT_CHARS = 50_000
"""The length of an answer; a longer one is wrong unread."""
MAX_TOKENS = 4_000
"""That ROUGE-L compares with each other: its work grows with the product of both lengths."""
_ARTICLES = frozenset({"a", "an", "the"})
_PUNCTUATION = str.maketrans("", "", string.punctuation + "“”„‘’«»…、。，！？")
_ONE_WAY = str.maketrans(dict.fromkeys("−–‒—", "-"))
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))|(?<=[0-9])\s+(?=%)")
_DIGIT = re.compile("[0-9]")
_NUMBER = re.compile(
    r"(?<![a-z0-9])-?(?:\$(?=[0-9.]))?\.?[0-9](?:[0-9.:/-]*[0-9])?|[0-9](?:[0-9.:/-]*[0-9])?"
)
_DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")
_SYMBOL = re.compile(r"(?<=[a-z])(\+\+?|#)[.,;:!?)\"'*]*\Z")
"""The signs at the end of names: C++, C#, A+."""
_NO_ROUGE_TOKEN = re.compile(r"[^a-z0-9]+")
_DAY_FIRST = re.compile(
    r"\b(?:the )?(\d{1,2})(?:st|nd|rd|th)?(?: of)? (January|February|March|April|May|June|July|August|"
    r"September|October|November|December),? (\d{4})\b",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|emph)\s*\{([^{}]*)\}")
_CONNECTS = re.compile(
    r"(?<![a-z])(?:it[’']s|is|are|was|were|be|by|in|at|on|from|to|of|as|called|named|equals|:)\s+(?:indeed\s+)?",
    re.IGNORECASE,
)
_SUBJECT = re.compile(r"(.{1,80}?)\s+(?:is|are|was|were)\s+(?:the|a|an|who|what|where)\b", re.IGNORECASE)
_WHO = re.compile(r"\bwho(\s[^?]{3,200})\?", re.IGNORECASE)
_VERDICT = re.compile(r"(yes|no|true|false)\s*[,.;:!—–-]", re.IGNORECASE)
"""The first word of a sentence that goes on to repeat it: "Yes, it is"."""
_FINISHED = re.compile(r"[.!。)\]*\"”'`$]\Z")
"""The end of a text that was not cut in the middle of a sentence."""
_ABOUT_A_NUMBER = re.compile(r"-?[0-9.,]+ (?:is|was) an? (?!good|right|correct)")
"""The begin of "12 is a classic example", which states no number."""
_SEVERAL = re.compile(r"\n|[.!?]\s")
"""The end of a sentence that another follows."""
_FIRST_VERDICT = re.compile(r"(?:of course,? )?(yes|no|true|false)\s*[,.;:!—–-]", re.IGNORECASE)
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_MAX_STATED_WORDS = 12
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")


def squad_normalised(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks (Rajpurkar et al. 2016, evaluate-v1.1).

    That was made for words. What changes a number or a symbol stays: -5, 1.5, 50%, C++ and 12:30 are not
    5, 15, 50, C and 1230. 1,000 is 1000, and 1.50 is 1.5.
    """
    plain = _THOUSANDS.sub("", unicodedata.normalize("NFKC", text).translate(_ONE_WAY).lower())
    words = [word for word in map(_plain_word, plain.split()) if word]
    # An answer that is nothing but an article, such as the choice "A", stays.
    return " ".join(word for word in words if word not in _ARTICLES) or " ".join(words)


def _plain_word(word: str) -> str:
    if _DIGIT.search(word) is None:
        symbol = _SYMBOL.search(word)
        return word.translate(_PUNCTUATION) + (symbol[1] if symbol else "")
    number = _NUMBER.search(word)
    if number is None:
        return word.translate(_PUNCTUATION)
    before, inside, after = word[: number.start()], number.group(), word[number.end() :]
    if "." in inside and inside.count(".") == 1 and _DECIMAL.fullmatch(inside):
        inside = inside.rstrip("0").rstrip(".")
    sign = "%" if after.startswith("%") else "+" if after.startswith("+") else ""
    return before.translate(_PUNCTUATION) + inside + sign + after.translate(_PUNCTUATION)


def exact_match(answer: str, gold: str) -> float:
    """1 where both are the same after `squad_normalised`, else 0. Of nothing but punctuation: as written."""
    ours, theirs = squad_normalised(answer), squad_normalised(gold)
    return float(ours == theirs if ours or theirs else answer.strip() == gold.strip())


def token_f1(answer: str, gold: str) -> float:
    """2PR / (P + R) over the bags of tokens (Rajpurkar et al. 2016); where one is empty, the exact match."""
    ours, theirs = squad_normalised(answer).split(), squad_normalised(gold).split()
    if not ours or not theirs:
        return exact_match(answer, gold)
    return _f1(_num_shared(Counter(ours), Counter(theirs)), len(ours), len(theirs))


def rouge(answer: str, gold: str, kind: str = "rougeL") -> float:
    """The F-measure of ROUGE-1, ROUGE-2 or ROUGE-L (Lin 2004), as the rouge-score package computes it.

    Tokens are runs of a-z and 0-9 after lower-casing, not stemmed: texts in other scripts have none, and 0.
    """
    ours, theirs = rouge_tokens(answer), rouge_tokens(gold)
    if kind == "rougeL":
        return _f1(_longest_common(ours, theirs), len(ours), len(theirs))
    size = {"rouge1": 1, "rouge2": 2}[kind]
    ours_grams, theirs_grams = _grams(ours, size), _grams(theirs, size)
    num_shared = _num_shared(ours_grams, theirs_grams)
    return _f1(num_shared, max(ours_grams.total(), 1), max(theirs_grams.total(), 1))


def rouge_tokens(text: str) -> list[str]:
    return _NO_ROUGE_TOKEN.sub(" ", text.lower()).split()[:MAX_TOKENS]


class TextGrader:
    """A `Grader` that pays the best score of a marked answer, or of all of the final text, over the golds.

    `correct_from`: the score from which an answer counts as correct.
    """

    task_fields = ("answer|answers",)

    def __init__(
        self,
        name: str,
        score: Callable[[str, str], float],
        *,
        correct_from: float,
        reading: str,
        thinks_first: bool,
    ) -> None:
        if not 0.0 < correct_from <= 1.0:
            raise ConfigError(f"`correct_from` is {correct_from}; it must be above 0 and at most 1.")
        self.name = name
        self.score = score
        self.correct_from = correct_from
        self.reading = require_reading(reading)
        self.thinks_first = thinks_first

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row without a right answer."""
        require_answer(answer, self.name)
        golds = gold_texts(task, self.name)
        statement = marked_statement(answer, thinks_first=self.thinks_first, max_chars=MAX_TEXT_CHARS)
        if isinstance(statement, NoAnswer):
            return unread(statement)
        return as_read(self.grade_text(statement.texts[0], golds), statement, self.reading)

    def grade_text(self, text: str, golds: Sequence[str]) -> Grade:
        scores = [self.score(text, gold) for gold in golds]
        best = max(scores)
        return Grade(
            score=best,
            is_correct=best >= self.correct_from,
            extracted=text,
            reason="equal" if best == 1.0 else "different" if best == 0.0 else "similar",
            metadata={"gold": golds[scores.index(best)]},
        )

    def close(self) -> None:
        """Nothing is held."""


class ExactGrader(TextGrader):
    """1 for the same words, whatever their case, punctuation and articles; `normalised=False`: as written."""

    def __init__(
        self, *, normalised: bool = True, reading: str = Reading.STRICT, thinks_first: bool = False
    ) -> None:
        score = exact_match if normalised else _as_written
        super().__init__("exact", score, correct_from=1.0, reading=reading, thinks_first=thinks_first)

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row without a right answer."""
        require_answer(answer, self.name)
        golds, question = gold_texts(task, self.name), str(task.get("question", ""))
        most_words = max(_MAX_STATED_WORDS, *(2 * len(gold.split()) for gold in golds))
        form = AnswerForm(is_answer=lambda text: 0 < len(text.split()) <= most_words)
        statement = stated_answer(answer, form, thinks_first=self.thinks_first)
        if isinstance(statement, NoAnswer):
            return unread(statement)
        if (
            statement.mark is Mark.WHOLE
            and statement.texts[0].endswith("?")
            and not any(each.endswith("?") for each in golds)
        ):
            return unread(NoAnswer.UNDECIDED)
        is_numeric = self.score is exact_match and any(map(is_plain_number, golds))
        if is_numeric:
            statement = replace(
                statement,
                texts=_with_results(statement.texts),
                restatements=tuple(map(_with_results, statement.restatements)),
            )
        grade, reading = self._best(statement.texts, golds), statement.reading
        if not grade.is_correct and self.score is exact_match:
            in_order = self._best([_month_first(each) for each in statement.texts], _all_month_first(golds))
            if in_order.is_correct:
                grade, golds, reading = in_order, _all_month_first(golds), Reading.LENIENT
                statement = replace(
                    statement, restatements=tuple(map(_all_month_first, statement.restatements))
                )
        text = final_text(answer, thinks_first=self.thinks_first) or ""
        if statement.mark is Mark.WHOLE and not grade.is_correct and statement.alternative is not None:
            statement = statement.alternative
            texts = _in_sentence(statement.texts, question)
            if is_numeric and _FINISHED.search(text):
                texts = (*_with_results(texts), only_number(statement.texts[-1], question) or texts[-1])
            if is_numeric and _ABOUT_A_NUMBER.match(statement.texts[-1]):
                return unread(NoAnswer.NOT_MARKED)
            is_all = is_numeric and _SEVERAL.search(text) is None
            grade, reading = self._best(texts, golds), Reading.STRICT if is_all else statement.reading
        if statement.mark in (Mark.WHOLE, Mark.PROSE):
            elsewhere = answered_equation(text, question) if is_numeric else _verdict_first(text)
            if elsewhere is not None:
                stated_grade = self._best((elsewhere.text,), golds)
                if not grade.is_correct or (stated_grade.is_correct and elsewhere.reading is Reading.STRICT):
                    grade, reading = stated_grade, elsewhere.reading
                    statement = replace(statement, mark=Mark.EARLIER, texts=(elsewhere.text,))
        is_restated = all(self._best(texts, golds).is_correct for texts in statement.restatements)
        if grade.is_correct and not is_restated:
            grade = wrong("different", grade.extracted)
        return as_read(grade, replace(statement, reading=reading), self.reading)

    def _best(self, texts: Sequence[str], golds: Sequence[str]) -> Grade:
        """The best grade of the ways to read one statement; a number goes with its unit."""
        ways = [_QUOTED.sub(r"\1", text).replace(r"\ ", " ").strip(" $") for text in texts]
        if len(ways) > 1 and ways[1][-1:] in "0123456789%" and ways[0].startswith(ways[1]):
            ways = [ways[0], *ways[2:]]
        return max((self.grade_text(way, golds) for way in ways), key=lambda grade: grade.score)


def _with_results(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return ways to read a statement, those that are equations also by their last side."""
    return (*texts, *filter(None, map(result_of_equation, texts)))


def _verdict_first(text: str) -> StatedBefore | None:
    """Return the yes or no that a text begins with; None where it says the opposite as well."""
    verdict = _FIRST_VERDICT.match(text)
    if verdict is None:
        return None
    opposite = _OPPOSITES[verdict[1].lower()]
    if re.search(rf"\b{opposite}\b", text, re.IGNORECASE):
        return None
    return StatedBefore(text=verdict[1], reading=Reading.LENIENT)


def _month_first(text: str) -> str:
    """A date as "July 20, 1969", where it is "20 July 1969" or "the 20th of July, 1969"."""
    return _DAY_FIRST.sub(r"\2 \1, \3", text)


def _all_month_first(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_month_first, texts))


def _in_sentence(texts: tuple[str, ...], question: str) -> tuple[str, ...]:
    """The predicate of a sentence, and its subject: "Rome is the capital", "… was made by Eve".

    Where the question is who made it, also "Eve made it".
    """
    sentence = texts[-1][:400]
    rests = [sentence[match.end() :] for match in _CONNECTS.finditer(sentence)]
    if subject := _SUBJECT.match(sentence):
        rests.append(subject[1])
    if verdict := _VERDICT.match(sentence):
        rests.append(verdict[1])
    rests += [sentence[: -len(who[1])] for who in _WHO.finditer(question) if sentence.endswith(who[1])]
    return (*texts, *rests)


class F1Grader(TextGrader):
    """SQuAD's token F1."""

    def __init__(
        self, *, correct_from: float = 1.0, reading: str = Reading.STRICT, thinks_first: bool = False
    ) -> None:
        super().__init__(
            "f1", token_f1, correct_from=correct_from, reading=reading, thinks_first=thinks_first
        )


class RougeGrader(TextGrader):
    """ROUGE-1, ROUGE-2 or ROUGE-L."""

    def __init__(
        self,
        *,
        kind: str = "rougeL",
        correct_from: float = 1.0,
        reading: str = Reading.STRICT,
        thinks_first: bool = False,
    ) -> None:
        if kind not in ROUGE_KINDS:
            raise ConfigError(f"`kind` is {kind!r}; {choices_of(kind, ROUGE_KINDS)}.")

        def score(answer: str, gold: str) -> float:
            return rouge(answer, gold, kind)

        super().__init__(
            "rouge", score, correct_from=correct_from, reading=reading, thinks_first=thinks_first
        )


def _as_written(answer: str, gold: str) -> float:
    return float(answer.strip() == gold.strip())


def _f1(num_shared: int, num_ours: int, num_theirs: int) -> float:
    if not num_shared:
        return 0.0
    precision, recall = num_shared / num_ours, num_shared / num_theirs
    return 2 * precision * recall / (precision + recall)


def _num_shared(ours: Counter[Any], theirs: Counter[Any]) -> int:
    return (ours & theirs).total()


def _grams(tokens: list[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[place:] for place in range(size)), strict=False))


def _longest_common(ours: list[str], theirs: list[str]) -> int:
    """Length of the longest common subsequence, with a bit for each token of ours (Hyyrö 2004)."""
    masks: dict[str, int] = {}
    for place, token in enumerate(ours):
        masks[token] = masks.get(token, 0) | 1 << place
    ones = (1 << len(ours)) - 1
    row = ones
    for token in theirs:
        matches = row & masks.get(token, 0)
        row = ((row + matches) | (row - matches)) & ones
    return len(ours) - row.bit_count()
