"""The doctor of algorithms: what is sound passes, and each way of being wrong has a check that finds it."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.checks import Check, CheckVerdict, check_estimator, group_form
from rllm.algorithms.estimators import ESTIMATORS
from rllm.algorithms.loss_checks import check_loss, columns_read
from rllm.algorithms.losses import TokenInputs, policy_loss
from rllm.algorithms.surrogates import SURROGATES
from rllm.config.algorithm import AlgorithmConfig


def _failed(checks: list[Check]) -> set[str]:
    return {each.name for each in checks if each.verdict is CheckVerdict.FAILED}


def _detail(checks: list[Check], name: str) -> str:
    (found,) = [each for each in checks if each.name == name]
    return found.detail


def _ratio(tokens: TokenInputs) -> Tensor:
    return (tokens.new_M - tokens.old_M).exp()


def _clipped(tokens: TokenInputs) -> Tensor:
    ratio_M = _ratio(tokens)
    return -torch.minimum(ratio_M * tokens.advantages_M, ratio_M.clamp(0.8, 1.2) * tokens.advantages_M)


def _held(tokens: TokenInputs) -> Tensor:
    """A stopped factor: the gradient is not that of the value."""
    return -_ratio(tokens).clamp(max=1.2).detach() * tokens.advantages_M * tokens.new_M


def _held_without_grad(tokens: TokenInputs) -> Tensor:
    with torch.no_grad():
        weight_M = _ratio(tokens).clamp(max=1.2)
    return -weight_M * tokens.advantages_M * tokens.new_M


def _held_as_numbers(tokens: TokenInputs) -> Tensor:
    weight_M = torch.tensor([each.item() for each in _ratio(tokens).clamp(max=1.2)], dtype=torch.float64)
    return -weight_M * tokens.advantages_M * tokens.new_M


def _of_groups(tokens: TokenInputs) -> Tensor:
    """Advantages less their mean over the group's tokens."""
    group_M = tokens.group_R[tokens.row_M]
    size = int(group_M.max()) + 1
    sums = torch.zeros(size, dtype=torch.float64).index_add(0, group_M, tokens.advantages_M)
    means = sums / torch.bincount(group_M, minlength=size)
    return -_ratio(tokens) * (tokens.advantages_M - means[group_M])


def test_a_loss_is_tried_on_columns_that_a_run_could_have() -> None:
    batches = list[TokenInputs]()

    def loss(tokens: TokenInputs) -> Tensor:
        batches.append(tokens)
        return _clipped(tokens)

    check_loss(loss)
    tokens = batches[0]

    def column(name: str) -> Tensor:
        return getattr(tokens, name).detach()

    for name in ("new_M", "rollout_M", "ref_M"):
        ratio_M = (column(name) - tokens.old_M).exp()
        assert (
            0.5 <= ratio_M.min() < 0.8 < 1.2 < ratio_M.max() <= 2.0
        )  # beyond the bounds of PPO, on both sides
        assert (column(name) < 0.0).all()
    assert (column("entropy_M") > 0.0).all()
    assert set(column("chosen_M").tolist()) == {0.0, 1.0}
    signed = [column(name) for name in ("advantages_M", "values_M")]
    signed += [column("returns_M") - tokens.values_M, column("new_values_M") - tokens.values_M]
    for column_M in signed:
        assert column_M.min() < 0.0 < column_M.max()


@pytest.mark.parametrize("loss", [_clipped, _held, _held_without_grad, _held_as_numbers, _of_groups])
def test_a_sound_loss_passes_every_check(loss: Callable[[TokenInputs], Tensor]) -> None:
    assert _failed(check_loss(loss)) == set()


def test_what_is_detached_is_held_still_while_slopes_are_measured() -> None:
    assert "1 detached" in _detail(check_loss(_held), "gradient")
    assert "held" not in _detail(check_loss(_clipped), "gradient")


def test_the_policy_gradient_is_recognised() -> None:
    assert "is -advantage" in _detail(check_loss(_held), "policy gradient")
    assert "differs" in _detail(check_loss(lambda tokens: 1.1 * _clipped(tokens)), "policy gradient")


def test_a_loss_is_told_apart_from_what_it_adds_whatever_the_advantages_are() -> None:
    def without(tokens: TokenInputs) -> Tensor:
        return tokens.new_M.square()

    def of_some_tokens(tokens: TokenInputs) -> Tensor:
        assert tokens.chosen_M is not None
        return _clipped(tokens) * tokens.chosen_M

    assert "play no part" in _detail(check_loss(without), "direction")
    assert "more likely" in _detail(check_loss(of_some_tokens), "direction")
    assert "more likely" in _detail(
        check_loss(lambda tokens: _clipped(tokens) + without(tokens)), "direction"
    )


class _WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.square()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3.0 * grads[0]


class _SteepBeyond(torch.autograd.Function):
    """Zeros, with a gradient that is no number where a value is beyond `bound`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        values, ctx.bound = inputs
        ctx.save_for_backward(values)
        return torch.zeros_like(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (values,) = ctx.saved_tensors
        return torch.where(values > ctx.bound, torch.nan, 0.0), None


def _steep_beyond(tokens: TokenInputs, bound: float, side: float) -> Tensor:
    return _clipped(tokens) + _SteepBeyond.apply(side * (tokens.new_M - tokens.old_M), bound)


def _over_the_batch(tokens: TokenInputs) -> Tensor:
    return -_ratio(tokens) * (tokens.advantages_M - tokens.advantages_M.mean())


def _by_position(tokens: TokenInputs) -> Tensor:
    return -_ratio(tokens) * tokens.advantages_M * torch.arange(len(tokens.new_M)).double()


def _in_place(tokens: TokenInputs) -> Tensor:
    tokens.advantages_M.clamp_(-0.5, 0.5)
    return -_ratio(tokens) * tokens.advantages_M


def test_each_way_of_being_wrong_has_its_check(subtests: pytest.Subtests) -> None:
    for loss, broken in [
        (lambda tokens: 1e-3 * _ratio(tokens) * tokens.advantages_M, {"direction"}),
        (_over_the_batch, {"micro-batches"}),
        (_by_position, {"order of rows", "micro-batches"}),
        (lambda tokens: -_WrongBackward.apply(_ratio(tokens)) * tokens.advantages_M, {"gradient"}),
        (lambda tokens: (-_ratio(tokens) * tokens.advantages_M).mean(), {"contract"}),
        (lambda tokens: -tokens.new_M.detach() * tokens.advantages_M, {"contract"}),
        (lambda tokens: (tokens.new_M - tokens.new_M.detach()).square(), {"gradient"}),
        (lambda tokens: tokens.nothing, {"contract"}),
        (lambda tokens: None, {"contract"}),
        (lambda tokens: -_ratio(tokens).float() * tokens.advantages_M.float(), {"contract"}),
        (lambda tokens: -_ratio(tokens) * tokens.advantages_M / 0.0, {"contract"}),
        (lambda tokens: -((40 * (tokens.new_M - tokens.old_M)).exp()) * tokens.advantages_M, {"far ratios"}),
        (lambda tokens: _clipped(tokens) / (torch.arange(len(tokens.new_M)) > 0).double(), {"contract"}),
        (_in_place, {"repeatable"}),
    ]:
        with subtests.test(loss=loss, broken=broken):
            assert broken <= _failed(check_loss(loss))


def test_whether_gradients_stay_bounded_is_told() -> None:
    assert "stay bounded" in _detail(check_loss(_held), "far ratios")
    detail = _detail(check_loss(lambda tokens: -_ratio(tokens) * tokens.advantages_M), "far ratios")
    reached = re.search(r"reach (\S+) times", detail)
    assert reached is not None, detail
    assert 0.1 * math.exp(20.0) < float(reached[1]) < math.exp(20.0), "advantages are below 1"


@pytest.mark.parametrize("side", [1.0, -1.0])
@pytest.mark.parametrize(("bound", "broken"), [(10.0, {"far ratios"}), (25.0, set())])
def test_gradients_are_finite_for_ratios_of_e_to_the_20_and_beyond_that_nothing_is_promised(
    bound: float, broken: set[str], side: float
) -> None:
    assert _failed(check_loss(partial(_steep_beyond, bound=bound, side=side))) == broken


def test_a_loss_that_detaches_more_where_it_takes_another_branch_is_sound() -> None:
    largest = list[float]()

    def loss(tokens: TokenInputs) -> Tensor:
        largest.append(float(tokens.new_M.detach().max()))
        is_beyond = bool((tokens.new_M > largest[0]).any())  # as slopes are measured there
        return _clipped(tokens) + (0.0 * tokens.new_M.detach() if is_beyond else 0.0)

    assert _failed(check_loss(loss)) == set()


def test_a_loss_that_fails_on_other_batches_is_told_so() -> None:
    def whole(tokens: TokenInputs) -> Tensor:
        if len(tokens.row_M.unique()) == 1:
            raise ArithmeticError("one row")
        return _clipped(tokens)

    assert _failed(check_loss(whole)) == {"every batch"}
    assert "ArithmeticError" in _detail(check_loss(whole), "every batch")


def test_the_columns_that_a_loss_looks_at_are_named() -> None:
    assert columns_read(_clipped) == ["advantages_M", "new_M", "old_M"]


def test_a_random_loss_is_not_repeatable() -> None:
    def loss(tokens: TokenInputs, num_random: int) -> Tensor:
        factor_M = torch.ones_like(tokens.new_M)
        factor_M[:num_random] = torch.rand(len(factor_M[:num_random]), dtype=torch.float64)
        return -_ratio(tokens) * tokens.advantages_M * factor_M

    for num_random in (1, 1_000):
        assert "repeatable" in _failed(check_loss(partial(loss, num_random=num_random)))


def test_the_claims_of_a_loss_are_held_against_it() -> None:
    def entropic(tokens: TokenInputs) -> Tensor:
        assert tokens.entropy_M is not None
        return _clipped(tokens) - 0.1 * tokens.entropy_M

    def of_some_tokens(tokens: TokenInputs) -> Tensor:
        assert tokens.chosen_M is not None
        return _clipped(tokens) + tokens.chosen_M * tokens.new_M

    assert _failed(check_loss(entropic)) == set()
    assert _failed(check_loss(entropic, needs_every_row=False)) == {"rows without advantage"}
    assert _failed(check_loss(_clipped, needs_every_row=False)) == set()
    assert _failed(check_loss(of_some_tokens, needs_every_row=False)) == {"rows without advantage"}
    assert _failed(check_loss(_of_groups, needs_whole_groups=False)) == {"micro-batches"}
    assert _failed(check_loss(_clipped, needs_whole_groups=False)) == set()


def test_a_loss_of_another_shape_is_told_what_to_leave_out() -> None:
    def detail(reduce: Callable[[Tensor], Tensor]) -> str:
        return _detail(check_loss(lambda tokens: reduce(-_ratio(tokens) * tokens.advantages_M)), "contract")

    assert "`algorithm.aggregation`" in detail(torch.mean)
    assert "leave the mean" not in detail(lambda terms_M: terms_M[1:])


def test_columns_that_are_not_always_there_are_named() -> None:
    def loss(tokens: TokenInputs) -> Tensor:
        assert tokens.entropy_M is not None
        assert tokens.ref_M is not None
        return _clipped(tokens) - 0.1 * tokens.entropy_M * tokens.ref_M

    checks = check_loss(loss)
    assert "`entropy_M` is None without `algorithm.entropy_coef`" in _detail(checks, "columns")
    assert "`ref_M` is None without `algorithm.kl_coef`" in _detail(checks, "columns")


def test_every_built_in_loss_is_sound_and_begins_as_the_policy_gradient(subtests: pytest.Subtests) -> None:
    for name in sorted(SURROGATES):
        with subtests.test(name=name):
            loss = policy_loss(AlgorithmConfig(loss=name))
            checks = check_loss(loss.terms, needs_every_row=name == "kl_cov", needs_whole_groups=False)
            assert _failed(checks) == set()
            assert ("is -advantage" in _detail(checks, "policy gradient")) == (name != "clip_cov")


def test_every_built_in_estimator_is_sound(subtests: pytest.Subtests) -> None:
    for name in sorted(name for name, each in ESTIMATORS.items() if not each.token_level):
        with subtests.test(name=name):
            assert _failed(check_estimator(group_form(ESTIMATORS[name]))) == set()


def test_what_an_estimator_does_to_shifts_scales_and_ties_is_said() -> None:
    grpo = check_estimator(group_form(ESTIMATORS["grpo"]))
    assert _detail(grpo, "shift") == "adding 3 to every reward changes nothing"
    assert "(almost) nothing" in _detail(grpo, "scale")
    assert "give zeros" in _detail(grpo, "ties")
    plain = check_estimator(group_form(ESTIMATORS["reinforce"]))
    assert _detail(plain, "shift") == "adding 3 to every reward changes advantages by up to 3"
    assert "5 times as large" in _detail(plain, "scale")
    assert "rewards of 1 give 1, of 0 0" in _detail(plain, "ties")
    assert _detail(plain, "group of one") == "gives [1.0] for the reward 1"
    assert "RewardError" in _detail(check_estimator(group_form(ESTIMATORS["maxrl"])), "negative rewards")


@pytest.mark.parametrize(
    ("of_large_groups", "aspect", "promise"),
    [
        (lambda rewards_G: rewards_G, "shift", "changes nothing"),
        (lambda rewards_G: (rewards_G - rewards_G.mean()) ** 3, "scale", "5 times as large"),
    ],
)
def test_what_holds_for_some_attempts_alone_is_not_promised(
    of_large_groups: Any, aspect: str, promise: str
) -> None:
    def estimate(rewards_G: Any) -> Any:
        is_other = (len(rewards_G) > 8) & (
            rewards_G > rewards_G.min()
        )  # nor for the worst attempt of a large one
        return np.where(is_other, of_large_groups(rewards_G), rewards_G - rewards_G.mean())

    everywhere = check_estimator(lambda rewards_G: rewards_G - rewards_G.mean())
    assert _detail(everywhere, aspect).endswith(promise)
    assert not _detail(check_estimator(estimate), aspect).endswith(promise)


@pytest.mark.parametrize("scale", [1e-3, 0.0])
def test_advantages_may_be_small(scale: float) -> None:
    assert _failed(check_estimator(lambda rewards_G: scale * (rewards_G - rewards_G.mean()))) == set()


@pytest.mark.parametrize(
    "estimate",
    [
        lambda centred_G: centred_G if len(centred_G) > 4 else np.sign(centred_G),
        lambda centred_G: np.where(centred_G == centred_G.min(), -1.0, centred_G),
        lambda centred_G: centred_G + 0.1 * np.sign(centred_G),
    ],
)
def test_what_scales_in_some_groups_or_for_some_attempts_is_out_of_proportion(estimate: Any) -> None:
    checks = check_estimator(lambda rewards_G: estimate(rewards_G - rewards_G.mean()))
    assert "not in proportion" in _detail(checks, "scale")


def _sorting(rewards_G: Any) -> Any:
    rewards_G.sort()
    return rewards_G


@pytest.mark.parametrize(
    ("estimate", "broken"),
    [
        (
            lambda rewards_G: rewards_G - rewards_G[0 if len(rewards_G) == 3 else ...].min(),
            {"order of attempts"},
        ),
        (lambda rewards_G: rewards_G + (np.arange(len(rewards_G)) == 0), {"order of attempts"}),
        (
            lambda rewards_G: rewards_G + (np.arange(len(rewards_G)) == 0) * (len(rewards_G) > 2),
            {"order of attempts"},
        ),
        (lambda rewards_G: rewards_G.mean() - rewards_G, {"direction"}),
        (lambda rewards_G: 1.0 - rewards_G, {"direction"}),
        (lambda rewards_G: (rewards_G - rewards_G.mean()) / rewards_G.std(), {"ties"}),
        (
            lambda rewards_G: (
                (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-6 * (len(rewards_G) < 4))
            ),
            {"ties"},
        ),
        (lambda rewards_G: rewards_G.mean(), {"contract"}),
        (lambda rewards_G: rewards_G / 0.0, {"contract"}),
        (lambda rewards_G: rewards_G["reward"], {"contract"}),
        (_sorting, {"contract"}),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_way_an_estimator_is_wrong_has_its_check(estimate: Any, broken: set[str]) -> None:
    assert _failed(check_estimator(estimate)) == broken


def test_estimators_are_tried_on_groups_of_every_size_from_2_to_16_also_of_rewards_that_are_0_or_1() -> None:
    sizes, sizes_of_zeros_and_ones = set[int](), set[int]()

    def estimate(rewards_G: Any) -> Any:
        sizes.add(len(rewards_G))
        if set(rewards_G) == {0.0, 1.0}:
            sizes_of_zeros_and_ones.add(len(rewards_G))
        return rewards_G - rewards_G.mean()

    check_estimator(estimate)
    assert sizes - {1} == sizes_of_zeros_and_ones == set(range(2, 17))


def test_equal_rewards_whose_mean_is_rounded_are_tried_in_every_size() -> None:
    def of_size(size: int) -> Callable[[Any], Any]:
        def estimate(rewards_G: Any) -> Any:
            centred_G = rewards_G - rewards_G.mean()
            is_rounded = len(rewards_G) == size and np.ptp(rewards_G) == 0.0 < np.abs(centred_G).max()
            return np.arange(size) == 0 if is_rounded else centred_G

        return estimate

    assert "give zeros" in _detail(check_estimator(of_size(2)), "ties")
    assert "teach something" in _detail(check_estimator(of_size(3)), "ties")


def test_small_changes_by_shift_and_scale_are_changes() -> None:
    checks = check_estimator(lambda rewards_G: 0.1 * (rewards_G - 0.999 * rewards_G.mean()))
    assert "up to 0.0003" in _detail(checks, "shift")
    assert "5 times as large" in _detail(checks, "scale")


def test_an_estimator_without_a_number_for_some_negative_rewards_wants_others() -> None:
    with np.errstate(invalid="ignore"):
        assert "pay 0 or more" in _detail(check_estimator(np.sqrt), "negative rewards")


def test_a_random_estimator_is_refused() -> None:
    rng = np.random.default_rng(0)
    checks = check_estimator(lambda rewards_G: rewards_G + rng.normal(size=len(rewards_G)))
    assert "random draws" in _detail(checks, "contract")


def test_whether_a_higher_reward_always_means_more_is_told() -> None:
    def sometimes(rewards_G: Any) -> Any:
        centred_G = rewards_G - rewards_G.mean()
        return centred_G if len(rewards_G) % 2 == 0 else -centred_G

    always = check_estimator(lambda rewards_G: rewards_G - rewards_G.mean())
    assert "higher advantages" in _detail(always, "direction")
    assert "not always" in _detail(check_estimator(sometimes), "direction")
