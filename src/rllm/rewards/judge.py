"""Answers that a model judges: by a rubric, or against a reference.

    question, rubric, answer ─────► prompts/judge*.md ─────► model ──► {"seal", "reason", "scores"} ──► Grade
    question, reference, answer ──► prompts/equality*.md ──► model ──► {…, "equivalent"} ─────────────► Grade

The answer stands between tags that it cannot contain, because they are a digest of it, and the verdict must
repeat a seal that only the system message holds: a verdict that the answer brings along is none.
"""

import hashlib
import math
import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError, RewardError
from rllm.inference.call_retries import CallPatience
from rllm.inference.client import ModelClient
from rllm.inference.engines import make_client
from rllm.inference.rollout_engine import RolloutEngine
from rllm.rewards.extraction import Marked, final_text, marked_answer
from rllm.rewards.grade import Grade, gold_texts, require_answer, right, task_has, wrong
from rllm.rewards.judge_calls import Judge, JudgeVerdict, MalformedVerdictError, Price, costs
from rllm.types.messages import Message

MAX_ANSWER_CHARS = 60_000
"""Shown to the judge; what is longer is cut in the middle, with a mark that says so."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Criterion:
    """One thing that a rubric asks for."""

    name: str
    description: str
    low: float = 0.0
    high: float = 1.0
    weight: float = 1.0


@dataclass(kw_only=True, slots=True)
class _ModelGrader(ABC):
    """The common part of both graders: the model that judges, and the frame around the answer.

    `client`: a ModelClient or RolloutEngine; without one, `base_url` and `model` name a server that speaks
    OpenAI's protocol, and where they are not given RLLM_JUDGE_BASE_URL and RLLM_JUDGE_MODEL do.
    `cache` is a directory for verdicts. Prices are per million tokens, in any currency.
    """

    client: ModelClient | RolloutEngine | None = None
    base_url: str = ""
    model: str = ""
    api_key: str | None = None
    temperature: float = 0.0
    max_tokens: int = 1024
    retries: int = 3
    timeout_s: float = 120.0
    cache: str = ""
    prompt_price: float = 0.0
    completion_price: float = 0.0
    _judge: Judge = field(init=False, repr=False)
    _own_client: ModelClient | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        client = self.client
        if client is None:
            self.base_url = self.base_url or os.environ.get("RLLM_JUDGE_BASE_URL", "")
            self.model = self.model or os.environ.get("RLLM_JUDGE_MODEL", "")
            if not self.base_url and not self.model:
                raise ConfigError(
                    "A judge needs a model: give `model`, and `base_url` (such as http://127.0.0.1:8000/v1) "
                    "where it is not OpenAI's, or set RLLM_JUDGE_MODEL and RLLM_JUDGE_BASE_URL."
                )
            client = self._own_client = make_client(
                "openai", {"base_url": self.base_url, "model": self.model, "api_key": self.api_key}
            )
        self._judge = Judge(
            client,
            name=self.model,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            retries=self.retries,
            patience=CallPatience(call_timeout_s=self.timeout_s),
            cache=Path(self.cache) if self.cache else None,
        )

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a task without its fields and a judge without a verdict, InferenceError and
        OSError for one that is not reached."""
        question = self._question(answer, task)
        if isinstance(question, Grade):
            return question
        return self._grade_of(question, self._judge.verdict(*question.request))

    async def grade_async(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """`grade`, in the event loop that the client lives in."""
        question = self._question(answer, task)
        if isinstance(question, Grade):
            return question
        return self._grade_of(question, await self._judge.ask(*question.request))

    @abstractmethod
    def _question(self, answer: str, task: Mapping[str, Any]) -> "Grade | _Question":
        """The question about an answer; its grade where no judge is needed."""

    @abstractmethod
    def _grade_of(self, question: "_Question", verdict: JudgeVerdict) -> Grade:
        """The grade that a verdict comes to."""

    def close(self) -> None:
        if self._own_client is not None:
            # First, because the client lives in the judge's event loop, which the next line ends.
            self._judge.run(self._own_client.close())
            self._own_client = None
        self._judge.close()

    def _costs(self, verdict: JudgeVerdict) -> dict[str, Any]:
        return costs(verdict, Price(prompt=self.prompt_price, completion=self.completion_price))


@dataclass(kw_only=True, slots=True)
class JudgeGrader(_ModelGrader):
    """A `Grader` by rubric. The score is the weighted mean of the criteria, each scaled to 0..1; `is_correct`
    from `threshold` on.

    A task has `question` and `rubric` (a text, a list of texts, or of {"name", "description", "min", "max",
    "weight"}), `reference`, or both.
    """

    threshold: float = 0.5
    name: str = field(default="judge", init=False)
    task_fields: tuple[str, ...] = field(default=("question", "rubric|reference"), init=False)

    def _question(self, answer: str, task: Mapping[str, Any]) -> "Grade | _Question":
        criteria = criteria_of(task)
        text = _answer_to_judge(answer, self.name)
        if isinstance(text, Grade):
            return text
        tag, seal = _tag_and_seal(text, task)
        reference = task.get("reference")
        keys = ", ".join(f'"{each.name}": a number from {each.low:g} to {each.high:g}' for each in criteria)
        criteria_text = "\n".join(
            f"- {each.name} (from {each.low:g} to {each.high:g}): {each.description}" for each in criteria
        )
        messages = [
            _system("judge", tag=tag, seal=seal, score_keys=keys),
            _user(
                "judge_question",
                tag=tag,
                question=_text(task, "question"),
                reference=f"\n# A reference answer\n\n{reference}\n" if reference else "",
                criteria=criteria_text,
                answer=_clip(text),
            ),
        ]
        return _Question(messages=messages, seal=seal, answer=text, criteria=criteria)

    def _grade_of(self, question: "_Question", verdict: JudgeVerdict) -> Grade:
        criteria, scores = question.criteria, verdict.reply["scores"]
        total = sum(each.weight for each in criteria)
        score = (
            sum(each.weight * (scores[each.name] - each.low) / (each.high - each.low) for each in criteria)
            / total
        )
        return Grade(
            score=score,
            is_correct=score >= self.threshold,
            extracted=question.answer,
            reason=verdict.reply["reason"],
            metadata={"scores": scores, "threshold": self.threshold, **self._costs(verdict)},
        )


@dataclass(kw_only=True, slots=True)
class EqualityGrader(_ModelGrader):
    """A `Grader` against `reference` (or `answer`, `answers`): 1 where the judge says that the answer means
    the same. An answer that is letter for letter the reference needs no judge."""

    name: str = field(default="equality", init=False)
    task_fields: tuple[str, ...] = field(default=("question", "reference|answer|answers"), init=False)

    def _question(self, answer: str, task: Mapping[str, Any]) -> "Grade | _Question":
        references = (
            [_text(task, "reference")] if task_has(task, "reference") else gold_texts(task, self.name)
        )
        question = _text(task, "question")
        text = _answer_to_judge(answer, self.name)
        if isinstance(text, Grade):
            return text
        mark = marked_answer(answer)
        if isinstance(mark, Marked) and _fold(mark.text) in map(_fold, references):
            return right("letter for letter the reference", text, calls=0, cost=0.0)
        tag, seal = _tag_and_seal(text, task)
        reference = "\n\nor\n\n".join(references)
        messages = [
            _system("equality", tag=tag, seal=seal),
            _user("equality_question", tag=tag, question=question, reference=reference, answer=_clip(text)),
        ]
        return _Question(messages=messages, seal=seal, answer=text)

    def _grade_of(self, question: "_Question", verdict: JudgeVerdict) -> Grade:
        make = right if verdict.reply["equivalent"] else wrong
        return make(verdict.reply["reason"], question.answer, **self._costs(verdict))


@dataclass(kw_only=True, slots=True, frozen=True)
class _Question:
    """The judge's question, and the check of its verdict."""

    messages: list[Message]
    seal: str
    answer: str
    criteria: Sequence[Criterion] = ()

    @property
    def request(self) -> tuple[list[Message], Any]:
        return self.messages, self._scores if self.criteria else self._equality

    def _scores(self, reply: dict[str, Any]) -> dict[str, Any]:
        scores = self._under_seal(reply, "scores").get("scores")
        names = [each.name for each in self.criteria]
        if not isinstance(scores, dict) or sorted(scores) != sorted(names):
            raise MalformedVerdictError(
                f"its scores are {scores!r:.200}; it was asked for {', '.join(names)}"
            )
        for each in self.criteria:
            value = scores[each.name]
            if (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not math.isfinite(value)
                or not each.low <= value <= each.high
            ):
                raise MalformedVerdictError(
                    f"its score for {each.name} is {value!r:.80}; it must be a number from {each.low:g} to "
                    f"{each.high:g}"
                )
        return reply

    def _equality(self, reply: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(self._under_seal(reply, "equivalent").get("equivalent"), bool):
            raise MalformedVerdictError(
                f"its `equivalent` is {reply.get('equivalent')!r:.80}, not true or false"
            )
        return reply

    def _under_seal(self, reply: dict[str, Any], key: str) -> dict[str, Any]:
        if set(reply) != {"seal", "reason", key} or not isinstance(reply["reason"], str):
            raise MalformedVerdictError(
                f"it has the keys {', '.join(map(str, reply))}; they must be seal, reason (a text), {key}"
            )
        if reply["seal"] != self.seal:
            raise MalformedVerdictError(f"its seal is {reply['seal']!r:.80}, not the one that it was given")
        return reply


def criteria_of(task: Mapping[str, Any]) -> list[Criterion]:
    """The rubric of a task; with a reference alone, agreement with it. Raises RewardError without either."""
    rubric = task.get("rubric")
    if not rubric:
        if not task_has(task, "reference"):
            raise RewardError(
                "The judge has nothing to judge by: the task has neither `rubric` nor `reference`. An answer "
                "is not right because there is one."
            )
        return [Criterion(name="agreement", description="It says what the reference answer says.")]
    if isinstance(rubric, str):
        return [Criterion(name="rubric", description=rubric, high=10.0)]
    if not isinstance(rubric, list):
        raise RewardError(f"The task's `rubric` is {rubric!r:.200}; it must be a text or a list of criteria.")
    criteria = [_criterion(each, number) for number, each in enumerate(rubric, start=1)]
    if len({each.name for each in criteria}) != len(criteria):
        raise RewardError("Two criteria of the task's `rubric` have one name; give each its own.")
    return criteria


def _criterion(entry: Any, number: int) -> Criterion:
    if isinstance(entry, str) and entry.strip():
        return Criterion(name=f"criterion_{number}", description=entry)
    keys = {"name", "description", "min", "max", "weight"}
    if not isinstance(entry, Mapping) or not entry.get("description") or set(entry) - keys:
        raise RewardError(
            f"Criterion {number} of the task's `rubric` is {entry!r:.200}; write a text, or a mapping with "
            f"`description` and any of {', '.join(sorted(keys - {'description'}))}."
        )
    criterion = Criterion(
        name=str(entry.get("name") or f"criterion_{number}"),
        description=str(entry["description"]),
        low=float(entry.get("min", 0.0)),
        high=float(entry.get("max", 1.0)),
        weight=float(entry.get("weight", 1.0)),
    )
    if not criterion.low < criterion.high or not 0.0 < criterion.weight < math.inf:
        raise RewardError(
            f"Criterion `{criterion.name}` goes from {criterion.low:g} to {criterion.high:g} with weight "
            f"{criterion.weight:g}; it must go from less to more, with a weight above 0."
        )
    return criterion


def _answer_to_judge(answer: str, grader: str) -> str | Grade:
    text = final_text(require_answer(answer, grader))
    if text is None:
        return wrong("unfinished thinking", calls=0, cost=0.0)
    # Blanks, control and format characters alone leave the judge nothing to see.
    visible = any(unicodedata.category(each)[0] not in "CZ" for each in text)
    return text if visible else wrong("empty", calls=0, cost=0.0)


def _tag_and_seal(text: str, task: Mapping[str, Any]) -> tuple[str, str]:
    """The tag holds a digest of the answer, so the answer cannot hold the tag. Both are the same every time:
    a prompt that changed with each asking could not be remembered."""
    digest = hashlib.blake2b(f"{task.get('question')}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"answer-{digest[:16]}", digest[16:24]


def _clip(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()  # lone surrogates cannot be sent
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    half = MAX_ANSWER_CHARS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def _fold(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).rstrip(".")


def _text(task: Mapping[str, Any], name: str) -> str:
    value = task.get(name)
    if not isinstance(value, str) or not value.strip():
        raise RewardError(f"The task has {value!r:.200} as `{name}`; the judge needs a text there.")
    return value


@cache
def _prompt(name: str) -> str:
    return resources.files("rllm").joinpath(f"rewards/prompts/{name}.md").read_text(encoding="utf-8").strip()


def _system(prompt: str, **values: str) -> Message:
    return {"role": "system", "content": _prompt(prompt).format(**values)}


def _user(prompt: str, **values: str) -> Message:
    # `format` reads the prompt alone, so braces in an answer or a question are plain text.
    return {"role": "user", "content": _prompt(prompt).format(**values)}
