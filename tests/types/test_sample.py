import numpy as np
import pytest

import rllm.types
from rllm.types.draws import draw_seed
from rllm.types.messages import LogprobMeaning, SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample


def _sample(versions: list[int]) -> TrainingSample:
    size = len(versions)
    return TrainingSample(
        token_ids_T=np.arange(size),
        policy_versions_T=np.array(versions, dtype=np.int64),
        logprobs_T=np.zeros(size, dtype=np.float32),
        advantages_T=np.zeros(size, dtype=np.float32),
        group_key=("t", "agent"),
        order_key=("t", 0, 0, 0),
    )


def test_a_token_is_trainable_exactly_when_a_policy_sampled_it() -> None:
    sample = _sample([NOT_SAMPLED, 0, NOT_SAMPLED, 3])
    assert sample.trainable_T.tolist() == [False, True, False, True]
    assert (sample.num_tokens, sample.num_trainable) == (4, 2)


def test_the_first_token_of_a_row_has_no_prediction_and_is_never_trained() -> None:
    assert _sample([4, 4]).trainable_T.tolist() == [False, True]
    assert _sample([]).num_trainable == 0


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="equally long"):
        TrainingSample(
            token_ids_T=np.arange(3),
            policy_versions_T=np.zeros(3, dtype=np.int64),
            logprobs_T=np.zeros(2, dtype=np.float32),
            advantages_T=np.zeros(3, dtype=np.float32),
            group_key=("t", "agent"),
            order_key=("t", 0, 0, 0),
        )


def test_the_room_hands_its_names_on_and_knows_no_others() -> None:
    assert rllm.types.TrainingSample is TrainingSample
    assert "TrainingSample" in dir(rllm.types)
    with pytest.raises(AttributeError, match="no attribute `Nothing`"):
        _ = rllm.types.Nothing


def test_a_seed_follows_from_its_key_and_from_nothing_else() -> None:
    assert draw_seed(1, "train/3", "lake", 0) == draw_seed(1, "train/3", "lake", 0)
    keys = [(1, "a"), (1, "b"), (2, "a"), ("1", "a"), (1, "a", 0), ("1a",), (1,)]
    seeds = {draw_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("params", "meaning"),
    [
        ({}, LogprobMeaning.RAW),
        ({"temperature": 0.6}, LogprobMeaning.TEMPERATURE),
        ({"temperature": 0.0}, LogprobMeaning.RAW),
        ({"top_p": 0.9}, LogprobMeaning.TRUNCATED),
        ({"top_k": 5, "temperature": 0.6}, LogprobMeaning.TRUNCATED),
    ],
)
def test_how_a_token_was_sampled_says_what_its_log_probability_means(
    params: dict[str, float], meaning: LogprobMeaning
) -> None:
    assert SamplingParams(**params).logprob_meaning is meaning


def test_sampling_that_cannot_be_done_is_refused_by_name(subtests: pytest.Subtests) -> None:
    for name, value in [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("max_tokens", 0),
    ]:
        with subtests.test(name=name, value=value), pytest.raises(ValueError, match=f"`{name}` is"):
            SamplingParams(**{name: value})
