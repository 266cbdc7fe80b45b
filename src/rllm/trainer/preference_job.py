"""The updates of a run on preferences, and what is known of a comparison before the first of them.

    rows ──reference, once──► reference.safetensors ──► ref_logprobs_T ──► update: loss of whole groups
                                                                      └──► evaluate: the same, held out

Imports torch, so it is imported once a run is assembled.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rllm.algorithms.preference import KTOLoss, PairLoss, preference_loss
from rllm.config.preference import DpoConfig
from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory
from rllm.trainer.backends.measured import MeasuredLoss, scored_tokens
from rllm.trainer.epochs import Epochs
from rllm.trainer.examples import Example, ExampleSets, largest_examples, rows_sha256
from rllm.trainer.kept_scores import kept_scores
from rllm.trainer.reference import reference_of
from rllm.trainer.supervised import SupervisedJob
from rllm.types.sample import NOT_SAMPLED, TrainingSample

if TYPE_CHECKING:
    from rllm.trainer.policies import PolicyModel

REFERENCE_FILE = "reference.safetensors"


class PreferenceJob(SupervisedJob):
    """Updates on whole comparisons, in the order of `Epochs`."""

    def __init__(self, policy: "PolicyModel", config: DpoConfig, dataset: ExampleSets) -> None:
        super().__init__(policy)
        self.config = config
        self.dataset = dataset
        self.epochs = Epochs(len(dataset.train), config)
        self.steps = self.epochs.num_steps
        self.loss = self._preference = preference_loss(config.preference)
        self.measured_examples = dataset.heldout[: config.evaluation.num_rows]
        limit = policy.loaded_model.max_positions
        self.others, self.measured_others = list[TrainingSample](), list[TrainingSample]()
        if isinstance(self._preference, KTOLoss):
            self.others = answers_to_others(dataset.train, (), limit)
            self.measured_others = answers_to_others(self.measured_examples, dataset.train, limit)

    def prepare(self, directory: RunDirectory) -> None:
        """Compute the reference's log-probability of every token that is compared: kept in the run, so that a
        run that goes on has the same."""
        if not self._preference.needs_reference:
            return
        # Where nothing is held out, what is measured on is trained on as well and there already.
        examples = [*self.dataset.train, *(self.measured_examples if self.dataset.is_heldout else ())]
        rows = [row for example in examples for row in example.rows] + self.others + self.measured_others
        optimizer = self.config.optimizer
        passes: dict[str, Any] = {
            "micro_batch_tokens": optimizer.micro_batch_tokens,
            "logits_mb": optimizer.logits_mb,
        }
        scores = kept_scores(
            directory.path / REFERENCE_FILE,
            rows,
            lambda: reference_of(self.policy, **passes),
        )
        for row, score_T in zip(rows, scores, strict=True):
            row.ref_logprobs_T = score_T

    def samples(self, step: int) -> list[TrainingSample]:
        return [row for place in self.epochs.batch(step) for row in self.dataset.train[place].rows]

    def update(self, step: int, learning_rate: float) -> dict[str, Any]:
        others = [self.others[place] for place in self.epochs.batch(step)] if self.others else []
        loss, more = self._loss_now(others)
        samples = self.samples(step)
        measured_loss = MeasuredLoss(loss)
        metrics = self.backend.update(samples, measured_loss, learning_rate)
        return {
            **metrics,
            **({} if metrics["skipped_updates"] else measured_loss.means),
            **more,
            "rows": len(samples),
            "trained_tokens": sum(each.num_trainable for each in samples),
            "tokens": sum(each.num_tokens for each in samples),
        }

    def largest_update(self) -> list[TrainingSample]:
        return largest_examples(self.dataset.train, self.config.batch_size)

    def evaluate(self) -> dict[str, float]:
        """Means over the held-out comparisons: `loss`, `accuracy`, `margin`, and what else it measures."""
        loss, more = self._loss_now(self.measured_others)
        rows = [row for example in self.measured_examples for row in example.rows]
        tokens = scored_tokens(rows, self.backend.score(rows), loss.aggregation)
        measured_loss = MeasuredLoss(loss)
        measured_loss.measures(tokens)
        return {"loss": float((loss.terms(tokens) * tokens.weights_M).sum()), **measured_loss.means, **more}

    def plan(self) -> dict[str, int | float | str]:
        examples = self.dataset.train
        rows = [row for example in examples for row in example.rows]
        num_tokens, num_trained = sum(row.num_tokens for row in rows), sum(row.num_trainable for row in rows)
        share = min(1.0, self.config.batch_size / len(examples))
        return {
            "examples": len(examples),
            "heldout_examples": len(self.dataset.heldout) if self.dataset.is_heldout else 0,
            "rows": len(rows),
            "tokens": num_tokens,
            "compared_tokens": num_trained,
            "longest_row": max(example.longest for example in examples),
            "dropped_examples": self.dataset.num_dropped,
            "beta": self._preference.beta,
            "optimizer_updates": self.steps,
            "updates_per_epoch": self.epochs.steps_per_epoch,
            "tokens_per_update": round(num_tokens * share),
            "compared_tokens_per_update": round(num_trained * share),
            **{f"run.{name}": count for name, count in self.dataset.counts.items()},
        }

    def identity(self) -> dict[str, Any]:
        return {"rows_sha256": rows_sha256(self.dataset.all())}

    def facts(self) -> dict[str, Any]:
        kind = "held-out examples" if self.dataset.is_heldout else "examples that were trained on"
        return {
            "examples": len(self.dataset.train),
            "measured_on": f"{len(self.measured_examples)} {kind}",
            "dropped_examples": self.dataset.num_dropped,
            **({"run_counts": self.dataset.counts} if self.dataset.counts else {}),
        }

    def _loss_now(self, others: Sequence[TrainingSample]) -> tuple[PairLoss | KTOLoss, dict[str, float]]:
        """The loss under the weights as they are, and what it was made with."""
        if not isinstance(self._preference, KTOLoss):
            return self._preference, {}
        kl = reference_point(others, self.backend.score(others))
        return replace(self._preference, kl=kl), {"reference_point": kl}


def reference_point(others: Sequence[TrainingSample], scores: Sequence[NDArray[np.float32]]) -> float:
    """KTO's z: max(0, mean of log π/π_ref over answers to other prompts), in nats.

    Ethayarajh et al. 2024 (arXiv:2402.01306), section 4.1. Measured over the whole update before it is split,
    so it is one number whatever the micro-batches.
    """
    log_ratios = [
        float((score_T - _reference_of(row)).astype(np.float64).sum())
        for row, score_T in zip(others, scores, strict=True)
    ]
    # Python's `max` would make 0 of a NaN, and train on.
    return float(np.maximum(0.0, np.mean(log_ratios)))


def _reference_of(row: TrainingSample) -> NDArray[np.float32]:
    assert row.ref_logprobs_T is not None, "the reference was asked before the first report"
    return row.ref_logprobs_T


def answers_to_others(
    examples: Sequence[Example], more: Sequence[Example], limit: int
) -> list[TrainingSample]:
    """For KTO, one row for each example: its prompt, and the answer of the next example with another prompt
    (where there is none among `examples`, of the first one in `more`), cut at `limit` tokens.

    The paper shifts the answers within each micro-batch; here the partner is fixed for the whole run, so the
    reference's part is computed once. Raises ConfigError where all prompts are one.
    """
    own = [_split_row(example.rows[0]) for example in examples]
    further = [_split_row(example.rows[0]) for example in more]
    rows: list[TrainingSample] = []
    for place, (prompt, _) in enumerate(own):
        following = itertools.chain(own[place + 1 :], own[:place], further)
        answer = next((theirs for other, theirs in following if not np.array_equal(other, prompt)), None)
        if answer is None:
            raise ConfigError(
                f"All {len(own)} examples have one prompt, so kto has no answers to other prompts to measure "
                "by; give examples of several prompts, or pairs and another `preference.loss`."
            )
        rows.append(_join(examples[place].rows[0], prompt, answer, limit))
    return rows


_Answer = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Ids of an answer, and the policy version of each: which of them are trained."""


def _split_row(row: TrainingSample) -> tuple[NDArray[np.int64], _Answer]:
    """The prompt, up to the first token that is trained, and what follows it."""
    start = int(np.flatnonzero(row.trainable_T)[0])
    return row.token_ids_T[:start], (row.token_ids_T[start:], row.policy_versions_T[start:])


def _join(row: TrainingSample, prompt: NDArray[np.int64], answer: _Answer, limit: int) -> TrainingSample:
    """The prompt of `row` with another's answer."""
    ids, versions = (column[: limit - len(prompt)] for column in answer)
    size = len(prompt) + len(ids)
    return replace(
        row,
        token_ids_T=np.concatenate((prompt, ids)),
        policy_versions_T=np.concatenate((np.full(len(prompt), NOT_SAMPLED), versions)),
        logprobs_T=np.zeros(size, dtype=np.float32),
        advantages_T=np.zeros(size, dtype=np.float32),
        rewards_T=None,
        group_key=(f"{row.group_key[0]}, answered for another", row.group_key[1]),
    )
