r"""The units of numbers: `5\text{ cm}^2` is 5 in "cm^2".

A unit may be left out on either side; where both sides name one, it must be the same. Nothing is converted.
"""

import re
from fractions import Fraction

_NAMES = {
    "millimeter": "mm millimeters millimetre millimetres",
    "centimeter": "cm centimeters centimetre centimetres",
    "meter": "m meters metre metres",
    "kilometer": "km kilometers kilometre kilometres",
    "inch": "in inches",
    "foot": "ft feet",
    "yard": "yd yards",
    "mile": "mi miles",
    "unit": "units",
    "second": "s sec secs seconds",
    "minute": "min mins minutes",
    "hour": "h hr hrs hours",
    "am": "AM",
    "pm": "PM",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "yr yrs years",
    "milligram": "mg milligrams",
    "gram": "g grams",
    "kilogram": "kg kilograms",
    "pound": "lb lbs pounds",
    "ounce": "oz ounces",
    "ton": "tons",
    "liter": "l L liters litre litres",
    "milliliter": "ml mL milliliters millilitre millilitres",
    "gallon": "gal gallons",
    "degree": "degrees deg",
    "radian": "rad radians",
    "dollar": "dollars USD usd bucks buck",
    "cent": "cents",
    "euro": "euros EUR",
    "pound sterling": "GBP quid",
    "rupee": "rupees INR Rs Rs.",
    "yen": "JPY",
    "yuan": "CNY RMB renminbi",
    "peso": "pesos",
    "won": "KRW",
    "franc": "francs CHF",
    "volt": "V volts",
    "ampere": "amp amps amperes",
    "ohm": "ohms",
    "watt": "W watts",
    "kilowatt": "kW kilowatts",
    "joule": "J joules",
    "newton": "N newtons",
    "hertz": "Hz",
    "pascal": "Pa pascals",
    "mole": "mol moles",
    "mile per hour": "mph",
    "kilometer per hour": "kph kmh",
}
_UNIT_OF = {alias: unit for unit, aliases in _NAMES.items() for alias in (unit, *aliases.split())}
_KIND_OF = {
    name: kind
    for kind, names in {
        "length": "millimeter centimeter meter kilometer inch foot yard mile",
        "time": "second minute hour day week month year",
        "mass": "milligram gram kilogram pound ounce ton",
        "volume": "liter milliliter gallon",
    }.items()
    for name in names.split()
}
_TIMES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_NO_UNIT = frozenset(
    {
        *("and", "or", "not", "no", "any", "all", "is", "are", "was", "if", "for", "the", "from", "than"),
        *("mod", "modulo", "percent", "half", "third", "quarter", "squared", "cubed"),
        *("over", "point", "plus", "minus", "times", "divided", "factorial", "modulus", "base"),
        *(
            "pair",
            "pairs",
            "tens",
            "hundreds",
            "thousands",
            "millions",
            "billions",
            "dozens",
            "score",
            "gross",
        ),
        *("halves", "thirds", "quarters", "fourths", "fifths", "sixths", "eighths", "tenths", "hundredths"),
        *(
            "but",
            "maybe",
            "perhaps",
            "wrong",
            "infinity",
            "pi",
            "more",
            "less",
            "fewer",
            "i",
            "in",
            "with",
            "where",
        ),
    }
)
"""Words that change what is said; no noun."""
_SIGNS = {r"\$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}
_SIGN_FIRST = re.compile(r"(-?)\s*(\\\$|[€£¥₹])\s*(?=[-0-9.\\])")
_CODE_FIRST = re.compile(
    r"(-?)\s*(?:\\text\{)?(?P<code>USD|EUR|GBP|INR|JPY|CNY|RMB|KRW|CHF|Rs\.?)\}?\s*(?=[-0-9.\\])"
)
_SIGN_LAST = re.compile(r"(?<=[0-9])\s*(\\\$|[€£¥₹])\Z")
_LAST = re.compile(
    r"(?:(?<=[0-9})!%])|(?<=\\pi))(?P<gap>\s*)(?:"
    r"\\text\{(?P<quoted>[A-Za-z][A-Za-z ./]{0,40})\}"
    r"|(?P<plain>(?:[A-Za-z]{2,20}|[a-z](?=/)"
    r"|(?<=[0-9] )[msghLVWJN](?=\s*(?:\^\{[23]\})?\Z))(?:[ /][A-Za-z]{1,20}){0,3})"
    r"|\^\{?\s*\\circ\s*\}?\s*(?:\\text\{)?(?P<scale>[CF]?)\}?|\\degree|(?P<sec>\\sec)"
    r")\s*(?:\^\{(?P<power>[23])\})?\Z"
)
_NOUNS = re.compile(r"[A-Za-z]+(?: [A-Za-z]+)*\Z")
_PERCENT = re.compile(r"(?<=[0-9})])\s*(?:\\text\{(?:percent|per cent|percentage)\}|percent)\Z")


def unit_named(word: str) -> str:
    """The one name of a unit; "" for what is none."""
    return _UNIT_OF.get(word, "")


def is_another_than_asked(unit: str, question: str) -> bool:
    """Whether a question names units of length, time, mass or volume, and this one of the same kind is not
    among them: 21.1 m, where kilometres are asked for."""
    kind = _KIND_OF.get(unit)
    if kind is None:
        return False
    units = {
        _UNIT_OF.get(word) or _UNIT_OF.get(word.lower()) for word in re.findall(r"[A-Za-z]{2,}", question)
    }
    same_kind = {name for name in units if name and _KIND_OF.get(name) == kind}
    return bool(same_kind) and unit not in same_kind


def is_known(unit: str) -> bool:
    """Whether it is a unit of measure or money, and not just any noun."""
    return bool(unit) and all(
        part in _NAMES or part.partition("^")[0] in _NAMES or part in _SIGNS.values()
        for part in unit.split(" per ")
    )


def without_unit(text: str) -> tuple[str, str, Fraction]:
    """(what remains, the unit or "", what the number is to be multiplied with) of a tidy text."""
    text = _PERCENT.sub(r"\\%", text)
    if sign := _SIGN_FIRST.match(text):
        return sign.group(1) + text[sign.end() :], _SIGNS[sign.group(2)], Fraction(1)
    if code := _CODE_FIRST.match(text):
        return code.group(1) + text[code.end() :], _UNIT_OF[code["code"]], Fraction(1)
    if sign := _SIGN_LAST.search(text):
        return text[: sign.start()], _SIGNS[sign.group(1)], Fraction(1)
    match = _LAST.search(text)
    if match is None:
        return text, "", Fraction(1)
    rest = text[: match.start()].rstrip()
    if match["quoted"] is None and match["plain"] is None:
        return rest, _degree_or_second(match), Fraction(1)
    words = " ".join((match["quoted"] or match["plain"]).split())
    magnitude, _, counted_noun = words.partition(" ")
    if magnitude in _TIMES and not match["power"]:
        return rest, _unit(counted_noun, "") if counted_noun else "", Fraction(_TIMES[magnitude])
    unit = _unit(words, match["power"] or "")
    is_noun = (
        len(words) >= 3 and _NO_UNIT.isdisjoint(words.lower().split()) and _NOUNS.match(words) is not None
    )
    if is_known(unit) or (is_noun and (match["quoted"] or match["gap"])):
        return rest, unit, Fraction(1)
    return text, "", Fraction(1)


def _degree_or_second(match: re.Match[str]) -> str:
    if match["sec"]:
        return "second"
    return {"": "degree", "C": "degree celsius", "F": "degree fahrenheit"}[match["scale"] or ""]


def _unit(words: str, power: str) -> str:
    """The one name of a unit: "square feet" and `ft^2` are `foot^2`."""
    parts: list[str] = []
    for part in re.split(r"\s*/\s*|\s+per\s+", words):
        names = part.split()
        exponent = {"square": "2", "sq": "2", "cubic": "3"}.get(names[0].lower(), "") if names else ""
        if exponent:
            names = names[1:]
        elif len(names) > 1 and names[-1] in ("squared", "cubed"):
            exponent = "2" if names.pop() == "squared" else "3"
        name = " ".join(names)
        name = _UNIT_OF.get(name) or _UNIT_OF.get(name.lower()) or name.lower().removesuffix("s")
        parts.append(name + (f"^{exponent}" if exponent else ""))
    unit = " per ".join(parts)
    return f"{unit}^{power}" if power and "^" not in unit else unit
