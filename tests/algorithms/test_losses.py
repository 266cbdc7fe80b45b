"""What is added to a surrogate, the value loss, and the loss that a configuration describes."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rllm.algorithms.aggregation import FixedLength
from rllm.algorithms.context import AlgorithmContext
from rllm.algorithms.correction import Correction
from rllm.algorithms.losses import (
    ActorCriticLoss,
    ImitationLoss,
    PolicyLoss,
    TokenInputs,
    ValueLoss,
    policy_loss,
)
from rllm.algorithms.surrogates import (
    SURROGATES,
    ClippedCovariance,
    ClippedRatio,
    ClippedWeight,
    DivergenceMask,
    GeometricMean,
    ImportanceRatio,
    OwnFunction,
    PenalisedCovariance,
    SequenceRatio,
    SoftGate,
    Tapered,
    WholeVocabulary,
)
from rllm.config import algorithm as config_algorithm
from rllm.config.algorithm import AlgorithmConfig
from rllm.errors import ConfigError


def tokens(**changes: Any) -> TokenInputs:
    """Six tokens of two rows; each column may be another."""
    columns: dict[str, Any] = {
        "new_M": [-1.0, -0.2, -2.0, -0.5, -0.9, -1.4],
        "old_M": [-1.1, -0.3, -1.2, -0.5, -1.4, -1.3],
        "advantages_M": [1.0, 1.0, 1.0, -2.0, -2.0, -2.0],
        "weights_M": [1 / 6] * 6,
    } | changes
    return TokenInputs(
        row_M=torch.tensor([0, 0, 0, 1, 1, 1]),
        group_R=torch.tensor([0, 0]),
        **{
            name: torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value
            for name, value in columns.items()
        },
    )


def _gradient(loss: Any, name: str, given: TokenInputs) -> Tensor:
    """Of the sum of the terms with respect to the column of that name."""
    leaf = getattr(given, name).clone().requires_grad_()
    loss.terms(replace(given, **{name: leaf})).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


ENTROPY = [0.3, 0.1, 1.2, 0.7, 0.9, 0.2]
REF = [-1.3, -0.1, -2.5, -0.6, -0.7, -1.1]
ROLLOUT = [-1.0, -0.9, -1.2, -0.4, -2.6, -1.3]


def test_entropy_and_divergence_are_added_to_every_term() -> None:
    plain = PolicyLoss()
    both = PolicyLoss(entropy_coef=0.1, kl_coef=0.5, kl_kind="k2")
    given = tokens(entropy_M=ENTROPY, ref_M=REF)
    expected = [
        term - 0.1 * entropy + 0.25 * (new - ref) ** 2
        for term, entropy, new, ref in zip(
            plain.terms(given).tolist(), ENTROPY, given.new_M.tolist(), REF, strict=True
        )
    ]
    assert both.terms(given).tolist() == pytest.approx(expected, abs=1e-12)
    assert _gradient(both, "entropy_M", given).tolist() == pytest.approx([-0.1] * 6)
    added = _gradient(both, "new_M", given) - _gradient(plain, "new_M", given)
    assert added.tolist() == pytest.approx((0.5 * (given.new_M - torch.tensor(REF))).tolist(), abs=1e-6)


def test_a_column_that_is_there_but_not_asked_for_changes_nothing() -> None:
    assert PolicyLoss().terms(tokens(entropy_M=ENTROPY, ref_M=REF, rollout_M=ROLLOUT)).tolist() == (
        PolicyLoss().terms(tokens()).tolist()
    )


def test_a_correction_weighs_the_surrogate_alone() -> None:
    correction = Correction(mode="mask", high=2.0)
    given = tokens(entropy_M=ENTROPY, ref_M=REF, rollout_M=ROLLOUT)
    surrogate = ClippedRatio().terms(given)
    weights = correction.weights_M(torch.tensor(ROLLOUT).double(), given.old_M, given.row_M)
    assert (weights == 0.0).any()
    corrected = PolicyLoss(correction=correction, entropy_coef=0.1, kl_coef=0.5)
    others = PolicyLoss(entropy_coef=0.1, kl_coef=0.5).terms(given) - surrogate
    assert corrected.terms(given).tolist() == pytest.approx((surrogate * weights + others).tolist())
    assert _gradient(PolicyLoss(correction=correction), "new_M", given).tolist() == pytest.approx(
        (_gradient(PolicyLoss(), "new_M", given) * weights).tolist()
    )


OWN = PolicyLoss(surrogate=OwnFunction(name="mine", function=lambda tokens: tokens.new_M))


def test_a_loss_says_what_it_needs(subtests: pytest.Subtests) -> None:
    for loss, every_row, entropy, whole_groups in [
        (PolicyLoss(), False, False, False),
        (PolicyLoss(entropy_coef=0.1), True, True, False),
        (PolicyLoss(kl_coef=0.1), True, False, False),
        (PolicyLoss(correction=Correction(mode="mask")), False, False, False),
        (OWN, True, False, True),
        (PolicyLoss(surrogate=WholeVocabulary(divergence="jsd", beta=0.5)), True, False, False),
        (PolicyLoss(surrogate=PenalisedCovariance()), True, False, False),
        (ValueLoss(clip=0.2), True, False, False),
        (
            ActorCriticLoss(policy=PolicyLoss(entropy_coef=0.1), value=ValueLoss(clip=0.2), coef=0.5),
            True,
            True,
            False,
        ),
        (ActorCriticLoss(policy=OWN, value=ValueLoss(clip=0.2), coef=0.5), True, False, True),
        (ImitationLoss(), True, False, False),
    ]:
        with subtests.test(loss=loss, every_row=every_row, entropy=entropy, whole_groups=whole_groups):
            found = (loss.needs_every_row, loss.needs_entropy, loss.needs_whole_groups)
            assert found == (every_row, entropy, whole_groups)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (PolicyLoss(entropy_coef=0.1), "`algorithm.entropy_coef`"),
        (PolicyLoss(kl_coef=0.1), r"`algorithm.kl_coef`.*log-prob"),
        (PolicyLoss(correction=Correction(mode="mask")), '`algorithm.old_logprobs` to "trainer"'),
        (ValueLoss(clip=0.2), "needs a critic's values and the returns; choose the estimator `gae`"),
    ],
)
def test_what_is_asked_for_and_missing_is_named(loss: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss.terms(tokens())


@pytest.mark.parametrize("missing", ["new_values_M", "values_M", "returns_M"])
def test_a_value_loss_needs_all_of_its_columns(missing: str) -> None:
    with pytest.raises(ConfigError, match="choose the estimator `gae`"):
        ValueLoss(clip=0.2).terms(tokens(**{**VALUES, missing: None}))


def test_measures_are_of_each_token() -> None:
    given = tokens(entropy_M=ENTROPY, ref_M=REF, rollout_M=ROLLOUT)
    measures = PolicyLoss(correction=Correction(mode="mask")).measures(given)
    gaps = (given.new_M - given.old_M).tolist()
    assert measures["ratio_mean"].tolist() == pytest.approx([math.exp(gap) for gap in gaps])
    assert measures["kl"].tolist() == pytest.approx([math.exp(gap) - 1 - gap for gap in gaps])
    assert measures["clipped_frac"].tolist() == [0, 0, 1, 0, 1, 0]
    assert measures["entropy"].tolist() == ENTROPY
    to_ref = [new - ref for new, ref in zip(given.new_M.tolist(), REF, strict=True)]
    assert measures["kl_ref"].tolist() == pytest.approx([math.exp(-gap) - 1 + gap for gap in to_ref])
    assert measures["correction_mean"].tolist() == pytest.approx(
        [math.exp(-0.1), math.exp(0.6), 1.0, math.exp(-0.1), 0.0, 1.0]
    )
    assert measures["corrected_frac"].tolist() == [0, 0, 0, 0, 1, 0]
    beside_a_teacher = PolicyLoss().measures(tokens(teacher_M=REF))
    assert (
        beside_a_teacher["reverse_kl"].tolist()
        == (given.old_M - torch.tensor(REF, dtype=torch.float64)).tolist()
    )
    assert set(PolicyLoss().measures(tokens())) == {"ratio_mean", "clipped_frac", "kl"}
    assert ImitationLoss().measures(given) == {}


def test_imitation_is_the_negative_log_likelihood() -> None:
    assert ImitationLoss().terms(tokens()).tolist() == [1.0, 0.2, 2.0, 0.5, 0.9, 1.4]


VALUES = {
    "new_values_M": [0.5, 1.0, -0.3, 0.2, 0.9, 0.0],
    "values_M": [0.4, 0.2, 0.4, 0.2, 1.0, 0.5],
    "returns_M": [1.0, 1.0, 1.0, -1.0, 0.0, 0.6],
}


def _scalar_value(new: float, old: float, ret: float, clip: float) -> tuple[float, float]:
    """(term, slope)."""
    held = min(max(new, old - clip), old + clip)
    if clip and (held - ret) ** 2 > (new - ret) ** 2:
        return (held - ret) ** 2 / 2, 0.0
    return (new - ret) ** 2 / 2, new - ret


@pytest.mark.parametrize("clip", [0.0, 0.2, 0.55])
def test_a_value_is_drawn_to_the_return_but_not_far_from_where_it_was(clip: float) -> None:
    given, loss = tokens(**VALUES), ValueLoss(clip=clip)
    new, old, returns = VALUES.values()
    expected = [_scalar_value(*row, clip) for row in zip(new, old, returns, strict=True)]
    assert loss.terms(given).tolist() == pytest.approx([term for term, _ in expected], abs=1e-10)
    gradient = _gradient(loss, "new_values_M", given)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-10)
    for step, slope in zip(1e-5 * torch.eye(6, dtype=torch.float64), gradient.tolist(), strict=True):
        moved = [torch.tensor(new, dtype=torch.float64) + sign * step for sign in (1, -1)]
        above, below = (float(loss.terms(replace(given, new_values_M=each)).sum()) for each in moved)
        assert slope == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-9)


def test_value_measures_are_of_each_token() -> None:
    measures = ValueLoss(clip=0.2).measures(tokens(**VALUES))
    assert measures["value_error"].tolist() == pytest.approx([0.25, 0.0, 1.69, 1.44, 0.81, 0.36])
    assert measures["value_clipped_frac"].tolist() == [0, 1, 1, 0, 0, 1]
    at_the_bound = tokens(new_values_M=[0.5, 0.0, 0.75], values_M=[0.0, 0.5, 0.0], returns_M=[1.0] * 3)
    assert ValueLoss(clip=0.5).measures(at_the_bound)["value_clipped_frac"].tolist() == [0, 0, 1]
    assert "value_clipped_frac" not in ValueLoss(clip=0.0).measures(tokens(**VALUES))


def test_the_value_loss_is_verls(verl_losses: dict[str, Any]) -> None:
    oracle = verl_losses["value"]
    mask = torch.tensor(verl_losses["mask"], dtype=torch.bool)
    values, returns = (
        torch.tensor(oracle[name], dtype=torch.float64)[mask] for name in ("values", "returns")
    )
    zeros = torch.zeros_like(values)
    given = TokenInputs(
        new_M=zeros,
        old_M=zeros,
        advantages_M=zeros,
        weights_M=zeros,
        row_M=zeros.long(),
        group_R=torch.zeros(1, dtype=torch.int64),
        new_values_M=values + 0.3,
        values_M=values,
        returns_M=returns,
    )
    terms = ValueLoss(clip=oracle["clip"]).terms(given)
    assert float(terms.mean()) == pytest.approx(oracle["loss"], abs=1e-7)
    held = terms > 0.5 * (values + 0.3 - returns).square()
    assert float(held.double().mean()) == pytest.approx(oracle["clipped"])


def test_on_one_trunk_the_terms_of_both_are_added() -> None:
    policy, value = PolicyLoss(aggregation="sequence_mean"), ValueLoss(clip=0.2, aggregation="sequence_mean")
    both, given = ActorCriticLoss(policy=policy, value=value, coef=0.3), tokens(**VALUES)
    assert both.terms(given).tolist() == pytest.approx(
        (policy.terms(given) + 0.3 * value.terms(given)).tolist()
    )
    assert set(both.measures(given)) == {*policy.measures(given), *value.measures(given)}
    assert both.aggregation == "sequence_mean"
    with pytest.raises(ConfigError, match=r"`token_mean`.*`sequence_mean`"):
        ActorCriticLoss(policy=PolicyLoss(), value=value, coef=0.5)


def test_every_loss_of_the_configuration_is_made_with_the_bounds_of_its_paper() -> None:
    assert set(SURROGATES) == set(config_algorithm.LOSSES)
    made = {name: policy_loss(AlgorithmConfig(loss=name)).surrogate for name in SURROGATES}
    assert made.pop("policy_gradient").terms(tokens()).tolist() == [1.0, 0.2, 2.0, -1.0, -1.8, -2.8]
    assert made == {
        "ppo": ClippedRatio(clip_low=0.2, clip_high=0.2, dual_clip=0.0),
        "gspo": SequenceRatio(clip_low=3e-4, clip_high=4e-4),
        "cispo": ClippedWeight(clip_low=1.0, clip_high=4.0),
        "gmpo": GeometricMean(clip_low=0.4, clip_high=0.4),
        "sapo": SoftGate(positive=1.0, negative=1.05),
        "dppo_tv": DivergenceMask(clip_low=0.15, clip_high=0.15, kl=False),
        "dppo_kl": DivergenceMask(clip_low=0.05, clip_high=0.05, kl=True),
        "topr": Tapered(),
        "clip_cov": ClippedCovariance(clip_low=0.2, clip_high=0.2, fraction=2e-4, low=1.0, high=5.0),
        "kl_cov": PenalisedCovariance(fraction=2e-4, kl_coef=1.0),
        "importance_sampling": ImportanceRatio(),
    }


def test_a_loss_made_by_hand_has_the_bounds_of_the_configuration() -> None:
    for name in ("ppo", "gspo", "cispo", "gmpo", "dppo_tv", "clip_cov", "kl_cov"):
        surrogate = policy_loss(AlgorithmConfig(loss=name)).surrogate
        assert type(surrogate)() == surrogate


def test_distilling_over_the_whole_vocabulary_weighs_the_divergence_of_each_token() -> None:
    surrogate = WholeVocabulary(divergence="reverse_kl", beta=0.5)
    given = tokens()
    divergence_M = torch.arange(1.0, 7.0)
    assert torch.equal(
        surrogate.terms(replace(given, divergence_M=divergence_M)), given.advantages_M * divergence_M
    )
    assert not surrogate.clipped_M(given).any()
    with pytest.raises(ConfigError, match="no teacher"):
        surrogate.terms(given)


def test_a_bound_of_zero_is_a_bound_and_only_what_is_left_out_is_the_papers() -> None:
    both = policy_loss(AlgorithmConfig(clip_low=0.0, clip_high=0.0)).surrogate
    assert both == ClippedRatio(clip_low=0.0, clip_high=0.0)
    assert policy_loss(AlgorithmConfig(clip_low=0.0)).surrogate == ClippedRatio(clip_low=0.0, clip_high=0.2)
    given = tokens()
    falls = (given.new_M < given.old_M) & (given.advantages_M < 0.0)
    assert falls.any()
    held = both.terms(given)[falls]
    assert held.tolist() == pytest.approx((-given.advantages_M[falls]).tolist())  # as at a ratio of 1
    for low in (-0.5, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"`algorithm.clip_low` is .* 0 and 1, or -1"):
            AlgorithmConfig(clip_low=low).validate()


@pytest.mark.parametrize("name", sorted(SURROGATES))
def test_every_key_that_a_loss_looks_at_changes_it(name: str) -> None:
    keys = config_algorithm.LOSSES[name]
    plain = policy_loss(AlgorithmConfig(loss=name))
    for key in keys:
        changed = AlgorithmConfig(loss=name)
        setattr(changed, key, 3.0 if key in ("dual_clip", "cov_high") else 0.37)
        changed.validate()
        assert policy_loss(changed) != plain
    surrogate: Any = plain.surrogate
    has = {each.name for each in fields(surrogate)} - {"kl", "context"}
    assert {key.removeprefix("sapo_").removeprefix("cov_") for key in keys} == has


def test_the_rest_of_the_section_is_taken_as_it_stands() -> None:
    config = AlgorithmConfig(
        aggregation="constant",
        aggregation_constant=512,
        entropy_coef=0.01,
        kl_coef=0.1,
        kl_kind="k3+",
        correction="mask",
        correction_level="geometric",
        correction_low=0.5,
        correction_high=3.0,
        old_logprobs="trainer",
    )
    config.validate()
    loss = policy_loss(replace(config, kl_coef=0.2, entropy_coef=0.0))
    assert loss == PolicyLoss(
        aggregation=FixedLength(num_tokens=512),
        kl_coef=0.2,
        kl_kind="k3+",
        correction=Correction(mode="mask", level="geometric", low=0.5, high=3.0),
    )
    paid = policy_loss(replace(config, kl_in="reward", kl_kind="k1"))
    assert (paid.kl_coef, paid.entropy_coef) == (0.0, 0.01)


def test_a_loss_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`ppo2`.*'ppo'.*ppo, policy_gradient, gspo"):
        policy_loss(AlgorithmConfig(loss="ppo2"))


def _written(path: Path, body: str) -> str:
    path.write_text(f"import torch\n\ndef mine(tokens):\n    {body}\n\ndef nothing():\n    return 0\n")
    return str(path)


def test_a_function_in_a_file_is_a_loss(tmp_path: Path) -> None:
    path = _written(tmp_path / "own_loss.py", "return -tokens.advantages_M * tokens.new_M ** 3")
    loss = policy_loss(AlgorithmConfig(loss=f"{path}:mine", kl_coef=0.5))
    given = tokens(ref_M=REF)
    own = -given.advantages_M * given.new_M**3
    added = PolicyLoss(kl_coef=0.5).terms(given) - PolicyLoss().terms(given)
    assert loss.terms(given).tolist() == pytest.approx((own + added).tolist())
    assert loss.needs_every_row
    assert loss.needs_whole_groups
    assert not loss.measures(given)["clipped_frac"].any()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return tokens.new_M.sum()", r"a tensor \(\)"),
        ("return tokens.new_M[:2]", r"a tensor \(2,\)"),
        ("return 0.5", r"0\.5"),
    ],
)
def test_what_is_not_one_term_a_token_is_refused(tmp_path: Path, body: str, found: str) -> None:
    path = _written(tmp_path / "wrong_loss.py", body)
    loss = policy_loss(AlgorithmConfig(loss=f"{path}:mine"))
    with pytest.raises(ConfigError, match=f"wrong_loss.py:mine returned {found} .* 6 tokens"):
        loss.terms(tokens())


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return torch.zeros_like(tokens.new_M)", "without a gradient"),
        ("return -tokens.advantages_M * tokens.new_M.detach()", "without a gradient"),
        ("return torch.ones_like(tokens.new_M, dtype=torch.int64)", "without a gradient"),
        ("return -tokens.advantages_M.mul_(2.0) * tokens.new_M", "changed advantages_M in place"),
        ("tokens.old_M.zero_(); return -tokens.advantages_M * tokens.new_M", "changed old_M in place"),
        ("return tokens.new_M.mul_(-1.0) * tokens.advantages_M", "changed new_M in place"),
    ],
)
def test_a_loss_that_moves_nothing_or_spoils_what_is_measured_is_refused(
    tmp_path: Path, body: str, found: str
) -> None:
    path = _written(tmp_path / "spoiling_loss.py", body)
    loss = policy_loss(AlgorithmConfig(loss=f"{path}:mine"))
    given = tokens()
    new_M = given.new_M.detach().requires_grad_()
    with pytest.raises(ConfigError, match=f"spoiling_loss.py:mine .*{found}"):
        loss.terms(replace(given, new_M=new_M * 1.0))


def test_a_function_that_cannot_be_called_with_tokens_is_refused_before_any_work(tmp_path: Path) -> None:
    path = _written(tmp_path / "odd_loss.py", "return tokens.new_M")
    with pytest.raises(ConfigError, match=r"nothing .*\(tokens\)"):
        policy_loss(AlgorithmConfig(loss=f"{path}:nothing"))
    with pytest.raises(ConfigError, match="has no loss `other`"):
        policy_loss(AlgorithmConfig(loss=f"{path}:other"))
    with pytest.raises(ConfigError, match="no file"):
        policy_loss(AlgorithmConfig(loss=f"{tmp_path}/absent.py:mine"))


def test_a_loss_that_yields_is_refused_whatever_it_takes(tmp_path: Path) -> None:
    for number, arguments in enumerate(("tokens", "tokens, context"), 1):
        path = tmp_path / f"yielding_{number}.py"
        path.write_text(f"def mine({arguments}):\n    yield tokens.new_M\n")
        with pytest.raises(ConfigError, match="generator"):
            policy_loss(AlgorithmConfig(loss=f"{path}:mine"))


def test_ones_own_loss_may_see_bounds_and_step_and_bounds_that_it_does_not_see_are_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "seeing_loss.py"
    path.write_text(
        "def seeing(tokens, context):\n"
        "    return tokens.new_M * (context.clip_low or 0.0) + context.step + (context.clip_high is None)\n\n"
        "def blind(tokens):\n"
        "    return tokens.new_M\n\n"
        "class Made:\n"
        "    def terms(self, tokens, context):\n"
        "        return tokens.new_M * context.total_steps\n"
    )
    start = AlgorithmContext()
    assert (start.step, start.total_steps, start.seed) == (0, 1, 0)
    config = AlgorithmConfig(loss=f"{path}:seeing", clip_low=0.25)
    config.validate()
    given = tokens()
    found = policy_loss(config, AlgorithmContext(config=config, step=4, total_steps=9)).terms(given)
    assert found.tolist() == pytest.approx((given.new_M * 0.25 + 4 + 1).tolist())
    closed = AlgorithmContext(config=AlgorithmConfig(clip_low=0.0, clip_high=0.0))
    assert (closed.clip_low, closed.clip_high) == (0.0, 0.0)
    made = AlgorithmConfig(loss=f"{path}:Made")
    assert (
        policy_loss(made, AlgorithmContext(total_steps=9)).terms(given).tolist() == (given.new_M * 9).tolist()
    )
    blind = AlgorithmConfig(loss=f"{path}:blind", clip_low=0.25)
    blind.validate()
    with pytest.raises(ConfigError, match=r"`algorithm.clip_low` is 0.25.*`def blind\(tokens, context\)`"):
        policy_loss(blind)
