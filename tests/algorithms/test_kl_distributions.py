"""Divergences over the whole vocabulary against their formulas written out, TRL's numbers, their bounds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rllm.algorithms.kl_distributions import DIVERGENCES, divergence_slopes, divergence_terms
from rllm.errors import ConfigError

TRL: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "trl_gkd.json").read_text())
logits = st.lists(st.floats(-6.0, 6.0), min_size=5, max_size=5)


def _softmax(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(each - top) for each in row]
    return [each / math.fsum(weights) for each in weights]


def _kl(of: list[float], against: list[float]) -> float:
    return math.fsum(p * math.log(p / q) for p, q in zip(of, against, strict=True))


def _by_hand(student: list[float], teacher: list[float], kind: str, beta: float) -> float:
    q, p = _softmax(student), _softmax(teacher)
    mixed = [beta * each + (1.0 - beta) * other for each, other in zip(p, q, strict=True)]
    return {
        "forward_kl": _kl(p, q),
        "reverse_kl": _kl(q, p),
        "jsd": beta * _kl(p, mixed) + (1.0 - beta) * _kl(q, mixed),
    }[kind]


def _terms(student: Any, teacher: Any, kind: str, beta: float = 0.5) -> torch.Tensor:
    rows = (torch.as_tensor(each, dtype=torch.float64).log_softmax(-1) for each in (student, teacher))
    return divergence_terms(*rows, kind, beta)


def test_a_word_that_is_never_said_counts_nothing() -> None:
    student, teacher = torch.tensor([[0.25, 0.75, 0.0]]).log(), torch.tensor([[0.125, 0.375, 0.5]]).log()
    assert float(_terms(student, teacher, "reverse_kl")) == pytest.approx(math.log(2.0))


@given(logits, logits, st.sampled_from(DIVERGENCES), st.floats(0.05, 0.95))
def test_each_is_its_formula(student: list[float], teacher: list[float], kind: str, beta: float) -> None:
    found = float(_terms([student], [teacher], kind, beta))
    assert found == pytest.approx(_by_hand(student, teacher, kind, beta), abs=1e-10)
    assert found >= -1e-12
    if kind == "jsd":
        assert float(_terms([student], [teacher], kind)) <= math.log(2.0) + 1e-12


@pytest.mark.parametrize(
    "case", TRL["found"], ids=lambda case: f"beta {case['beta']} T {case['temperature']}"
)
def test_values_and_gradients_are_those_of_trl(case: dict[str, Any]) -> None:
    student = torch.tensor(TRL["student"], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(TRL["teacher"], dtype=torch.float64)
    beta, temperature = case["beta"], case["temperature"]
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    rows = ((each / temperature).log_softmax(-1) for each in (student, teacher))
    found = divergence_terms(*rows, kind, beta)
    found.sum().backward()
    torch.testing.assert_close(found, torch.tensor(case["terms"], dtype=torch.float64), atol=1e-10, rtol=0)
    expected = torch.tensor(case["gradient"], dtype=torch.float64)
    torch.testing.assert_close(student.grad, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_gradient_is_that_of_finite_differences_and_goes_to_the_student_alone(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn((2, 3, 6), generator=generator, dtype=torch.float64).unbind()
    student.requires_grad_()
    teacher.requires_grad_()
    assert torch.autograd.gradcheck(lambda row: _of_logits(row, teacher.detach(), kind), student)
    _of_logits(student, teacher, kind).sum().backward()
    assert teacher.grad is None


def _of_logits(student: torch.Tensor, teacher: torch.Tensor, kind: str) -> torch.Tensor:
    return divergence_terms(student.log_softmax(-1), teacher.log_softmax(-1), kind, 0.3)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_what_one_of_the_two_never_says_makes_no_number_that_is_none(kind: str) -> None:
    student = torch.tensor([[0.0, 1.0, -1e4]], dtype=torch.float32, requires_grad=True)
    found = divergence_terms(
        student.log_softmax(-1), torch.tensor([[0.0, 1.0, -1e4]]).log_softmax(-1), kind, 0.5
    )
    found.sum().backward()
    assert student.grad is not None
    assert bool(torch.isfinite(found).all() and torch.isfinite(student.grad).all())


def test_an_unknown_divergence_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"`kl`.*forward_kl, reverse_kl, jsd"):
        _terms([[0.0]], [[0.0]], "kl")


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("scale", [1.0, 60.0])
def test_slopes_are_the_derivatives_by_the_logits(kind: str, scale: float) -> None:
    """Also where one of the two finds words impossible."""
    generator = torch.Generator().manual_seed(0)
    student_M_V, teacher_M_V = (
        scale * torch.randn(5, 11, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    student_M_V[0, 0], teacher_M_V[1, 1] = -1e4, -1e4
    student_M_V.requires_grad_()
    teacher_M_V = teacher_M_V.log_softmax(-1)
    divergence_terms(student_M_V.log_softmax(-1), teacher_M_V, kind, 0.3).sum().backward()
    slopes_M_V = divergence_slopes(student_M_V.detach().log_softmax(-1), teacher_M_V, kind, 0.3)
    torch.testing.assert_close(slopes_M_V, student_M_V.grad, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_words_that_both_rule_out_change_no_slope(kind: str) -> None:
    student, teacher = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, -1.0]])
    ruled_out = torch.tensor([[-math.inf]])
    with_more = (torch.cat((each, ruled_out), 1).log_softmax(-1) for each in (student, teacher))
    slopes = divergence_slopes(*with_more, kind, 0.3)
    alone = divergence_slopes(student.log_softmax(-1), teacher.log_softmax(-1), kind, 0.3)
    assert slopes[0, 2] == 0.0
    torch.testing.assert_close(slopes[:, :2], alone)


def test_slopes_of_a_divergence_that_there_is_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="no divergence `hellinger`"):
        divergence_slopes(torch.zeros(1, 2), torch.zeros(1, 2), "hellinger", 0.5)
