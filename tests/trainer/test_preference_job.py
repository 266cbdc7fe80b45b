"""KTO's answers to other prompts and the point that they make, by rows worked out by hand."""

from typing import Any

import numpy as np
import pytest

from rllm.errors import ConfigError
from rllm.trainer.examples import Example
from rllm.trainer.preference_job import answers_to_others, reference_point
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Step, Trajectory
from rllm.types.images import PATCH_IDS_FROM
from rllm.types.sample import NOT_SAMPLED, TrainingSample

LIMIT = 6


def _row(prompt: list[int], answer: list[int]) -> TrainingSample:
    ids = [*prompt, *answer]
    return TrainingSample(
        token_ids_T=np.array(ids),
        policy_versions_T=np.array([NOT_SAMPLED] * len(prompt) + [0] * len(answer)),
        logprobs_T=np.full(len(ids), -1.0, dtype=np.float32),
        advantages_T=np.full(len(ids), 1.0, dtype=np.float32),
        group_key=(f"row {answer[0]}", "agent"),
        order_key=("t", answer[0], 0, 0),
    )


def _example(prompt: list[int], answer: list[int]) -> Example:
    return Example(where="row", task="t", rows=[_row(prompt, answer)])


def _ids(rows: list[TrainingSample]) -> list[list[int]]:
    return [row.token_ids_T.tolist() for row in rows]


def test_each_prompt_has_the_next_answer_to_another_prompt() -> None:
    one, other = [1, 1], [2, 2, 2]
    examples = [_example(one, [10]), _example(one, [11, 11]), _example(other, [12, 12, 12, 12, 12])]
    rows = answers_to_others(examples, [_example([3], [13])], LIMIT)
    assert _ids(rows) == [[1, 1, 12, 12, 12, 12], [1, 1, 12, 12, 12, 12], [2, 2, 2, 10]]
    assert [row.num_trainable for row in rows] == [4, 4, 1]
    assert [row.trainable_T.tolist().index(True) for row in rows] == [2, 2, 3]
    for row, example in zip(rows, examples, strict=True):
        assert not row.logprobs_T.any()
        assert not row.advantages_T.any()
        assert row.group_key[0] != example.rows[0].group_key[0]
        assert row.group_key[1] == "agent"


def test_where_all_prompts_are_one_the_first_of_the_others_answers() -> None:
    alone = [_example([1], [10]), _example([1], [11])]
    more = [_example([1], [12]), _example([2], [13]), _example([3], [14])]
    assert _ids(answers_to_others(alone, more, LIMIT)) == [[1, 13], [1, 13]]
    with pytest.raises(ConfigError, match="one prompt"):
        answers_to_others(alone, more[:1], LIMIT)


@pytest.mark.parametrize(("gains", "expected"), [((3.0, 1.0), 2.0), ((-3.0, 1.0), 0.0), ((-1.0, 1.5), 0.25)])
def test_the_reference_point_is_the_mean_gain_over_the_reference_or_nothing(
    gains: tuple[float, float], expected: float
) -> None:
    rows = [_row([1], [2, 3]), _row([1], [4])]
    for row in rows:
        row.ref_logprobs_T = np.where(row.trainable_T, -2.0, 0.0).astype(np.float32)
    scores = [np.array([0.0, -2.0 + gains[0], -2.0]), np.array([0.0, -2.0 + gains[1]])]
    assert reference_point(rows, [each.astype(np.float32) for each in scores]) == expected


def test_the_reference_point_is_no_number_where_a_score_is_none() -> None:
    row = _row([1], [2])
    row.ref_logprobs_T = np.zeros(2, dtype=np.float32)
    assert np.isnan(reference_point([row], [np.array([0.0, np.nan], dtype=np.float32)]))


def test_images_of_a_row_are_in_memory_when_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("rllm.trainer.samples.keep_images", kept.append)
    messages = [{"role": "user", "content": "a picture"}]
    for last_id in (PATCH_IDS_FROM - 1, PATCH_IDS_FROM):
        step = Step(
            prompt_ids=[5, last_id],
            response_ids=[6],
            logprobs=[-1.0],
            policy_versions=[0],
            chat_completions=messages,
        )
        trajectory_rows(Trajectory(name="agent", steps=[step]), "t", 0, 0, 1.0)
    assert kept == [messages], "where it shows some"
