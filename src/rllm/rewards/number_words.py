"""Numbers that are written in words, or in the digits of another script.

"twenty-one marbles"  ──► number_in_words ──► ("21", "marbles")
"一百二十", "1千"       ──► number_in_words ──► ("120", ""), ("1000", "")
"٣٫٥"                 ──► plain_digits ──► "3.5"
"""

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    *("twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = {word: number for number, word in enumerate(_UNITS)} | {
    word: 10 * number for number, word in enumerate(_TENS, 2)
}
_LARGE = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {
    **dict.fromkeys(("half", "halves"), 2),
    **dict.fromkeys(("quarter", "quarters"), 4),
    **{
        f"{name}{plural}": number
        for number, name in enumerate(
            ("third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"), 3
        )
        for plural in ("", "s")
    },
}
_WORD = "|".join((*_SMALL, *_LARGE))
_RUN = re.compile(
    rf"(?<![\w-])(?:(?P<sign>minus|negative)\s+)?(?P<number>(?:{_WORD})(?:(?:\s+and\s+|[\s-]+)(?:{_WORD}))*)"
    rf"(?:[\s-]+(?P<part>{'|'.join(_PARTS)}))?"
    r"(?![\w-])(?!\s+(?:less|fewer|past|squared|cubed|as)\b)",
    re.IGNORECASE,
)
_NO_NOUN = f"to|of|and|or|a|an|the|by|from|in|per|over|out|point|than|{_WORD}"
_NOUN = re.compile(rf"\s+((?:(?!(?:{_NO_NOUN})(?![A-Za-z]))[A-Za-z]+(?: |\Z)){{1,3}})\Z", re.IGNORECASE)
_HAN_COUNTERS = "个個只隻本枚支张張人名次天元円岁歲块塊颗顆条條件匹つ"
_HAN = re.compile(
    rf"(?:一共|总共|共)?(?P<sign>[负負]?)(?P<number>[0-9.]*[零〇一二两兩三四五六七八九十百千万萬亿億]+)[{_HAN_COUNTERS}]?\Z"
)
_HAN_LARGE = frozenset("十百千万萬亿億")
_MARKS = str.maketrans({"٫": ".", "٬": ",", "،": ","})


def plain_digits(text: str) -> str:
    """Return the text with the digits of all scripts as 0 to 9, and Arabic separators as ours."""
    return "".join(
        character if character.isascii() or not character.isdecimal() else str(unicodedata.decimal(character))
        for character in text
    ).translate(_MARKS)


def number_in_words(text: str) -> tuple[str, str] | None:
    """Return the digits of a text that is one number in words, and the noun behind it; None for others."""
    text = text.strip(" .!。\n")
    if han := _HAN.match(text):
        value = _han_value(han["number"])
        return None if value is None else (f"{'-' if han['sign'] else ''}{value}", "")
    run = _RUN.match(text)
    if run is None:
        return None
    digits, rest = _run_digits(run), text[run.end() :]
    noun = _NOUN.match(rest)
    if digits is None or (rest and noun is None):
        return None
    return digits, noun[1] if noun else ""


def numbers_in_words(sentence: str) -> list[tuple[int, str]]:
    """Return (begin, digits) of all numbers in words of a sentence; "one" alone is an article as often."""
    runs = [run for run in _RUN.finditer(sentence) if run.group().lower() != "one"]
    return [(run.start(), digits) for run in runs if (digits := _run_digits(run)) is not None]


def _run_digits(run: re.Match[str]) -> str | None:
    words = [word for word in re.split(r"[\s-]+", run["number"].lower()) if word != "and"]
    value = _english_value(words)
    if value is None:
        return None
    number = Fraction(value, _PARTS[run["part"].lower()]) if run["part"] else Fraction(value)
    return f"{'-' if run['sign'] else ''}{number}"


def _english_value(words: Sequence[str]) -> int | None:
    """The value; None for words that make no one number, such as "two three"."""
    total = group = 0
    last = 0
    for word in words:
        if word in _SMALL:
            number = _SMALL[word]
            is_free = group == 0 or (last in (100, 1000, 10**6, 10**9, 10**12))
            is_unit_of_tens = 20 <= last <= 90 and 0 < number < 10
            if last and not (is_free or is_unit_of_tens):
                return None
            group, last = group + number, number
        elif word == "hundred":
            if not 0 < group < 100:
                return None
            group, last = group * 100, 100
        else:
            if not group:
                return None
            total, group, last = total + group * _LARGE[word], 0, _LARGE[word]
    return total + group


def _han_value(text: str) -> int | None:
    """The value of Chinese numerals, behind digits as well."""
    digits = re.match(r"[0-9.]*", text)
    leading = digits.group() if digits else ""
    rest = text[len(leading) :]
    if leading:
        value = Fraction(leading) if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", leading) else None
        if value is None or not set(rest) <= _HAN_LARGE:
            return None
        for character in rest:
            value *= int(unicodedata.numeric(character))
        return int(value) if value.denominator == 1 else None
    if not set(rest) & _HAN_LARGE:
        return int("".join(str(_han_digit(character)) for character in rest))
    total = section = number = 0
    for character in rest:
        digit = _han_digit(character)
        if digit < 10:
            number = digit
        elif digit < 10_000:
            section, number = section + (number or 1) * digit, 0
        else:
            total, section, number = (total + section + number) * digit, 0, 0
    return total + section + number


def _han_digit(character: str) -> int:
    return (
        0
        if character in "零〇"
        else int(unicodedata.numeric({"两": "二", "兩": "二"}.get(character, character)))
    )
