"""What all tasks of a run share, and what one of them says itself."""

from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.environments.base import BaseEnv

_SETTINGS: dict[str, Any] = {
    "steps": 1,
    "rollout": {"tasks_per_step": 3, "group_size": 2},
    "warm_start": {"steps": 1},
    "evaluation": {"every_steps": 1},
}


def _rows(**letters: str) -> list[dict[str, Any]]:
    """A task a name; "" leaves its letter to what is shared."""
    return [{"task_id": name, **({"letter": letter} if letter else {})} for name, letter in letters.items()]


@pytest.mark.parametrize(
    ("train", "train_args", "letters_by_task"),
    [
        ({"own": "A", "none": ""}, {}, {"own": {"A"}, "none": {"Z"}}),
        ({"none": "", "own": "A"}, {}, {"own": {"A"}, "none": {"Z"}}),
        (
            {"own": "A", "second": "", "third": ""},
            {"letter": ["X", "Y"]},
            {"own": {"A"}, "second": {"Y"}, "third": {"X"}},
        ),
    ],
    ids=["the first says it", "the second says it", "training tasks have their own"],
)
def test_what_a_task_says_wins_over_what_is_shared_in_every_phase(
    letters: ModuleType,
    tmp_path: Path,
    train: dict[str, str],
    train_args: dict[str, Any],
    letters_by_task: dict[str, set[str]],
) -> None:
    """Each task is asked by itself: a training task that says it takes it from no other one."""
    played, demonstrated = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)

    class Recorded(letters.LetterEnv):  # type: ignore[name-defined, misc]
        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            played[info["task_id"].split("@")[0]].add(info["letter"])
            return letters.LetterEnv.from_dict(info)

    def demonstrate(task: dict[str, Any], *rest: Any) -> Any:
        demonstrated[task["task_id"].split("@")[0]].add(task["letter"])
        return letters.demonstrate(task, *rest)

    letters.make_trainer(
        tmp_path / "run",
        {**_SETTINGS, "task": {"environment_args": {"letter": "Z"}, "train_args": train_args}},
        train_dataset=_rows(**train),
        val_dataset=_rows(reported="", reported_own="C"),
        validation_dataset=_rows(validated="B", validated_own="D", spare=""),
        env_class=Recorded,
        demonstrate=demonstrate,
    ).train()
    reported = {"reported": {"Z"}, "reported_own": {"C"}}  # the expert plays them, to be compared with
    assert demonstrated == {**letters_by_task, **reported}
    assert played == {**letters_by_task, **reported, "validated": {"B"}, "validated_own": {"D"}}
