import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.sample import NOT_SAMPLED, TrainingSample


@pytest.fixture
def episode() -> Callable[..., Episode]:
    """An episode of one task with one turn each: rewards by role."""

    def make(
        task_id: str, attempt: int, rewards: dict[str, Any], outcome: Outcome = Outcome.SCORED
    ) -> Episode:
        trajectories = [
            Trajectory(
                uid=f"{task_id}/{attempt}/{role}", name=role, reward=reward, steps=[Step(response_ids=[1])]
            )
            for role, reward in rewards.items()
        ]
        return Episode(task_id=task_id, rollout_idx=attempt, trajectories=trajectories, outcome=outcome)

    return make


@pytest.fixture(scope="session")
def verl_losses() -> dict[str, Any]:
    """What verl 0.9.1 computes in float32 for losses; see its `source`."""
    return json.loads((Path(__file__).parent / "data" / "verl_losses.json").read_text())


@pytest.fixture(scope="session")
def flagged() -> Callable[..., TrainingSample]:
    """A row whose tokens are trained on where the flags say so, with a prompt token in front."""

    def make(flags: Sequence[bool | int], task_id: str = "t") -> TrainingSample:
        size = len(flags) + 1
        return TrainingSample(
            token_ids_T=np.zeros(size, dtype=np.int64),
            policy_versions_T=np.array([NOT_SAMPLED, *[0 if flag else NOT_SAMPLED for flag in flags]]),
            logprobs_T=np.zeros(size, dtype=np.float32),
            advantages_T=np.zeros(size, dtype=np.float32),
            group_key=(task_id, "agent"),
            order_key=(task_id, 0, 0, 0),
        )

    return make
