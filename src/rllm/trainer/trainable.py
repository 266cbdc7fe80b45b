"""Episodes of a step in, those that cannot be trained on marked as failed.

A program or workflow may bring tokens without log-probabilities, tokens of a server that does not tell how it
sampled, or a role that no policy plays. Found only while learning, one such episode would end a run of
thousands; here it fails alone, before anything is compared, stored or learned from.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from rllm.engine.failures import fail_episode
from rllm.errors import ConfigError, error_text
from rllm.trainer.policies import Policies
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import LEARNABLE, Episode
from rllm.types.images import PATCH_IDS_FROM
from rllm.types.sample import TrainingSample

log = logging.getLogger(__name__)

TRAINER = "trainer"
"""Where an episode failed: `info["error"]["place"]`."""


def fail_untrainable(episodes: Sequence[Episode], policies: Policies, max_failed_fraction: float) -> None:
    """Mark the episodes that cannot be trained on as failures.

    Raises the first ConfigError where they are more than `max_failed_fraction` of all, or none is left.
    """
    errors: list[ConfigError] = []
    learnable = [each for each in episodes if each.outcome in LEARNABLE]
    for episode in learnable:
        try:
            trainable_rows(episode, policies, policies.is_trained)
        except ConfigError as error:
            errors.append(error)
            fail_episode(episode, error, TRAINER)
    if not errors:
        return
    if len(errors) == len(learnable) or len(errors) > max_failed_fraction * len(episodes):
        errors[0].add_note(
            f"{len(errors)} of the {len(episodes)} episodes of this step cannot be trained on; "
            f"`rollout.max_failed_fraction` is {max_failed_fraction:g}."
        )
        raise errors[0]
    log.warning(
        "%d of %d episodes cannot be trained on and are left out: %s",
        len(errors),
        len(episodes),
        error_text(errors[0]),
    )


def trainable_rows(
    episode: Episode, policies: Policies, wants: Callable[[str], bool]
) -> list[TrainingSample]:
    """The rows of the roles that `wants` names, without advantages.

    Raises ConfigError for what no model could have sampled, or nobody says how.
    """
    rows: list[TrainingSample] = []
    for index, trajectory in enumerate(episode.trajectories):
        if not wants(trajectory.name):
            continue
        num_tokens = policies.vocabulary_of(trajectory.name)
        for row in trajectory_rows(trajectory, episode.task_id, episode.rollout_idx, index, 0.0):
            rows.append(row)
            ids_T = row.token_ids_T
            # Ids of images lie beyond the vocabulary.
            if policies.reads_images(trajectory.name):
                ids_T = ids_T[ids_T < PATCH_IDS_FROM]
            if not len(ids_T) or not 0 <= ids_T.min() <= ids_T.max() < num_tokens:
                raise ConfigError(
                    f"A row of task {episode.task_id} has the token ids {row.token_ids_T.min()} to "
                    f"{row.token_ids_T.max()}, but the model of role {trajectory.name!r} has {num_tokens}; "
                    "sample from that model, and leave steps without ids that are no model call."
                )
            if not np.isfinite(row.logprobs_T).all():
                raise ConfigError(
                    f"A row of task {episode.task_id} has log-probabilities that are not finite; sample "
                    "from a server that returns what it sampled with."
                )
    return rows
