"""The number that a sentence or an equation states.

"So there are 13 shells.", where shells were asked for        ──► only_number ──► "13"
"57 - 32 = 25"                                                ──► result_of_equation ──► "25"
"57 - 32 = 25. Glad to help.", where 57 - 32 was asked for    ──► answered_equation ──► "25"
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rllm.rewards.extraction import Reading
from rllm.rewards.math_arithmetic import arithmetic_value
from rllm.rewards.phrases import is_doubtful, sentence_begin, takes_back

_NUMBER = re.compile(r"(?<![0-9A-Za-z.,/])-?[0-9][0-9.,/:]*")
_UNIT = re.compile(r"\s+([A-Za-z]+)")
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_OPERATOR = re.compile(r"[0-9)]\s*[-+*/^]\s*[-(0-9]")
_EQUATION = re.compile(
    r"(?P<left>[-(0-9][-+*/^().0-9 ]{1,200}?)\s*=\s*(?P<right>-?[0-9]+(?:\.[0-9]+)?)(?![0-9])"
)
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
_TIMES = re.compile(r"(?<=[0-9)])\s*x\s*(?=[0-9(])")


@dataclass(kw_only=True, slots=True, frozen=True)
class StatedBefore:
    """An answer that stands before the last sentence of a text."""

    text: str
    reading: Reading
    """The strictest that takes it."""


def only_number(sentence: str, question: str) -> str | None:
    """Return the number of a sentence that has one alone.

    A word behind it must be what the question counts.
    """
    numbers = [*_NUMBER.finditer(sentence)]
    if len(numbers) != 1:
        return None
    unit = _UNIT.match(sentence, numbers[0].end())
    is_counted = unit is None or re.search(rf"\bhow many {unit[1]}\b", question, re.IGNORECASE)
    return numbers[0].group().rstrip(".,:/") if is_counted else None


def is_plain_number(text: str) -> bool:
    """Return whether a text is digits, with a sign and decimals at most."""
    return _PLAIN.fullmatch(text.strip()) is not None


def result_of_equation(text: str) -> str | None:
    """Return the last side of `7 * 8 = 8 * 7 = 56`; None unless it is a number and all sides are worth it."""
    *terms, result = (side.strip() for side in _plain(text).split("="))
    if not terms or not is_plain_number(result):
        return None
    is_computed = all(_OPERATOR.search(term) and arithmetic_value(term) == Fraction(result) for term in terms)
    return result if is_computed else None


def answered_equation(text: str, question: str) -> StatedBefore | None:
    """Return the result of the last equation whose left side the question asks for.

    Read strictly where nothing or a new line follows it. None where the text gives several results, or has
    another number or a second thought behind it.
    """
    plain = _plain(text)
    bare_question = "".join(_plain(question).split())
    equations = [match for match in _EQUATION.finditer(plain) if _is_within(match["left"], bare_question)]
    results = {match["right"] for match in equations}
    if len(results) != 1:
        return None
    before, tail = plain[: equations[-1].start()], plain[equations[-1].end() :]
    is_open = is_doubtful(before[sentence_begin(before, len(before)) :])
    if is_open or takes_back(tail) or any(map(str.isdigit, tail)):
        return None
    result = result_of_equation(equations[-1].group())
    if result is None:
        return None
    is_apart = tail.lstrip(" .!*`$").startswith("\n") or not tail.strip(" .!*`$")
    return StatedBefore(text=result, reading=Reading.STRICT if is_apart else Reading.LENIENT)


def _plain(text: str) -> str:
    return _TIMES.sub(" * ", text.translate(_SIGNS)).replace("==", "=")


def _is_within(term: str, bare_question: str) -> bool:
    """Return whether a term with an operator stands in a question, and not as a part of a longer one."""
    bare = "".join(term.split())
    if _OPERATOR.search(bare) is None:
        return False
    return re.search(rf"(?<![-0-9.+*/^(]){re.escape(bare)}(?![-0-9+*/^)]|\.[0-9])", bare_question) is not None
