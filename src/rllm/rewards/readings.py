r"""The answer that a model gives, and the strictness with which it is read.

    text ──► stated_answer ──► Stated(texts, mark, reading, restatements) | NoAnswer
              \boxed{5}, <answer>5</answer>, "The answer is 5", "#### 5", {"answer": 5}     strict
              the same, and other text follows; what the last sentence says                lenient

`texts` are the ways to read the one statement, the most exact first: "5 apples" and "5" of "**5** apples".
What follows an answer must take nothing back; what leads to it must not deny it.
"""

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from rllm.errors import ConfigError, choices_of
from rllm.rewards.extraction import (
    MAX_ANSWER_CHARS,
    Mark,
    NoAnswer,
    Reading,
    boxes_in,
    ends,
    final_text,
    last_tag,
    marked_answer,
)
from rllm.rewards.grade import Grade, wrong
from rllm.rewards.phrases import (
    ANSWER_IS,
    IS_THE_ANSWER,
    is_courtesy,
    is_doubtful,
    is_left_open,
    refuses,
    sentence_begin,
    takes_back,
)

MAX_READ_CHARS = 20_000
"""The length of the end of a text in which statements are looked for."""
_FORMULA = re.compile(
    r"\$\$(?P<display>.+?)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<round>.+?)\\\)"
    r"|(?<!\\)\$(?P<dollar>[^$\n]{1,400}?)(?<!\\)\$(?![0-9])",
    re.DOTALL,
)
_BOLD = re.compile(r"\*\*(?P<bold>[^*\n]{1,300})\*\*|__(?P<under>[^_\n]{1,300})__|`(?P<code>[^`\n]{1,300})`")
_JSON = re.compile(
    r"[\"'](?:final_?answer|answer|result)[\"']\s*:\s*(?:\"(?P<text>(?:[^\"\\]|\\.)*)\"|(?P<number>-?[0-9][0-9.,]*))",
    re.IGNORECASE,
)
_SKIPPED = re.compile(r"(?:[\s*_:：=→>`]|\n[ \t]*[-•][ \t])*")
_END_OF_SENTENCE = re.compile(r"[!?。！？।]|(?<!\bsq)(?<!\bi\.e)(?<!\be\.g)\.(?![0-9A-Za-z])|\n")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$*,;&]|\\[()\[\],;!]|\\q?quad|\\text\{[^{}]{0,12}\}|(?:and|or|y|e|et|und|o|ou|oder|и|или|和|或|및|と)(?![a-z])"
    r"|[A-Za-z](?:_\{?[0-9]\}?)?\s*=)*\Z",
    re.IGNORECASE,
)
_FINALLY = re.compile(
    r"final|therefore|thus|hence|answer|\bso\b|total|overall|conclu|altogether|∴|\bin all\b|因此|所以|答案"
    r"|一共|总共|共"
    r"|したがって|よって|따라서|donc|also\b|insgesamt|daher|portanto|por lo tanto|por tanto"
    r"|quindi|dunque|итак"
    r"|таким образом|следовательно|ответ",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(
    r"\b(?:final(?:ly)?|therefore|thus|hence|so|total|overall|altogether|in all|donc|insgesamt|daher"
    r"|portanto|por (?:lo )?tanto"
    r"|quindi|dunque|таким образом|итак|следовательно)\b|∴|因此|所以|一共|总共|したがって|따라서",
    re.IGNORECASE,
)
_WORDS_ALONE = re.compile(r"[^0-9$\\=^_{}<>+]*\Z")
_MAX_STATEMENTS = 20
"""The last ones of a text that are looked at."""
_MAX_TAIL_CHARS = 200
_MAX_AFTERWARDS = 600
"""Characters of an explanation that may follow, in lines of its own, what was stated in a line before."""
_ENDS_LINE = re.compile(r"(?:[ \t.,;:!*_`。！✓✅🎉$]|\\[)\]])*\n")
_NAMED_ONCE = re.compile(r"\$[A-Za-z]\$|\\\([A-Za-z]\\\)")
"""A letter as a formula: "where $c$ is a constant"."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Stated:
    """An answer, as it was stated."""

    texts: tuple[str, ...]
    """Ways to read it, the most exact one first."""
    mark: Mark
    reading: Reading
    """The strictest that takes it."""
    restatements: tuple[tuple[str, ...], ...] = ()
    """The answers that later sentences state, each with its ways: all must be right."""
    alternative: "Stated | None" = None
    """The text that a lenient reading takes where `texts` turn out to be no answer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AnswerForm:
    """The forms that an answer to this question can have."""

    is_answer: Callable[[str], bool]
    """Whether a statement can be one at all."""
    is_list: bool = False
    """Whether several boxes in one sentence are one answer."""
    words_follow: bool = False
    """Whether words that take nothing back may follow: a unit, "is the area"."""
    phrases: tuple[re.Pattern[str], ...] = (ANSWER_IS,)
    """The phrases before a statement."""


def stated_answer(answer: str, form: AnswerForm, *, thinks_first: bool = False) -> Stated | NoAnswer:
    """The answer that a text states, or why there is none."""
    text = final_text(answer, thinks_first=thinks_first)
    if text is None:
        return NoAnswer.UNFINISHED
    if not text:
        return NoAnswer.EMPTY
    if text.endswith("####"):
        return NoAnswer.UNFINISHED
    text = text[-MAX_READ_CHARS:]
    match = _mark(text, form.is_list)
    if match is None:
        match = _statement(text, form)
    if isinstance(match, NoAnswer):
        return match
    if match is not None:
        return _continuation(text, *match, form)
    bare = _bare(_FENCE.sub("", _ORNAMENT.sub("", text))) if len(text) <= _MAX_AFTERWARDS else ""
    whole = _EMPHASIS.sub(r"\2", _ORNAMENT.sub("", text))
    return Stated(
        texts=(whole, bare) if bare and "\n" not in bare else (whole,),
        mark=Mark.WHOLE,
        reading=Reading.STRICT,
        alternative=_last_words(text, form.is_answer),
    )


def marked_statement(
    answer: str, *, thinks_first: bool = False, max_chars: int = MAX_ANSWER_CHARS
) -> Stated | NoAnswer:
    """The text that is marked as the answer, or else all of it, for graders that compare words.

    A sentence of that text may begin "The answer is …" and be a part of the answer, so it is no mark.
    """
    mark = marked_answer(answer, thinks_first=thinks_first, max_chars=max_chars)
    if not isinstance(mark, NoAnswer):
        return Stated(texts=(mark.text,), mark=mark.mark, reading=Reading.STRICT)
    if mark is not NoAnswer.NOT_LAST:
        return mark
    statement = stated_answer(answer, _MARKED, thinks_first=thinks_first)
    if isinstance(statement, Stated) and len(statement.texts[0]) > max_chars:
        return NoAnswer.TOO_LONG
    return statement


_MARKED = AnswerForm(is_answer=lambda text: False, phrases=())
_EMPHASIS = re.compile(r"\A(\*{2,3}|__)(?![\s*_])((?:(?!\*\*|__).)+?)(?<!\s)\1(?=[.!。]?\Z)", re.DOTALL)
"""Around all of a text."""
_ORNAMENT = re.compile(r"\A(?:[-•]\s+(?=\*\*)|[✅✔✓☑]\ufe0f?\s*)")
"""Before all of it."""
_FENCE = re.compile(r"\A```[a-z]*\n|\n```\Z|\A>\s")


def ways_to_read(text: str) -> tuple[str, ...]:
    """A stated answer without what surrounds it: formulas, bold words, units, the clause that explains it."""
    if text.count("**") % 2:
        text = text.partition("**")[0]
    whole = _bare(text)
    clause = _bare(_CLAUSE.split(whole, maxsplit=1)[0])
    readings = [clause, whole]
    aside = _ASIDE.search(clause)
    if aside and aside.start() and not takes_back(aside.group().strip()):
        readings.insert(0, _bare(clause[: aside.start()]))
    formulas = [*_FORMULA.finditer(clause)]
    if formulas and all(_is_joint(gap) for gap in _gaps(clause, formulas)):
        formula_list = ", ".join(next(filter(None, each.groups())) for each in formulas)
        rest = clause[formulas[-1].end() :]
        readings.insert(0, formula_list)
        if len(formulas) == 1 and (unit := UNIT_BEHIND.match(rest)):
            readings.insert(0, rf"{formula_list}\text{{ {unit[1]}}}")
    elif bold := [*_BOLD.finditer(clause)]:
        if len(bold) == 1:
            inside = next(filter(None, bold[0].groups()))
            unit = UNIT_BEHIND.match(clause[bold[0].end() :])
            readings[0:0] = [f"{inside} {unit[1]}" if unit else inside, inside]
    elif number := _NUMBER_AND_WORDS.match(clause):
        unit = UNIT_BEHIND.match(clause[number.end(1) :])
        is_other_number = unit is not None and CHANGES_NUMBER.match(unit[1]) is not None
        with_unit = f"{number[1]} {unit[1]}" if unit else number[1]
        readings[0:0] = [with_unit] if is_other_number else [with_unit, number[1]]
    elif (count := _COUNTER.match(clause)) and not set("万亿千百億萬") & set(clause):
        readings.insert(0, count[1])
    return tuple(dict.fromkeys(filter(None, map(_bare, readings))))


_ASIDE = re.compile(r"\s\([^()]*\)\s*\Z|(?<![0-9])(?<![0-9] ):\s.*\Z|:\s(?![0-9]).*\Z", re.DOTALL)
_COUNTER = re.compile(r"([-−]?[0-9][0-9,.]*)\s*[\u3040-\u9fff\uac00-\ud7af]{1,4}\Z")
"""A number with the word that counts in Chinese, Japanese or Korean."""
_CLAUSE = re.compile(
    r"[,;(]?\s+(?:because|since|as\s+(?:it|the|we|this|shown|required)|which|where|so\s+that|given\s+that|because\s+of"
    r"|i\.e\.|namely|when|after|car\s|porque|weil|puisque)\b|\s+and\s+it\s+is\b|,\s*(?:not|because|since|as|and\s+(?:it|this|that|we|the|so))\b|，|,?\s*因为",
    re.IGNORECASE,
)
UNIT_BEHIND = re.compile(
    r"\s*((?!(?:is|are|was|were|in|and|or|of|on|at|for|per|each|which|we|as|by|to|from|because|since|the)(?![a-z]))"
    r"(?:square\s+|cubic\s+|sq\.?\s+)?[A-Za-zµ°€£%][A-Za-z°]{0,20}(?![^\W\d_²³])(?:\s*/\s*[A-Za-z]{1,8}|\s+per\s+[A-Za-z]{1,12})?(?:\^?[23²³])?|\\?%)"
)
CHANGES_NUMBER = re.compile(
    r"(?:half|halves|(?:third|quarter|fourth|fifth|sixth|eighth|tenth|hundredth|thousandth)s?|tens|hundreds"
    r"|thousands|millions|billions|dozens|squared|cubed|factorial)\Z",
    re.IGNORECASE,
)
"""Words behind a number that make it another one, and no unit."""
_NUMBER_AND_WORDS = re.compile(
    r"([-+−]?(?:\\?[$€£¥])?\s?[0-9][0-9,.]*(?:/[0-9]+)?(?:\s?\\?%)?)"
    r"(?=\s+(?!(?:or|and|to|through|plus|minus|times|over|out)\s)[^0-9\s][^0-9]*\Z)"
)
_LEADING = re.compile(
    r"(?:(?:therefore|thus|then|now|so|hence|and|in\s+total|altogether|finally|clearly|indeed|exactly|simply|just|only|about|approximately|roughly|equal\s+to|equals|given\s+by"
    r"|is|the\s+number|the\s+value|still|that)(?![a-z])[\s:,]*)+",
    re.IGNORECASE,
)
_TRAILING = re.compile(
    r"\s*(?:です|である|となります|になります|でした|だ|입니다|이다|है|हैं|(?<=[0-9])'?(?:d[iıuü]r|t[iıuü]r))\Z"
)


def _bare(text: str) -> str:
    """Without emphasis, quotation marks, leading words and the end of the sentence."""
    text = text.strip(' \t\n\r*_`~"“”‘’«»「」『』:：,;。！!？।').removesuffix(".").strip(' \t\n*_`~"“”«»')
    text = _TRAILING.sub("", text)
    lead = _LEADING.match(text)
    return text[lead.end() :].strip(' *_`"') if lead and lead.end() < len(text) else text


def _gaps(clause: str, formulas: list[re.Match[str]]) -> list[str]:
    return [clause[one.end() : other.start()] for one, other in pairwise(formulas)]


def _is_joint(gap: str) -> bool:
    return _BETWEEN_BOXES.match(gap) is not None


def _mark(text: str, is_list: bool) -> tuple[tuple[str, ...], Mark, int, int] | NoAnswer | None:
    """(ways to read, mark, begin, end) of the last box or tag; None where there is neither."""
    boxes, tag = boxes_in(text), last_tag(text)
    # A box inside the tag is a part of its answer; one that begins behind the tag is a later answer.
    if tag is not None and (not boxes or boxes[-1][0] < tag[0] or (tag[2] > 0 and boxes[-1][0] < tag[2])):
        begin, inside, end = tag
        if end < 0:
            return NoAnswer.UNFINISHED
        if len(set(re.findall(r"<answer>([^<]*)</answer>", text))) > 2:
            return NoAnswer.UNDECIDED
        within = boxes_in(inside)
        if within and within[-1][2] < 0:
            return NoAnswer.UNFINISHED
        if within and not ends(inside, within[-1][2]):
            return NoAnswer.NOT_LAST
        texts = (within[-1][1],) if within else (inside, *_inner_statement(inside))
        return (texts, Mark.TAGGED, begin, end) if texts[0] else NoAnswer.EMPTY
    if not boxes:
        return None
    if boxes[-1][2] < 0:
        return NoAnswer.UNFINISHED
    if not boxes[-1][1]:
        return NoAnswer.EMPTY
    return _boxes(text, boxes, is_list)


def _inner_statement(inside: str) -> tuple[str, ...]:
    """The statement of a sentence inside a tag."""
    matches = _last_matches(ANSWER_IS, inside)
    return ways_to_read(inside[matches[-1].end() :] if matches else inside)


def _boxes(
    text: str, boxes: list[tuple[int, str, int]], is_list: bool
) -> tuple[tuple[str, ...], Mark, int, int] | NoAnswer:
    """The last box; with those that stand beside it in one sentence, a list."""
    first = len(boxes) - 1
    while first and _BETWEEN_BOXES.match(text[boxes[first - 1][2] : boxes[first][0]]):
        first -= 1
    insides = list(dict.fromkeys("".join(inside.split()) for _, inside, _ in boxes[first:]))
    begin, end = boxes[first][0], boxes[-1][2]
    if len(insides) > 1:
        if not is_list:
            return NoAnswer.UNDECIDED
        return (", ".join(inside for _, inside, _ in boxes[first:]),), Mark.BOXED, begin, end
    others = {"".join(inside.split()) for _, inside, _ in boxes[:first]} - set(insides)
    if others:
        between = text[boxes[first - 1][2] : begin]
        if re.search(
            r"\b(?:or|maybe|perhaps|alternatively|possibly|either|second guess|another)\b",
            between,
            re.IGNORECASE,
        ):
            return NoAnswer.UNDECIDED
        if len(others) > 1 and not _FINALLY.search(text[sentence_begin(text, begin) : begin]):
            return NoAnswer.UNDECIDED  # a parade
    return (boxes[-1][1],), Mark.BOXED, begin, end


def _statement(text: str, form: AnswerForm) -> tuple[tuple[str, ...], Mark, int, int] | NoAnswer | None:
    """The last sentence that says what the answer is."""
    last: tuple[tuple[str, ...], Mark, int, int] | None = None
    different: set[str] = set()
    for phrase in form.phrases:
        for match in _last_matches(phrase, text):
            span = _span_after(text, match.end())
            texts = ways_to_read(text[span[0] : span[1]])
            if any(map(form.is_answer, texts)):
                different.add(texts[0])
                if last is None or match.start() >= last[2]:
                    last = (texts, Mark.STATED, match.start(), span[1])
    if last is not None and len(different) > 2 and not _CONCLUDES.search(text[last[2] - 30 : last[2] + 30]):
        return NoAnswer.UNDECIDED  # a parade
    for match in _JSON.finditer(text):
        if last is None or match.start() > last[2]:
            closing = re.compile(r"[\s}\]`]*").match(text, match.end())
            end = closing.end() if closing else match.end()
            last = ((match["text"] or match["number"],), Mark.STATED, match.start(), end)
    for match in IS_THE_ANSWER.finditer(text):
        if last is None or match.start() > last[3]:
            begin = sentence_begin(text, match.start())
            begin += text[begin : match.start()].rfind(";") + 1
            subject = text[begin : match.start()]
            texts = ways_to_read(subject)
            if any(map(form.is_answer, texts)) and not _is_of_before(subject):
                last = (texts, Mark.STATED, begin, match.end())
    return last


def _last_matches(phrase: re.Pattern[str], text: str) -> list[re.Match[str]]:
    return list(deque(phrase.finditer(text), maxlen=_MAX_STATEMENTS))


def _span_after(text: str, place: int) -> tuple[int, int]:
    """The sentence, or the displayed formula, that begins there."""
    filler = _SKIPPED.match(text, place)
    begin = filler.end() if filler else place
    opening = re.compile(r"```[a-z]*\n|\*\*|__").match(text, begin)
    begin = opening.end() if opening else begin
    place = begin
    while True:
        # A full stop inside of a formula ends no sentence.
        formula = _FORMULA.search(text, place)
        end = _END_OF_SENTENCE.search(text, place)
        if formula is None or (end is not None and end.start() < formula.start()):
            return begin, end.start() if end else len(text)
        place = formula.end()


def _continuation(
    text: str, texts: tuple[str, ...], mark: Mark, begin: int, end: int, form: AnswerForm
) -> Stated | NoAnswer:
    """The answer as a reader takes it who has read what stands around it."""
    if is_left_open(text[sentence_begin(text, begin) : begin]):
        return NoAnswer.UNDECIDED
    tail = text[end:]
    if mark is Mark.STATED and takes_back(text[begin:end]):
        return NoAnswer.UNDECIDED
    if mark is Mark.BOXED:
        if _is_part(text, begin):
            return NoAnswer.NOT_LAST
        inner, tail = _rest_of_formula(text, begin, end)
        unit = _BEHIND.match(inner or tail)
        if unit:
            texts = (texts[0] + (rf"\text{{ {unit[1]}}}" if unit[1][-1].isalpha() else unit[1]),)
            inner, tail = ("", tail) if inner else ("", tail[unit.end() :])
        if rounded_match := _ROUNDED.match(inner or tail):
            inner, tail = (inner[rounded_match.end() :], tail) if inner else ("", tail[rounded_match.end() :])
        if _NO_WEIGHT.sub("", inner) or _GOES_ON.match(tail):
            return NoAnswer.NOT_LAST
    if ends(tail, 0):
        return Stated(texts=texts, mark=mark, reading=Reading.STRICT)
    if takes_back(tail):
        return NoAnswer.UNDECIDED
    is_short = (
        len(tail) <= _MAX_TAIL_CHARS
        and form.words_follow
        and _WORDS_ALONE.match(_NAMED_ONCE.sub("", tail)) is not None
    )
    bare = _UNWRAPPED.sub("", tail)
    predicate = IS_THE_ANSWER.match(" " + bare)
    rest = bare[predicate.end() - 1 :] if predicate else bare
    is_apart = len(tail) <= _MAX_AFTERWARDS and _ENDS_LINE.match(tail) is not None
    is_end = is_short or is_apart or is_courtesy(rest)
    reading = Reading.STRICT if is_end else Reading.LENIENT
    return Stated(texts=texts, mark=mark, reading=reading, restatements=_restatements(tail, form))


def _is_part(text: str, begin: int) -> bool:
    r"""Whether a box is a part of what stands before it: `-\boxed{5}`, `\frac{1}{\boxed{5}}`."""
    line = text[max(0, begin - 200) : begin].rpartition("\n")[2]
    return _LEADS_INTO.search(line) is not None and line.strip() not in ("-", "+", "*")


_LEADS_INTO = re.compile(
    r"(?:[-+/^][ ]?|(?<![A-Za-z.#])[0-9][ ]?|[A-Za-z0-9)}]\^\{|\\frac\{|\}\{|\\sqrt\{|\\(?:times|cdot"
    r"|div|pm)\s*)\Z"
)


def _rest_of_formula(text: str, begin: int, end: int) -> tuple[str, str]:
    """(what stands between a box and the end of its formula, what follows that)."""
    before = text[max(0, begin - 2_000) : begin]
    is_inside = (
        len(re.findall(r"(?<!\\)\$", before)) % 2 == 1
        or before.rfind(r"\(") > before.rfind(r"\)")
        or before.rfind(r"\[") > before.rfind(r"\]")
        or before.count("$$") % 2 == 1
    )
    closing = _CLOSING.search(text, end) if is_inside else None
    return (text[end : closing.start()], text[closing.end() :]) if closing else ("", text[end:])


_CLOSING = re.compile(r"(?<!\\)\$\$?|\\\)|\\\]")
_NO_WEIGHT = re.compile(
    r"\\(?:q?quad|checkmark|square|blacksquare|Box|qed|hfill|,|;|!|\\|end\{[a-z*]+\}|tag\{[^{}]*\}|text\{[^{}]*\})|[\s.,;:!}&]"
)
_UNWRAPPED = re.compile(r"\A(?:[\s$*_`]|\\[)\]])+")
_UNITS = (
    "[mck]?m|mi|ft|yd|kg|mg|g|lbs?|oz|mL|km/h|mph|m/s|hours?|minutes?|seconds?|days?|weeks?|months?|years?|inches|feet|foot|yards?"
    "|miles?|(?:milli|centi|kilo)?met(?:er|re)s?|(?:kilo|milli)?grams?|pounds?|ounces?|(?:milli)?lit(?:er|re)s?|gallons?|degrees?"
    "|radians?|dollars?|cents?|euros?|units?"
)
_BEHIND = re.compile(
    r"(?:\s|\\[,; !])*(?:\\(?:text|mathrm|textrm)\s*\{\s*)?"
    rf"((?:hundred|thousand|million|billion|trillion|dozen|percent)|\\?%|\^\{{?\\circ\}}?|°"
    rf"|(?:square |cubic |sq )?(?:{_UNITS})(?:/(?:s|h|min)|\s+per\s+[a-z]{{1,10}}|\s(?:squared"
    rf"|cubed))?(?![A-Za-z]))"
    r"\s*\}?(?:\^\{?[23]\}?|[²³])?"
)
"""Words that belong to a number in a box: a magnitude, a unit."""
_ROUNDED = re.compile(r"\s*(?:\\approx|≈)\s*-?[0-9][0-9.,]*(?![0-9A-Za-z^*/+])")
_GOES_ON = re.compile(
    r"[ \t]*(?:\\(?!text|[)\],;! %]|mathrm|end|q?quad|checkmark|square|blacksquare|tag)[a-zA-Z]+"
    r"|,[0-9]{3}|[\^_+*/=<>](?!\*)|-[0-9\\a-z]|[0-9]|[a-zA-Z](?![a-zA-Z ]))"
)


def _restatements(tail: str, form: AnswerForm) -> tuple[tuple[str, ...], ...]:
    """The answers that later sentences state."""
    restatements: list[tuple[str, ...]] = []
    for phrase in form.phrases:
        for match in _last_matches(phrase, tail):
            begin, end = _span_after(tail, match.end())
            restatements.append(ways_to_read(tail[begin:end]))
    for match in IS_THE_ANSWER.finditer(tail):
        subject = tail[sentence_begin(tail, match.start()) : match.start()]
        if not _is_of_before(subject):
            restatements.append(ways_to_read(subject))
    return tuple(texts for texts in restatements if any(map(form.is_answer, texts)))


def _is_of_before(subject: str) -> bool:
    """Whether what is called the answer is one that was stated before: "I hope it is correct"."""
    return is_courtesy(subject) or _PRONOUN.search(subject) is not None


_LIST_NUMBER = re.compile(r"[0-9]{1,2}[.)]")
_PRONOUN = re.compile(r"(?:\A|[\s(*])(?:it|this|that|which|everything|all)\Z", re.IGNORECASE)
_PROSE_SENTENCE = re.compile(r"(?<=[.!?。！？।])(?<!\bsq\.)(?<!\bi\.e\.)(?<!\be\.g\.)\s+|\n+|(?<=[。！？])")


def _last_words(text: str, is_answer: Callable[[str], bool]) -> Stated | None:
    """The statement of the last sentence that is no courtesy; None where it asks, doubts or says nothing."""
    sentences = [each for each in _PROSE_SENTENCE.split(text[-2_000:]) if each and each.strip()]
    while sentences and is_courtesy(sentences[-1]):
        sentences.pop()
    if not sentences:
        return None
    last = sentences[-1].strip()[-_MAX_AFTERWARDS:]
    if _LIST_NUMBER.fullmatch(last) and any(map(_LIST_NUMBER.match, sentences[:-1])):
        return None  # an item that was begun
    if (
        refuses(text[-2_000:])
        or last.rstrip("*_ ").endswith(("?", "？"))
        or takes_back(last)
        or is_doubtful(last)
    ):
        return None
    texts = ways_to_read(last)
    if not texts:
        return None
    concludes = _CONCLUDES.search(last) is not None
    statement = Stated(texts=texts, mark=Mark.PROSE, reading=Reading.STRICT if concludes else Reading.LENIENT)
    bold = [*_BOLD.finditer(last)]
    if len(bold) == 1 and not is_left_open(last[: bold[0].start()]):
        inside = next(filter(None, bold[0].groups()))
        if is_answer(inside):
            ends_it = not last[bold[0].end() :].strip(" .!*_")
            reading = Reading.STRICT if ends_it else statement.reading
            return replace(
                statement, texts=tuple(dict.fromkeys((*ways_to_read(inside), *texts))), reading=reading
            )
    return statement


def require_reading(reading: str) -> Reading:
    """Raises ConfigError for a reading that there is not."""
    if reading not in set(Reading):
        raise ConfigError(f"`reading` is {reading!r}; {choices_of(reading, Reading)}.")
    return Reading(reading)


RULES = {
    Mark.BOXED: r"the last \boxed{…}",
    Mark.TAGGED: "the last tag such as <answer>…</answer>",
    Mark.STATED: "the last sentence that says what the answer is",
    Mark.EARLIER: "an equation, a yes or a no before the last sentence",
    Mark.PROSE: "the last sentence",
    Mark.WHOLE: "the whole text behind the thoughts",
}
"""The rule that found an answer, by its mark, for people."""
_SHOWN_CHARS = 300


def as_read(grade: Grade, statement: Stated, reading: Reading) -> Grade:
    """The grade under `reading` of a statement; its metadata has what each reading pays, and which rule read
    which part of the answer."""
    is_strict = statement.reading is Reading.STRICT
    readings = {"strict": grade.is_correct and is_strict, "lenient": grade.is_correct}
    if reading is Reading.STRICT and grade.score and not is_strict:
        grade = replace(grade, score=0.0, is_correct=False, reason=NoAnswer.NOT_LAST.value)
    part = max(statement.texts, key=len)[:_SHOWN_CHARS]
    explanation = {"rule": RULES[statement.mark], "part": part, "readings": readings}
    return replace(grade, metadata={**grade.metadata, **explanation})


def unread(why: NoAnswer) -> Grade:
    """The grade, under every reading, of a text that states no answer."""
    return wrong(why.value, readings={"strict": False, "lenient": False})
