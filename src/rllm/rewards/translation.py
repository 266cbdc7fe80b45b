"""The closeness of a translation to those of people: chrF and BLEU, as sacrebleu computes them.

    answer ──► marked answer, or all of the final text ──► sacrebleu, beside all references at once ──► 0 … 1

Both say how many characters or words are shared, not what they mean.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllm.errors import ConfigError, MissingExtraError, choices_of
from rllm.rewards.extraction import NoAnswer, Reading
from rllm.rewards.grade import Grade, gold_texts, require_answer
from rllm.rewards.readings import as_read, marked_statement, require_reading, unread
from rllm.rewards.text import MAX_TEXT_CHARS

METRICS = ("chrf", "bleu")


class TranslationGrader:
    """A `Grader` that pays chrF (Popović 2015; characters of 1 to 6, β = 2) or the BLEU of the one sentence.

    Both are divided by 100. `correct_from`: the score from which an answer counts as correct. BLEU of a
    sentence is smoothed (exponential), with the orders that the sentence is long enough for.
    """

    name = "translation"
    task_fields = ("answer|answers",)

    def __init__(
        self,
        *,
        metric: str = "chrf",
        correct_from: float = 0.5,
        reading: str = Reading.STRICT,
        thinks_first: bool = False,
    ) -> None:
        if metric not in METRICS:
            raise ConfigError(f"`metric` is {metric!r}; {choices_of(metric, METRICS)}.")
        if not 0.0 < correct_from <= 1.0:
            raise ConfigError(f"`correct_from` is {correct_from}; it must be above 0 and at most 1.")
        self.metric = metric
        self.correct_from = correct_from
        self.reading = require_reading(reading)
        self.thinks_first = thinks_first
        self._score = _scorer(metric)

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a row without a reference."""
        require_answer(answer, self.name)
        references = gold_texts(task, self.name)
        statement = marked_statement(answer, thinks_first=self.thinks_first, max_chars=MAX_TEXT_CHARS)
        if isinstance(statement, NoAnswer):
            return unread(statement)
        text = statement.texts[0]
        score = min(max(self._score(text, references) / 100.0, 0.0), 1.0)  # rounding leaves 1.0000000002
        grade = Grade(
            score=score,
            is_correct=score >= self.correct_from,
            extracted=text,
            reason=f"{self.metric} {score:.3f}",
        )
        return as_read(grade, statement, self.reading)

    def close(self) -> None:
        """Nothing is held."""


class BleuGrader(TranslationGrader):
    """BLEU of one sentence."""

    name = "bleu"

    def __init__(
        self, *, correct_from: float = 0.5, reading: str = Reading.STRICT, thinks_first: bool = False
    ) -> None:
        super().__init__(metric="bleu", correct_from=correct_from, reading=reading, thinks_first=thinks_first)


def _scorer(metric: str) -> Callable[[str, Sequence[str]], float]:
    if importlib.util.find_spec("sacrebleu") is None:
        raise MissingExtraError("sacrebleu", "grading")
    import sacrebleu  # heavy: only where a translation is graded

    measure = sacrebleu.CHRF() if metric == "chrf" else sacrebleu.BLEU(effective_order=True)

    def score(answer: str, references: Sequence[str]) -> float:
        return measure.sentence_score(answer, list(references)).score

    return score
