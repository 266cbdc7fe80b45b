r"""One way to write each thing: what only changes the looks of a formula is taken out.

    r"$\left(\dfrac12,\,1{,}000\right)$."  ──► r"(\frac{1}{2},1000)"
    "x² ≤ √(2)·π"                          ──► r"x^{2}\le \sqrt{2}\cdot \pi "

What comes out is LaTeX for a small reader: brackets are plain, fractions and roots have their braces,
thousands are joined, words stand in `\text{…}`.
"""

import re

from rllm.rewards.number_words import plain_digits

_BLANKS = "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\t\r\n"
_GREEK_NAMES = "pi theta alpha beta gamma delta lambda mu phi sigma omega epsilon"
_GREEK = dict(zip("πθαβγδλμφσωε", _GREEK_NAMES.split(), strict=True))
_COMMANDS = dict(
    zip("≤≥≠∈∪∩∞∅±∓", ("le", "ge", "ne", "in", "cup", "cap", "infty", "emptyset", "pm", "mp"), strict=True)
)
_FRACTIONS = {"½": "1/2", "¼": "1/4", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("−–‒—﹣－", "-"),
        **dict.fromkeys("×✕⨯", r"\times "),
        **dict.fromkeys("·⋅∙•", r"\cdot "),
        **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys(_BLANKS, " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", None),
        **dict.fromkeys("‘’´`", "'"),
        **{sign: rf"\{name} " for sign, name in _COMMANDS.items()},
        "°": r"^\circ ",
        "√": " sqrt",
        **dict(zip("％，（）．＝＋", "%,().=+", strict=True)),
        **{letter: rf"\{name} " for letter, name in _GREEK.items()},
        **{sign: rf" \frac{{{sign_text[0]}}}{{{sign_text[2]}}}" for sign, sign_text in _FRACTIONS.items()},
    }
)
_SUPERSCRIPTS = {sign: str(place) for place, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "-"}
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_LOOKS = re.compile(
    r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|quad|qquad|mathstrut)(?![a-zA-Z])"
    r"|(?<!\\)\\[,;:! ()\[\]]|~|(?<!\\)\$"
)
_EMPTY_DELIMITER = re.compile(r"\\(?:left|right)\s*\.")
_BRACKET_NAMES = re.compile(r"\\([lr])(brace|brack|vert|Vert|angle|paren)(?![a-zA-Z])")
_BRACKETS = {
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "lparen": "(",
    "rparen": ")",
    "langle": "(",
    "rangle": ")",
}
_JOINED = re.compile(r"(?<=[0-9])(?:\{,\}|\\!,|,\\!|\\,|\\ )\s*(?=[0-9]{3}(?![0-9]))")
_DECIMAL_COMMA = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_MODULUS = re.compile(
    r"\s*(?:\\pmod\s*\{?\s*[0-9]+\s*\}?"
    r"|\\text\{\s*\(\s*mod\s*\}\s*[0-9]+\s*\)|(?:\\text\{\s*)?\(\s*(?:\\bmod|mod)\s*[0-9]+\s*\)\}?)\s*\Z"
)
"""In brackets behind a remainder: which division it is of."""
_INTRODUCED = re.compile(r"\A\s*\\text(?:bf|rm)?\{[^{}]*\b(?:is|are|equals)\s*:?\s*\}(?=[^=]+\Z)")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9,])")
_WORDS = re.compile(
    r"\\(?:text|textrm|textit|textbf|textsf|mbox|mathrm|mathbf|mathit|mathsf|operatorname|emph)\*?\s*"
    r"\{([^{}]*)\}"
)
_FUNCTIONS = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc"),
    *("log", "ln", "exp", "gcd", "det"),
)
_NAMES = {
    **{name: rf"\{name} " for name in (*_FUNCTIONS, *_GREEK.values(), "sqrt", "pm")},
    **dict.fromkeys(("infinity", "Infinity", "infty", "inf", "oo"), r"\infty "),
}
_PLAIN_NAME = re.compile(
    rf"(?<![\\a-zA-Z{{])({'|'.join(sorted(_NAMES, key=len, reverse=True))})(?![a-zA-Z}}])"
)
_SEPARATORS = frozenset({"and", "or", ", and", ", or"})
_BARE_NUMBER = re.compile(r"[-+]?[0-9][0-9.,]*\Z")
_LETTER = re.compile(r"\(?([A-Za-z])\)?\Z")


_OPEN_OUTWARDS = re.compile(r"([\[\]])\s*+(?![,;])([^\[\],;]+[,;]\s*+[^\[\],;]+)([\[\]])")
"""An interval whose open ends are written as brackets that turn away from it."""
_SQUARE = re.compile(r"(?<![A-Za-z])sq\.\s*")
_HALF_OF_DAY = re.compile(r"(?<=[0-9])\s*([ap])\.?\s?m(?:\.|(?![A-Za-z]))(?!\s*[0-9])", re.IGNORECASE)
_CONSTANT = re.compile(
    r"\+\s*(?:c|C_\{?[01]\}?|\\text\{\s*(?:[Cc]|[Cc]onst(?:ant)?\.?)\s*\}|const(?:ant)?\.?)\s*\Z"
)
"""The constant of integration, under each of its names."""


def tidy(text: str) -> str:
    """The formula, written the one way."""
    text = plain_digits(text)
    text = _SUPERSCRIPT_RUN.sub(
        lambda run: f"^{{{''.join(map(_SUPERSCRIPTS.__getitem__, run.group()))}}}", text
    )
    text = text.translate(_CHARACTERS)
    text = _JOINED.sub("", text)
    text = _DECIMAL_COMMA.sub(".", text).replace("{:}", ":")
    text = _MODULUS.sub("", text)
    text = _INTRODUCED.sub("", text)
    # In brackets a comma parts items, so (1,000) may be two numbers.
    if not any(bracket in text for bracket in "([") and r"\{" not in text:
        text = _THOUSANDS.sub(lambda number: re.sub("[, ]", "", number.group()), text)
    text = _EMPTY_DELIMITER.sub("", text)
    text = _LOOKS.sub(" ", text)
    text = _OPEN_OUTWARDS.sub(_inwards, text)
    text = _BRACKET_NAMES.sub(lambda name: _BRACKETS.get(name.group(1) + name.group(2), "|"), text)
    text = _WORDS.sub(_word, text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = _SQUARE.sub("sq ", text)
    text = _HALF_OF_DAY.sub(r" \\text{\1m}", text)
    text = text.replace("**", "^")
    text = _PLAIN_NAME.sub(lambda name: _NAMES[name.group()], text)
    text = re.sub(r"(?<!\\)\*", r"\\cdot ", text)
    text = _with_braces(text)
    text = _PRIME.sub("'", text)
    text = _CONSTANT.sub("+C", text)
    text = " ".join(text.split())
    # Dots that stand for more are no full stop.
    return text if text.endswith("..") else text.removesuffix(".").strip()


def _inwards(interval: re.Match[str]) -> str:
    """`]0,1[` as `(0,1)`."""
    opening, inside, closing = interval.groups()
    if (opening, closing) == ("[", "]"):
        return interval.group()
    return f"{'(' if opening == ']' else '['}{inside}{')' if closing == '[' else ']'}"


def bracket_end(text: str, begin: int) -> int:
    """The place behind the bracket that closes the one at `begin`; -1 where it is never closed.

    Round and square brackets close each other, as those of intervals do.
    """
    depth = 0
    place = begin
    while place < len(text):
        character = text[place]
        if character == "\\" and text[place + 1 : place + 2] not in ("{", "}"):
            place += 1
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return place + 1
        place += 1
    return -1


def _word(match: re.Match[str]) -> str:
    word = " ".join(match.group(1).split())
    if word in _SEPARATORS:
        return f" {word} "
    if word in _NAMES:
        return rf"\{word} "
    if _BARE_NUMBER.match(word):
        return word
    if letter := _LETTER.match(word):
        is_unit = letter.group(1) in "msghL" and match.string[: match.start()].rstrip()[-1:].isdigit()
        return f" {letter.group(1)}" if is_unit else letter.group(1)
    return rf"\text{{{word}}}" if word else " "


def _with_braces(text: str) -> str:
    r"""`\frac12`, `\sqrt2`, `\sqrt(2)`, `x^10` and `2^(n+1)` with the braces that they stand for."""
    text = re.sub(r"\^\s*(-?[0-9]+)", r"^{\1}", text)
    # From the last to the first: a command is rewritten before one that
    # it is an argument of, and the places of those before it stay right.
    for match in reversed([*_TAKES_ARGUMENTS.finditer(text)]):
        text = text[: match.start()] + _command_with_braces(match.group(), text[match.end() :])
    return text


def _command_with_braces(command: str, rest: str) -> str:
    """A command and what follows it; unchanged where its arguments are not there."""
    place = 0
    head = command
    if command == r"\sqrt" and rest.lstrip().startswith("["):
        place = rest.index("]") + 1 if "]" in rest else 0
        head += rest[:place].strip()
    for _ in range(2 if command == r"\frac" else 1):
        match = _ARGUMENT.match(rest, place)
        if match is None:
            return command + rest
        argument, place = match.group(1), match.end()
        if argument in ("{", "("):
            begin = match.start(1)
            place = bracket_end(rest, begin)
            if place < 0 or (argument == "(" and command == r"\frac"):
                return command + rest
            argument = rest[begin + 1 : place - 1]
        elif command == r"\frac" and argument[0].isdigit():
            argument, place = argument[0], match.start(1) + 1
        head += f"{{{argument}}}"
    return head + rest[place:]


_PRIME = re.compile(r"\^?\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))")
_TAKES_ARGUMENTS = re.compile(r"\\(?:frac|sqrt)(?![a-zA-Z])|\^(?=\s*\()")
_ARGUMENT = re.compile(r"\s*(\{|\(|[0-9]+|[a-zA-Z]|\\[a-zA-Z]+)")
