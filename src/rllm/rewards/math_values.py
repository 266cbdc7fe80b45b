"""The values of mathematical answers: a number, a formula, words, or several of these."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(kw_only=True, slots=True, frozen=True)
class Words:
    """A value that is compared as text."""

    text: str
    """Without case, blanks and full stop."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Scalar:
    """A number or a formula."""

    text: str
    """Tidy LaTeX, without its unit."""
    value: Fraction | None = None
    """Exactly, where it is plain arithmetic."""
    is_huge: bool = False
    """A number larger than any that is computed here."""
    unit: str = ""
    name: str = ""
    """The name that it is equal to: `x` of "x = 5"."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Several:
    """Values together."""

    brackets: str
    """`()`, `[)` …; `{}` a set; `` a bare list; `U` a union; `M` a matrix of rows; `=` equal sides; `:` a
    ratio; WITHOUT all real numbers but these."""
    items: "tuple[Value, ...]"


@dataclass(kw_only=True, slots=True, frozen=True)
class Equation:
    """Two formulas that are said to be equal, neither of them a lone name."""

    left: Scalar
    right: Scalar


@dataclass(kw_only=True, slots=True, frozen=True)
class SolutionFamily:
    """Numbers that an integer counts, such as all multiples of π."""

    members: tuple[Scalar, ...]
    """Formulas in `letter`."""
    letter: str
    is_declared: bool
    """Whether it says that the letter stands for every integer."""


Value = Words | Scalar | Several | Equation | SolutionFamily

WITHOUT = "R\\"
EMPTY_SET = Several(brackets="{}", items=())
INFINITY, MINUS_INFINITY = Scalar(text=r"\infty"), Scalar(text=r"-\infty")


def multiply(one: Scalar, other: Scalar) -> Scalar:
    """Return the product; units and names are left out."""
    value = None if one.value is None or other.value is None else one.value * other.value
    return Scalar(text=rf"({one.text})\cdot({other.text})", value=value)


_DESCRIPTIONS = {
    "": "a list in any order",
    "{}": "a set",
    "U": "a union of intervals",
    "M": "a matrix or vector",
    "=": "equal sides",
    ":": "a ratio",
    "()": "a tuple or an open interval",
    WITHOUT: "all real numbers but some",
}


def describe_value(value: Value) -> str:
    """Return the kind of value that a text was read as, for people."""
    match value:
        case Words():
            return "words"
        case Scalar(value=None):
            description = "a formula"
        case Scalar():
            description = f"the number {value.value}"[:80]
        case Several():
            return _DESCRIPTIONS.get(value.brackets, "an interval")
        case Equation():
            return "an equation"
        case SolutionFamily():
            return f"numbers for every integer {value.letter}"
    return f"{description} in {value.unit}" if value.unit else description
