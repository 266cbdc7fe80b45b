"""Who judges, once, and what becomes of an episode that nobody could judge."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import pytest

from rllm.environments.judging import GraderFailure
from rllm.errors import ConfigError, InferenceError
from rllm.eval.judging import JudgedEngine, failing_alone, row_by_row, task_evaluator, verdict
from rllm.eval.results import result_of
from rllm.rewards.evaluator import Evaluator
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.evaluation import EvalOutput

TASK: dict[str, Any] = {"task_id": "t", "question": "1 + 1", "grader": "math", "grading": {"answer": "2"}}


def said(text: str, outcome: Outcome = Outcome.SCORED, **changes: Any) -> Episode:
    step = Step(chat_completions=[{"role": "assistant", "content": text}], model_response=text)
    return Episode(
        task={**TASK, **changes},
        task_id="t",
        trajectories=[Trajectory(steps=[step], reward=7.0)],
        outcome=outcome,
    )


class Played:
    """An engine that has played already."""

    def __init__(self, *episodes: Episode) -> None:
        self.episodes = episodes

    async def run(self, tasks: Sequence[Any], **options: Any) -> AsyncGenerator[Episode, None]:
        for episode in self.episodes:
            yield episode


async def judged(evaluator: Evaluator | None, *episodes: Episode) -> list[Episode]:
    return [each async for each in JudgedEngine(Played(*episodes), evaluator).run([])]


async def test_what_a_workflow_pays_itself_does_not_count() -> None:
    right, wrong, failed = await judged(
        task_evaluator(), said("\\boxed{2}"), said("\\boxed{3}"), said("", Outcome.POLICY_FAILURE)
    )
    assert (right.is_correct, right.reward) == (True, 1.0)
    assert (wrong.is_correct, wrong.reward) == (False, 0.0)
    assert result_of(wrong).extracted == "3"
    assert (failed.outcome, failed.is_correct) == (Outcome.POLICY_FAILURE, False)


async def test_who_cannot_be_judged_has_failed_and_has_no_reward() -> None:
    def broken(task: Mapping[str, Any], episode: Episode) -> float:
        raise ZeroDivisionError("a bug")

    (failed,) = await judged(Evaluator(broken), said("\\boxed{2}"))
    assert (failed.outcome, failed.trajectories[0].reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert result_of(failed).is_unjudged
    assert result_of(failed).reason == "broken could not judge: ZeroDivisionError: a bug"
    noted: Any = row_by_row(Evaluator(broken)).evaluate(TASK, said("\\boxed{2}"))
    episode = said("\\boxed{2}")
    episode.info["evaluation"] = noted.metadata
    (failed,) = await judged(None, episode)
    assert result_of(failed).is_unjudged
    assert "evaluation" not in failed.info


async def test_a_judgement_that_no_store_can_hold_fails_its_row_and_not_the_save() -> None:
    def odd(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
        return EvalOutput(reward=1.0, is_correct=True, metadata={"reason": {"why": float("nan")}})

    (failed,) = await judged(Evaluator(odd), said("\\boxed{2}"))
    assert result_of(failed).is_unjudged
    assert "`info['evaluation']['reason']['why']` is nan" in result_of(failed).reason


async def test_what_is_wrong_of_every_task_ends_the_evaluation() -> None:
    with pytest.raises(ConfigError, match="names no grader"):
        await judged(task_evaluator(), said("2", grader=""))


def test_a_row_that_its_grader_cannot_judge_fails_alone_while_training() -> None:
    hole = said("\\boxed{2}", grading={})
    assert isinstance(verdict(task_evaluator(), hole), GraderFailure)
    with pytest.raises(InferenceError, match="could not judge"):
        failing_alone(task_evaluator()).evaluate({**TASK, "grading": {}}, hole)
    paid: Any = failing_alone(task_evaluator()).evaluate(TASK, said("\\boxed{2}"))
    assert paid.is_correct
