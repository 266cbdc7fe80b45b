import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.aggregation import FixedLength, token_weights
from rllm.algorithms.correction import Correction
from rllm.algorithms.losses import ImitationLoss, Loss, PolicyLoss, TokenInputs
from rllm.algorithms.surrogates import ClippedRatio, GeometricMean, SequenceRatio
from rllm.distributed import ALONE, RankGroup
from rllm.errors import CheckpointError, NumericsError
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]
LOSSES: dict[str, Loss] = {
    "clip": PolicyLoss(),
    "sequence mean": PolicyLoss(aggregation="sequence_mean"),
    "imitation": ImitationLoss(),
    "of rows": PolicyLoss(
        surrogate=SequenceRatio(clip_low=0.1, clip_high=0.1),
        aggregation="group_mean",
        kl_coef=0.3,
        correction=Correction(mode="truncate", level="sequence", high=1.1),
    ),
    "geometric": PolicyLoss(surrogate=GeometricMean(), aggregation=FixedLength(num_tokens=9)),
}


def _with_references(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The same rows with what a sampler and a reference policy might have said of them."""
    rng = np.random.default_rng(4)

    def near(sample: TrainingSample) -> np.ndarray:
        gaps_T = rng.normal(0.0, 0.2, sample.num_tokens)
        return np.where(sample.trainable_T, sample.logprobs_T + gaps_T, 0.0).astype(np.float32)

    return [
        replace(sample, rollout_logprobs_T=near(sample), ref_logprobs_T=near(sample)) for sample in samples
    ]


def _gradient(
    backend: TorchBackend, samples: Sequence[TrainingSample], loss: Loss
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of one update that, at learning rate 0, leaves the weights as they are."""
    metrics = backend.update(samples, loss, 0.0)
    return metrics["loss"], {
        name: each.grad.clone() for name, each in backend.model.named_parameters() if each.grad is not None
    }


def _reference(
    model: Any, samples: Sequence[TrainingSample], loss: Loss, plain_logprobs: Make
) -> tuple[float, dict[str, Tensor]]:
    """The same by definition: every row alone, every token's term times its weight."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for sample, weights_T in zip(samples, token_weights(samples, loss.aggregation), strict=True):
        if not sample.num_trainable:
            continue
        trained_T = torch.from_numpy(sample.trainable_T)

        def column(values_T: np.ndarray | None, trained_T: Tensor = trained_T) -> Any:
            return None if values_T is None else torch.from_numpy(values_T)[trained_T]

        tokens = TokenInputs(
            new_M=plain_logprobs(model, sample)[trained_T],
            old_M=column(sample.logprobs_T),
            advantages_M=column(sample.advantages_T),
            weights_M=column(weights_T),
            row_M=torch.zeros(sample.num_trainable, dtype=torch.int64),
            group_R=torch.zeros(1, dtype=torch.int64),
            rollout_M=column(sample.rollout_logprobs_T),
            ref_M=column(sample.ref_logprobs_T),
        )
        total = total + (loss.terms(tokens) * tokens.weights_M).sum()
    total.backward()
    return float(total.detach()), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def _gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


PLANS = {
    "as it comes": {},
    "one row at a time": {"micro_batch_tokens": 1},
    "small micro-batches": {"micro_batch_tokens": 40},
    "without sharing": {"share_prefixes": False},
    "without sharing, one row at a time": {"share_prefixes": False, "micro_batch_tokens": 1},
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_every_plan_gives_the_loss_and_gradient_of_rows_computed_alone_to_the_tenth_digit(
    decoder: Make,
    backend: Make,
    batch: list[TrainingSample],
    plain_logprobs: Make,
    num_kv_heads: int,
    loss: Loss,
) -> None:
    model = decoder(
        num_kv_heads, qk_norm=num_kv_heads == 2, tied=num_kv_heads != 1, qkv_bias=num_kv_heads == 1
    ).double()
    batch = _with_references(batch)
    expected_loss, expected = _reference(model, batch, loss, plain_logprobs)
    for plan in PLANS.values():
        for rows in (batch, batch[::-1], random.Random(3).sample(batch, len(batch))):
            found_loss, found = _gradient(backend(model, max_grad_norm=1e12, **plan), rows, loss)
            assert found_loss == pytest.approx(expected_loss, abs=1e-10)
            assert _gap(found, expected) <= 1e-10


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_in_float32_the_gradient_is_the_unshared_one_to_the_sixth_digit(
    decoder: Make, backend: Make, batch: list[TrainingSample], plain_logprobs: Make, plan: str
) -> None:
    model = decoder(2)
    expected_loss, expected = _reference(model, batch, PolicyLoss(), plain_logprobs)
    found_loss, found = _gradient(backend(model, max_grad_norm=1e12, **PLANS[plan]), batch, PolicyLoss())
    assert found_loss == pytest.approx(expected_loss, abs=1e-6)
    assert _gap(found, expected) <= 1e-6


def test_any_row_may_be_the_only_one(
    decoder: Make, backend: Make, batch: list[TrainingSample], plain_logprobs: Make
) -> None:
    model = decoder(2).double()
    for row in batch:
        if not row.num_trainable:
            continue
        _, expected = _reference(model, [row], PolicyLoss(), plain_logprobs)
        _, found = _gradient(backend(model, max_grad_norm=1e12), [row], PolicyLoss())
        assert _gap(found, expected) <= 1e-10


@pytest.mark.parametrize("plan", sorted(PLANS))
def test_a_score_is_the_log_probability_of_a_plain_forward_pass(
    decoder: Make, backend: Make, batch: list[TrainingSample], plain_logprobs: Make, plan: str
) -> None:
    model = decoder(2)
    scores = backend(model, **PLANS[plan]).score(batch)
    for score_T, sample in zip(scores, batch, strict=True):
        with torch.no_grad():
            expected_T = plain_logprobs(model, sample).numpy()
        assert score_T.shape == sample.token_ids_T.shape
        assert np.abs(score_T - np.where(sample.trainable_T, expected_T, 0.0)).max() <= 1e-5
    assert all((parameter.grad is None) for parameter in model.parameters())


def test_nothing_is_predicted_and_so_nothing_is_learned_where_no_policy_wrote(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    model = decoder().double()
    num_predictions = []
    logits = model.logits

    def counting(hidden_M_D: Tensor) -> Tensor:
        num_predictions.append(len(hidden_M_D))
        return logits(hidden_M_D)

    model.logits = counting
    _gradient(backend(model), batch, PolicyLoss())
    trained = {  # two rows that begin alike and are trained on the same token there have one prediction
        (sample.group_key, sample.temperature, *sample.token_ids_T[: place + 1].tolist())
        for sample in batch
        for place in np.flatnonzero(sample.trainable_T).tolist()
    }
    assert sum(num_predictions) == len(trained) <= sum(sample.num_trainable for sample in batch)


def test_what_stands_beside_an_untrained_token_is_never_looked_at(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    model = decoder().double()
    before = _gradient(backend(model), batch, PolicyLoss())
    for sample in batch:
        untrained = ~sample.trainable_T
        sample.logprobs_T[untrained] = np.nan
        last = int(np.flatnonzero(sample.trainable_T)[-1]) if sample.num_trainable else -1
        sample.token_ids_T[last + 1 :] = 0  # nobody is to predict these, or to see them
    for sample in batch:
        if sample.num_trainable:
            sample.advantages_T[~sample.trainable_T] = np.float32(1e30)
    after = _gradient(backend(model), batch, PolicyLoss())
    assert after[0] == before[0]
    assert _gap(after[1], before[1]) == 0.0


def test_tied_rows_need_not_be_computed_and_still_count_in_the_mean(
    decoder: Make, backend: Make, batch: list[TrainingSample], group: Make, plain_logprobs: Make
) -> None:
    tied = group("tied", 5, ["sss", "sos"], seed=11)
    for row in tied:
        row.advantages_T[:] = 0.0
    model = decoder().double()
    expected_loss, expected = _reference(model, [*batch, *tied], PolicyLoss(), plain_logprobs)
    found_loss, found = _gradient(backend(model, max_grad_norm=1e12), [*batch, *tied], PolicyLoss())
    assert found_loss == pytest.approx(expected_loss, abs=1e-10)
    assert _gap(found, expected) <= 1e-10


def test_an_update_without_a_trained_token_leaves_weights_and_version(
    decoder: Make, backend: Make, sample: Make
) -> None:
    learner = backend(decoder(), weight_decay=0.1)
    before = _weights(learner)
    for samples in ([], [sample("pppp")]):
        metrics = learner.update(samples, PolicyLoss(), 1.0)
        assert (metrics["grad_norm"], metrics["skipped_updates"]) == (0.0, 0.0)
    assert learner.policy_version == 0
    assert _equal(before, _weights(learner))
    assert learner.score([]) == []


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_update_whose_rows_all_tie_is_a_step_along_a_gradient_of_zero(
    decoder: Make, backend: Make, sample: Make, name: str
) -> None:
    learner = backend(decoder(), name=name)
    learner.update([sample("pss", advantage=0.0)], PolicyLoss(), 1.0)
    begun = _weights(learner)
    assert learner.policy_version == 1
    assert _equal(begun, _weights(backend(decoder(), name=name)))  # there are no moments yet
    learner.update([sample("pss")], PolicyLoss(), 1e-3)
    moved = _weights(learner)
    metrics = learner.update([sample("pss", advantage=0.0)], PolicyLoss(), 1e-3)
    assert (learner.policy_version, metrics["grad_norm"], metrics["loss"]) == (3, 0.0, 0.0)
    assert not _equal(moved, _weights(learner))


def _weights(learner: TorchBackend) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in learner.model.named_parameters()}


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name].nan_to_num(9e9), second[name].nan_to_num(9e9)) for name in first)


def test_an_advantage_that_is_no_number_is_caught_before_the_weights_change(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    learner = backend(decoder())
    before = _weights(learner)
    bad = batch[3]
    place = int(np.flatnonzero(bad.trainable_T)[1])
    bad.advantages_T[place] = np.nan
    with pytest.raises(NumericsError) as caught:
        learner.update(batch, PolicyLoss(), 1e-2)
    assert f"token {place} (id {bad.token_ids_T[place]}) of {bad.order_key}" in str(caught.value)
    assert learner.policy_version == 0
    assert _equal(before, _weights(learner))


@pytest.mark.parametrize("loss", [PolicyLoss(), ImitationLoss()], ids=["policy", "imitation"])
def test_weights_that_are_no_numbers_are_caught_with_the_tokens_that_met_them(
    decoder: Make, backend: Make, sample: Make, loss: Loss
) -> None:
    learner = backend(decoder(tied=False))
    good, bad = sample("ppss", task="good", seed=1), sample("ppss", task="bad", seed=2)
    for row in (good, bad):
        row.token_ids_T[:] = np.arange(4)
    bad.token_ids_T[0] = 39
    with torch.no_grad():
        learner.model.embed.weight[39] = float("nan")
    before = _weights(learner)
    with pytest.raises(NumericsError) as caught:
        learner.update([good, bad], loss, 1e-2)
    assert "token 2 (id 2) of ('bad', 0, 0, 0); token 3 (id 3) of ('bad', 0, 0, 0)" in str(caught.value)
    assert "good" not in str(caught.value)
    assert _equal(before, _weights(learner))
    with torch.no_grad():
        learner.model.embed.weight[39] = 0.0
    assert np.isfinite(learner.update([good, bad], loss, 1e-2)["loss"])


def test_a_gradient_that_overflows_is_caught_before_the_weights_change(
    decoder: Make, backend: Make, sample: Make
) -> None:
    learner = backend(decoder())
    before = _weights(learner)
    with pytest.raises(NumericsError, match=r"norm is (inf|nan) .*version 0"):
        learner.update([sample("ppss", advantage=-1e38)], PolicyLoss(), 1e-2)
    assert _equal(before, _weights(learner))
    assert learner.policy_version == 0


def test_an_exploding_gradient_is_scaled_down_to_the_limit(
    decoder: Make, backend: Make, sample: Make
) -> None:
    samples = [sample("ppsssoss", advantage=-1e4)]
    _, free = _gradient(backend(decoder().double(), max_grad_norm=1e12), samples, PolicyLoss())
    norm = torch.cat([each.flatten() for each in free.values()]).norm().item()
    learner = backend(decoder().double(), max_grad_norm=0.5)
    assert learner.update(samples, PolicyLoss(), 0.0)["grad_norm"] == pytest.approx(norm, rel=1e-6)
    clipped = {name: each.grad for name, each in learner.model.named_parameters()}
    assert norm > 100.0
    assert _gap(clipped, {name: each * (0.5 / norm) for name, each in free.items()}) < 1e-6


def test_metrics_are_token_means_over_the_whole_update(
    decoder: Make, backend: Make, batch: list[TrainingSample], plain_logprobs: Make
) -> None:
    model = decoder()
    metrics = backend(model, micro_batch_tokens=40).update(
        batch, PolicyLoss(surrogate=ClippedRatio(clip_low=0.1, clip_high=0.1)), 0.0
    )
    with torch.no_grad():
        gaps = torch.cat(
            [
                (plain_logprobs(model, each) - torch.from_numpy(each.logprobs_T))[
                    torch.from_numpy(each.trainable_T)
                ]
                for each in batch
            ]
        )
    ratios = gaps.exp()
    assert metrics["ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-5)
    assert metrics["clipped_frac"] == pytest.approx(((ratios < 0.9) | (ratios > 1.1)).float().mean().item())
    assert metrics["kl"] == pytest.approx((ratios - 1 - gaps).mean().item(), rel=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(gaps.abs().max().item(), rel=1e-4)


def test_updates_go_downhill(decoder: Make, backend: Make, batch: list[TrainingSample]) -> None:
    learner = backend(decoder())
    losses = [learner.update(batch, ImitationLoss(), 1e-2)["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5
    assert learner.policy_version == 12


def test_a_publish_tells_the_sampler_the_version_of_the_weights(
    decoder: Make, backend: Make, sample: Make
) -> None:
    heard: list[int] = []
    learner = backend(decoder(), publish=heard.append)
    assert learner.publish_weights() == 0
    for _ in range(2):
        learner.update([sample("pss")], PolicyLoss(), 1e-3)
    assert heard == [0]
    assert learner.publish_weights() == 2
    assert heard == [0, 2]


def test_a_saved_learner_goes_on_bit_for_bit_where_it_was(
    decoder: Make, backend: Make, batch: list[TrainingSample], tmp_path: Path
) -> None:
    def go_on(learner: TorchBackend) -> list[dict[str, float]]:
        return [learner.update(batch, PolicyLoss(), 1e-2) for _ in range(2)]

    first = backend(decoder())
    go_on(first)
    first.save(tmp_path)
    saved = _weights(first)
    second = backend(decoder(seed=9))
    second.load(tmp_path)
    assert _equal(saved, _weights(second))
    assert second.policy_version == 2
    assert go_on(first) == go_on(second)
    assert _equal(_weights(first), _weights(second))
    assert second.policy_version == first.policy_version == 4


def test_a_learner_saved_before_its_first_update_has_no_moments(
    decoder: Make, backend: Make, batch: list[TrainingSample], tmp_path: Path
) -> None:
    first = backend(decoder())
    first.save(tmp_path)
    second = backend(decoder(seed=9))
    second.update(batch, PolicyLoss(), 1e-2)
    second.load(tmp_path)
    assert second.policy_version == 0
    assert first.update(batch, PolicyLoss(), 1e-2) == second.update(batch, PolicyLoss(), 1e-2)
    assert _equal(_weights(first), _weights(second))


def test_a_fresh_optimizer_forgets_the_moments_and_nothing_else(
    decoder: Make, backend: Make, batch: list[TrainingSample]
) -> None:
    used, new = backend(decoder()), backend(decoder())
    used.update(batch, PolicyLoss(), 0.0)
    used.reset_optimizer()
    used.update(batch, PolicyLoss(), 1e-2)
    new.update(batch, PolicyLoss(), 1e-2)
    assert _equal(_weights(used), _weights(new))
    assert (used.policy_version, new.policy_version) == (2, 1)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "torn"])
def test_a_checkpoint_that_cannot_be_read_changes_nothing(
    decoder: Make, backend: Make, batch: list[TrainingSample], tmp_path: Path, name: str, damage: str
) -> None:
    learner = backend(decoder())
    learner.update(batch, PolicyLoss(), 1e-2)
    learner.save(tmp_path)
    learner.update(batch, PolicyLoss(), 1e-2)
    before = _weights(learner)
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.load(tmp_path)
    assert _equal(before, _weights(learner))


def test_the_checkpoint_of_another_model_is_refused(decoder: Make, backend: Make, tmp_path: Path) -> None:
    backend(decoder()).save(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        backend(decoder(tied=False)).load(tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        backend(decoder(hidden_size=32)).load(tmp_path)


@pytest.mark.parametrize(("tensor_size", "optimizer"), [(1, "adamw"), (2, "adamw"), (2, "muon")])
def test_two_ranks_learn_what_one_does(
    tensor_size: int, optimizer: str, decoder: Make, backend: Make, group: Make, on_two_ranks: Make
) -> None:
    """Rows split among them, or every layer; a norm that is clipped, and heads that share keys."""
    samples = [*group("a", 3, ["ss", "sps", "s"]), *group("b", 2, ["sss", "ps"], seed=1)]

    def learned(ranks: RankGroup) -> tuple[dict[str, float], dict[str, Tensor]]:
        model = decoder(
            num_kv_heads=2
        ).double()  # AdamW's first steps are of one length, however small a slope
        learner = backend(model, ranks=ranks, name=optimizer, max_grad_norm=0.01)
        for _ in range(2):
            metrics = learner.update(samples, PolicyLoss(), 0.01)
        learner.publish_weights()
        return metrics, {name: each.detach().clone() for name, each in model.named_parameters()}

    metrics, weights = learned(ALONE)
    for rank_metrics, rank_weights in on_two_ranks(learned, tensor_size=tensor_size):
        for name in ("loss", "grad_norm"):
            assert rank_metrics[name] == pytest.approx(metrics[name], rel=1e-4)
        for name, weight in weights.items():
            assert torch.allclose(rank_weights[name], weight, atol=1e-5), name
