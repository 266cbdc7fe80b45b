"""Did an answer follow instructions that a program can check? The 25 kinds of IFEval (Zhou et al. 2023).

    {"instructions": [{"id": "keywords:existence", "kwargs": {"keywords": ["sea"]}}, …]}
                                   │
    answer ──► without thoughts ──► each kind's check ──► followed or not, strictly and loosely ──► score

Ids, arguments and verdicts are the published ones (arXiv:2311.07911). Loosely means that the answer may also
be read without its first line, without its last, and without asterisks. An id that is not known, or an
argument that is missing, is a mistake in the task and a RewardError: never taken for followed.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import ConfigError, RewardError, choices_of
from rllm.rewards import instruction_kinds as kinds
from rllm.rewards.extraction import final_text
from rllm.rewards.grade import Grade, require_answer, wrong

SCORES = ("all", "share")


@dataclass(kw_only=True, slots=True, frozen=True)
class InstructionKind:
    """A kind of instruction for an answer, and its check."""

    check: Callable[..., bool]
    """(text, **arguments) -> followed."""
    arguments: tuple[str, ...] = ()
    relation: str = ""
    """Name of the argument that says `at least` or `less than`, where there is one."""


def _kind(check: Callable[..., bool], *arguments: str, relation: str = "") -> InstructionKind:
    return InstructionKind(check=check, arguments=arguments, relation=relation)


KINDS: dict[str, InstructionKind] = {
    "keywords:existence": _kind(kinds.has_keywords, "keywords"),
    "keywords:frequency": _kind(kinds.keyword_count, "keyword", "frequency", relation="relation"),
    "keywords:forbidden_words": _kind(kinds.has_no_forbidden_word, "forbidden_words"),
    "keywords:letter_frequency": _kind(
        kinds.letter_count, "letter", "let_frequency", relation="let_relation"
    ),
    "language:response_language": _kind(kinds.is_in_language, "language"),
    "length_constraints:number_sentences": _kind(kinds.sentence_count, "num_sentences", relation="relation"),
    "length_constraints:number_paragraphs": _kind(kinds.has_paragraphs, "num_paragraphs"),
    "length_constraints:number_words": _kind(kinds.word_count, "num_words", relation="relation"),
    "length_constraints:nth_paragraph_first_word": _kind(
        kinds.nth_paragraph_begins_with, "num_paragraphs", "nth_paragraph", "first_word"
    ),
    "detectable_content:number_placeholders": _kind(kinds.has_placeholders, "num_placeholders"),
    "detectable_content:postscript": _kind(kinds.has_postscript, "postscript_marker"),
    "detectable_format:number_bullet_lists": _kind(kinds.has_bullets, "num_bullets"),
    "detectable_format:constrained_response": _kind(kinds.is_constrained),
    "detectable_format:number_highlighted_sections": _kind(kinds.has_highlights, "num_highlights"),
    "detectable_format:multiple_sections": _kind(kinds.has_sections, "section_spliter", "num_sections"),
    "detectable_format:json_format": _kind(kinds.is_json),
    "detectable_format:title": _kind(kinds.has_title),
    "combination:two_responses": _kind(kinds.is_two_responses),
    "combination:repeat_prompt": _kind(kinds.repeats_prompt, "prompt_to_repeat"),
    "startend:end_checker": _kind(kinds.ends_with, "end_phrase"),
    "startend:quotation": _kind(kinds.is_quoted),
    "change_case:capital_word_frequency": _kind(
        kinds.capital_word_count, "capital_frequency", relation="capital_relation"
    ),
    "change_case:english_capital": _kind(kinds.is_english_capitals),
    "change_case:english_lowercase": _kind(kinds.is_english_lowercase),
    "punctuation:no_comma": _kind(kinds.has_no_comma),
}
"""Published id -> kind. The misspelt `section_spliter` is the published argument's name."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Instruction:
    """One instruction of a task."""

    id: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])

    def is_followed(self, text: str) -> bool:
        """Blank text follows nothing."""
        return bool(text.strip()) and KINDS[self.id].check(text, **self.arguments)


@dataclass(kw_only=True, slots=True)
class InstructionGrader:
    """A `Grader`. `score`: 1 when `all` are followed and else 0, or the `share` that is followed.

    `loose` scores by the loose reading; both readings are in the metadata, whatever is scored.
    """

    score: str = "all"
    loose: bool = False
    name: str = field(default="instructions", init=False)
    task_fields: tuple[str, ...] = field(default=("instructions|instruction_id_list",), init=False)

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ConfigError(f"`score` is {self.score!r}; {choices_of(self.score, SCORES)}.")

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a task with instructions that are not known."""
        instructions = instructions_of(task)
        text = final_text(require_answer(answer, self.name))
        if text is None:
            return wrong("unfinished thinking")
        strict = [each.is_followed(text) for each in instructions]
        loose = [any(map(each.is_followed, loose_readings(text))) for each in instructions]
        verdicts = loose if self.loose else strict
        share = sum(verdicts) / len(verdicts)
        failures = [
            each.id for each, is_followed in zip(instructions, verdicts, strict=True) if not is_followed
        ]
        return Grade(
            score=share if self.score == "share" else float(not failures),
            is_correct=not failures,
            extracted=text,
            reason=f"not followed: {', '.join(failures)}"
            if failures
            else f"followed all {len(instructions)}",
            metadata={
                "score": self.score,
                "reading": "loose" if self.loose else "strict",
                "followed": [
                    {"id": each.id, "strict": by_letter, "loose": by_spirit}
                    for each, by_letter, by_spirit in zip(instructions, strict, loose, strict=True)
                ],
                "strict": all(strict),
                "loose": all(loose),
                "strict_share": sum(strict) / len(strict),
                "loose_share": sum(loose) / len(loose),
            },
        )

    def close(self) -> None:
        """Nothing to close."""


def loose_readings(text: str) -> list[str]:
    """The answer as it is; without first line, last line, both; and each of these without asterisks."""
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return cut + [each.replace("*", "") for each in cut]


def instructions_of(task: Mapping[str, Any]) -> list[Instruction]:
    """Instructions of a task: `instructions`, or a published row's `instruction_id_list` and `kwargs`."""
    entries = task.get("instructions")
    if entries is None and "instruction_id_list" in task:
        ids, kwargs = (
            task["instruction_id_list"],
            task.get("kwargs") or [{}] * len(task["instruction_id_list"]),
        )
        if len(ids) != len(kwargs):
            raise RewardError(
                f"The task has {len(ids)} entries in `instruction_id_list` and {len(kwargs)} in `kwargs`; "
                "there must be as many."
            )
        entries = [{"id": each, "kwargs": arguments} for each, arguments in zip(ids, kwargs, strict=True)]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise RewardError(
            f"The task has {entries!r:.200} as `instructions`; they must be a list such as "
            '[{"id": "punctuation:no_comma", "kwargs": {}}].'
        )
    return [_instruction(each) for each in entries]


def _instruction(entry: Any) -> Instruction:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("id"), str):
        raise RewardError(f"The instruction {entry!r:.200} has no `id`; write one of {', '.join(KINDS)}.")
    name = entry["id"]
    kind = KINDS.get(name)
    if kind is None:
        nearest = difflib.get_close_matches(name, KINDS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are {', '.join(KINDS)}."
        raise RewardError(f"There is no instruction `{name}`; {hint}")
    # Published rows list every argument of every kind, and None for those that are of another.
    arguments = {key: value for key, value in (entry.get("kwargs") or {}).items() if value is not None}
    argument_names = {*kind.arguments, kind.relation} - {""}
    if set(arguments) != argument_names:
        raise RewardError(
            f"The instruction `{name}` is given {', '.join(sorted(arguments)) or 'no arguments'}; it takes "
            f"{', '.join(sorted(argument_names)) or 'none'}."
        )
    for key, value in arguments.items():
        _require_fit(name, key, value, is_relation=key == kind.relation)
    if kind.relation:
        arguments["relation"] = arguments.pop(kind.relation)
    return Instruction(id=name, arguments=arguments)


_TEXTS = ("keywords", "forbidden_words")
_COUNTS = ("num_", "nth_", "frequency", "let_frequency", "capital_frequency")


def _require_fit(name: str, key: str, value: Any, *, is_relation: bool) -> None:
    if is_relation:
        good, requirement = value in kinds.RELATIONS, f"one of {', '.join(kinds.RELATIONS)}"
    elif key in _TEXTS:
        good = isinstance(value, list) and value and all(isinstance(each, str) and each for each in value)
        requirement = "a list of texts"
    elif key.startswith(_COUNTS):
        # A JSON writer with one number type makes 3.0 of 3.
        good = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value) >= 0
        requirement = "a whole number"
    else:
        good, requirement = isinstance(value, str) and bool(value.strip()), "a text"
    if not good:
        raise RewardError(
            f"The instruction `{name}` has {value!r:.200} as `{key}`; it must be {requirement}."
        )
