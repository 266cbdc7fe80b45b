"""Is what a search agent answers one of the answers that people accept?

    answer ──► <answer>…</answer>, or all of the final text ──► exact match ──► 1
                                                            └─► best token F1 ──► that, from a threshold on

Documents and thoughts on the way are not looked at.
"""

from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError
from rllm.rewards.extraction import NoAnswer, Reading
from rllm.rewards.grade import Grade, gold_texts, require_answer
from rllm.rewards.readings import as_read, marked_statement, require_reading, unread
from rllm.rewards.text import exact_match, token_f1


class SearchGrader:
    """A `Grader`: 1 for an exact match (SQuAD's normalisation) with a right answer; only that is correct.

    What shares enough words with one is paid its token F1, if that is `partial_from` or more; 1.0 pays exact
    matches only.
    """

    name = "search"
    task_fields = ("answer|answers",)

    def __init__(
        self, *, partial_from: float = 0.3, reading: str = Reading.STRICT, thinks_first: bool = False
    ) -> None:
        if not 0.0 < partial_from <= 1.0:
            raise ConfigError(f"`partial_from` is {partial_from}; it must be above 0 and at most 1.")
        self.partial_from = partial_from
        self.reading = require_reading(reading)
        self.thinks_first = thinks_first

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row without a right answer."""
        require_answer(answer, self.name)
        golds = gold_texts(task, self.name)
        statement = marked_statement(answer, thinks_first=self.thinks_first)
        if isinstance(statement, NoAnswer):
            return unread(statement)
        text = statement.texts[0]
        is_exact = any(exact_match(text, gold) for gold in golds)
        f1 = max(token_f1(text, gold) for gold in golds)
        is_partial = not is_exact and self.partial_from <= f1 < 1.0
        grade = Grade(
            score=1.0 if is_exact else f1 if is_partial else 0.0,
            is_correct=is_exact,
            extracted=text,
            reason="equal" if is_exact else "similar" if is_partial else "different",
            metadata={"signals": {"exact_match": float(is_exact), "f1": f1}},
        )
        return as_read(grade, statement, self.reading)

    def close(self) -> None:
        """Nothing is held."""
