"""Losses of preferences against their formulas written out, TRL's numbers, and what their papers claim."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllm.algorithms.aggregation import token_weights
from rllm.algorithms.preference import (
    PAIR_RULES,
    KTOLoss,
    PairLoss,
    dpo,
    ipo,
    orpo,
    preference_loss,
    robust_dpo,
)
from rllm.algorithms.tokens import TokenInputs
from rllm.config.preference import SETTINGS, PreferenceConfig
from rllm.types.sample import NOT_SAMPLED, TrainingSample

AnyLoss = PairLoss | KTOLoss
Answer = list[tuple[float, float]]
"""(log-probability under the policy, under the reference) of each token."""


def inputs(rows: Sequence[tuple[int, int, Answer]], loss: AnyLoss) -> TokenInputs:
    """Tokens of (group, sign, answer) rows as one micro-batch; the policy's log-probabilities are a leaf."""
    tokens = [(rank, *row[:2], *token) for rank, row in enumerate(rows) for token in row[2]]
    rank, _, sign, new, ref = zip(*tokens, strict=True)
    weights = token_weights([as_sample(*row) for row in rows], loss.aggregation)
    numbers: dict[int, int] = {}
    return TokenInputs(
        new_M=torch.tensor(new, dtype=torch.float64, requires_grad=True),
        old_M=torch.tensor(ref, dtype=torch.float64),
        advantages_M=torch.tensor(sign, dtype=torch.float32),
        weights_M=torch.from_numpy(np.concatenate([weights_T[1:] for weights_T in weights])),
        row_M=torch.tensor(rank),
        group_R=torch.tensor([numbers.setdefault(group, len(numbers)) for group, _, _ in rows]),
        ref_M=torch.tensor(ref, dtype=torch.float64),
    )


def as_sample(group: int, sign: int, answer: Answer) -> TrainingSample:
    size = 1 + len(answer)  # a token of the prompt in front
    return TrainingSample(
        token_ids_T=np.zeros(size, dtype=np.int64),
        policy_versions_T=np.array([NOT_SAMPLED] + [0] * len(answer)),
        logprobs_T=np.zeros(size, dtype=np.float32),
        advantages_T=np.full(size, sign, dtype=np.float32),
        group_key=(str(group), "agent"),
        order_key=(str(group), sign, 0, 0),
    )


def total(loss: AnyLoss, tokens: TokenInputs) -> Tensor:
    return (loss.terms(tokens) * tokens.weights_M).sum()


def pair_rows(pairs: Sequence[tuple[Answer, Answer]]) -> list[tuple[int, int, Answer]]:
    return [
        (group, sign, answer)
        for group, pair in enumerate(pairs)
        for sign, answer in zip((1, -1), pair, strict=True)
    ]


# ---- the formulas, number by number ----------------------------------------------------------------------


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def by_hand(loss: PairLoss, chosen: Answer, rejected: Answer) -> float:
    """The loss of one pair as its paper writes it."""

    def of(answer: Answer, column: int, mean: bool) -> float:
        return math.fsum(token[column] for token in answer) / (len(answer) if mean else 1)

    b, eps, mean = loss.beta, loss.label_smoothing, loss.length_average
    h = of(chosen, 0, mean) - of(chosen, 1, mean) - of(rejected, 0, mean) + of(rejected, 1, mean)
    likelihood = of(chosen, 0, True)
    match loss.name:
        case "dpo":
            value = -(1 - eps) * log_sigmoid(b * h) - eps * log_sigmoid(-b * h)
        case "robust_dpo":
            value = (-(1 - eps) * log_sigmoid(b * h) + eps * log_sigmoid(-b * h)) / (1 - 2 * eps)
        case "ipo":
            value = (h - 1 / (2 * b)) ** 2
        case "hinge":
            value = max(0.0, 1 - b * h)
        case "simpo":
            value = -log_sigmoid(b * (likelihood - of(rejected, 0, True)) - loss.target_margin)
        case "orpo":
            p, q = math.exp(likelihood), math.exp(of(rejected, 0, True))
            value = -b * log_sigmoid(math.log(p / (1 - p)) - math.log(q / (1 - q)))
        case _:
            raise AssertionError(loss.name)
    return value - loss.sft_coef * likelihood


def kto_by_hand(loss: KTOLoss, sign: int, answer: Answer) -> float:
    r = math.fsum(new - ref for new, ref in answer)
    weight = loss.desirable_weight if sign > 0 else loss.undesirable_weight
    return weight * (1 - 1 / (1 + math.exp(-loss.beta * sign * (r - loss.kl))))


LOSSES = [
    PairLoss(name="dpo", beta=0.3),
    PairLoss(name="dpo", beta=0.3, label_smoothing=0.2, sft_coef=0.7),
    PairLoss(name="dpo", beta=0.8, length_average=True),
    PairLoss(name="robust_dpo", beta=0.3, label_smoothing=0.1),
    PairLoss(name="ipo", beta=0.4),
    PairLoss(name="ipo", beta=0.4, length_average=True),
    PairLoss(name="hinge", beta=0.35),
    PairLoss(name="simpo", beta=2.0, target_margin=0.9, sft_coef=0.1),
    PairLoss(name="orpo", beta=0.2, sft_coef=1.0),
]
KTO = KTOLoss(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7, kl=0.8)

tokens_of = st.tuples(st.floats(-4.0, -0.01), st.floats(-4.0, -0.01))
answers = st.lists(tokens_of, min_size=1, max_size=5)
few = settings(max_examples=20)
pairs_of = st.lists(st.tuples(answers, answers), min_size=1, max_size=4)


def test_every_loss_of_the_configuration_is_there_and_tried_here() -> None:
    assert {*PAIR_RULES, "kto"} == set(SETTINGS)
    assert {loss.name for loss in LOSSES} == set(PAIR_RULES)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@few
@given(pairs=pairs_of)
def test_a_loss_of_pairs_is_the_mean_of_what_its_paper_writes(
    loss: PairLoss, pairs: list[tuple[Answer, Answer]]
) -> None:
    expected = math.fsum(by_hand(loss, *pair) for pair in pairs) / len(pairs)
    ours = total(loss, inputs(pair_rows(pairs), loss)).item()
    assert ours == pytest.approx(expected, rel=1e-10, abs=1e-10)


@given(st.lists(st.tuples(st.sampled_from((1, -1)), answers), min_size=1, max_size=5))
def test_kto_is_the_mean_of_what_its_paper_writes(rows: list[tuple[int, Answer]]) -> None:
    expected = math.fsum(kto_by_hand(KTO, sign, answer) for sign, answer in rows) / len(rows)
    tokens = inputs([(group, *row) for group, row in enumerate(rows)], KTO)
    assert total(KTO, tokens).item() == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_kto_measures_how_far_an_answer_is_on_its_side_of_the_reference_point() -> None:
    """Log-ratios 1.5 and 0.2 around the point 0.8, by hand."""
    rows: list[Any] = [(0, 1, [(-1.0, -2.5)]), (1, -1, [(-1.0, -1.2)]), (2, 1, [(-1.0, -1.2)])]
    tokens = inputs(rows, KTO)
    measures = KTO.measures(tokens)
    assert measures["margin"].tolist() == pytest.approx([0.3 * 0.7, 0.3 * 0.6, -0.3 * 0.6])
    assert measures["accuracy"].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("loss", [*LOSSES, KTO], ids=str)
@few
@given(pairs=pairs_of)
def test_the_gradient_is_the_slope_of_the_loss(loss: AnyLoss, pairs: list[tuple[Answer, Answer]]) -> None:
    rows = pair_rows(pairs)
    if isinstance(loss, KTOLoss):
        rows = [(group, sign, answer) for group, (_, sign, answer) in enumerate(rows)]
    tokens = inputs(rows, loss)
    total(loss, tokens).backward()
    grad, h = tokens.new_M.grad, 1e-5
    assert grad is not None
    for place in range(len(grad)):
        slopes: list[float] = []
        for sign in (1, -1):
            with torch.no_grad():
                tokens.new_M[place] += sign * h
                slopes.append(total(loss, tokens).item())
                tokens.new_M[place] -= sign * h
        if isinstance(loss, PairLoss) and loss.name == "hinge" and _near_the_bend(loss, tokens):
            continue
        slope = (slopes[0] - slopes[1]) / (2 * h)
        assert slope == pytest.approx(grad[place].item(), rel=1e-6, abs=1e-8)


def _near_the_bend(loss: PairLoss, tokens: TokenInputs) -> bool:
    return bool(((1.0 - loss.measures(tokens)["margin"]).abs() < 1e-3).any())


# ---- what they do not depend on --------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [*LOSSES, KTO], ids=str)
@few
@given(pairs=pairs_of, order=st.randoms(use_true_random=False))
def test_loss_and_gradient_depend_neither_on_the_order_of_rows_nor_on_the_split_into_micro_batches(
    loss: AnyLoss, pairs: list[tuple[Answer, Answer]], order: Any
) -> None:
    rows = pair_rows(pairs)
    whole = inputs(rows, loss)
    value = total(loss, whole)
    value.backward()
    grad_of = dict(zip(_names(rows), _by_row(whole, rows), strict=True))

    groups = [rows[index : index + 2] for index in range(0, len(rows), 2)]
    order.shuffle(groups)
    share = 1.0 / len(groups)
    summed = 0.0
    for group in groups:
        order.shuffle(group)
        part = inputs(group, loss)
        partial = share * total(loss, part)
        partial.backward()
        summed += partial.item()
        for name, grad in zip(_names(group), _by_row(part, group), strict=True):
            assert torch.allclose(grad, grad_of[name], rtol=1e-10, atol=1e-12)
    assert summed == pytest.approx(value.item(), rel=1e-10, abs=1e-12)


def _names(rows: Sequence[tuple[int, int, Answer]]) -> list[tuple[int, int]]:
    return [(group, sign) for group, sign, _ in rows]


def _by_row(tokens: TokenInputs, rows: Sequence[tuple[int, int, Answer]]) -> tuple[Tensor, ...]:
    assert tokens.new_M.grad is not None
    return tokens.new_M.grad.split([len(answer) for _, _, answer in rows])


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@few
@given(chosen=answers, rejected=st.lists(tokens_of, min_size=2, max_size=6), others=pairs_of)
def test_an_answer_in_two_rows_counts_like_the_same_answer_in_one(
    loss: PairLoss, chosen: Answer, rejected: Answer, others: list[tuple[Answer, Answer]]
) -> None:
    rest = [(group + 1, sign, answer) for group, sign, answer in pair_rows(others)]
    one = [(0, 1, chosen), (0, -1, rejected), *rest]
    two = [(0, 1, chosen), (0, -1, rejected[:1]), (0, -1, rejected[1:]), *rest]
    assert total(loss, inputs(two, loss)).item() == pytest.approx(
        total(loss, inputs(one, loss)).item(), rel=1e-10
    )


def test_a_group_without_one_of_its_sides_is_refused() -> None:
    tokens = inputs(
        [(0, 1, [(-1.0, -1.0)]), (1, 1, [(-1.0, -1.0)]), (1, -1, [(-2.0, -1.0)])], PairLoss(beta=0.1)
    )
    with pytest.raises(ValueError, match=r"chosen.*\(advantage 1\).*rejected"):
        PairLoss(beta=0.1).terms(tokens)


@pytest.mark.parametrize("loss", [PairLoss(beta=0.1), KTO], ids=["dpo", "kto"])
def test_a_loss_that_compares_with_a_reference_needs_one(loss: AnyLoss) -> None:
    tokens = inputs(pair_rows([([(-1.0, -1.0)], [(-1.0, -1.0)])]), loss)
    with pytest.raises(ValueError, match="give every sample `ref_logprobs_T`"):
        loss.terms(replace(tokens, ref_M=None))


# ---- TRL ---------------------------------------------------------------------------------------------------

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trl_preferences.json").read_text())
TRL_PAIRS: list[tuple[Answer, Answer]] = [
    (
        list(zip(pair["chosen"], pair["ref_chosen"], strict=True)),
        list(zip(pair["rejected"], pair["ref_rejected"], strict=True)),
    )
    for pair in TRL["pairs"]
]
PAIRED = [case for case in TRL["cases"] if case["name"] not in ("kto", "orpo")]


def _name(case: dict[str, Any]) -> str:
    return f"{case['name']} {case['settings']}"


def _grads(case: dict[str, Any], name: str = "grad") -> list[float]:
    return [value for pair in case[name] for side in ("chosen", "rejected") for value in pair[side]]


@pytest.mark.parametrize("case", PAIRED, ids=_name)
def test_pairs_cost_what_they_cost_in_trl(case: dict[str, Any]) -> None:
    loss = PairLoss(name=case["name"], **case["settings"])
    tokens = inputs(pair_rows(TRL_PAIRS), loss)
    value = total(loss, tokens)
    value.backward()
    assert tokens.new_M.grad is not None
    assert value.item() == pytest.approx(case["loss"], abs=1e-10)
    assert tokens.new_M.grad.tolist() == pytest.approx(_grads(case), abs=1e-10)


def test_orpo_costs_what_it_costs_in_trl_but_for_the_likelihood_which_there_is_of_the_prompt_too() -> None:
    (case,) = (case for case in TRL["cases"] if case["name"] == "orpo")
    loss = PairLoss(name="orpo", **case["settings"])
    tokens = inputs(pair_rows(TRL_PAIRS), loss)
    value = total(loss, tokens)
    value.backward()
    assert tokens.new_M.grad is not None
    assert value.item() == pytest.approx(case["loss_without_likelihood"], abs=1e-6)
    assert tokens.new_M.grad.tolist() == pytest.approx(_grads(case, "grad_without_likelihood"), abs=1e-6)


@pytest.mark.parametrize("case", [case for case in TRL["cases"] if case["name"] == "kto"], ids=_name)
def test_kto_costs_what_it_costs_in_trl(case: dict[str, Any]) -> None:
    usual = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    loss = KTOLoss(**usual | case["settings"], kl=case["kl"])
    rows = [(number, sign, answer) for number, (_, sign, answer) in enumerate(pair_rows(TRL_PAIRS))]
    tokens = inputs(rows, loss)
    value = total(loss, tokens)
    value.backward()
    assert tokens.new_M.grad is not None
    assert value.item() == pytest.approx(case["loss"], abs=1e-10)
    assert tokens.new_M.grad.tolist() == pytest.approx(_grads(case), abs=1e-10)


def test_the_measures_are_those_of_trl() -> None:
    (case,) = (case for case in PAIRED if case["settings"] == {"beta": 0.3} and case["name"] == "dpo")
    loss = PairLoss(**case["settings"])
    tokens = inputs(pair_rows(TRL_PAIRS), loss)
    measured = {
        name: float((values_M * tokens.weights_M).sum().detach())
        for name, values_M in loss.measures(tokens).items()
    }
    theirs = case["metrics"]
    assert measured["margin"] == pytest.approx(theirs["rewards/margins"], abs=1e-10)
    assert measured["accuracy"] == theirs["rewards/accuracies"]
    for side in ("chosen", "rejected"):
        assert measured[f"{side}_logprob"] == pytest.approx(theirs[f"logps/{side}"], abs=1e-10)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_measured_margin_compares_what_the_loss_compares(loss: PairLoss) -> None:
    """Sums of tokens or their means, against the reference or without one."""
    alone = loss.name in ("simpo", "orpo")
    chosen, rejected = [(-1.0, -0.5), (-0.2, -0.4), (-0.3, -0.1)], [(-2.0, -1.0)]

    def reward(answer: Answer) -> float:
        log_ratios = [new - (0.0 if alone else ref) for new, ref in answer]
        return math.fsum(log_ratios) / (len(answer) if alone or loss.length_average else 1)

    margin_M = loss.measures(inputs(pair_rows([(chosen, rejected)]), loss))["margin"]
    expected = loss.beta * (reward(chosen) - reward(rejected))
    assert margin_M.tolist() == pytest.approx([expected] * 4, abs=1e-12)


# ---- what the papers claim ---------------------------------------------------------------------------------


@given(st.floats(-20, 20), st.floats(0.05, 0.45))
def test_robust_dpo_is_on_average_over_flipped_labels_the_dpo_loss_without_flips(
    h: float, eps: float
) -> None:
    margin = torch.tensor([h, -h], dtype=torch.float64)
    right, flipped = robust_dpo(margin, beta=0.5, label_smoothing=eps)
    expected = dpo(margin[:1], beta=0.5)
    assert (1 - eps) * right + eps * flipped == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "optimum"),
    [
        (lambda h: dpo(h, beta=0.5, label_smoothing=0.2), math.log(0.8 / 0.2) / 0.5),
        (lambda h: ipo(h, beta=0.5), 1.0),
    ],
    ids=["conservative dpo", "ipo"],
)
def test_a_margin_that_is_large_enough_is_not_pushed_further(
    rule: Callable[[Tensor], Tensor], optimum: float
) -> None:
    margin = torch.tensor([optimum], dtype=torch.float64, requires_grad=True)
    rule(margin).sum().backward()
    assert margin.grad is not None
    assert abs(margin.grad.item()) < 1e-12


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    certain = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    orpo(certain, torch.tensor([-1.0], dtype=torch.float64), beta=0.1).sum().backward()
    assert certain.grad is not None
    assert certain.grad.isfinite().all()


def test_a_policy_that_is_its_reference_has_no_opinion_and_the_loss_of_a_coin() -> None:
    pairs = [([(-1.0, -1.0), (-0.5, -0.5)], [(-2.0, -2.0)])]
    tokens = inputs(pair_rows(pairs), PairLoss(beta=0.1))
    assert total(PairLoss(beta=0.1), tokens).item() == pytest.approx(math.log(2.0), abs=1e-12)
    measures = PairLoss(beta=0.1).measures(tokens)
    assert set(measures["accuracy"].tolist()) == {0.5}
    assert set(measures["kl"].tolist()) == {0.0}
    assert set(measures["ranking_accuracy"].tolist()) == {1.0}  # -1.5 is likelier than -2
    swapped = inputs(pair_rows([(rejected, chosen) for chosen, rejected in pairs]), PairLoss(beta=0.1))
    assert set(PairLoss(beta=0.1).measures(swapped)["ranking_accuracy"].tolist()) == {0.0}


def test_how_far_the_policy_is_from_its_reference_is_measured_token_by_token() -> None:
    pairs = [([(-1.0, -1.5), (-0.5, -0.25)], [(-2.0, -1.0)])]
    ratios = [math.exp(0.5), math.exp(-0.25), math.exp(-1.0)]  # of the policy to its reference
    for loss in (PairLoss(beta=0.1), KTO):
        kl_M = loss.measures(inputs(pair_rows(pairs), loss))["kl"]
        assert kl_M.tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios], rel=1e-6)


# ---- from the configuration --------------------------------------------------------------------------------


def test_the_configuration_names_the_loss_and_its_usual_strength() -> None:
    assert preference_loss(PreferenceConfig()) == PairLoss(name="dpo", beta=0.1)
    kto = preference_loss(PreferenceConfig(loss="kto"))
    assert isinstance(kto, KTOLoss)
    assert kto.kl == 0.0  # nothing was measured yet
    for loss in (kto, preference_loss(PreferenceConfig())):
        assert (loss.needs_every_row, loss.needs_whole_groups, loss.needs_entropy) == (True, True, False)
    assert kto.needs_reference
    assert preference_loss(PreferenceConfig(loss="simpo")) == PairLoss(
        name="simpo", beta=2.0, target_margin=1.0
    )
    assert preference_loss(PreferenceConfig(loss="orpo", beta=0.5)) == PairLoss(
        name="orpo", beta=0.5, sft_coef=1.0
    )
    assert preference_loss(PreferenceConfig(loss="kto", desirable_weight=2.0), kl=0.4) == KTOLoss(
        beta=0.1, desirable_weight=2.0, undesirable_weight=1.0, kl=0.4
    )
