"""A teacher for on-policy distillation: what it says of the student's tokens becomes their advantage.

    rows that the student sampled ──► Scorer (a directory, a server) ──► log π_teacher
        paid per token: log π_teacher - log π_student ──► returns ──► advantages_T ──► policy gradient

On average over the student's own samples, what a token is paid is -KL(student, teacher) there: the reverse
divergence, which asks the student for one of the teacher's ways instead of a mixture of all. Agarwal et al.
2023 (GKD, arXiv:2306.13649) train on the student's samples; Gu et al. 2023 (MiniLLM, arXiv:2306.08543) write
the gradient as a policy gradient, equation 2. `distill.gamma` says how far a token is held responsible for
what follows: 1 is the exact gradient of the divergence of whole sequences, as MiniLLM has it, 0 pays each
token for itself alone, which varies far less and leaves out that a token leads to others. A teacher is asked
for the sampled tokens alone, so a server can be one; GKD's divergences over the whole vocabulary
(`distill.divergence`) are a loss of their own, in `rllm.trainer.backends.torch_distilling`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rllm.algorithms.advantages import FloatArray
from rllm.algorithms.returns import returns_to_go
from rllm.config.distill import TEACHER
from rllm.config.schema import TrainConfig
from rllm.errors import ConfigError
from rllm.models.directory import LoadedModel, load_model
from rllm.store.run_directory import RunDirectory, is_run
from rllm.trainer.policies import Policies
from rllm.trainer.reference import ModelScorer, Scorer
from rllm.trainer.trainable import trainable_rows
from rllm.types.episode import LEARNABLE, Episode
from rllm.types.sample import TrainingSample


@dataclass(kw_only=True, slots=True, frozen=True)
class Teacher:
    """Advantages and measurements from what a scorer says of sampled rows."""

    config: TrainConfig
    scorer: Scorer
    loaded_model: LoadedModel | None = field(default=None, repr=False)
    """The model itself, where it is in this process."""

    def teaches(self, role: str) -> bool:
        """Whether the tokens of a role are paid by it."""
        return self.config.estimator_of(role) == TEACHER

    def teach(self, samples: Sequence[TrainingSample]) -> tuple[list[TrainingSample], dict[str, float]]:
        """The rows of all roles, those of its own with advantages; and what there is to say of them."""
        mine = [each for each in samples if self.teaches(each.group_key[1])]
        if self.config.distill.is_over_vocabulary:  # the update asks it of the whole distribution
            role = self.config.role
            weights = [role(each.group_key[1]).reward_weight for each in mine]
            return [_with_advantages(row, weight) for row, weight in zip(mine, weights, strict=True)], {}
        gaps = gaps_between(mine, self.scorer)
        others = [each for each in samples if not self.teaches(each.group_key[1])]
        samples_out = [*others, *self._with_credit(mine, gaps)]
        divergence = divergence_of(gaps)
        if self.config.distill.clip and divergence:
            divergence["teacher_clipped_frac"] = float(
                (np.abs(np.concatenate(gaps)) > self.config.distill.clip).mean()
            )
        return sorted(samples_out, key=lambda each: each.order_key), divergence

    def measure(self, episodes: Sequence[Episode], policies: Policies) -> dict[str, float]:
        """`reverse_kl` in nats per token, with its standard error, of what the student sampled.

        Of the roles that it pays; where it pays none, because it only writes, of all. `unmeasured`: episodes
        that are left out because they could not be trained on, where there are any. Raises the first
        ConfigError where none is left.
        """
        roles = {trajectory.name for episode in episodes for trajectory in episode.trajectories}
        roles_measured = {role for role in roles if self.teaches(role)} or roles
        learnable = [each for each in episodes if each.outcome in LEARNABLE]
        rows: list[TrainingSample] = []
        errors: list[ConfigError] = []
        for episode in learnable:
            try:
                rows += trainable_rows(episode, policies, roles_measured.__contains__)
            except ConfigError as error:
                errors.append(error)
        if errors and len(errors) == len(learnable):
            raise errors[0]
        error_counts: dict[str, float] = {"unmeasured": len(errors)} if errors else {}
        return divergence_of(gaps_between(rows, self.scorer)) | error_counts

    def _with_credit(
        self, samples: Sequence[TrainingSample], gaps: Sequence[FloatArray]
    ) -> list[TrainingSample]:
        """Each token is credited with what it, and those behind it in its trajectory, are paid.

        `samples` have in `advantages_T` the number of each token's turn.
        """
        distill = self.config.distill
        in_order = sorted(zip(samples, gaps, strict=True), key=lambda each: each[0].order_key)
        credits: list[FloatArray] = []
        for _, of_trajectory in groupby(in_order, key=lambda each: each[0].order_key[:3]):
            rows, mine = zip(*of_trajectory, strict=True)
            # Rows may take turns, as conversations of one agent do; `back` undoes the order of time.
            turns = np.concatenate([row.advantages_T[row.trainable_T] for row in rows])
            order = np.argsort(turns, kind="stable")
            back = np.argsort(order, kind="stable")
            rewards = -np.concatenate(mine)[order]
            if distill.clip:
                rewards = rewards.clip(-distill.clip, distill.clip)
            ends = np.cumsum([len(gap) for gap in mine])[:-1]
            credits.extend(np.split(returns_to_go(rewards, distill.gamma)[back], ends))
        if distill.baseline == "mean" and credits:
            mean = float(np.concatenate(credits).mean())
            credits = [credit - mean for credit in credits]
        weight_of = self.config.role
        return [
            _with_advantages(row, credit * weight_of(row.group_key[1]).reward_weight)
            for (row, _), credit in zip(in_order, credits, strict=True)
        ]


def gaps_between(samples: Sequence[TrainingSample], scorer: Scorer) -> list[FloatArray]:
    """log π_student - log π_teacher of the trained tokens of each row: in the mean the reverse divergence.

    The student is who sampled, `logprobs_T`. Raises ConfigError for a teacher that finds a token impossible:
    there is no direction towards that.
    """
    gaps: list[FloatArray] = []
    for sample, scores_T in zip(samples, scorer.score(samples) if samples else (), strict=True):
        trained_T = sample.trainable_T
        if not np.isfinite(scores_T[trained_T]).all():
            place = int(np.flatnonzero(trained_T & ~np.isfinite(scores_T))[0])
            raise ConfigError(
                f"The teacher's log-probability of token {place} (id {sample.token_ids_T[place]}) of "
                f"{sample.order_key} is {scores_T[place]}; a teacher must give every token of the vocabulary "
                "a probability."
            )
        gaps.append(sample.logprobs_T[trained_T].astype(np.float64) - scores_T[trained_T])
    return gaps


def divergence_of(gaps: Sequence[FloatArray]) -> dict[str, float]:
    """`reverse_kl`: mean over all tokens, in nats; `reverse_kl_error`: its standard error, over rows, because
    the tokens of a row depend on each other. Nothing of no tokens."""
    num_tokens = sum(len(each) for each in gaps)
    if not num_tokens:
        return {}
    mean = sum(float(each.sum()) for each in gaps) / num_tokens
    residuals = np.array([each.sum() - mean * len(each) for each in gaps])
    return {"reverse_kl": mean, "reverse_kl_error": float(np.sqrt((residuals**2).sum())) / num_tokens}


def _with_advantages(row: TrainingSample, advantages: FloatArray | float) -> TrainingSample:
    advantages_T = np.zeros(row.num_tokens, dtype=np.float32)
    advantages_T[row.trainable_T] = advantages
    return replace(row, advantages_T=advantages_T)


def teacher_of(config: TrainConfig, students: Mapping[str, LoadedModel]) -> Teacher | None:
    """The teacher that `[distill]` names, for the models that learn; None where it names none.

    Raises ConfigError for one that cannot score, or whose vocabulary is another than a student's.
    """
    if not config.distill.teacher:
        return None
    if config.distill.is_server:
        from rllm.trainer.teacher_server import ServerScorer

        scorer: Scorer = ServerScorer(config.distill.teacher, model=config.distill.teacher_model)
        scorer.require_room(config.inference.max_context)
        for each in students.values():
            scorer.require_same_vocabulary(each.tokenizer)
        return Teacher(config=config, scorer=scorer)
    model = _load(config, students)
    scorer = ModelScorer(
        model=model.model,
        micro_batch_tokens=config.optimizer.micro_batch_tokens,
        logits_mb=config.optimizer.logits_mb,
    )
    return Teacher(config=config, scorer=scorer, loaded_model=model)


def _load(config: TrainConfig, students: Mapping[str, LoadedModel]) -> LoadedModel:
    """The teacher's directory as a frozen model beside the students', in their precision."""
    path = Path(config.distill.teacher)
    if is_run(path):
        path = RunDirectory.read(path).model_path
    parameter = next(next(iter(students.values())).model.parameters())
    teacher = load_model(
        path,
        device=config.model.device,
        dtype=parameter.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    for student in students.values():
        require_same_vocabulary(student.tokenizer.vocabulary(), teacher.tokenizer.vocabulary(), str(path))
    if teacher.max_positions < config.inference.max_context:
        raise ConfigError(
            f"`inference.max_context` is {config.inference.max_context}, but the teacher {path} reads "
            f"{teacher.max_positions} tokens; set it to that, or choose another teacher."
        )
    teacher.model.requires_grad_(False)
    return teacher


def require_same_vocabulary(student: Mapping[int, str], teacher: Mapping[int, str], name: str) -> None:
    """Raises ConfigError naming the first id that is another token for the teacher."""
    for token_id in sorted(student.keys() | teacher.keys()):
        mine, theirs = student.get(token_id), teacher.get(token_id)
        if mine != theirs:
            raise ConfigError(
                f"The teacher {name} has another vocabulary than the student: token {token_id} is "
                f"{_token_text(mine)} for the student and {_token_text(theirs)} for the teacher. Its "
                "log-probabilities "
                "would be of other tokens; choose a teacher of the student's family, or learn from its "
                "answers as text with `rllm sft`."
            )


def _token_text(token: Any) -> str:
    return "no token" if token is None else repr(token)
