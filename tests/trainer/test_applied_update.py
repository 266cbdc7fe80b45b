"""From episodes to the backend's gradient, nothing bypassed: the applied update is the documented one.

The world is that of `rllm.trainer.update_checks`, whose batches can all be gone through. Formulas and weights
are written out here once more, by definition.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.estimators import ESTIMATORS
from rllm.errors import ConfigError
from rllm.models.decoder import Decoder
from rllm.trainer.backends.critic import CriticBackend
from rllm.trainer.reference import ModelScorer
from rllm.trainer.samples import trajectory_rows
from rllm.trainer.teacher import Teacher
from rllm.trainer.update_checks import ANSWERS, SMALLEST, TASKS, Picks, UpdateProbe, WorldTask

COMPARED = sorted(name for name, rule in ESTIMATORS.items() if not rule.token_level)
AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "group_mean", "constant")
CLOSE = 2e-6
"""Columns of a row are float32."""
Groups = list[np.ndarray]
"""Of each task, one number an attempt."""
MICRO_BATCHES = (16_384, 7, 1)
DOCUMENTED_MEANS = {"rloo", "reinforce", "remax", "dr_grpo", "reinforce_baseline", "pass_at_k"}
"""Estimators that the documents call unbiased, or whose bias they name: `_documented_mean`."""


# ---- by definition ---------------------------------------------------------------------------------------


def _spread(values: np.ndarray, groups: Groups) -> Groups:
    return list(np.split(values, np.cumsum([len(each) for each in groups])[:-1]))


def _each(formula: Callable[[np.ndarray], np.ndarray]) -> Callable[[Groups, Groups], Groups]:
    return lambda rewards, lengths: [formula(each) for each in rewards]


def _leave_one_out(r: np.ndarray) -> np.ndarray:
    return np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])


def _grpo(r: np.ndarray) -> np.ndarray:
    return (r - r.mean()) / (r.std() + 1e-6) if len(set(r)) > 1 else 0 * r


def _best_of_two(r: np.ndarray) -> np.ndarray:
    """What an attempt adds to a pair, over all pairs that it is in; a mean over pairs times the size."""
    size = len(r)
    gains = [sum(max(0.0, r[i] - r[j]) for j in range(size) if j != i) for i in range(size)]
    return np.array(gains) * size / (size * (size - 1) / 2)


def _opo(rewards: Groups, lengths: Groups) -> Groups:
    return [r - (n * r).sum() / n.sum() for r, n in zip(rewards, lengths, strict=True)]


def _gpg(rewards: Groups, lengths: Groups) -> Groups:
    attempts = sum(map(len, rewards))
    telling = sum(len(r) for r in rewards if len(set(r)) > 1)
    return [(r - r.mean()) * (attempts / telling if telling else 0.0) for r in rewards]


def _white(rewards: Groups, lengths: Groups) -> Groups:
    tokens = np.repeat(np.concatenate(rewards), np.concatenate(lengths).astype(int))
    if np.ptp(tokens) == 0.0:
        return [0 * r for r in rewards]
    return [(r - tokens.mean()) / (tokens.std() + 1e-6) for r in rewards]


FORMULAS: dict[str, Callable[[Groups, Groups], Groups]] = {
    "grpo": _each(_grpo),
    "dr_grpo": _each(lambda r: r - r.mean()),
    "rloo": _each(_leave_one_out),
    "opo": _opo,
    "maxrl": _each(lambda r: (r - r.mean()) / r.mean() if r.any() else r),
    "pass_at_k": _each(_best_of_two),
    "gigpo": _each(lambda r: 2 * _grpo(r)),  # every attempt has one turn, and all begin in the same state
    "gpg": _gpg,
    "reinforce": _each(lambda r: r),
    "reinforce_baseline": lambda rewards, lengths: [r - np.concatenate(rewards).mean() for r in rewards],
    "prpo": lambda rewards, lengths: [
        (r - np.concatenate(rewards).mean()) / (np.concatenate(rewards).std() + 1e-6) for r in rewards
    ],
    "reinforce_plus_plus": _white,
    "reinforce_plus_plus_baseline": lambda rewards, lengths: _white([r - r.mean() for r in rewards], lengths),
    "remax": lambda rewards, lengths: [r - task.rewards[0] for r, task in zip(rewards, TASKS, strict=True)],
}


def _weights(aggregation: str, lengths: Groups) -> Groups:
    """What each token of each attempt counts; every attempt of the update is in the denominators."""
    rows, tokens = sum(map(len, lengths)), sum(n.sum() for n in lengths)
    return {
        "token_mean": lambda: [np.full(len(n), 1 / tokens) for n in lengths],
        "sequence_mean": lambda: [1 / (rows * n) for n in lengths],
        "sequence_sum": lambda: [np.full(len(n), 1 / rows) for n in lengths],
        "group_mean": lambda: [np.full(len(n), 1 / (len(lengths) * n.sum())) for n in lengths],
        "constant": lambda: [np.full(len(n), 1 / (rows * 4)) for n in lengths],
    }[aggregation]()


def _by_definition(
    picks: Picks,
    slopes: Sequence[Tensor],
    estimator: str,
    aggregation: str,
    tasks: Sequence[WorldTask] = TASKS,
) -> Tensor:
    """[P] Σ weight · advantage · gradient of the log-probability."""
    rewards = [np.array([task.rewards[a] for a in mine]) for task, mine in zip(tasks, picks, strict=True)]
    lengths = [np.array([len(ANSWERS[a]) for a in mine], dtype=float) for mine in picks]
    advantages = FORMULAS[estimator](rewards, lengths)
    found = torch.zeros_like(slopes[0][0])
    for mine, slopes_A_P, a, w in zip(picks, slopes, advantages, _weights(aggregation, lengths), strict=True):
        found += torch.from_numpy(a * w) @ slopes_A_P[list(mine)]
    return found


def _probe(estimator: str, aggregation: str, *more: str, tasks: Sequence[WorldTask] = TASKS) -> UpdateProbe:
    constant = ("algorithm.aggregation_constant=4",) if aggregation == "constant" else ()
    chosen = (f"algorithm.estimator={estimator}", f"algorithm.aggregation={aggregation}")
    return UpdateProbe((*chosen, *constant, *more), tasks)


# ---- the whole grid --------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", COMPARED)
def test_every_update_is_the_documented_one_ties_included(estimator: str) -> None:
    """All batches with sums over tokens where their mean is documented, every seventh otherwise."""
    for aggregation in AGGREGATIONS:
        is_whole = aggregation == "sequence_sum" and estimator in DOCUMENTED_MEANS
        _require_documented_updates(estimator, aggregation, 1 if is_whole else 7)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", COMPARED)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_update_that_there_can_be_is_the_documented_one(estimator: str, aggregation: str) -> None:
    _require_documented_updates(estimator, aggregation, 1)


def _require_documented_updates(estimator: str, aggregation: str, stride: int) -> None:
    """Of every batch that can be sampled, or of some, in micro-batches of several sizes; and on average."""
    probe = _probe(estimator, aggregation)
    backend = probe.learner.policies["policy"].backend
    assert backend is not None
    slopes = [probe.slopes(task) for task in TASKS]
    batches = list(probe.batches())[::stride]
    largest, mean = 0.0, torch.zeros_like(slopes[0][0])
    for (picks, likely), size in zip(batches, itertools.cycle(MICRO_BATCHES), strict=False):
        backend.config.micro_batch_tokens = size
        applied = probe.gradient(picks)
        documented = _by_definition(picks, slopes, estimator, aggregation)
        assert (applied - documented).abs().max() < CLOSE * slopes[0].abs().max(), (aggregation, picks)
        largest, mean = max(largest, float(documented.abs().max())), mean + likely * applied
    assert largest > 1e-3
    unit = {"sequence_sum": 1.0, "constant": 4.0}.get(aggregation)
    if stride == 1 and unit is not None and estimator in DOCUMENTED_MEANS:
        expected = _documented_mean(probe)[estimator]
        assert (unit * mean - expected).norm() < CLOSE * expected.norm()


def _documented_mean(probe: UpdateProbe) -> dict[str, Tensor]:
    """By estimator, over sums of tokens."""
    exact = probe.policy_gradient()
    attempts = sum(task.num_attempts for task in TASKS)
    smaller, best = torch.zeros_like(exact), torch.zeros_like(exact)
    for task in TASKS:
        share, size = task.num_attempts / attempts, task.num_attempts
        likely_A, slopes_A_P = probe.probabilities(task), probe.slopes(task)
        rewards_A = torch.tensor(task.rewards, dtype=torch.float64)
        smaller += share * (size - 1) / size * ((likely_A * rewards_A) @ slopes_A_P)
        for first, second in itertools.product(range(len(ANSWERS)), repeat=2):
            both = likely_A[first] * likely_A[second] * max(task.rewards[first], task.rewards[second])
            best += share * both * (slopes_A_P[first] + slopes_A_P[second])
    return {
        "rloo": exact,
        "reinforce": exact,
        "remax": exact,
        "dr_grpo": smaller,
        "reinforce_baseline": (attempts - 1) / attempts * exact,
        "pass_at_k": best,
    }


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A user's own PPO, word for word."""
    path = tmp_path_factory.mktemp("own") / "copied.py"
    path.write_text(
        "import torch\n\n\n"
        "def ppo(tokens):\n"
        "    ratio_M = torch.exp(tokens.new_M - tokens.old_M)\n"
        "    a_M = tokens.advantages_M\n"
        "    return -torch.minimum(ratio_M * a_M, ratio_M.clamp(0.8, 1.2) * a_M)\n"
    )
    return f"{path}:ppo"


@pytest.mark.parametrize("estimator", COMPARED)
def test_nothing_that_computes_tied_rows_changes_the_update(estimator: str, copied: str) -> None:
    some_ties: Picks = ((0, 2, 2), (0, 1))
    all_ties: Picks = ((0, 0, 2), (1, 2))
    variants = (
        ("algorithm.kl_coef=1e-12",),
        ("algorithm.entropy_coef=1e-12",),
        (f"algorithm.loss={copied}",),
        ("algorithm.old_logprobs=trainer",),
    )
    for aggregation in AGGREGATIONS if estimator == "grpo" else ("token_mean", "group_mean"):
        plain = _probe(estimator, aggregation)
        others = [_probe(estimator, aggregation, *variant) for variant in variants]
        for picks in (some_ties, all_ties):
            expected = plain.gradient(picks)
            for variant, probe in zip(variants, others, strict=True):
                gap = (probe.gradient(picks) - expected).abs().max()
                assert gap < 1e-7, (aggregation, picks, variant)


def test_a_probe_applies_the_first_step_of_its_run(tmp_path: Path) -> None:
    own = tmp_path / "step.py"
    own.write_text(
        "def plain(tokens):\n    return -tokens.advantages_M * tokens.new_M\n"
        "def growing(tokens, context):\n    return (1 + context.step) * plain(tokens)\n"
    )
    picks: Picks = ((0, 1, 2), (0, 1))
    plain, growing = (
        _probe("rloo", "token_mean", f"algorithm.loss={own}:{name}").gradient(picks)
        for name in ("plain", "growing")
    )
    assert plain.abs().max() > 0.0
    assert torch.equal(plain, growing)


# ---- advantages of tokens: a critic's and a teacher's ----------------------------------------------------

TokenAdvantages = Callable[[Picks], list[list[np.ndarray]]]
"""Of each task and attempt, one number a token."""


def _token_slopes(probe: UpdateProbe) -> dict[str, list[list[Tensor]]]:
    """Of each task and answer, the gradient of each token's log-probability."""
    return {
        task.task_id: [[probe.slope_of(each) for each in logprobs] for logprobs in probe.logprobs(task)]
        for task in TASKS
    }


def _require_documented_tokens(
    probe: UpdateProbe, aggregation: str, advantages: TokenAdvantages, stride: int
) -> Tensor:
    """Of every batch, or of some, in micro-batches of several sizes. Returns the mean update."""
    backend = probe.learner.policies["policy"].backend
    assert backend is not None
    slopes = _token_slopes(probe)
    mean, largest = torch.zeros_like(slopes["a"][0][0]), 0.0
    for (picks, likely), size in zip(
        list(probe.batches())[::stride], itertools.cycle(MICRO_BATCHES), strict=False
    ):
        backend.config.micro_batch_tokens = size
        lengths = [np.array([len(ANSWERS[a]) for a in mine], dtype=float) for mine in picks]
        documented = torch.zeros_like(mean)
        for task, mine, weights, of_task in zip(
            TASKS, picks, _weights(aggregation, lengths), advantages(picks), strict=True
        ):
            for answer, weight, values in zip(mine, weights, of_task, strict=True):
                for value, slope in zip(values, slopes[task.task_id][answer], strict=True):
                    documented += weight * value * slope
        applied = probe.gradient(picks)
        scale = max(1.0, float(documented.abs().max()))
        assert (applied - documented).abs().max() < CLOSE * scale, (aggregation, picks, size)
        largest, mean = max(largest, float(documented.abs().max())), mean + likely * applied
    assert largest > 1e-3
    return mean


def _other_model(seed: int) -> Decoder:
    model = Decoder(SMALLEST).double()
    model.initialize(torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize(
    ("gamma", "baseline"),
    [
        (1.0, "none"),
        (0.5, "mean"),
        pytest.param(0.0, "none", marks=pytest.mark.slow),
        pytest.param(0.0, "mean", marks=pytest.mark.slow),
        pytest.param(1.0, "mean", marks=pytest.mark.slow),
    ],
)
def test_a_teacher_pays_each_token_for_what_follows_from_it(gamma: float, baseline: str) -> None:
    """Σ_{u ≥ t} gamma^(u-t) (log π_teacher - log π_student); without a baseline, over sums of tokens and
    with gamma 1 the update is on average the gradient of the divergence of whole answers."""
    teacher = _other_model(7)
    more = (f"distill.gamma={gamma}", f"distill.baseline={baseline}", "distill.teacher=somewhere")
    more += ("warm_start.steps=0", "warm_start.noise=0")
    for aggregation in AGGREGATIONS:
        probe = _probe("teacher", aggregation, *more)
        scorer = ModelScorer(model=copy.deepcopy(teacher).requires_grad_(False))
        probe.learner.teacher = Teacher(config=probe.config, scorer=scorer)
        student, theirs = probe.model, {}
        with torch.no_grad():
            mine = {task.task_id: [each.numpy() for each in probe.logprobs(task)] for task in TASKS}
            probe.model = teacher
            theirs = {task.task_id: [each.numpy() for each in probe.logprobs(task)] for task in TASKS}
        probe.model = student

        def advantages(
            picks: Picks, mine: Any = mine, theirs: Any = theirs
        ) -> list[list[np.ndarray]]:  # bound: a closure would see the last aggregation's
            found = [
                [
                    np.array(
                        [sum(gamma**k * gap for k, gap in enumerate(gaps[t:])) for t in range(len(gaps))]
                    )
                    for gaps in (theirs[task.task_id][a] - mine[task.task_id][a] for a in answers)
                ]
                for task, answers in zip(TASKS, picks, strict=True)
            ]
            level = np.concatenate([row for rows in found for row in rows]).mean()
            return [[row - (level if baseline == "mean" else 0.0) for row in rows] for rows in found]

        exact = gamma == 1.0 and baseline == "none" and aggregation == "sequence_sum"
        applied = _require_documented_tokens(probe, aggregation, advantages, 1 if exact else 11)
        if exact:
            attempts, expected = sum(task.num_attempts for task in TASKS), torch.zeros_like(applied)
            for task in TASKS:
                logprobs_A = torch.stack([each.sum() for each in probe.logprobs(task)])
                of_teacher_A = torch.tensor([each.sum() for each in theirs[task.task_id]])
                divergence = (logprobs_A.exp() * (logprobs_A - of_teacher_A)).sum()
                expected -= task.num_attempts / attempts * probe.slope_of(divergence)
            assert (applied - expected).norm() < CLOSE * expected.norm()


@pytest.mark.parametrize(
    ("gamma", "lam"), [(0.9, 0.95), *(pytest.param(1.0, lam, marks=pytest.mark.slow) for lam in (0.5, 1.0))]
)
def test_gae_is_the_documented_sum_of_surprises_white_over_the_update(gamma: float, lam: float) -> None:
    """A_t = Σ_k (gamma lam)^k δ_{t+k}, δ_t = r_t + gamma V_{t+1} - V_t, then (A - mean) / std over tokens."""
    more = ("critic.trunk=separate", f"algorithm.gamma={gamma}", f"algorithm.gae_lambda={lam}")
    for aggregation in AGGREGATIONS:
        probe = _probe("gae", aggregation, *more)
        critic = CriticBackend(_other_model(9), config=probe.config.optimizer)
        with torch.no_grad():
            for each in critic.value_head.parameters():
                each.normal_(generator=torch.Generator().manual_seed(3))
        probe.learner.critics = {"policy": critic}

        def values_of(
            task: WorldTask, answer: int, probe: UpdateProbe = probe, critic: CriticBackend = critic
        ) -> np.ndarray:
            picks = tuple((answer,) if each is task else () for each in TASKS)
            (episode,) = probe.episodes(picks)
            (row,) = trajectory_rows(episode.trajectories[0], task.task_id, 0, 0, 0.0)
            return critic.values([row])[0][row.trainable_T].astype(np.float64)

        known = {(task.task_id, a): values_of(task, a) for task in TASKS for a in range(len(ANSWERS))}
        assert len({round(float(each[0]), 6) for each in known.values()}) > 1

        def advantages(picks: Picks, known: Any = known) -> list[list[np.ndarray]]:
            found: list[list[np.ndarray]] = []
            for task, answers in zip(TASKS, picks, strict=True):
                found.append([])
                for answer in answers:
                    values, size = known[task.task_id, answer], len(ANSWERS[answer])
                    rewards = [0.0] * (size - 1) + [task.rewards[answer]]
                    later = [*values[1:], 0.0]
                    deltas = [r + gamma * v - own for r, v, own in zip(rewards, later, values, strict=True)]
                    found[-1].append(
                        np.array(
                            [
                                sum((gamma * lam) ** k * each for k, each in enumerate(deltas[t:]))
                                for t in range(size)
                            ]
                        )
                    )
            every = np.concatenate([row for rows in found for row in rows])
            scale = np.sqrt(every.var() + 1e-8)
            return [[(row - every.mean()) / scale for row in rows] for rows in found]

        _require_documented_tokens(probe, aggregation, advantages, 7)


# ---- the report that this began with ---------------------------------------------------------------------

TWELVE = [
    WorldTask(task_id=f"{number:02}", prompt_ids=(0, 1), rewards=(1.0, 0.0, 0.0), num_attempts=8)
    for number in range(12)
]
NINE_TIED: Picks = (*[(0,) * 8] * 9, *[(0,) * 5 + (1,) * 3] * 3)


def test_nine_tied_groups_of_twelve_do_not_make_the_step_of_the_others_longer() -> None:
    """It was exactly four times as long without a divergence as with one of 1e-12."""
    norms = [
        float(
            _probe("grpo", "sequence_sum", f"algorithm.kl_coef={coef}", tasks=TWELVE)
            .gradient(NINE_TIED)
            .norm()
        )
        for coef in (0.0, 1e-12)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    dropped = _probe("grpo", "sequence_sum", "algorithm.ties=drop", tasks=TWELVE).gradient(NINE_TIED).norm()
    assert float(dropped) == pytest.approx(4 * norms[0], rel=1e-6)


def test_dropped_ties_are_as_if_they_had_not_been_sampled_whatever_is_computed() -> None:
    for aggregation in AGGREGATIONS:
        without = _probe("grpo", aggregation, tasks=TWELVE[9:]).gradient(NINE_TIED[9:])
        for more in ((), ("algorithm.kl_coef=1e-12",), ("algorithm.entropy_coef=1e-12",)):
            dropped = _probe("grpo", aggregation, "algorithm.ties=drop", *more, tasks=TWELVE)
            assert (dropped.gradient(NINE_TIED) - without).abs().max() < 1e-7, (aggregation, more)


def test_gpg_makes_up_for_ties_once() -> None:
    """Its factor is B / (attempts whose groups do not tie): 4 here."""
    gpg, dr_grpo = (
        _probe(name, "token_mean", tasks=TWELVE).gradient(NINE_TIED).norm() for name in ("gpg", "dr_grpo")
    )
    assert float(gpg / dr_grpo) == pytest.approx(4.0, rel=1e-6)
    with pytest.raises(ConfigError, match="twice"):
        _probe("gpg", "token_mean", "algorithm.ties=drop")


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "reinforce_plus_plus", "remax"])
def test_ties_are_dropped_only_where_attempts_at_one_task_are_compared(name: str) -> None:
    with pytest.raises(ConfigError, match="groups tie"):
        _probe(name, "token_mean", "algorithm.ties=drop")


# ---- several updates in a step ---------------------------------------------------------------------------


def test_a_share_whose_tasks_all_tie_is_an_update_of_its_own() -> None:
    """So the task that does not tie is in the second share whether or not the first one ties."""
    for picks in (((0, 2, 2), (0, 1)), ((0, 1, 2), (0, 1))):
        probe = _probe("rloo", "token_mean", "algorithm.updates_per_step=2")
        backend = probe.learner.policies["policy"].backend
        assert backend is not None
        found = probe.gradient(picks)
        assert backend.policy_version == 2
        slopes = [probe.slopes(TASKS[1])]
        documented = _by_definition(picks[1:], slopes, "rloo", "token_mean", TASKS[1:])
        assert (found - documented).abs().max() < CLOSE * slopes[0].abs().max()


def test_the_optimizer_goes_on_by_its_moments_where_everything_ties() -> None:
    """As it does by a gradient of 1e-12: what is not computed cannot be told from what is."""
    ends = []
    for coef in ("0", "1e-12"):
        more = (f"algorithm.kl_coef={coef}", "optimizer.learning_rate=0.01", "optimizer.weight_decay=0.1")
        probe = _probe("rloo", "token_mean", *more)
        for picks in (((0, 1, 1), (0, 1)), ((0, 2, 2), (1, 2)), ((0, 0, 0), (0, 0))):
            probe.gradient(picks)
        ends.append(torch.cat([each.detach().flatten() for each in probe.model.parameters()]))
    assert (ends[0] - ends[1]).abs().max() < 1e-6
