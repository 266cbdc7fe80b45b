"""Episodes and advantages in, token rows out, with every sampled token accounted for.

A step goes on with the row that its prompt begins with, and begins a row where there is none: the agent
rewrote its history, or holds several conversations at a time. No sampled token is lost, none is encoded
again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from rllm.algorithms.grouping import LEARNABLE
from rllm.errors import ConfigError, CountError
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.messages import LogprobMeaning
from rllm.types.sample import NOT_SAMPLED, TrainingBatch, TrainingSample


def training_batch(
    episodes: Iterable[Episode],
    advantages: Mapping[str, float],
    *,
    drop_tied: bool = True,
    masked: Collection[str] = frozenset(),
    is_trained: Callable[[str], bool] = lambda role: True,
) -> TrainingBatch:
    """Rows of all learnable episodes, ordered by (task, attempt, trajectory, segment).

    `advantages`: trajectory uid -> advantage, given to every token the trajectory sampled. `drop_tied` leaves
    out trajectories with advantage 0, which have no gradient. `masked`: uids of trajectories that were cut
    off and are left out. `is_trained`: whether a role is learned from. Tokens that a grammar left no choice
    about are read but not trained on. Raises CountError unless sampled = trained + masked.forced +
    dropped.failed + dropped.tied + dropped.truncated + dropped.untrained.
    """
    samples: list[TrainingSample] = []
    always = ("sampled", "trained", "masked.forced", "dropped.failed", "dropped.tied")
    counts: Counter[str] = Counter(dict.fromkeys(always, 0))
    for episode in sorted(episodes, key=lambda each: (each.task_id, each.rollout_idx)):
        for index, trajectory in enumerate(episode.trajectories):
            num_sampled = sum(len(step.response_ids) for step in trajectory.steps)
            counts["sampled"] += num_sampled
            if episode.outcome not in LEARNABLE:
                counts["dropped.failed"] += num_sampled
            elif trajectory.uid in masked:
                counts["dropped.truncated"] += num_sampled
            elif not is_trained(trajectory.name):
                counts["dropped.untrained"] += num_sampled
            elif drop_tied and advantages[trajectory.uid] == 0.0:
                counts["dropped.tied"] += num_sampled
            else:
                advantage = advantages[trajectory.uid]
                rows = trajectory_rows(trajectory, episode.task_id, episode.rollout_idx, index, advantage)
                counts["trained"] += sum(row.num_trainable for row in rows)
                counts["masked.forced"] += sum(
                    step.policy_versions.count(NOT_SAMPLED) for step in trajectory.steps
                )
                samples.extend(rows)
    if 2 * counts["sampled"] != counts.total():
        raise CountError(f"Tokens do not add up: {dict(counts)}; sampled must be the sum of the others.")
    return TrainingBatch(samples=samples, token_counts=dict(counts))


def trajectory_rows(
    trajectory: Trajectory, task_id: str, attempt: int, index: int, advantage: float
) -> list[TrainingSample]:
    """One row per segment of each conversation of the trajectory."""
    builders: list[_RowBuilder] = []  # the one that grew last comes last: it is the likeliest to grow again
    begun: list[_RowBuilder] = []
    for step in trajectory.steps:
        _require_trainable(step, task_id)
        builder = next((each for each in reversed(builders) if each.continues_in(step.prompt_ids)), None)
        if builder is None:
            builder = _RowBuilder()
            begun.append(builder)
        else:
            builders.remove(builder)
        builders.append(builder)
        builder.append(step)
    return [
        builder.row(task_id, trajectory.name, (task_id, attempt, index, segment), advantage)
        for segment, builder in enumerate(begun)
    ]


class _RowBuilder:
    """A row that grows by a prompt's new part and the answer to it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.versions: list[int] = []
        self.logprobs: list[float] = []
        self.temperature: float | None = None

    def continues_in(self, prompt_ids: list[int]) -> bool:
        return prompt_ids[: len(self.ids)] == self.ids

    def append(self, step: Step) -> None:
        num_new = len(step.prompt_ids) - len(self.ids)
        self.ids = step.prompt_ids + step.response_ids
        self.versions += [NOT_SAMPLED] * num_new + step.policy_versions
        self.logprobs += [0.0] * num_new + step.logprobs
        temperature = _temperature_of(step)
        if self.temperature is not None and temperature != self.temperature:
            raise ConfigError(
                f"One conversation was sampled at temperature {self.temperature} and then at {temperature}; "
                "its tokens have no common policy to be trained on. Sample all turns of an episode alike."
            )
        self.temperature = temperature

    def row(
        self, task_id: str, role: str, order_key: tuple[str, int, int, int], advantage: float
    ) -> TrainingSample:
        versions_T = np.array(self.versions, dtype=np.int64)
        return TrainingSample(
            token_ids_T=np.array(self.ids, dtype=np.int64),
            policy_versions_T=versions_T,
            logprobs_T=np.where(versions_T != NOT_SAMPLED, self.logprobs, 0.0).astype(np.float32),
            advantages_T=np.where(versions_T != NOT_SAMPLED, advantage, 0.0).astype(np.float32),
            group_key=(task_id, role),
            order_key=order_key,
            temperature=1.0 if self.temperature is None else self.temperature,
        )


def _temperature_of(step: Step) -> float:
    """What the logits were divided by.

    RAW log-probabilities are the model's own, however the token was picked.
    """
    output = step.model_output
    return 1.0 if output is None or output.logprob_meaning is LogprobMeaning.RAW else output.temperature


def _require_trainable(step: Step, task_id: str) -> None:
    """Raises ConfigError for a step whose tokens cannot be trained on, naming what is missing."""
    if not step.prompt_ids or len(step.logprobs) != len(step.response_ids):
        raise ConfigError(
            f"A step of task {task_id} has {len(step.prompt_ids)} prompt ids, {len(step.response_ids)} "
            f"response ids and {len(step.logprobs)} log-probabilities; training needs all of them. Sample "
            "from an engine that returns them."
        )
    if len(step.policy_versions) != len(step.response_ids):
        raise ConfigError(
            f"A step of task {task_id} has {len(step.policy_versions)} policy versions for "
            f"{len(step.response_ids)} sampled tokens; the inference client must say which weights wrote "
            "each token."
        )
    if step.model_output is not None and step.model_output.logprob_meaning is LogprobMeaning.TRUNCATED:
        raise ConfigError(
            f"A step of task {task_id} was sampled with top-k or top-p; its log-probabilities belong to a "
            "truncated distribution. Train with top_p = 1 and top_k = 0."
        )
    if step.model_output is not None and step.model_output.logprob_meaning is LogprobMeaning.UNKNOWN:
        raise ConfigError(
            f"A step of task {task_id} was sampled by a server that does not tell how: nobody knows which "
            "distribution its log-probabilities belong to. Serve the model with vLLM or SGLang, and set "
            "`temperature`, `top_p` and `top_k` for the session, so that nothing is left to the server."
        )


def group_shares(samples: Sequence[TrainingSample], num_shares: int) -> Iterator[list[TrainingSample]]:
    """Samples dealt out in turn by whole tasks, so that all roles of a task are in one share; empty shares
    are left out."""
    task_ids = sorted({sample.group_key[0] for sample in samples})
    for number in range(num_shares):
        mine = set(task_ids[number::num_shares])
        if mine:
            yield [sample for sample in samples if sample.group_key[0] in mine]
