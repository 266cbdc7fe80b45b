"""Is the update that a configuration describes the one that is applied? Episodes in, gradients out.

    every batch of answers of a small world ──► Episodes ──► learn: judge, advantages, rows, shares
        ──► TorchBackend.update: weights, packing, forward, backward ──► gradient · the batch's probability

The world has two tasks and three answers of one or two tokens, so all batches can be gone through: what an
algorithm does on average is a finite sum. Many of its batches have groups that tie. Nothing is bypassed
between episodes and gradient; the model is a real decoder, the smallest there is.
"""

import copy
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from rllm.algorithms.checks import Check, CheckVerdict, fail_check, pass_check
from rllm.algorithms.task_sampler import TaskSampler
from rllm.config.loader import load_config
from rllm.config.schema import TrainConfig
from rllm.models.builtin import create_model
from rllm.models.decoder import Decoder, DecoderShape
from rllm.models.directory import LoadedModel, load_model
from rllm.trainer.judging import needs_greedy
from rllm.trainer.learning import Learner, learn
from rllm.trainer.policies import make_policies
from rllm.trainer.reference import ModelScorer
from rllm.types.episode import Episode, Outcome, Step, Trajectory

END, GO_ON = 1, 0
ANSWERS = ((END,), (GO_ON, GO_ON), (GO_ON, END))
"""All that a policy over two tokens can say in at most two."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WorldTask:
    """A question, and what each of ANSWERS is paid."""

    task_id: str
    prompt_ids: tuple[int, ...]
    rewards: tuple[float, ...]
    num_attempts: int


TASKS = (
    WorldTask(task_id="a", prompt_ids=(END, GO_ON), rewards=(0.0, 1.0, 0.0), num_attempts=3),
    WorldTask(task_id="b", prompt_ids=(GO_ON, END), rewards=(1.0, 0.25, 0.25), num_attempts=2),
)
"""In both two answers are paid alike, so that groups tie without being all of one answer."""

SMALLEST = DecoderShape(
    vocab_size=2,
    hidden_size=4,
    intermediate_size=4,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=4,
    norm_eps=1e-6,
    rope_theta=100.0,
    max_positions=8,
    tied=False,
    qkv_bias=False,
    out_bias=False,
    qk_norm=False,
)

Picks = tuple[tuple[int, ...], ...]
"""The answers of each task's attempts, as places in ANSWERS."""

SAME = 1e-6
"""Relative: a row's columns are float32."""
SPARED: Picks = ((0, 2, 2), (0, 1))
"""A batch in which the first task ties, and the second does not."""
SILENT = "algorithm.kl_coef=1e-12"
"""Has rows computed that would be spared, and counts for nothing."""
FOR_COLUMN = {
    "ref_M": "algorithm.kl_coef=1e-12",
    "entropy_M": "algorithm.entropy_coef=1e-12",
    "rollout_M": "algorithm.old_logprobs=trainer",
}
"""The setting that a run needs for a column that a loss reads."""
OF_CRITIC = frozenset({"new_values_M", "values_M", "returns_M"})


class UpdateProbe:
    """One algorithm, as the trainer applies it to batches of the world."""

    def __init__(self, assignments: Iterable[str] = (), tasks: Sequence[WorldTask] = TASKS) -> None:
        """`assignments`: "section.key=value" on top of one update a step, without a bound on the gradient."""
        self.tasks = tasks
        # With such a rate the weights stay as they are, so that all batches meet the same policy.
        self.config: TrainConfig = load_config(
            {
                "rollout": {"tasks_per_step": len(tasks), "group_size": 2},
                "algorithm": {"updates_per_step": 1, "aggregation": "sequence_sum"},
                "optimizer": {"max_grad_norm": 1e30, "learning_rate": 1e-30},
                "steps": 10,
            },
            assignments,
        )
        self.model = Decoder(SMALLEST).double()
        self.model.initialize(torch.Generator().manual_seed(0))
        with torch.no_grad():
            self._sampled_logprobs = {
                task.task_id: [each.tolist() for each in self.logprobs(task)] for task in tasks
            }
        model_copy = replace(_a_loaded_model(), model=self.model)
        policies = make_policies(self.config, {"policy": model_copy})
        reference = ModelScorer(model=copy.deepcopy(self.model).requires_grad_(False))
        self.learner = Learner(
            config=self.config,
            policies=policies,
            tasks=TaskSampler([{}], seed=0, purpose="tasks"),
            demonstrations=None,
            references={"policy": reference} if self.config.algorithm.kl_coef else {},
        )

    def gradient(self, picks: Picks) -> Tensor:
        """[P] minus the gradient of the loss in the (last) update of the first step, on these answers."""
        greedy = [self._episode(task, 0, 0) for task in self.tasks]
        learn(self.learner, self.episodes(picks), 0, greedy if self._needs_greedy else ())
        return -torch.cat(
            [
                torch.zeros_like(each).flatten() if each.grad is None else each.grad.flatten()
                for each in self.model.parameters()
            ]
        )

    def mean_gradient(self) -> Tensor:
        """[P] its mean over all batches, each as likely as the policy makes it: the expected update."""
        return torch.stack([likely * self.gradient(picks) for picks, likely in self.batches()]).sum(0)

    def batches(self) -> Iterator[tuple[Picks, float]]:
        """Every batch of answers up to the order of attempts, and its probability; these add up to 1."""
        groups = [list(_groups(self.probabilities(task), task.num_attempts)) for task in self.tasks]
        for combination in itertools.product(*groups):
            yield tuple(picks for picks, _ in combination), math.prod(likely for _, likely in combination)

    def episodes(self, picks: Picks) -> list[Episode]:
        return [
            self._episode(task, attempt, answer)
            for task, answers in zip(self.tasks, picks, strict=True)
            for attempt, answer in enumerate(answers)
        ]

    def logprobs(self, task: WorldTask) -> list[Tensor]:
        """The log-probabilities of each token of each answer, by a pass over that answer alone."""
        rows: list[Tensor] = []
        for answer in ANSWERS:
            ids = torch.tensor([*task.prompt_ids, *answer])
            states = self.model.hidden(ids, torch.arange(len(ids)), _attend)
            scores = self.model.logits(states).log_softmax(-1)
            rows.append(scores[len(task.prompt_ids) - 1 : -1].gather(1, ids[-len(answer) :, None])[:, 0])
        return rows

    def probabilities(self, task: WorldTask) -> Tensor:
        """[A] of each answer."""
        with torch.no_grad():
            return torch.stack([each.sum() for each in self.logprobs(task)]).exp()

    def slopes(self, task: WorldTask) -> Tensor:
        """[A, P] gradient of the log-probability of each whole answer."""
        return torch.stack([self.slope_of(each.sum()) for each in self.logprobs(task)])

    def slope_of(self, value: Tensor) -> Tensor:
        """[P]"""
        slopes = torch.autograd.grad(value, list(self.model.parameters()), retain_graph=True)
        return torch.cat([slope.flatten() for slope in slopes])

    def policy_gradient(self) -> Tensor:
        """[P] gradient of the expected reward, a task counting as often as it has attempts."""
        total = sum(task.num_attempts for task in self.tasks)
        parts: list[Tensor] = []
        for task in self.tasks:
            reward_terms_A = self.probabilities(task) * torch.tensor(task.rewards, dtype=torch.float64)
            parts.append(task.num_attempts / total * (reward_terms_A @ self.slopes(task)))
        return torch.stack(parts).sum(0)

    @property
    def _needs_greedy(self) -> bool:
        return needs_greedy(self.config)

    def _episode(self, task: WorldTask, attempt: int, answer: int) -> Episode:
        ids = list(ANSWERS[answer])
        step = Step(
            prompt_ids=list(task.prompt_ids),
            response_ids=ids,
            logprobs=self._sampled_logprobs[task.task_id][answer],
            policy_versions=[0] * len(ids),
            observation=task.task_id,
            reward=task.rewards[answer],
        )
        trajectory = Trajectory(
            uid=f"{task.task_id}/{attempt}", name="agent", steps=[step], reward=task.rewards[answer]
        )
        return Episode(
            task_id=task.task_id, rollout_idx=attempt, trajectories=[trajectory], outcome=Outcome.SCORED
        )


def check_update(assignments: Sequence[str], reads: Sequence[str] = ()) -> list[Check]:
    """Verdicts on an algorithm as the trainer applies it, `assignments` being what selects it.

    `reads`: columns that its loss looks at. What a function of the user's raises on the way is a verdict as
    well.
    """
    if OF_CRITIC & set(reads):
        detail = "not applied here: the loss reads what a critic says, and there is none"
        return [Check(name="applied update", verdict=CheckVerdict.NOTED, detail=detail)]
    assignments = [*assignments, *(FOR_COLUMN[name] for name in reads if name in FOR_COLUMN)]
    try:
        probe = UpdateProbe(assignments)
        update = probe.gradient(SPARED)
        checks = [_ties(assignments, update), _split(assignments, update)]
        return [*checks, _expected_update(probe)]
    except Exception as error:  # noqa: BLE001  whatever a user's function raises is the verdict
        return [
            fail_check(
                "applied update", f"raised {type(error).__name__} between episodes and gradient: {error}"
            )
        ]


def _ties(assignments: Sequence[str], update: Tensor) -> Check:
    whole = UpdateProbe((*assignments, SILENT)).gradient(SPARED)
    gap = float((whole - update).abs().max()) / (float(update.abs().max()) or 1.0)
    if not gap <= SAME:
        return fail_check(
            "tied groups",
            f"the update changes by {gap:.1e} of itself when groups that tie are computed, as `kl_coef` has "
            "them: a loss must give rows with advantage 0 no gradient, or say that it needs every row",
        )
    return pass_check(
        "tied groups", f"groups that tie count alike, computed or not (within {max(gap, SAME):.0e})"
    )


def _split(assignments: Sequence[str], update: Tensor) -> Check:
    alone = UpdateProbe((*assignments, "optimizer.micro_batch_tokens=1")).gradient(SPARED)
    gap = float((alone - update).abs().max()) / (float(update.abs().max()) or 1.0)
    if not gap <= SAME:
        return fail_check("applied in micro-batches", f"the update changes by {gap:.1e} of itself")
    return pass_check("applied in micro-batches", "any split of the update gives the same gradient")


def _expected_update(probe: UpdateProbe) -> Check:
    """Against the policy gradient: a choice of the algorithm, so neither right nor wrong."""
    mean_update, exact = probe.mean_gradient(), probe.policy_gradient()
    if not mean_update.any():
        return Check(name="expected update", verdict=CheckVerdict.NOTED, detail="is 0 over all batches")
    cosine = float(mean_update @ exact / mean_update.norm() / exact.norm())
    ratio = float(mean_update.norm() / exact.norm())
    same = abs(ratio - 1.0) <= SAME and 1.0 - cosine <= SAME
    detail = (
        "over sums of tokens it is, on average, the gradient of the expected reward: unbiased"
        if same
        else f"over sums of tokens it is, on average, {ratio:.3g} times as long as the gradient of the "
        f"expected reward, at a cosine of {cosine:.3f} to it"
    )
    return Check(name="expected update", verdict=CheckVerdict.NOTED, detail=detail)


def _groups(probabilities: Tensor, num_attempts: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """The possible answers of a task's attempts, up to their order, with the probability of each."""
    for picks in itertools.combinations_with_replacement(range(len(ANSWERS)), num_attempts):
        orders = math.factorial(num_attempts)
        for count in Counter(picks).values():
            orders //= math.factorial(count)
        yield picks, orders * math.prod(float(probabilities[answer]) for answer in picks)


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one row, written out."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)


@cache
def _a_loaded_model() -> LoadedModel:
    """Tokenizer and names of the built-in model: no token is made of text here."""
    with tempfile.TemporaryDirectory() as directory:
        create_model(Path(directory) / "tiny")
        return load_model(Path(directory) / "tiny")
