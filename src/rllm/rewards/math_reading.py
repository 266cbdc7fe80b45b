r"""An answer as it is written ──► what it is: a number, a formula, words, or several of these.

    r"\left[1, \tfrac{3}{2}\right)"  ──► Several("[)", 1, 3/2)
    r"x = \pm\sqrt{2}"               ──► Several("", \sqrt{2}, -\sqrt{2})    a bare list: in any order
    r"5\text{ cm}^2", r"50\%"        ──► Scalar(5, unit="centimeter^2"), Scalar(1/2)
    r"1 \le x < 2"                   ──► Several("[)", 1, 2)
    r"\text{east}"                   ──► Words("east")

Nothing is computed here but arithmetic on plain numbers.
"""

import re
from dataclasses import replace
from fractions import Fraction

from rllm.rewards.math_arithmetic import MAX_NESTING, NoValue, arithmetic_value
from rllm.rewards.math_families import read_family
from rllm.rewards.math_tidy import bracket_end, tidy
from rllm.rewards.math_units import without_unit
from rllm.rewards.math_values import (
    EMPTY_SET,
    INFINITY,
    MINUS_INFINITY,
    WITHOUT,
    Equation,
    Scalar,
    Several,
    SolutionFamily,
    Value,
    Words,
    multiply,
)
from rllm.rewards.number_words import number_in_words

MAX_CHARS = 1_000
MAX_ITEMS = 64
MAX_EXPONENT = 10_000
"""The exponent of a formula with unknowns."""


class UnreadableError(Exception):
    """A text that is no answer; the message says why."""


_NO_SOLUTION = re.compile(r"(?:thereis|thereare)?no(?:real)?solutions?(?:exists?)?\Z|(?:the)?emptyset\Z")
_INFINITE = re.compile(r"([+-]?)\s*\\infty\Z")
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\Z")
_SCALED = re.compile(
    r"(?P<factor>[^,;=<>]*[^,;=<>\s({])\s*(?P<rest>\\begin\{[pbB]?matrix\}.*|\([^()]*,.*\))\Z"
)
_NAME_OF_FUNCTION = re.compile(r"(?:[A-Za-z]|\\(?!frac|sqrt|pi)[a-zA-Z]+)\s*\Z|[a-zA-Z](?<!pi)\Z")
"""The end of what may be a function of several arguments, and no factor."""
_TIMES_SIGN = re.compile(r"\s*\\(?:cdot|times)\s*\Z")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
_POSITIVE_REALS = re.compile(
    r"\\mathbb\s*\{?\s*R\s*\}?\s*(?:\^\s*\{?\s*\+\s*\}?|_\s*\{?\s*(?:\+|>\s*0)\s*\}?)\Z"
)
_COLON = re.compile(":")
_TIME_OF_DAY = re.compile(
    r"(?P<hour>[0-9]{1,2}):(?P<minute>[0-5][0-9])\s*(?:(?:\\text\{)?\s*(?P<half>[ap]m)\}?)?\Z", re.IGNORECASE
)
_LONE_NAME = re.compile(
    r"(?:\\[a-zA-Z]+|[A-Za-z])(?:_(?:[A-Za-z0-9]|\{[A-Za-z0-9]+\}))?'?(?:\^\{-1\})?"
    r"\s*(?:\([A-Za-z](?:,[A-Za-z])*\))?\Z"
)
_BARRED_NAME = re.compile(r"\|\s*[A-Za-z]\s*\|\Z")
_NAMES = re.compile(r"\([A-Za-z](?:,\s*[A-Za-z])+\)\Z")
_RELATION = re.compile(r"\\(?:leq|le|geq|ge|leqslant|geqslant|lt|gt|neq|ne|in)(?![a-zA-Z])|<=|>=|!=|[<>=]")
_SIGN_OF = {
    **dict.fromkeys((r"\le", r"\leq", r"\leqslant", "<="), "<="),
    **dict.fromkeys((r"\ge", r"\geq", r"\geqslant", ">="), ">="),
    **dict.fromkeys((r"\lt", "<"), "<"),
    **dict.fromkeys((r"\gt", ">"), ">"),
    "=": "=",
    r"\in": "in",
    **dict.fromkeys((r"\ne", r"\neq", "!="), "!="),
}
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_MINUS = re.compile(r"\\(?:setminus|backslash|smallsetminus)(?![a-zA-Z])|(?<=\})\s*-\s*(?=\\\{)")
_SUCH_THAT = re.compile(
    r"\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?:\\mid|\||:)(?P<rest>.+)\\\}\Z"
)
_SEPARATOR = re.compile(r"[,;]\s*(?:(?:and|or)(?![a-zA-Z]))?|(?<![a-zA-Z\\{])(?:and|or)(?![a-zA-Z}])")
_WORD = re.compile(r"(?<![a-zA-Z\\])[A-Za-z]{3,}")
_NUMBERS_APART = re.compile(r"(?<![_0-9.])[0-9.]+\s+[0-9.]")
_MIXED_NUMBER = re.compile(r"[0-9]+ +[0-9]+/[0-9]+")
_ODD_SIGNS = re.compile(r"'|(?<!log)[0-9)\]]\s*_|\.\.")
"""Primes, indices of numbers, dots that go on: readers of LaTeX leave them out, and change what is said."""
_LOGIC = re.compile(
    r"\\(?:to|(?:left|right|leftright)arrow|(?:Left|Right|Leftright)arrow|implies|iff|land|lor|lnot|neg|wedge"
    r"|vee|forall|exists|oplus)(?![a-zA-Z])"
)
"""Statements of logic, which are compared as they are written."""
_BASE_NUMBER = re.compile(r"-?[0-9A-Fa-f]+_\{?[0-9]+\}?\Z")
_FORMULA_CHARACTERS = re.compile(r"[0-9A-Za-z\\{}()\[\]+\-*/^_!%|.,'=& ]*\Z")
_QUOTED = re.compile(r"\\(?:text|textrm|textit|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_ANGLE_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)")
_MATES = {"}": "{", r"\}": r"\{", ")": "(", "]": "("}


def read(text: str) -> Value:
    """Read an answer. Raises UnreadableError for a text that is empty, too long, too deep, or not
    balanced."""
    if len(text) > MAX_CHARS:
        raise UnreadableError(f"longer than {MAX_CHARS} characters")
    tidy_text = tidy(text)
    if not tidy_text:
        raise UnreadableError("empty")
    if (why := _imbalance(tidy_text)) and _WORD.search(tidy_text) is None:
        raise UnreadableError(why)
    return Words(text=plain_words(text)) if why else _family(tidy_text) or _value(tidy_text, text)


def _family(text: str) -> SolutionFamily | None:
    family = read_family(text)
    if family is None:
        return None
    body, letter, is_declared = family
    value = _value(_DEGREE.sub(r"\\cdot\\frac{\\pi}{180}", body))
    members = value.items if isinstance(value, Several) and value.brackets in ("", "{}") else (value,)
    scalars = tuple(replace(member, name="") for member in members if isinstance(member, Scalar))
    if len(scalars) != len(members):
        return None
    return SolutionFamily(members=scalars, letter=letter, is_declared=is_declared)


def plain_words(text: str) -> str:
    """Text for comparison: no case, no blanks, no full stop, no quotation marks."""
    text = _QUOTED.sub(r"\1", text.replace("$", " ").replace("{:}", ":"))
    return re.sub(r"[\s\"“”*]|\\[ ,;:!]", "", text.casefold()).strip(".,;:!'")


def _value(text: str, original: str = "") -> Value:
    """Value of a tidy text; `original` is what it was before."""
    text = _unwrap(text)
    if not text:
        raise UnreadableError("empty")
    if match := _MATRIX.match(text):
        return _matrix(match.group(2))
    if vector := _scaled_vector(text):
        return vector
    outer = _outer(text)
    if match := _SUCH_THAT.match(text):
        return _value(match["rest"].strip())
    if (parts := _split(text, outer, _MINUS)) and len(parts) == 2 and (rest := _without(*map(_value, parts))):
        return rest
    if parts := _split(text, outer, _UNION):
        return _joined_reals(_several("U", parts))
    if parts := _split(text, outer, _SEPARATOR):
        return _list_of(parts, [each.group() for each in _SEPARATOR.finditer(outer)])
    if inside := _inside_brackets(text):
        return inside
    if relations := [*_RELATION.finditer(outer)]:
        return _relation(text, relations)
    if ratio := _ratio(text, outer):
        return ratio
    if text.count(r"\pm") == 1:
        return _both_signs(text)
    return _scalar_or_words(text, original or text)


def _scalar_or_words(text: str, original: str) -> Value:
    if match := _INFINITE.match(text):
        return MINUS_INFINITY if match.group(1) == "-" else INFINITY
    if text in (r"\emptyset", r"\varnothing") or _NO_SOLUTION.match(plain_words(original)):
        return EMPTY_SET
    if _POSITIVE_REALS.match(text):
        return Several(brackets="()", items=(Scalar(text="0", value=Fraction(0)), INFINITY))
    if text in (r"\mathbb{R}", r"\R", r"\mathbb R"):
        return Several(brackets="()", items=(MINUS_INFINITY, INFINITY))
    bare, unit, times = without_unit(text)
    bare = _unwrap(bare)
    # The sign in `\sin 30^\circ` belongs to the argument and is no unit of the value.
    if unit.startswith("degree") and _ANGLE_FUNCTION.search(bare):
        bare, unit = text, ""
    if _is_words(bare):
        if word_number := number_in_words(_QUOTED.sub(r"\1", original)):
            return _scalar_or_words(" ".join(filter(None, word_number)), original="")
        is_in_base = _BASE_NUMBER.match(bare) is not None
        return Words(text=re.sub("[{}]", "", bare) if is_in_base else plain_words(original))
    value = arithmetic_value(bare)
    if value is NoValue.UNDEFINED:
        raise UnreadableError("a division by zero")
    if value is NoValue.TOO_LARGE:
        return Scalar(text=_without_blanks(bare), is_huge=True, unit=unit)
    if times != 1:
        # In the text as well, because a worker is given nothing else.
        bare = rf"{times}\cdot({bare})"
        value = None if value is None else value * times
    if value is None and _has_tower(bare):
        raise UnreadableError(f"an exponent above {MAX_EXPONENT}")
    return Scalar(text=_without_blanks(bare), value=value, unit=unit)


def _scaled_vector(text: str) -> Several | None:
    """A vector or matrix with a number before it, multiplied out."""
    match = _SCALED.match(text)
    if match is None:
        return None
    factor, rest = _TIMES_SIGN.sub("", match["factor"]), match["rest"]
    is_matrix = rest.startswith(r"\begin")
    if not is_matrix and (bracket_end(rest, 0) != len(rest) or _NAME_OF_FUNCTION.search(factor)):
        return None
    number, vector = _value("-1" if factor == "-" else factor), _value(rest)
    if not (isinstance(number, Scalar) and isinstance(vector, Several)):
        return None
    return _times(number, vector) if vector.brackets in ("()", "M") else None


def _times(number: Scalar, vector: Several) -> Several | None:
    items: list[Value] = []
    for item in vector.items:
        part = multiply(number, item) if isinstance(item, Scalar) else None
        if isinstance(item, Several):
            part = _times(number, item)
        if part is None:
            return None
        items.append(part)
    return replace(vector, items=tuple(items))


def _ratio(text: str, outer: str) -> Several | None:
    """`3:4`, and a time of day, whose half is the unit of its minutes."""
    if time := _TIME_OF_DAY.match(text):
        hour, minute = (Scalar(text=part, value=Fraction(part)) for part in (time["hour"], time["minute"]))
        return Several(brackets=":", items=(hour, replace(minute, unit=(time["half"] or "").lower())))
    parts = _split(text, outer, _COLON)
    if not 2 <= len(parts) <= 4 or not all(parts):
        return None
    items = [_value(part) for part in parts]
    numbers = tuple(item for item in items if isinstance(item, Scalar) and not item.unit)
    return Several(brackets=":", items=numbers) if len(numbers) == len(parts) else None


def _has_tower(formula: str) -> bool:
    """Whether it raises something to a number that is larger than those of any answer."""
    for match in re.finditer(r"\^(?=\{)", formula):
        end = bracket_end(formula, match.end())
        exponent = arithmetic_value(formula[match.end() : end])
        if exponent is NoValue.TOO_LARGE or (isinstance(exponent, Fraction) and abs(exponent) > MAX_EXPONENT):
            return True
    return False


def _is_words(text: str) -> bool:
    return (
        r"\text" in text
        or (_LOGIC.search(text) is not None and r"\lim" not in text)
        or _FORMULA_CHARACTERS.match(text) is None
        or _WORD.search(text) is not None
        or _ODD_SIGNS.search(text) is not None
        or _NUMBERS_APART.search(_MIXED_NUMBER.sub("1", text)) is not None
        or _BASE_NUMBER.match(text) is not None
    )


def _unwrap(text: str) -> str:
    """Without braces around the whole, which only group in LaTeX."""
    text = text.strip()
    while text.startswith("{") and bracket_end(text, 0) == len(text):
        text = text[1:-1].strip()
    return text


def _inside_brackets(text: str) -> Value | None:
    """A tuple, interval or set, or what stands in plain brackets."""
    is_set = text.startswith(r"\{")
    begin = 1 if is_set else 0
    if text[begin : begin + 1] not in ("(", "[", "{") or bracket_end(text, begin) != len(text):
        return None
    inside = text[begin + 1 : -2 if is_set else -1].strip()
    if is_set and not inside:
        return EMPTY_SET
    parts = _split(inside, _outer(inside), re.compile("[,;]"))
    if not parts:
        if not is_set and text[0] + text[-1] != "()":
            return None
        return _several("{}", [inside]) if is_set else _value(inside)
    return _several("{}" if is_set else text[0] + text[-1], parts)


def _several(brackets: str, parts: list[str]) -> Several:
    if len(parts) > MAX_ITEMS:
        raise UnreadableError(f"more than {MAX_ITEMS} items")
    if not all(parts):
        raise UnreadableError("an item is missing")
    items: list[Value] = []
    for part in parts:
        item = _value(part)
        if brackets in ("", "{}") and r"\pm" in part and isinstance(item, Several) and not item.brackets:
            items += item.items
        else:
            items.append(item)
    return Several(brackets=brackets, items=tuple(items))


def _list_of(parts: list[str], separators: list[str]) -> Several:
    """A bare list; inequalities that are joined by "or" are the union of their intervals."""
    several = _several("", parts)
    if any("or" in each for each in separators) and all(_is_interval(each) for each in several.items):
        return _joined_reals(replace(several, brackets="U"))
    if all(isinstance(each, Several) and each.brackets == WITHOUT for each in several.items):
        return Several(
            brackets=WITHOUT,
            items=tuple(item for each in several.items for item in getattr(each, "items", ())),
        )
    first = several.items[0]
    if isinstance(first, Several) and first.brackets == WITHOUT:  # "x \\ne 2, 3"
        return replace(first, items=(*first.items, *several.items[1:]))
    names = [item.name for item in several.items if isinstance(item, Scalar) and item.name]
    if len(set(names)) == len(several.items):  # "y = 2, x = 1" is what "x = 1, y = 2" is
        return replace(
            several, items=tuple(sorted(several.items, key=lambda item: getattr(item, "name", "")))
        )
    return several


def _without(whole: Value, part: Value) -> Several | None:
    """An interval without some points: all real numbers but those, or what is left of it in pieces."""
    if not (_is_interval(whole) and isinstance(whole, Several)):
        return None
    points = _points(part)
    begin, end = whole.items
    if (begin, end) == (MINUS_INFINITY, INFINITY):
        return Several(brackets=WITHOUT, items=points)
    numbers = sorted({each.value for each in points if isinstance(each, Scalar) and each.value is not None})
    if len(numbers) != len(points):
        return None
    pieces: list[Several] = []
    opening, closing = whole.brackets
    lowest, highest = (getattr(each, "value", None) for each in whole.items)
    for number in numbers:
        if number == lowest:
            opening = "("
        elif number == highest:
            closing = ")"
        if (lowest is not None and number <= lowest) or (highest is not None and number >= highest):
            continue  # nothing of the interval is on its other side
        pieces.append(Several(brackets=f"{opening})", items=(begin, Scalar(text=str(number), value=number))))
        opening, begin = "(", Scalar(text=str(number), value=number)
    pieces.append(Several(brackets=f"{opening}{closing}", items=(begin, end)))
    return Several(brackets="U", items=tuple(pieces)) if len(pieces) > 1 else pieces[0]


def _points(value: Value) -> tuple[Value, ...]:
    return value.items if isinstance(value, Several) and value.brackets in ("{}", "") else (value,)


def _joined_reals(union: Several) -> Several:
    """Open intervals that leave out single points of the line are all real numbers but those."""
    if not all(
        isinstance(each, Several) and each.brackets == "()" and len(each.items) == 2 for each in union.items
    ):
        return union
    # Followed from end to begin, whatever order the pieces are written in.
    next_of = {item.items[0]: item.items[1] for item in union.items if isinstance(item, Several)}
    points: list[Value] = []
    end = next_of.pop(MINUS_INFINITY, None)
    while end is not None and end != INFINITY:
        points.append(end)
        end = next_of.pop(end, None)
    return Several(brackets=WITHOUT, items=tuple(points)) if end == INFINITY and not next_of else union


def _is_interval(value: Value) -> bool:
    return isinstance(value, Several) and value.brackets in ("()", "[)", "(]", "[]") and len(value.items) == 2


def _both_signs(text: str) -> Several:
    upper = _value(text.replace(r"\pm", "+").replace(r"\mp", "-"))
    lower = _value(text.replace(r"\pm", "-").replace(r"\mp", "+"))
    items = [
        item
        for each in (upper, lower)
        for item in (each.items if isinstance(each, Several) and not each.brackets else (each,))
    ]
    return Several(brackets="", items=tuple(items))


def _matrix(inside: str) -> Several:
    rows = [row for row in re.split(r"\\\\", inside) if row.strip()]
    if not rows:
        raise UnreadableError("an empty matrix")
    return Several(brackets="M", items=tuple(_several("M", row.split("&")) for row in rows))


def _relation(text: str, relations: list[re.Match[str]]) -> Value:
    """The value beside signs of equality or order."""
    ends = [0, *(each.end() for each in relations)]
    begins = [*(each.start() for each in relations), len(text)]
    sides = [text[end:begin].strip() for end, begin in zip(ends, begins, strict=True)]
    signs = [_SIGN_OF.get(each.group(), "?") for each in relations]
    if not all(sides):
        raise UnreadableError("a side is missing")
    if signs == ["in"] and _LONE_NAME.match(sides[0]):
        return _value(sides[1])
    if set(signs) == {"="}:
        return _equation(sides)
    if signs == ["!="] and _LONE_NAME.match(sides[0]):
        return Several(brackets=WITHOUT, items=_points(_value(sides[1])))
    return _absolute(sides, signs) or _interval(sides, signs) or Words(text=plain_words(text))


def _equation(sides: list[str]) -> Value:
    if len(sides) == 2 and _LONE_NAME.match(sides[1]) and not _LONE_NAME.match(sides[0]):
        sides.reverse()
    if len(sides) == 2 and _NAMES.match(sides[0]):
        return _value(sides[1])
    if _LONE_NAME.match(sides[0]) and not (len(sides) == 2 and _is_lone_letter(sides[1])):
        name = _without_blanks(sides[0])
        rest = [_value(side) for side in sides[1:]]
        if len(rest) == 1:
            return replace(rest[0], name=name) if isinstance(rest[0], Scalar) else rest[0]
        return Several(brackets="=", items=tuple(rest))
    values = [_value(side) for side in sides]
    scalars = [each for each in values if isinstance(each, Scalar)]
    if len(scalars) == 2 == len(values):
        return Equation(left=scalars[0], right=scalars[1])
    return Several(brackets="=", items=tuple(values))


def _is_lone_letter(text: str) -> bool:
    return _LONE_NAME.match(text) is not None and r"\infty" not in text and r"\pi" not in text and text != "e"


def _absolute(sides: list[str], signs: list[str]) -> Several | None:
    """`|x| < 2` as the interval, and `|x| > 2` as the two, that they mean."""
    if len(sides) != 2 or signs[0] not in _TURNED or _BARRED_NAME.match(sides[0]) is None:
        return None
    end = _value(sides[1])
    if not isinstance(end, Scalar) or end.value is None or end.value <= 0:
        return None
    begin = Scalar(text=f"-{end.text}", value=-end.value)
    opening, closing = ("[", "]") if "=" in signs[0] else ("(", ")")
    if signs[0][0] == "<":
        return Several(brackets=opening + closing, items=(begin, end))
    left = Several(brackets=f"({closing}", items=(MINUS_INFINITY, begin))
    return Several(brackets="U", items=(left, Several(brackets=f"{opening})", items=(end, INFINITY))))


def _interval(sides: list[str], signs: list[str]) -> Several | None:
    """`x > 1`, `1 < x` and `1 \\le x < 2` as the intervals that they mean; None for anything else."""
    if any(sign not in _TURNED for sign in signs):
        return None
    if len(sides) == 2:
        if _LONE_NAME.match(sides[1]) and not _LONE_NAME.match(sides[0]):
            sides, signs = sides[::-1], [_TURNED[signs[0]]]
        if not _LONE_NAME.match(sides[0]):
            return None
        end = _value(sides[1])
        if signs[0][0] == ">":
            return Several(brackets=("[" if "=" in signs[0] else "(") + ")", items=(end, INFINITY))
        return Several(brackets="(" + ("]" if "=" in signs[0] else ")"), items=(MINUS_INFINITY, end))
    if len(sides) != 3 or not _LONE_NAME.match(sides[1]) or signs[0][0] != signs[1][0]:
        return None
    if signs[0][0] == ">":
        sides, signs = sides[::-1], [_TURNED[sign] for sign in signs[::-1]]
    brackets = ("[" if "=" in signs[0] else "(") + ("]" if "=" in signs[1] else ")")
    return Several(brackets=brackets, items=(_value(sides[0]), _value(sides[2])))


def _split(text: str, outer: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between separators that stand in no bracket; none where there is no separator."""
    separators = [*separator.finditer(outer)]
    if not separators:
        return []
    ends = [0, *(each.end() for each in separators)]
    begins = [*(each.start() for each in separators), len(text)]
    return [text[end:begin].strip() for end, begin in zip(ends, begins, strict=True)]


def _outer(text: str) -> str:
    """The text with a NUL for each character that stands in brackets."""
    depth = 0
    characters: list[str] = []
    for character in text:
        depth -= character in ")]}"
        # NUL fits no separator or sign, and all places stay the same as in the text.
        characters.append(character if depth <= 0 else "\0")
        depth += character in "([{"
    return "".join(characters)


def _imbalance(text: str) -> str:
    """The fault of unpaired brackets, or ""; round and square ones pair with each other, as in intervals."""
    open_brackets: list[str] = []
    for match in re.finditer(r"\\[{}]|\\\\|[(){}\[\]]", text):
        bracket = match.group()
        if bracket in ("(", "[", "{", r"\{"):
            open_brackets.append("(" if bracket == "[" else bracket)
            if len(open_brackets) > MAX_NESTING:
                return f"nested more than {MAX_NESTING} deep"
        elif bracket in _MATES and (not open_brackets or open_brackets.pop() != _MATES[bracket]):
            return f"`{bracket}` closes nothing"
    return f"`{open_brackets[-1]}` is never closed" if open_brackets else ""


def _without_blanks(text: str) -> str:
    r"""Blanks that separate nothing are taken out; `\pi r` keeps its own."""
    return re.sub(r"(?<![a-zA-Z0-9]) | (?![a-zA-Z0-9])", "", text)
