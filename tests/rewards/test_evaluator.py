import math
from typing import Any

import numpy as np
import pytest

import rllm
from rllm.errors import ConfigError, RewardError
from rllm.eval.types import EvalOutput, Signal
from rllm.rewards.evaluator import Evaluator, as_evaluator
from rllm.types.episode import Episode
from rllm.types.judgements import judgement


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> float:
    return task["pay"]


@rllm.evaluator(name="careful")
async def judge(task: dict[str, Any], episode: Episode) -> bool:
    return True


async def test_a_decorated_function_evaluates_and_is_still_callable() -> None:
    assert isinstance(score, Evaluator)
    assert score({"pay": 0.5}, Episode()) == 0.5
    assert score.evaluate({"pay": 0.5}, Episode()) == EvalOutput(0.5, True)
    assert (judge.name, judge.is_async, score.is_async) == ("careful", True, False)
    assert await judge.evaluate({}, Episode()) == EvalOutput(1.0, True)  # type: ignore[misc]


def test_a_judgement_may_be_said_in_several_ways(subtests: pytest.Subtests) -> None:
    for said, reward, is_correct in [
        (1, 1.0, True),
        (0.0, 0.0, False),
        (-0.5, -0.5, False),
        (True, 1.0, True),
        (np.bool_(False), 0.0, False),
        (np.float32(0.5), 0.5, True),
        ((0.3, False), 0.3, False),
        (EvalOutput(reward=2, is_correct=np.bool_(True)), 2.0, True),  # type: ignore[arg-type]
    ]:
        with subtests.test(said=said, reward=reward, is_correct=is_correct):
            output = judgement(said, "score")
            assert (output.reward, output.is_correct) == (reward, is_correct)
            assert type(output.reward) is float
            assert type(output.is_correct) is bool


@pytest.mark.parametrize(
    "said",
    [
        None,
        math.nan,
        math.inf,
        -math.inf,
        "1.0",
        [1.0],
        10**400,
        1j,
        (1.0,),
        (1.0, "yes"),
        (None, True),
        EvalOutput(reward=math.nan, is_correct=True),
        EvalOutput(reward=1.0, is_correct=None),  # type: ignore[arg-type]
        EvalOutput(1.0, True, signals=[Signal("format", math.nan)]),
        EvalOutput(1.0, True, signals=["format"]),  # type: ignore[list-item]
    ],
)
def test_what_is_no_judgement_is_an_error_that_names_the_evaluator(said: Any) -> None:
    with pytest.raises(RewardError, match=r"^score returned"):
        Evaluator(lambda task, episode: said, "score").evaluate({}, Episode())


class Grader:
    name = "grader"

    def evaluate(self, task: dict[str, Any], episode: Episode) -> EvalOutput:
        return EvalOutput(reward=1.0, is_correct=True)


@pytest.mark.parametrize(
    ("judge", "name"), [(Grader, "grader"), (Grader(), "grader"), (lambda task, episode: 1.0, "<lambda>")]
)
def test_functions_objects_and_classes_are_evaluators(judge: Any, name: str) -> None:
    evaluator = as_evaluator(judge)
    assert evaluator.name == name
    assert evaluator.evaluate({}, Episode()) == EvalOutput(1.0, True)


@pytest.mark.parametrize(
    ("judge", "named"),
    [
        (3, r"3 \(a int\) is no evaluator"),
        (lambda episode: 1.0, r"cannot be called with \(task, episode\)"),
        ("no.such:score", "`no.such`"),
        ("gsm8k", "`gsm8k`"),
    ],
)
def test_what_is_no_evaluator_is_refused(judge: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        as_evaluator(judge)
