from typing import Any

import pytest

from rllm.environments.checks import check_env
from rllm.environments.follow_ups import FollowUpEnvironment, conversation_verdict
from rllm.errors import ConfigError
from rllm.eval.judging import task_evaluator
from rllm.types.episode import Episode, Step, Trajectory

NO_COMMA: dict[str, Any] = {"id": "punctuation:no_comma", "kwargs": {}}
SEA: dict[str, Any] = {"id": "keywords:existence", "kwargs": {"keywords": ["sea"]}}
TASK: dict[str, Any] = {
    "task_id": "talk",
    "question": "Write about the sea.",
    "follow_ups": ["Use no commas.", "Shorter."],
    "grader": "instructions",
    "grader_args": {},
    "grading": {
        "instructions": [SEA, NO_COMMA],
        "turns": [
            {"instructions": [SEA]},
            {"instructions": [SEA, NO_COMMA]},
            {"instructions": [SEA, NO_COMMA]},
        ],
    },
}
GOOD = ["The sea, so blue.", "The sea is blue.", "Blue sea."]


def played(answers: list[str], **changes: Any) -> tuple[list[Any], float, dict[str, Any]]:
    environment = FollowUpEnvironment.from_dict({**TASK, **changes})
    shown, total, info = [environment.reset()[0]], 0.0, {}
    for place, answer in enumerate(answers, start=1):
        observation, reward, done, info = environment.step(answer)
        assert done == (place == 3)
        shown.append(observation)
        total += reward
    return shown, total, info


def test_every_answer_is_held_to_the_instructions_of_its_turn() -> None:
    shown, total, info = played(GOOD)
    assert shown == [TASK["question"], *TASK["follow_ups"], {}]
    assert total == pytest.approx(1.0)
    assert info["is_correct"]
    _, total, info = played([GOOD[0], "The sea, so blue.", GOOD[2]])
    assert total == pytest.approx(2 / 3)
    assert not info["is_correct"]
    assert "punctuation:no_comma" in info["reason"]


def test_stored_conversations_are_judged_as_they_were_played() -> None:
    for answers in (GOOD, [*GOOD[:2], "No."], GOOD[:1], [*GOOD, "and more, after the end"]):
        steps = [Step(chat_completions=[], model_response=answer) for answer in answers]
        episode = Episode(task=TASK, task_id="talk", trajectories=[Trajectory(steps=steps)])
        found: Any = task_evaluator().evaluate(TASK, episode)
        assert found.is_correct == (answers[:3] == GOOD)
        assert found.reward == pytest.approx(conversation_verdict(TASK, answers).reward)
    assert conversation_verdict(TASK, GOOD[:1]).reward == pytest.approx(1 / 3)


def test_a_reward_function_pays_for_the_last_answer() -> None:
    _, total, info = played(GOOD, reward_fn=lambda task, answer: float(answer == GOOD[2]))
    assert (total, info["is_correct"]) == (1.0, True)


def test_as_many_gradings_as_questions_are_wanted() -> None:
    with pytest.raises(ConfigError, match=r"3 questions.*`grading\.turns` has 1"):
        played([], grading={"turns": [{}]})


def test_it_keeps_the_contract_of_environments() -> None:
    check_env(FollowUpEnvironment.from_dict(TASK), "The sea is blue.")
