"""Episodes and advantages in, token rows out, with every sampled token accounted for.

A step goes on with the row that its prompt begins with, and begins a row where there is none: the agent
rewrote its history, or holds several conversations at a time. No sampled token is lost, none is encoded
again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from rllm.algorithms.advantages import FloatArray, TurnAdvantages
from rllm.algorithms.grouping import num_forced, turn_rewards
from rllm.errors import ConfigError, CountError
from rllm.rendering.images import keep_images
from rllm.types.episode import LEARNABLE, Episode, Step, Trajectory
from rllm.types.images import PATCH_IDS_FROM
from rllm.types.messages import LogprobMeaning
from rllm.types.prefix import Prefix
from rllm.types.sample import NOT_SAMPLED, TrainingBatch, TrainingSample


def training_batch(
    episodes: Iterable[Episode],
    advantages: Mapping[str, TurnAdvantages],
    *,
    rewards: Mapping[str, float] = {},
    exclusion_reasons: Mapping[str, str] = {},
    is_trained: Callable[[str], bool] = lambda role: True,
) -> TrainingBatch:
    """Rows of all learnable episodes, ordered by (task, attempt, trajectory, segment).

    `advantages`: trajectory uid -> those of its turns, a number for all tokens of a turn or one for each.
    `rewards`: uid -> reward of trajectories that are paid otherwise than they say. `exclusion_reasons`: uid
    -> why, such as `truncated`, of those that are left out. `is_trained`: whether a role is learned from.
    Trajectories whose advantages are all 0 have their rows like any other: they count in the means of the
    loss, and whether their forward pass can be spared is the backend's business. Tokens that a grammar left
    no choice about are read but not trained on. Raises CountError unless sampled = trained + masked.forced +
    dropped.failed + dropped.tied + dropped.untrained + dropped.REASON of each reason in `exclusion_reasons`.
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
            elif trajectory.uid in exclusion_reasons:
                counts[f"dropped.{exclusion_reasons[trajectory.uid]}"] += num_sampled
            elif not is_trained(trajectory.name):
                counts["dropped.untrained"] += num_sampled
            else:
                reward = rewards.get(trajectory.uid, trajectory.reward)
                rows = trajectory_rows(
                    trajectory,
                    episode.task_id,
                    episode.rollout_idx,
                    index,
                    advantages[trajectory.uid],
                    None if reward is None else turn_rewards(trajectory, reward),
                )
                counts["trained"] += sum(row.num_trainable for row in rows)
                counts["masked.forced"] += sum(map(num_forced, trajectory.steps))
                samples.extend(rows)
    # `sampled` is among the counts, so all of them together are twice as much.
    if 2 * counts["sampled"] != counts.total():
        raise CountError(f"Tokens do not add up: {dict(counts)}; sampled must be the sum of the others.")
    return TrainingBatch(samples=samples, token_counts=dict(counts))


def trajectory_rows(
    trajectory: Trajectory,
    task_id: str,
    attempt: int,
    index: int,
    advantages: TurnAdvantages | float,
    turn_rewards_K: FloatArray | None = None,
) -> list[TrainingSample]:
    """One row per segment of each conversation of the trajectory.

    `advantages`: those of the turns, or one for all of them. `turn_rewards_K`: what each turn was paid,
    which goes to the last token sampled in it; a turn that sampled none hands it to the one before.
    """
    builders: list[_RowBuilder] = []  # the one that grew last comes last: it is the likeliest to grow again
    row_builders: list[_RowBuilder] = []
    num_turns = len(trajectory.steps)
    given_K = list(advantages) if isinstance(advantages, Sequence | np.ndarray) else [advantages] * num_turns
    paid_K = [0.0] * num_turns if turn_rewards_K is None else _paid_to_samplers(trajectory, turn_rewards_K)
    turns = zip(trajectory.steps, given_K, paid_K, strict=True)
    for turn, (step, advantage, reward) in enumerate(turns):
        _require_trainable(step, task_id)
        for place in range(len(builders) - 1, -1, -1):
            if builders[place].continues_in(step.prompt_ids):
                builders.append(builders.pop(place))
                break
        else:
            builders.append(_RowBuilder())
            row_builders.append(builders[-1])
        builders[-1].append(turn, step, advantage, reward)
    return [
        builder.row(
            (task_id, trajectory.name), (task_id, attempt, index, segment), is_paid=turn_rewards_K is not None
        )
        for segment, builder in enumerate(row_builders)
    ]


def _paid_to_samplers(trajectory: Trajectory, turn_rewards_K: FloatArray) -> list[float]:
    """The pay of each turn, moved back to the nearest turn that sampled a token.

    What was paid before anything was sampled belongs to no token.
    """
    paid_K = turn_rewards_K.tolist()
    for turn in range(len(paid_K) - 1, -1, -1):
        versions = trajectory.steps[turn].policy_versions
        if not versions or (versions[0] == NOT_SAMPLED and versions.count(NOT_SAMPLED) == len(versions)):
            if turn:
                paid_K[turn - 1] += paid_K[turn]
            paid_K[turn] = 0.0
    return paid_K


class _RowBuilder:
    """A row that grows by a prompt's new part and the answer to it."""

    def __init__(self) -> None:
        self.turns: list[tuple[int, Step, FloatArray | float, float]] = []
        """(number, step, its advantage, what it was paid); the prompt of each begins with all turns before
        it."""
        self.temperature: float | None = None

    def continues_in(self, prompt_ids: list[int]) -> bool:
        last = self.turns[-1][1]
        before = last.prompt_ids
        start = len(before)
        end = start + len(last.response_ids)
        if prompt_ids[start:end] != last.response_ids:
            return False
        if type(before) is Prefix and before.shares_row_with(prompt_ids):  # nothing has to be compared
            return len(prompt_ids) >= start
        return prompt_ids[:start] == before

    def append(self, turn: int, step: Step, advantage: FloatArray | float, reward: float) -> None:
        self.turns.append((turn, step, advantage, reward))
        temperature = _temperature_of(step)
        if self.temperature is not None and temperature != self.temperature:
            raise ConfigError(
                f"One conversation was sampled at temperature {self.temperature} and then at {temperature}; "
                "its tokens have no common policy to be trained on. Sample all turns of an episode alike."
            )
        self.temperature = temperature

    def row(
        self, group_key: tuple[str, str], order_key: tuple[str, int, int, int], *, is_paid: bool
    ) -> TrainingSample:
        last_step = self.turns[-1][1]
        ids = last_step.prompt_ids + last_step.response_ids
        if max(ids) >= PATCH_IDS_FROM:
            keep_images(last_step.chat_completions)
        versions_T = np.full(len(ids), NOT_SAMPLED, dtype=np.int64)
        logprobs_T, advantages_T, rewards_T = np.zeros((3, len(ids)), dtype=np.float32)
        some_forced = False
        for _, step, advantage, reward in self.turns:
            versions = step.policy_versions
            start = len(step.prompt_ids)
            end = start + len(versions)
            if not versions or versions.count(versions[0]) == len(versions):  # as good as always
                if not versions or versions[0] == NOT_SAMPLED:
                    continue
                versions_T[start:end] = versions[0]
                last = end - 1
            else:
                versions_T[start:end] = versions
                last = start + int(np.flatnonzero(versions_T[start:end] != NOT_SAMPLED)[-1])
                some_forced = True
            logprobs_T[start:end] = step.logprobs
            advantages_T[start:end] = advantage
            rewards_T[last] = reward
        if some_forced:
            forced_T = versions_T == NOT_SAMPLED
            logprobs_T[forced_T] = advantages_T[forced_T] = 0.0
        return TrainingSample(
            token_ids_T=np.fromiter(ids, np.int64, len(ids)),
            policy_versions_T=versions_T,
            logprobs_T=logprobs_T,
            advantages_T=advantages_T,
            rewards_T=rewards_T if is_paid else None,
            group_key=group_key,
            order_key=order_key,
            temperature=1.0 if self.temperature is None else self.temperature,
            turns=tuple(
                (turn, len(step.prompt_ids), len(step.response_ids)) for turn, step, _, _ in self.turns
            ),
        )


def _temperature_of(step: Step) -> float:
    """The divisor of the logits.

    RAW log-probabilities are the model's own, however the token was picked.
    """
    output = step.model_output
    return 1.0 if output is None or output.logprob_meaning is LogprobMeaning.RAW else output.temperature


def _require_trainable(step: Step, task_id: str) -> None:
    """Raises ConfigError for a step whose tokens cannot be trained on, naming what is missing."""
    num_sampled = len(step.response_ids)
    if not step.prompt_ids or len(step.logprobs) != num_sampled:
        raise ConfigError(
            f"A step of task {task_id} has {len(step.prompt_ids)} prompt ids, {num_sampled} "
            f"response ids and {len(step.logprobs)} log-probabilities; training needs all of them. Sample "
            "from an engine that returns them."
        )
    if len(step.policy_versions) != num_sampled:
        raise ConfigError(
            f"A step of task {task_id} has {len(step.policy_versions)} policy versions for "
            f"{num_sampled} sampled tokens; the inference client must say which weights wrote each token."
        )
    meaning = None if step.model_output is None else step.model_output.logprob_meaning
    if meaning is LogprobMeaning.TRUNCATED:
        raise ConfigError(
            f"A step of task {task_id} was sampled with top-k or top-p; its log-probabilities belong to a "
            "truncated distribution. Train with top_p = 1 and top_k = 0."
        )
    if meaning is LogprobMeaning.UNKNOWN:
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
