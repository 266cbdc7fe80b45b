import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rllm.types.episode import Episode, Outcome, Trajectory


@pytest.fixture(scope="session")
def oracle() -> dict[str, Any]:
    """What verl 0.9.1 computes in float32 for a small batch; see its `source`."""
    return json.loads((Path(__file__).parent / "data" / "verl_oracles.json").read_text())


@pytest.fixture
def episode() -> Callable[..., Episode]:
    """An episode of one task: rewards by role."""

    def make(
        task_id: str, attempt: int, rewards: dict[str, Any], outcome: Outcome = Outcome.SCORED
    ) -> Episode:
        trajectories = [
            Trajectory(uid=f"{task_id}/{attempt}/{role}", name=role, reward=reward)
            for role, reward in rewards.items()
        ]
        return Episode(task_id=task_id, rollout_idx=attempt, trajectories=trajectories, outcome=outcome)

    return make
