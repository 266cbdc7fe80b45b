"""Is an answer to a reasoning-gym question right? Its own scorers, asked only what they can be trusted with.

    answer ──► form that the data set asks for ──► scorer ──► 1.0 is right, everything less is wrong
                 └ no: wrong, and the scorer never reads it

What its scorers do as they are (0.1.25), and what is done about it: some evaluate the answer as Python, some
find numbers or moves anywhere in free text, one takes any text for True, one compares as many letters as the
answer has, some raise on nonsense. So answers have to be the whole answer in the form that was asked for,
scorers that compute what a model wrote run in a process that can be killed, and an exception means wrong.
Where the data set has one right answer of one line, a text that states it as graders read it is right too.
"""

import ast
import json
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from rllm.errors import RewardError
from rllm.rewards.extraction import Reading, final_text
from rllm.rewards.stated_numbers import is_plain_number
from rllm.rewards.text import ExactGrader
from rllm.rewards.workers import WorkerPool, WorkerStatus

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

MAX_ANSWER_CHARS = 20_000
SCORING_TIMEOUT_S = 20.0
"""For scorers that do algebra on what a model wrote; more is a wrong answer."""
EXACT = frozenset(
    {"binary_matrix", "game_of_life_halting", "knights_knaves", "letter_jumble", "spell_backward"}
    | {"spiral_matrix", "string_insertion", "time_intervals"}
)
"""The one right answer has to be written as it is, but for spaces and the case of letters."""
_FORMS = {
    "countdown": r"(?!.*\*\*)[\d\s+\-*/().]{1,200}",
    "fraction_simplification": r"\$?\s*(?:-?\d+\s*/\s*-?\d+|\\d?frac\{-?\d+\}\{-?\d+\})\s*\$?",
    "gsm_symbolic": r"-?\d+(?:\.\d+)?",
    "kakurasu": r"[01\s]+",
    "n_queens": r"[Q_\s]+",
    "polynomial_equations": r"-?\d+(?:\.\d*)?(?:\s*,\s*-?\d+(?:\.\d*)?)*",
    "polynomial_multiplication": (
        r"(?!.*\)\s*\*\*)(?!.*[A-Za-z]{2})(?!.*\d{30})(?:[A-Za-z\d\s+\-*()]|\*\*\s*\d{1,2}(?!\d))+"
    ),
    "pool_matrix": r"(?=.*\d)[\d\s.\-]+",
    "propositional_logic": r"[A-Z¬∧∨→↔()\s]+",
    "puzzle24": r"(?!.*\*\*)[\d\s+\-*/().]{1,200}",
    "quantum_lock": r"[A-C](?:\s*(?:→|->|,)\s*[A-C])*",
    "rush_hour": r"[A-Z][+-]\d+(?:\s+[A-Z][+-]\d+)*",
    "sokoban": r"[LRUD]+",
    "survo": r"[\d\s]+",
}
"""Data set -> what the whole answer looks like."""
_INTEGRALS = ("intermediate_integration", "simple_integration")
_ALGEBRA = re.compile(
    r"(?:[A-Za-z](?![A-Za-z])|(?:sin|cos|tan|exp|log|sqrt|Integral)(?=\()|[\d\s+\-*/(),.])+"
)
_PROBABILITY = re.compile(r"\d{1,12}(?:\.\d{1,20})?(?:[eE]-\d{1,2})?|\d{1,20}/\d{1,20}")
_APPLY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_MAX_STATED_CHARS = 80
"""The longest answer that is looked for in a sentence."""
_HEDGE = re.compile(r"\bI (?:think|guess|believe|suppose)\b", re.IGNORECASE)
_ENDS = " .,;:!*`\"'"
_STATED = ExactGrader(reading=Reading.LENIENT)
_PROBABILITY_TOLERANCE = 1e-3
"""Relative: the right answers reach down to 1e-5."""
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>[\s.]*\Z", re.DOTALL)


@dataclass(kw_only=True, slots=True, frozen=True)
class Score:
    """The worth of an answer."""

    is_right: bool
    partial: float
    """From 0 to 1; what the data set's scorer says, 1 for what is right alone."""
    reason: str


def answer_in(text: str) -> str | None:
    """The answer of a model: the last <answer>…</answer> if nothing follows, the whole text where there is no
    tag.

    None for thoughts, or a tag, that do not end.
    """
    answer_text = final_text(text)
    if answer_text is None or "<answer>" not in answer_text:
        return answer_text
    tag = _TAG.search(answer_text)
    return None if tag is None else tag[1].strip()


def score(name: str, dataset: "ProceduralDataset", entry: Mapping[str, Any], text: str) -> Score:
    """Judge what a model wrote; `name`: the data set that the entry comes from.

    An answer that is not all of the text counts where it is the one right answer, stated as graders read it.
    """
    verdict = _score_alone(name, dataset, entry, text)
    if verdict.is_right or not _states(text, entry):
        return verdict
    return Score(is_right=True, partial=1.0, reason="right")


def _states(text: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a text states the right answer, written as it is but for the case of letters."""
    oracle = entry["answer"]
    if not isinstance(oracle, str) or len(oracle) > _MAX_STATED_CHARS or "\n" in oracle.strip():
        return False
    if _HEDGE.search(text):
        return False
    grade = _STATED.grade(text, {"answer": oracle, "question": str(entry["question"])})
    if not grade.is_correct or (" " in oracle and not grade.metadata["readings"]["strict"]):
        return False
    answer = grade.extracted or ""
    return is_plain_number(oracle) or _fold(answer).strip(_ENDS) == _fold(oracle).strip(_ENDS)


def _score_alone(name: str, dataset: "ProceduralDataset", entry: Mapping[str, Any], text: str) -> Score:
    answer = answer_in(text)
    if not answer:
        return Score(is_right=False, partial=0.0, reason="no answer")
    if len(answer) > MAX_ANSWER_CHARS:
        return Score(is_right=False, partial=0.0, reason="too long")
    oracle = entry["answer"]
    if name in EXACT:
        return _score(float(_fold(answer) == _fold(oracle)))
    if isinstance(oracle, str) and answer == oracle:
        return _score(1.0)
    if name in _FORMS and re.fullmatch(_FORMS[name], answer, re.DOTALL) is None:
        return Score(is_right=False, partial=0.0, reason="not in the form that was asked for")
    if name == "coin_flip":
        return _score(_same_probability(answer, oracle))
    if name == "puzzle24":
        return _score(float(_makes_24(answer, entry["metadata"]["numbers"])))
    if name in _INTEGRALS:
        return _integral_score(name, entry, answer)
    try:
        return _score(float(dataset.score_answer(answer, dict(entry))))
    except Exception as error:  # noqa: BLE001  whatever a scorer stumbles over, right answers it does not
        return Score(is_right=False, partial=0.0, reason=f"the scorer raised {type(error).__name__}")


def _score(points: float) -> Score:
    is_right = points >= 1.0
    return Score(
        is_right=is_right, partial=min(1.0, max(0.0, points)), reason="right" if is_right else "wrong"
    )


def _fold(text: str) -> str:
    return " ".join(text.lower().split())


def _makes_24(answer: str, numbers: Iterable[int]) -> bool:
    """Each of the numbers once, and exactly 24; the scorer would take any four numbers, and 24.9."""
    try:
        tree = ast.parse(answer.strip(), mode="eval")
        return sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers) and _value(tree.body) == 24
    except (SyntaxError, ValueError, ZeroDivisionError):
        return False


def _value(node: ast.expr) -> Fraction:
    """Value of whole numbers joined by + - * /. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _APPLY:
        return _APPLY[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(ast.dump(node))


def _same_probability(answer: str, oracle: str) -> float:
    if _PROBABILITY.fullmatch(answer) is None or answer.endswith("/0"):
        return 0.0
    probability, right = Fraction(answer), Fraction(oracle)
    return float(abs(probability - right) <= _PROBABILITY_TOLERANCE * right)


def _integral_score(name: str, entry: Mapping[str, Any], answer: str) -> Score:
    if _ALGEBRA.fullmatch(answer) is None or len(answer) > 1_000:
        return Score(is_right=False, partial=0.0, reason="not in the form that was asked for")
    metadata = {
        "integrand": str(entry["metadata"]["integrand"]),
        "variable": str(entry["metadata"]["variable"]),
    }
    reply = _pool().call(name, json.dumps(metadata), answer)
    if (
        reply.status is WorkerStatus.TIMEOUT
        and reply.cpu_s is not None
        and reply.cpu_s < SCORING_TIMEOUT_S / 4
    ):
        raise RewardError(f"No processor had time to score reasoning-gym/{name} in {SCORING_TIMEOUT_S:g} s.")
    if reply.status is not WorkerStatus.OK:
        return Score(is_right=False, partial=0.0, reason=f"the scorer's process: {reply.status}")
    return _score(float(reply.value))


@cache
def _pool() -> WorkerPool:
    return WorkerPool(
        "rllm.environments.reasoning_gym_scoring:integral_points", workers=1, timeout_s=SCORING_TIMEOUT_S
    )


def integral_points(name: str, metadata: str, answer: str) -> float:
    """The score that the scorer of an integration data set gives; runs in the worker."""
    from reasoning_gym.factory import create_dataset  # heavy: in a process of its own

    entry = {"answer": "", "metadata": json.loads(metadata)}
    with _SCORER:
        return float(create_dataset(name, seed=0, size=1).score_answer(answer, entry))


_SCORER = threading.Lock()
