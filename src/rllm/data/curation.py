"""Conversations of the past ──► rows to learn from, each once and without secrets.

    PastConversation ──sft──────────► {"messages"}
                 ──preferences──► {"prompt", "chosen", "rejected"}   answers to one prompt, better first
    a row ──CleanRows──► masked, None where it is there already

The rows are those that `rllm sft` and `rllm dpo` read; what they were made of stands beside them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rllm.data.masking import with_marks


class RowKind(StrEnum):
    """The use of rows."""

    SFT = "sft"
    PREFERENCES = "preferences"
    TASKS = "tasks"


@dataclass(kw_only=True, slots=True, frozen=True)
class PastConversation:
    """One that ends with an answer, and what the answer came to."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    is_right: bool
    score: float | None = None
    """None where nobody gave one."""
    is_corrected: bool = False
    """Somebody wrote the answer instead."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The origin of the rows, for people."""

    @property
    def prompt(self) -> list[dict[str, Any]]:
        """All before the first answer."""
        return self.messages[: self._answer_begin]

    @property
    def answer(self) -> list[dict[str, Any]]:
        return self.messages[self._answer_begin :]

    @property
    def _answer_begin(self) -> int:
        roles = [each.get("role") for each in self.messages]
        return roles.index("assistant") if "assistant" in roles else len(roles)

    def is_better_than(self, other: "PastConversation") -> bool:
        """By what somebody wrote, then by being right, then by scores where both have one."""
        if self.is_corrected or other.is_corrected:
            return not other.is_corrected
        if self.is_right != other.is_right:
            return self.is_right
        return self.score is not None and other.score is not None and self.score > other.score


def sft_row(conversation: PastConversation) -> dict[str, Any]:
    tools = {"tools": conversation.tools} if conversation.tools else {}
    return {"messages": conversation.messages, **tools}


def preference_rows(
    conversations: Iterable[PastConversation],
) -> Iterator[tuple[dict[str, Any], PastConversation, PastConversation]]:
    """For every answer that is worse than another to the same prompt: a row, and both."""
    by_prompt: dict[str, list[PastConversation]] = {}
    for each in conversations:
        key = json.dumps([each.prompt, each.tools], sort_keys=True)
        by_prompt.setdefault(key, []).append(each)
    for answers in by_prompt.values():
        leaders = _leaders(answers)
        for worse in answers:
            best = next((each for each in leaders if each.is_better_than(worse)), None)
            if best is None or best.answer == worse.answer:  # then chance decided, not the answer
                continue
            tools = {"tools": best.tools} if best.tools else {}
            row = {"prompt": best.prompt, "chosen": best.answer, "rejected": worse.answer, **tools}
            yield row, best, worse


def _leaders(answers: list[PastConversation]) -> list[PastConversation]:
    """Those that some answer is worse than, if any is better: the best of each kind, the best kind first."""
    corrections = [each for each in answers if each.is_corrected]
    leaders = corrections[-1:]
    for is_right in (True, False):
        others = [each for each in answers if each.is_right is is_right and not each.is_corrected]
        with_score = [each for each in others if each.score is not None]
        leaders += [max(with_score, key=lambda each: each.score or 0.0)] if with_score else []
        leaders += [each for each in others if each.score is None][:1] if is_right else []
    return leaders


class CleanRows:
    """Rows with marks in the place of secrets, each once."""

    def __init__(self) -> None:
        self.num_masked = 0
        """Texts with a mark in rows that were handed on."""
        self._digests: set[bytes] = set()

    def clean(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """None for a row that was there already."""
        clean_row, num_masked = with_marks(row)
        text = json.dumps(clean_row, sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self._digests:
            return None
        self._digests.add(digest)
        self.num_masked += num_masked
        return clean_row
