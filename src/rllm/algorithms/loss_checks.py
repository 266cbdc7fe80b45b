"""Does a loss keep the laws that the trainer counts on? A function in, verdicts out.

    (tokens: TokenInputs) -> Tensor [M]    gradient, direction, order of rows, micro-batches, untrained tokens

Everything is computed in float64 on one small batch of made-up tokens, the same every time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rllm.algorithms.advantages import FloatArray
from rllm.algorithms.checks import SAME, Check, CheckVerdict, fail_check, pass_check
from rllm.algorithms.losses import TokenInputs, token_weights
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Terms = Callable[[TokenInputs], Tensor]

SLOPE_TOLERANCE = 1e-6
"""Tolerance between a gradient and finite differences, relative to its largest entry."""
SLOPE_STEP = 1e-5
GRADIENT_COLUMNS = ("new_M", "entropy_M", "new_values_M")
"""The columns that depend on the weights that are updated."""
SOMETIMES_THERE = {
    "entropy_M": "`algorithm.entropy_coef`",
    "rollout_M": '`algorithm.old_logprobs = "trainer"`',
    "ref_M": "`algorithm.kl_coef`",
    "new_values_M": "a critic",
    "values_M": "a critic",
    "returns_M": "a critic",
    "chosen_M": "the loss `clip_cov` or `kl_cov`",
}
"""Column -> what a run must have for it; it is None in any other."""


def check_loss(terms: Terms, *, needs_every_row: bool = True, needs_whole_groups: bool = True) -> list[Check]:
    """Verdicts on a loss.

    `needs_every_row` False is its claim that rows with advantage 0 have no gradient, `needs_whole_groups`
    False that terms of a row do not depend on other rows. A loss that raises, or returns something else than
    [M] numbers, gets that one verdict.
    """
    rows = _rows()
    failure, reads = _contract(terms, _tokens(rows))
    if failure:
        return [Check(name="contract", verdict=CheckVerdict.FAILED, detail=failure)]
    early_checks = [
        Check(
            name="contract", verdict=CheckVerdict.PASSED, detail=f"[M] finite numbers of {', '.join(reads)}"
        ),
        *_sometimes_there(reads),
    ]
    try:
        checks = [
            _repeatable_loss(terms, rows),
            _gradient(terms, rows),
            _direction(terms, rows),
            _row_order(terms, rows),
            _micro_batches(terms, rows, needs_whole_groups),
            _untrained_tokens(terms, rows),
            _policy_gradient(terms, rows),
            _far_ratios(terms, rows),
        ]
        return (
            [*early_checks, *checks] if needs_every_row else [*early_checks, *checks, _zero_rows(terms, rows)]
        )
    except Exception as error:  # noqa: BLE001  as in the contract
        detail = f"raised {type(error).__name__} on other tokens than the first: {error}"
        return [*early_checks, fail_check("every batch", detail)]


def columns_read(terms: Terms) -> list[str]:
    """Names of the columns of `TokenInputs` that a sound loss looks at."""
    return _contract(terms, _tokens(_rows()))[1]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Row:
    sample: TrainingSample
    gradient: dict[str, FloatArray]
    """[T] of every column that carries a gradient."""


def _rows() -> list[_Row]:
    """Three groups of rows of several lengths, prompts and observations between their sampled tokens."""
    rng = np.random.default_rng(0)
    patterns = (("ppss", "ppsos", "ppssoss"), ("psss", "psoos"), ("pppsssss", "ppps", "ppposs"))
    return [
        _row(pattern, f"task-{number}", attempt, rng)
        for number, group in enumerate(patterns)
        for attempt, pattern in enumerate(group)
    ]


def _row(pattern: str, task: str, attempt: int, rng: np.random.Generator) -> _Row:
    """Ratios between about 0.5 and 2, so that most bounds are met on both sides, and from both."""
    size = len(pattern)
    sampled_T = np.array([letter == "s" for letter in pattern])

    most = np.log(2)

    def near(centre_T: Any) -> Any:
        return rng.uniform(centre_T - most, centre_T + most, size)

    old_T, values_T = near(-most - most), near(0.0)  # a probability that is doubled is still one
    sample = TrainingSample(
        token_ids_T=np.zeros(size, dtype=np.int64),
        policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
        logprobs_T=old_T,
        advantages_T=near(0.0),
        rollout_logprobs_T=near(old_T),
        ref_logprobs_T=near(old_T),
        values_T=values_T,
        returns_T=near(values_T),
        chosen_T=rng.integers(2, size=size).astype(np.float32),
        group_key=(task, "agent"),
        order_key=(task, attempt, 0, 0),
    )
    gradient = {
        "new_M": near(old_T),
        "entropy_M": near(most),
        "new_values_M": near(values_T),
    }
    return _Row(sample=sample, gradient=gradient)


def _tokens(rows: Sequence[_Row], weights: Sequence[FloatArray] | None = None) -> TokenInputs:
    """The trained tokens of the rows, as a backend hands them to a loss.

    `weights`: of the update that the rows are a micro-batch of; without it they are the whole update.
    """
    samples = [row.sample for row in rows]
    if weights is None:
        weights = token_weights(samples, "token_mean")
    masks = [sample.trainable_T for sample in samples]

    def column(columns: Sequence[Any]) -> Tensor:
        parts = [values_T[mask_T] for values_T, mask_T in zip(columns, masks, strict=True)]
        return torch.tensor(np.concatenate(parts), dtype=torch.float64)

    number_of: dict[tuple[str, str], int] = {}
    groups = [number_of.setdefault(sample.group_key, len(number_of)) for sample in samples]
    counts = torch.tensor([sample.num_trainable for sample in samples])
    return TokenInputs(
        old_M=column([sample.logprobs_T for sample in samples]),
        advantages_M=column([sample.advantages_T for sample in samples]),
        weights_M=column(weights),
        row_M=torch.repeat_interleave(torch.arange(len(rows)), counts),
        group_R=torch.tensor(groups),
        rollout_M=column([sample.rollout_logprobs_T for sample in samples]),
        ref_M=column([sample.ref_logprobs_T for sample in samples]),
        values_M=column([sample.values_T for sample in samples]),
        returns_M=column([sample.returns_T for sample in samples]),
        chosen_M=column([sample.chosen_T for sample in samples]),
        new_M=column([row.gradient["new_M"] for row in rows]),
        entropy_M=column([row.gradient["entropy_M"] for row in rows]),
        new_values_M=column([row.gradient["new_values_M"] for row in rows]),
    )


def _with_gradients(tokens: TokenInputs) -> TokenInputs:
    leaves = {name: getattr(tokens, name).clone().requires_grad_() for name in GRADIENT_COLUMNS}
    return replace(tokens, **leaves)


def _total(terms: Terms, tokens: TokenInputs) -> Tensor:
    return (terms(tokens) * tokens.weights_M).sum()


def _terms_and_slopes(terms: Terms, tokens: TokenInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] terms, and [M] gradient of the weighted sum with respect to each column that carries one."""
    leaves = _with_gradients(tokens)
    terms_M = terms(leaves)
    total = (terms_M * leaves.weights_M).sum()
    if total.requires_grad:
        total.backward()  # pyright: ignore[reportUnknownMemberType]
    slopes = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name in GRADIENT_COLUMNS
        for leaf in [getattr(leaves, name)]
    }
    return terms_M.detach(), slopes


def _contract(terms: Terms, tokens: TokenInputs) -> tuple[str, list[str]]:
    """The fault of the loss itself, if it has one, and the columns that it reads."""
    names = {each.name for each in fields(TokenInputs)}
    reads: set[str] = set()

    class Watched(TokenInputs):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name in names:
                reads.add(name)
            return super().__getattribute__(name)

    watch = Watched(**{name: getattr(tokens, name) for name in names})
    object.__setattr__(watch, "new_M", tokens.new_M.clone().requires_grad_())
    try:
        terms_M: Any = terms(watch)
    except Exception as error:  # noqa: BLE001  whatever a user's function raises is the verdict
        return f"raised {type(error).__name__}: {error}", []
    requirement = f"return one term a token, a float tensor of shape [{len(tokens.new_M)}]"
    if not isinstance(terms_M, Tensor):
        return f"returned a {type(terms_M).__name__}; {requirement}", []
    if terms_M.shape != tokens.new_M.shape:
        hint = "; leave the mean to `algorithm.aggregation`" if terms_M.dim() == 0 else ""
        return f"returned the shape {list(terms_M.shape)}; {requirement}{hint}", []
    if terms_M.dtype != torch.float64:
        return f"returned {terms_M.dtype} for float64 columns; {requirement} and keep the type", []
    if not torch.isfinite(terms_M).all():
        return "returned numbers that are not finite for ratios between 0.5 and 2", []
    if not terms_M.requires_grad and not {"entropy_M", "new_values_M"} & reads:
        return "has no gradient: it never uses `tokens.new_M`, or only what is detached from it", []
    return "", sorted(reads)


def _sometimes_there(reads: Sequence[str]) -> list[Check]:
    needs = [f"`{name}` is None without {SOMETIMES_THERE[name]}" for name in reads if name in SOMETIMES_THERE]
    return [Check(name="columns", verdict=CheckVerdict.NOTED, detail="; ".join(needs))] if needs else []


def _repeatable_loss(terms: Terms, rows: Sequence[_Row]) -> Check:
    tokens = _tokens(rows)
    first, second = terms(tokens), terms(tokens)
    if (gap := float((first - second).detach().abs().max())) > 0.0:
        return fail_check("repeatable", f"two calls differ by {gap:.1e}; leave out random draws and state")
    fresh = _tokens(rows)
    for each in fields(TokenInputs):
        column_M = getattr(tokens, each.name)
        # Those of a teacher's whole distribution are in no run with a loss of one's own.
        if column_M is not None and not torch.equal(column_M, getattr(fresh, each.name)):
            return fail_check("repeatable", f"it writes into `tokens.{each.name}`; compute with copies")
    return pass_check("repeatable", "the same terms twice, columns untouched")


def _gradient(terms: Terms, rows: Sequence[_Row]) -> Check:
    """Central differences, with everything that the loss detaches held at its value."""
    tokens = _tokens(rows)
    _, slopes = _terms_and_slopes(terms, tokens)
    largest = max(float(each.abs().max()) for each in slopes.values())
    if largest == 0.0:
        return fail_check("gradient", "it is 0 at every token: what depends on `tokens.new_M` is detached")
    random_values = _Held()
    with random_values:
        _total(terms, _with_gradients(tokens))
    worst, place = 0.0, ""
    for name, slope_M in slopes.items():
        for index in range(len(slope_M)):
            slope = _measured_slope(terms, tokens, name, index, random_values)
            gap = abs(slope - float(slope_M[index])) / largest
            if not gap <= worst:
                worst = gap
                place = f"token {index} has {float(slope_M[index]):.6g} for {slope:.6g} ({name})"
    if not worst <= SLOPE_TOLERANCE:
        return fail_check("gradient", f"finite differences say otherwise: {place}")
    also = f", {random_values.count} detached values held still" if random_values.count else ""
    return pass_check("gradient", f"agrees with finite differences within {worst:.0e}{also}")


def _measured_slope(
    terms: Terms, tokens: TokenInputs, name: str, index: int, random_values: "_Held"
) -> float:
    values: list[float] = []
    for sign in (1.0, -1.0):
        column = getattr(tokens, name).clone()
        column[index] += sign * SLOPE_STEP
        with random_values.replayed():
            total = _total(terms, _with_gradients(replace(tokens, **{name: column})))
        values.append(float(total.detach()))
    return (values[0] - values[1]) / (2 * SLOPE_STEP)


class _Held(TorchFunctionMode):
    """Remembers what a loss computes without a gradient, and gives it back while other values are tried.

    A loss that detaches a factor (CISPO, straight-through estimators) has the gradient of another function
    than the one that it computes; with that factor held still the two are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[Any] = []
        self._place: int | None = None
        """Which of the known values comes next; None while they are recorded."""

    @property
    def count(self) -> int:
        return len(self._known)

    def replayed(self) -> "_Held":
        self._place = 0
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _cuts_gradient(args, result):
            return result
        if self._place is None:
            self._known.append(result)
            return result
        if self._place == len(self._known):  # another branch than before: nothing to hold it at
            return result
        self._place += 1
        return self._known[self._place - 1]


def _cuts_gradient(args: tuple[Any, ...], result: Any) -> bool:
    """Whether a number came of one with a gradient and has none itself."""
    if not any(isinstance(each, Tensor) and each.requires_grad for each in args):
        return False
    if isinstance(result, Tensor):
        return result.is_floating_point() and not result.requires_grad
    return isinstance(result, float)


def _direction(terms: Terms, rows: Sequence[_Row]) -> Check:
    """On the policy that sampled, what had a positive advantage must become more likely."""
    tokens = _on_policy(_tokens(rows))
    # What does not depend on advantages, such as an entropy, is taken off.
    zero = replace(tokens, advantages_M=torch.zeros_like(tokens.advantages_M))
    slope_M = _terms_and_slopes(terms, tokens)[1]["new_M"] - _terms_and_slopes(terms, zero)[1]["new_M"]
    if float(slope_M.abs().max()) <= SAME:
        return Check(name="direction", verdict=CheckVerdict.NOTED, detail="advantages play no part")
    uphill = float((slope_M * tokens.advantages_M).sum())
    if uphill > 0.0:
        return fail_check(
            "direction", "it makes tokens with positive advantages less likely; the loss wants a minus sign"
        )
    return pass_check("direction", "tokens with positive advantages become more likely, others less")


def _on_policy(tokens: TokenInputs) -> TokenInputs:
    return replace(tokens, new_M=tokens.old_M.clone(), rollout_M=tokens.old_M.clone())


def _row_order(terms: Terms, rows: Sequence[_Row]) -> Check:
    rng = np.random.default_rng(1)
    whole_M, whole_slopes = _terms_and_slopes(terms, _tokens(rows))
    bounds: list[int] = np.cumsum([0, *(row.sample.num_trainable for row in rows)]).tolist()
    worst = 0.0
    for _ in range(4):
        order: list[int] = rng.permutation(len(rows)).tolist()
        moved_M, moved_slopes = _terms_and_slopes(terms, _tokens([rows[index] for index in order]))
        place = torch.cat([torch.arange(bounds[index], bounds[index + 1]) for index in order])
        worst = max(worst, _gap(whole_M[place], moved_M))
        worst = max(worst, *(_gap(whole_slopes[name][place], moved_slopes[name]) for name in whole_slopes))
    if not worst <= SAME:
        return fail_check(
            "order of rows",
            f"terms or gradients change by {worst:.1e} when rows change places; "
            "use `row_M` and `group_R` to find what belongs together, never positions",
        )
    return pass_check("order of rows", f"changes nothing (within {worst:.0e})")


def _micro_batches(terms: Terms, rows: Sequence[_Row], needs_whole_groups: bool) -> Check:
    """Each row in a micro-batch of its own, then each group, against all in one."""
    of_rows = _gap_when_split(terms, rows, [[row] for row in rows])
    if of_rows <= SAME:
        return pass_check("micro-batches", f"any split gives the same (within {of_rows:.0e})")
    groups: dict[tuple[str, str], list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.sample.group_key, []).append(row)
    of_groups = _gap_when_split(terms, rows, list(groups.values()))
    if not of_groups <= SAME:
        return fail_check(
            "micro-batches",
            f"terms or gradients change by {of_groups:.1e} when the update is split; a term may depend on "
            "its own row and group, never on a sum, mean or count over all tokens",
        )
    if not needs_whole_groups:
        return fail_check(
            "micro-batches",
            f"terms or gradients change by {of_rows:.1e} when a group is split, but the loss claims not to "
            "need whole groups",
        )
    return pass_check(
        "micro-batches", f"any split that keeps groups whole gives the same (within {of_groups:.0e})"
    )


def _gap_when_split(terms: Terms, rows: Sequence[_Row], parts: Sequence[Sequence[_Row]]) -> float:
    weights = token_weights([row.sample for row in rows], "token_mean")
    weights_of = {row.sample.order_key: weights_T for row, weights_T in zip(rows, weights, strict=True)}
    whole_M, whole_slopes = _terms_and_slopes(terms, _tokens(rows, weights))
    gradients = [
        _terms_and_slopes(terms, _tokens(part, [weights_of[row.sample.order_key] for row in part]))
        for part in parts
    ]
    gaps = [_gap(whole_M, torch.cat([part_M for part_M, _ in gradients]))]
    gaps += [
        _gap(whole, torch.cat([slopes[name] for _, slopes in gradients]))
        for name, whole in whole_slopes.items()
    ]
    return max(gaps)


def _untrained_tokens(terms: Terms, rows: Sequence[_Row]) -> Check:
    longer_rows = [_with_observations(row) for row in rows]
    whole_M, whole_slopes = _terms_and_slopes(terms, _tokens(rows))
    longer_M, longer_slopes = _terms_and_slopes(terms, _tokens(longer_rows))
    worst = max(
        _gap(whole_M, longer_M), *(_gap(whole_slopes[name], longer_slopes[name]) for name in whole_slopes)
    )
    if not worst <= SAME:
        return fail_check("untrained tokens", f"terms change by {worst:.1e} when observations are inserted")
    return pass_check("untrained tokens", "observations inserted anywhere change nothing")


def _with_observations(row: _Row) -> _Row:
    """The row with a token that nobody sampled before each of its own."""

    def spread(values_T: Any) -> Any:
        return np.insert(values_T, np.arange(row.sample.num_tokens), NOT_SAMPLED)

    columns = {
        each.name: spread(values_T)
        for each in fields(TrainingSample)
        if isinstance(values_T := getattr(row.sample, each.name), np.ndarray)
    }
    gradient = {name: spread(values_T) for name, values_T in row.gradient.items()}
    return _Row(sample=replace(row.sample, **columns), gradient=gradient)


def _policy_gradient(terms: Terms, rows: Sequence[_Row]) -> Check:
    tokens = _on_policy(_tokens(rows))
    slope_M = _terms_and_slopes(terms, tokens)[1]["new_M"] / tokens.weights_M
    gap = _gap(slope_M, -tokens.advantages_M)
    detail = (
        "on the policy that sampled, the gradient of each token is -advantage: the policy gradient"
        if gap <= 1e-8
        else f"on the policy that sampled, the gradient differs from the policy gradient by up to {gap:.2g}"
    )
    return Check(name="policy gradient", verdict=CheckVerdict.NOTED, detail=detail)


def _far_ratios(terms: Terms, rows: Sequence[_Row]) -> Check:
    """Ratios of e^±20, as a policy that has moved far, or a mismatch of two engines, has them."""
    tokens = _tokens(rows)
    signs_M = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(tokens.new_M))[: len(tokens.new_M)]
    far = replace(tokens, new_M=tokens.old_M + 20.0 * signs_M)
    far_M, slopes = _terms_and_slopes(terms, far)
    if not torch.isfinite(far_M).all() or not all(torch.isfinite(each).all() for each in slopes.values()):
        return fail_check(
            "far ratios", "terms or gradients are not finite for ratios of e^20; clamp the log-ratio first"
        )
    largest = float((slopes["new_M"] / tokens.weights_M).abs().max())
    verdict = "stay bounded" if largest < 1e3 else f"reach {largest:.0e} times an advantage"
    return Check(
        name="far ratios",
        verdict=CheckVerdict.NOTED,
        detail=f"finite for ratios of e^20; gradients {verdict}",
    )


def _zero_rows(terms: Terms, rows: Sequence[_Row]) -> Check:
    silent = [
        replace(row, sample=replace(row.sample, advantages_T=0.0 * row.sample.advantages_T)) for row in rows
    ]
    _, slopes = _terms_and_slopes(terms, _tokens(silent))
    largest = max(float(each.abs().max()) for each in slopes.values())
    if largest > 0.0:
        return fail_check(
            "rows without advantage", f"have a gradient of {largest:.1e}, but it claims they have none"
        )
    return pass_check("rows without advantage", "have no gradient, so they need not be computed")


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
