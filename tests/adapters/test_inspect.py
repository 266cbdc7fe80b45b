"""Tasks of Inspect AI, evaluated by the real package: scores, limits, and whose failure is whose."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai")

from rllm.errors import ConfigError
from rllm.integrations.task_programs import task_program
from rllm.types.episode import Outcome, TerminationReason

TASK = f"inspect:{Path(__file__).parent / 'environments' / 'sums_task.py'}@sums"


def right(messages: Sequence[Any]) -> str:
    return str(int(re.findall(r"(\d+) \+ 1 =", messages[-1]["content"])[-1]) + 1)


def right_or_yes(messages: Sequence[Any]) -> str:
    return "yes" if "Is that right?" in messages[-1]["content"] else right(messages)


async def test_its_scorer_pays_and_every_call_has_its_tokens(play: Any) -> None:
    program = task_program(TASK)
    first, second = await play(
        program, program.tasks("train", 2), lambda messages: right(messages).replace("3", "no")
    )
    assert [episode.trajectories[0].reward for episode in (first, second)] == [1.0, 0.0]
    assert [episode.is_correct for episode in (first, second)] == [True, False]
    (step,) = first.trajectories[0].steps
    assert step.model_response == "2"
    assert len(step.response_ids) == len(step.logprobs) == len(step.policy_versions) > 0
    assert first.trajectories[0].signals == {"match": 1.0}


async def test_what_a_scorer_asks_is_not_trained_on(play: Any) -> None:
    program = task_program(f"{TASK}?fault=asks")
    (episode,) = await play(program, program.tasks("train", 1), right_or_yes)
    assert [step.model_response for step in episode.trajectories[0].steps] == ["2"]
    assert episode.metrics["unclaimed_calls"] == 1.0


@pytest.mark.parametrize(("fault", "words"), [("scorer", "a bug of the scorer"), ("text", "splendid")])
async def test_a_scorer_that_fails_is_no_zero(play: Any, fault: str, words: str) -> None:
    program = task_program(f"{TASK}?fault={fault}")
    broken, whole = await play(program, program.tasks("train", 2), right)
    assert (whole.outcome, whole.trajectories[0].reward) == (Outcome.SCORED, 1.0)
    assert (broken.outcome, broken.trajectories[0].reward) == (Outcome.INFRASTRUCTURE_FAILURE, None)
    assert words in broken.info["error"]["message"]


async def test_a_limit_of_the_task_cuts_it_off_and_it_is_scored(play: Any) -> None:
    program = task_program(f"{TASK}?message_limit=3")
    (episode,) = await play(program, program.tasks("train", 1), right)
    assert (episode.outcome, episode.termination_reason) == (
        Outcome.TRUNCATED,
        TerminationReason.MAX_TURNS_EXCEEDED,
    )
    assert len(episode.trajectories[0].steps) == 1
    assert episode.trajectories[0].reward == 1.0


def test_every_twentieth_sample_is_held_out() -> None:
    program = task_program(TASK)
    assert [task.metadata["input"]["id"] for task in program.tasks("test")] == [1, 21]
    assert len(program.tasks("train")) == 38


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("inspect:sums", "FILE.py@TASK"),
        ("inspect:not_there.py@sums", "no file"),
        (TASK.replace("@sums", "@sum"), "sums"),
        (f"{TASK}?counts=3", "counts"),
        (TASK.replace("@sums", "@without_scorer"), "no scorer"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task_program(name)
