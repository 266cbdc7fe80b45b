"""The checks behind the 25 kinds of verifiable instructions: a text in, followed or not out.

Each function is one published instruction (see `rllm.rewards.instructions` for its id) and reads the text as
the published checker does. Three are ours where that needs large tools: sentences are counted by a splitter
of our own, words in capitals by their letters, and a text whose language nobody can tell is in no language.
"""

import functools
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

from rllm.errors import MissingExtraError

RELATIONS = ("less than", "at least")
_WORD = re.compile(r"\w+")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_detecting = threading.Lock()
MAX_LANGUAGE_CHARS = 10_000
"""Read to tell the language by."""


def _is_in_relation(count: int, relation: str, limit: float) -> bool:
    return count < limit if relation == "less than" else count >= limit


def has_keywords(text: str, *, keywords: Sequence[str]) -> bool:
    return all(re.search(re.escape(each), text, re.IGNORECASE) for each in keywords)


def keyword_count(text: str, *, keyword: str, frequency: float, relation: str) -> bool:
    count = len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE))
    return _is_in_relation(count, relation, frequency)


def has_no_forbidden_word(text: str, *, forbidden_words: Sequence[str]) -> bool:
    """Whole words only: `sea` is not in `season`."""
    return not any(
        re.search(rf"(?<!\w){re.escape(each)}(?!\w)", text, re.IGNORECASE) for each in forbidden_words
    )


def letter_count(text: str, *, letter: str, let_frequency: float, relation: str) -> bool:
    return _is_in_relation(text.lower().count(letter.strip().lower()), relation, let_frequency)


def is_in_language(text: str, *, language: str) -> bool:
    """`language` is a code of ISO 639-1, such as `de`."""
    return language_of(text) == language.strip().lower()


def sentence_count(text: str, *, num_sentences: float, relation: str) -> bool:
    return _is_in_relation(len(sentences(text)), relation, num_sentences)


def has_paragraphs(text: str, *, num_paragraphs: float) -> bool:
    """Paragraphs parted by `***`; an empty one counts only against the answer."""
    parts = [each.strip() for each in re.split(r"\s?\*\*\*\s?", text)]
    if not all(parts[1:-1]):
        return False
    return sum(map(bool, parts)) == num_paragraphs


def word_count(text: str, *, num_words: float, relation: str) -> bool:
    return _is_in_relation(len(_WORD.findall(text)), relation, num_words)


def nth_paragraph_begins_with(
    text: str, *, num_paragraphs: float, nth_paragraph: float, first_word: str
) -> bool:
    """Paragraphs parted by an empty line, as many as asked, and one of them begins with the word."""
    parts = text.split("\n\n")
    count = sum(bool(each.strip()) for each in parts)
    if count != num_paragraphs or not 1 <= nth_paragraph <= count:
        return False
    words = parts[int(nth_paragraph) - 1].split()
    if not words:
        return False
    return re.split(r"[.,?!'\"]", words[0].lstrip("'\""), maxsplit=1)[0].lower() == first_word.strip().lower()


def has_placeholders(text: str, *, num_placeholders: float) -> bool:
    """Such as [address]."""
    return sum(map(_num_brackets, text.split("\n"))) >= num_placeholders


def _num_brackets(line: str) -> int:
    """The number of [...] in a line; a search by pattern is quadratic in brackets that never close."""
    count, end = 0, 0
    while (begin := line.find("[", end)) >= 0 and (end := line.find("]", begin) + 1) > 0:
        count += 1
    return count


def has_postscript(text: str, *, postscript_marker: str) -> bool:
    """`P.P.S` and `P.S.` may be written with blanks between their letters."""
    marker = postscript_marker.strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def has_bullets(text: str, *, num_bullets: float) -> bool:
    """Exactly that many lines that begin with `* ` or `- `."""
    lines = [each.lstrip() for each in text.split("\n")]
    num_starred = sum(each[:1] == "*" and each[1:2] != "*" for each in lines)
    return num_starred + sum(each[:1] == "-" for each in lines) == num_bullets


def is_constrained(text: str) -> bool:
    return any(each in text for each in _ANSWERS)


def has_highlights(text: str, *, num_highlights: float) -> bool:
    """Such as *this* or **this**."""
    single = [each.strip("*").strip() for each in re.findall(r"\*[^\n\*]*\*", text)]
    double = [each.strip("*").strip() for each in re.findall(r"\*\*[^\n\*]*\*\*", text)]
    return sum(map(bool, single + double)) >= num_highlights


def has_sections(text: str, *, section_spliter: str, num_sections: float) -> bool:
    """Headed by the word and a number: `Section 1`."""
    heads = re.findall(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)
    return len(heads) >= num_sections


def is_json(text: str) -> bool:
    """The whole answer, which may stand in a ``` block."""
    bare = re.sub(r"^```(?:json|Json|JSON)?", "", text.strip())
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    """Such as <<A poem>>, on one line."""
    return any(
        0 <= (begin := line.find("<<")) < (end := line.rfind(">>")) and line[begin:end].strip("<>").strip()
        for line in text.split("\n")
    )


def is_two_responses(text: str) -> bool:
    """Two different answers parted by `******`."""
    parts = [each.strip() for each in text.split("******")]
    if not all(parts[1:-1]):
        return False
    responses = [each for each in parts if each]
    return len(responses) == 2 and responses[0] != responses[1]


def repeats_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """First of all, word for word."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def ends_with(text: str, *, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    bare = text.strip()
    return len(bare) > 1 and bare[0] == bare[-1] == '"'


def capital_word_count(text: str, *, capital_frequency: float, relation: str) -> bool:
    """Words of which every letter is a capital, `I` and `A` among them."""
    words = re.findall(r"[\w'’-]+", text)
    return _is_in_relation(sum(each.isupper() for each in words), relation, capital_frequency)


def is_english_capitals(text: str) -> bool:
    return text.isupper() and language_of(text) == "en"


def is_english_lowercase(text: str) -> bool:
    return text.islower() and language_of(text) == "en"


def has_no_comma(text: str) -> bool:
    return "," not in text


_TITLE = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|No|Fig|e\.g|i\.e|[A-Z])\.$")
"""Goes on whatever follows."""
_SHORT_FORM = re.compile(r"\b(?:etc|approx|Inc|Ltd|Co|U\.S|a\.m|p\.m)\.$")
"""Goes on unless a capital follows."""
# The repeats with `++` give nothing back, so a long run of dots is read once and not from each of its places.
_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]]*+(?=\s|$)|[。！？]++|\n[^\S\n]*+\n|$")
_LONGEST_SHORT_FORM = 8


def sentences(text: str) -> list[str]:
    """A text cut at . ! ? before a blank, at 。！？ and at empty lines; not behind `Dr.`, `e.g.` or `J.`."""
    text = text.strip()
    spans: list[str] = []
    begin = 0
    for match in _SENTENCE_END.finditer(text):
        # A search from the begin of the sentence at every full stop would take quadratic time.
        tail = text[max(begin, match.end() - _LONGEST_SHORT_FORM) : match.end()]
        follows = text[match.end() : match.end() + 2].strip()
        goes_on = _TITLE.search(tail) or (_SHORT_FORM.search(tail) and not follows.isupper())
        if (goes_on and follows) or not _WORD.search(text, begin, match.end()):
            continue
        spans.append(text[begin : match.end()].strip())
        begin = match.end()
    return spans


def language_of(text: str) -> str | None:
    """Code of the likeliest language, the same every time; None where there is nothing to tell it by."""
    factory, error = _languages()
    detector = factory.create()
    detector.seed = 0
    detector.append(text[:MAX_LANGUAGE_CHARS])
    try:
        return detector.detect()
    except error:
        return None


@functools.cache
def _loaded_languages() -> tuple[Any, type[Exception]]:
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory
        from langdetect.lang_detect_exception import LangDetectException
    except ModuleNotFoundError as error:
        raise MissingExtraError("langdetect", "grading") from error
    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    return factory, LangDetectException


def _languages() -> tuple[Any, type[Exception]]:
    with _detecting:  # profiles take half a second to read: once, whichever thread comes first
        return _loaded_languages()
