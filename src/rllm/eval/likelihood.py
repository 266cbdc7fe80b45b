"""Questions whose choices are compared by how likely a model finds them: nothing is written, nothing is read.

    row ──likelihood_task──► {"context", "choices", "grading"}
    context + " " + choice ──tokens──► log p of the choice's tokens ──► sum, per token, per character

Published figures of MMLU, HellaSwag and ARC are made like this (Gao et al. 2023, lm-evaluation-harness:
`acc` is the sum, `acc_norm` is per character). The tokens are split as that program splits them.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rllm.data.questions import Question, letter, render
from rllm.engine.attempts import EpisodeCounts, ParallelLimit, attempts_at, play_all
from rllm.engine.rollout import GRADE
from rllm.errors import ConfigError
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId

Score = Callable[[list[int], int], Awaitable[list[float]]]
"""(ids, start) -> the log-probability of each of `ids[start:]`, in nats."""
SUM, TOKEN, CHARACTER = READINGS = ("sum", "token", "character")
"""Measures of a choice: its log-probability, that of a token of it, or that of a character of it."""
TEXT, LETTER = ANSWERS = ("text", "letter")
"""Forms of a choice in the model's words: its text, or its letter behind a list of all choices."""
BETWEEN = "\n\n"
"""Between worked examples and the question."""
PROMPT = "Question: {{question}}\nAnswer:"
WAY = "likelihood"
_PARALLEL = 16


def likelihood_task(
    question: Question, *, task_id: str, prompt: str, answer: str, examples: Sequence[Question] = ()
) -> dict[str, Any]:
    """A question as a text that each choice continues, behind worked `examples`.

    `prompt` shows values of the question as in the catalogue; `answer` is one of ANSWERS. Raises ConfigError
    for a question without choices.
    """
    choices = question.grading.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ConfigError(
            f"{task_id} has no choices, so there is nothing to compare; leave --likelihood out."
        )
    texts = [f"{_context(each, prompt)} {_right_answer(each, answer)}{BETWEEN}" for each in examples]
    context = "".join(texts) + _context(question, prompt)
    return {
        "task_id": task_id,
        "question": context,
        "context": context,
        "choices": [letter(n) if answer == LETTER else choice for n, choice in enumerate(choices)],
        "grading": {**question.grading, "answer": _right_letter(question)},
        "category": question.category,
    }


def _context(question: Question, prompt: str) -> str:
    values = dict(question.prompt_values)
    values["choices"] = "\n".join(
        f"{letter(n)}. {choice}" for n, choice in enumerate(question.grading["choices"])
    )
    return render(prompt, values)


def _right_answer(question: Question, answer: str) -> str:
    right = _right_letter(question)
    return right if answer == LETTER else question.grading["choices"][ord(right) - ord("A")]


def _right_letter(question: Question) -> str:
    """The letter of the right choice, which rows of a user's own may name by its text. Raises ConfigError for
    an answer that is no choice."""
    choices, right = question.grading["choices"], str(question.grading.get("answer"))
    letters = [letter(place) for place in range(len(choices))]
    if right in letters:
        return right
    if right in choices:
        return letters[choices.index(right)]
    raise ConfigError(
        f"The right answer {right!r:.60} is neither a letter of {letters} nor one of the choices."
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoredChoice:
    """One choice, and how likely the model finds it."""

    text: str
    logprob: float
    """Log-probability of all its tokens together, in nats."""
    num_tokens: int

    def value(self, reading: str) -> float:
        """Return the measure that a reading compares."""
        if reading == TOKEN:
            return self.logprob / self.num_tokens
        return self.logprob / len(self.text) if reading == CHARACTER else self.logprob


class LikelihoodEngine:
    """An `EpisodeEngine` whose episodes are comparisons of choices."""

    def __init__(
        self, score: Score, *, encode: Callable[[str], list[int]], max_context: int, reading: str
    ) -> None:
        """`encode`: text to ids, as a text to be continued begins. `reading`: the one that decides whether an
        episode is right; all are recorded."""
        self.counts = EpisodeCounts()
        self._score, self._encode, self._max_context = score, encode, max_context
        self._reading = reading
        self._places = ParallelLimit(_PARALLEL)

    def live(self) -> Sequence[object]:
        return ()

    def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """As of every engine. Nothing is drawn, so `sampling` and `purpose` change nothing."""
        pending = attempts_at(tasks, group_size, skip=skip)

        async def work(results: Any) -> None:
            while pending:
                identity, task = pending.pop()
                results.put_nowait(await self._compare(identity, task))

        return play_all(pending, work, self._places, self.counts)

    async def _compare(self, identity: EpisodeId, task: Mapping[str, Any]) -> Episode:
        context, choices = task["context"], task["choices"]
        pairs = [pair_ids(self._encode, context, f" {choice}") for choice in choices]
        longest = max(len(ids) for ids, _ in pairs)
        if longest > self._max_context:
            return _too_long(identity, task, longest, self._max_context)
        scores: list[ScoredChoice] = []
        for choice, (ids, start) in zip(choices, pairs, strict=True):
            logprobs = await self._score(ids, start)
            scores.append(ScoredChoice(text=choice, logprob=sum(logprobs), num_tokens=len(logprobs)))
        return self._episode(identity, task, scores, len(pairs[0][0]))

    def _episode(
        self, identity: EpisodeId, task: Mapping[str, Any], scores: list[ScoredChoice], num_prompt: int
    ) -> Episode:
        best = {name: int(np.argmax([score.value(name) for score in scores])) for name in READINGS}
        readings = {name: letter(n) == task["grading"]["answer"] for name, n in best.items()}
        place = best[self._reading]
        is_correct = readings[self._reading]
        step = Step(
            chat_completions=[
                {"role": "user", "content": task["context"]},
                {"role": "assistant", "content": scores[place].text},
            ],
            model_response=scores[place].text,
            done=True,
            reward=float(is_correct),
            usage={"prompt_tokens": num_prompt, "completion_tokens": 0},
            info={
                "choices": [
                    {"text": score.text, "logprob": score.logprob, "tokens": score.num_tokens}
                    for score in scores
                ]
            },
        )
        trajectory = Trajectory(
            task=dict(task),
            steps=[step],
            reward=float(is_correct),
            output=scores[place].text,
            termination_reason=TerminationReason.ENV_DONE,
            outcome=Outcome.SCORED,
            info={GRADE: {"extracted": letter(place), "readings": readings, "is_correct": is_correct}},
        )
        return Episode(
            task=dict(task),
            task_id=identity.task_id,
            rollout_idx=identity.attempt,
            trajectories=[trajectory],
            is_correct=is_correct,
            termination_reason=TerminationReason.ENV_DONE,
            outcome=Outcome.SCORED,
        )


def pair_ids(encode: Callable[[str], list[int]], context: str, continuation: str) -> tuple[list[int], int]:
    """(ids of both, number of those of `context`). White space at the end of the context belongs to what
    follows, as tokenizers begin words with it; tokens that cross the border count to the continuation."""
    bare_context = context.rstrip()
    continuation = context[len(bare_context) :] + continuation
    return encode(bare_context + continuation), len(encode(bare_context))


def _too_long(identity: EpisodeId, task: Mapping[str, Any], length: int, room: int) -> Episode:
    reason = f"the question and a choice have {length} tokens, and the context holds {room}"
    trajectory = Trajectory(
        task=dict(task),
        reward=0.0,
        outcome=Outcome.TRUNCATED,
        termination_reason=TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
        info={"error": {"type": "ContextLengthError", "message": reason}},
    )
    return Episode(
        task=dict(task),
        task_id=identity.task_id,
        rollout_idx=identity.attempt,
        trajectories=[trajectory],
        termination_reason=TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
        outcome=Outcome.TRUNCATED,
    )
