r"""The last words of a model: the text after its thoughts, and the answer that it marks there.

    answer ──► final_text ──► marked_answer ──► Marked(text, mark) | NoAnswer
               after </think>  \boxed{…}, <answer>…</answer>, or the whole text

The last mark counts, and it must end the text. What stands in the middle of free text is no answer, and
thoughts that were begun and never closed hold none. Everything here reads its text once, whatever it holds.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from rllm.errors import RewardError
from rllm.types.episode import Episode

MAX_ANSWER_CHARS = 2_000
"""The length of the marked answer; longer is no answer."""
_THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis", "<|channel|>final<|message|>"),
    ("◁think▷", "◁/think▷"),
    ("<scratchpad>", "</scratchpad>"),
    ("<reflection>", "</reflection>"),
)
_TAGS = (
    ("<answer>", "</answer>"),
    ("<final_answer>", "</final_answer>"),
    ("<|begin_of_box|>", "<|end_of_box|>"),
)
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BLANKS = " \t\n\r\f\v\xa0\u2028\u2029\ufeff\u200b"
_END_OF_TURN = re.compile(
    r"(?:\s|<\|(?:im_end|eot_id|end|endoftext|return|end_of_text|end_of_turn)\|>|</s>|<eos>)+\Z"
)
_CLOSERS = re.compile(
    r"(?:[\s$.,;:!*_`~'\"’”}。！।]|\\[)\],;! ]|\\end\{(?:equation|align|aligned|gather|center)\*?\})*"
)
"""The marks that may still follow: those that close a formula, a quotation or a sentence."""


class Reading(StrEnum):
    """The mark that an answer must have to count."""

    STRICT = "strict"
    """It is marked or stated, and the text ends with it."""
    LENIENT = "lenient"
    """Also one that other text follows, and what the last sentence says where nothing is marked: as published
    harnesses read."""


class NoAnswer(StrEnum):
    """The reason that there is nothing to judge."""

    EMPTY = "empty"
    UNFINISHED = "unfinished"
    """Thoughts, or the answer itself, were begun and never closed."""
    NOT_LAST = "not_last"
    """Something follows the last answer that was marked."""
    NOT_MARKED = "not_marked"
    """Nothing is marked as the answer, and the whole text is none."""
    TOO_LONG = "too_long"
    UNDECIDED = "undecided"
    """The answer is denied, asked, supposed, taken back, or one of several."""


class Mark(StrEnum):
    """The mark of an answer."""

    BOXED = "boxed"
    TAGGED = "tagged"
    STATED = "stated"
    """By a sentence: "The answer is …"."""
    EARLIER = "earlier"
    """By an equation, a yes or a no that stands before the last sentence."""
    PROSE = "prose"
    """Not at all: it is the last thing that the last sentence says."""
    WHOLE = "whole"
    """Not at all: it is the whole text after the thoughts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Marked:
    """An answer, and how it was found."""

    text: str
    mark: Mark


def final_text(answer: str, *, thinks_first: bool = False) -> str | None:
    """The text after the thoughts; None where they do not end.

    `thinks_first`: the prompt itself opened the thoughts, as DeepSeek-R1's template does, so that a text
    without a closing tag is all thoughts.
    """
    begin = 0
    for opening, closing in _THOUGHTS:
        last = answer.rfind(closing)
        if answer.rfind(opening) > last:
            return None
        if last >= 0:
            begin = max(begin, last + len(closing))
    if begin == 0 and thinks_first:
        return None
    text = answer[begin:]
    # The pattern is tried at every place of a run of blanks,
    # so a search in a long run would take quadratic time.
    tail = _END_OF_TURN.search(text[-200:])
    return (text[: len(text) - (tail.end() - tail.start())] if tail else text).strip(_BLANKS)


def marked_answer(
    answer: str,
    *,
    thinks_first: bool = False,
    after: re.Pattern[str] | None = None,
    max_chars: int = MAX_ANSWER_CHARS,
) -> Marked | NoAnswer:
    r"""The answer that a text ends with, or why there is none.

    The last `\boxed{…}` or `<answer>…</answer>`, if nothing but the end of a sentence follows it (and what
    `after` matches, such as a unit, which is then part of the answer); the whole final text where nothing is
    marked.
    """
    text = final_text(answer, thinks_first=thinks_first)
    if text is None:
        return NoAnswer.UNFINISHED
    if not text:
        return NoAnswer.EMPTY
    mark = _last_mark(text, after)
    if isinstance(mark, NoAnswer):
        return mark
    if not mark.text:
        return NoAnswer.EMPTY
    if len(mark.text) > max_chars:
        return NoAnswer.NOT_MARKED if mark.mark is Mark.WHOLE else NoAnswer.TOO_LONG
    return mark


def boxes_in(text: str) -> list[tuple[int, str, int]]:
    """(begin, what is inside, end) of every box that stands in no other; end is -1 for one left open."""
    boxes: list[tuple[int, str, int]] = []
    place = 0
    while match := _BOX.search(text, place):
        boxes.append(_box_at(text, match))
        # All other boxes stand in the one that is left open.
        if boxes[-1][2] < 0:
            break
        place = boxes[-1][2]
    return boxes


def last_tag(text: str) -> tuple[int, str, int] | None:
    """(begin, what is inside, end) of the last `<answer>`; end is -1 for one left open."""
    begin, opening, closing = max(
        ((text.rfind(opening), opening, closing) for opening, closing in _TAGS), key=lambda each: each[0]
    )
    if begin < 0:
        return None
    end = text.find(closing, begin)
    if end < 0:
        return begin, "", -1
    return begin, text[begin + len(opening) : end].strip(), end + len(closing)


def last_assistant_text(episode: Episode) -> str:
    """The end of an episode: `artifacts["answer"]`, else the last trajectory's output, its last step's, or
    the last answer.

    Raises RewardError where no model was asked: that says nothing about the policy.
    """
    text = episode.artifacts.get("answer")
    if isinstance(text, str):
        return text
    for trajectory in reversed(episode.trajectories):
        if isinstance(trajectory.output, str):
            return trajectory.output
        for step in reversed(trajectory.steps):
            if isinstance(step.output, str):
                return step.output
            return step.model_response or _last_message(step.chat_completions)
    raise RewardError(
        f"Episode {episode.id or '(without id)'} holds no answer: it has no step, no output and no "
        '`artifacts["answer"]`, so there is nothing to grade.'
    )


def _last_message(messages: list[dict[str, object]]) -> str:
    content = messages[-1].get("content") if messages and messages[-1].get("role") == "assistant" else ""
    return content if isinstance(content, str) else ""


def _last_mark(text: str, after: re.Pattern[str] | None) -> Marked | NoAnswer:
    tag, box = last_tag(text), _last_box(text)
    if tag is None and box is None:
        return Marked(text=text, mark=Mark.WHOLE)
    if tag is not None and (box is None or box[0] < tag[0] or box[0] < tag[2]):
        return _tag_content(text, tag)
    assert box is not None, "one of the two is there"
    _, inside, end = box
    if end < 0:
        return NoAnswer.UNFINISHED
    unit = after.match(text, end) if after is not None else None
    if unit is not None and ends(text, unit.end()):
        return Marked(text=inside + unit.group(), mark=Mark.BOXED)
    return Marked(text=inside, mark=Mark.BOXED) if ends(text, end) else NoAnswer.NOT_LAST


def _tag_content(text: str, tag: tuple[int, str, int]) -> Marked | NoAnswer:
    _, inside, end = tag
    if end < 0:
        return NoAnswer.UNFINISHED
    if not ends(text, end):
        return NoAnswer.NOT_LAST
    box = _last_box(inside)
    if box is None:
        return Marked(text=inside, mark=Mark.TAGGED)
    if box[2] < 0:
        return NoAnswer.UNFINISHED
    return Marked(text=box[1], mark=Mark.TAGGED) if ends(inside, box[2]) else NoAnswer.NOT_LAST


def ends(text: str, place: int) -> bool:
    """Whether nothing of weight stands from `place` on."""
    closing = _CLOSERS.match(text, place)
    return closing is not None and closing.end() == len(text)


def _last_box(text: str) -> tuple[int, str, int] | None:
    boxes = boxes_in(text)
    return boxes[-1] if boxes else None


def _box_at(text: str, match: re.Match[str]) -> tuple[int, str, int]:
    begin = match.end()
    while begin < len(text) and text[begin] in " \t\n":
        begin += 1
    if text[begin : begin + 1] != "{":
        bare = re.compile(r"[^\s$\\.,;]*").match(text, begin)
        end = bare.end() if bare else begin
        return match.start(), text[begin:end], end
    depth = 0
    place = begin
    while place < len(text):
        character = text[place]
        # A brace behind a backslash is a sign of the formula and groups nothing.
        if character == "\\":
            place += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return match.start(), text[begin + 1 : place].strip(), place + 1
        place += 1
    return match.start(), "", -1
