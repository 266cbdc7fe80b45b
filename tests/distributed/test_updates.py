"""An update is the same function of its rows, on however many ranks it is computed."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rllm.errors import ConfigError
from rllm.models.packing import WeightedRow, rank_shares
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.types.sample import TrainingSample

Ranks = Callable[..., list[dict[str, Any]]]
RequireSame = Callable[..., None]
RequireAllWell = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def together(
    ranks: Ranks,
    require_all_well: RequireAllWell,
    smallest_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What two ranks made: `updates` and the `run` of a game."""
    place = tmp_path_factory.mktemp("together")
    require_all_well(ranks("recorded", [smallest_model, place / "updates", 1, "{}", "", place / "run"], 2))
    return place


def test_two_ranks_update_as_one_does(
    require_same: RequireSame, alone_for_one_step: Any, together: Path
) -> None:
    require_same(alone_for_one_step, torch.load(together / "updates", weights_only=False))


def test_a_run_on_two_ranks_plays_counts_and_learns_as_on_one(
    letters_program: ModuleType, together: Path, tmp_path: Path
) -> None:
    letters_program.play(tmp_path / "run", {})
    alone, shared = (RunDirectory.read(place / "run") for place in (tmp_path, together))
    assert sampled(alone) == sampled(shared)
    for mine, theirs in zip(read_metrics(alone.metrics_path), read_metrics(shared.metrics_path), strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("episodes", "failed", "groups", "tasks", "tokens.sampled", "tokens.trained", "success"):
            assert mine.get(name) == theirs.get(name), (mine["phase"], mine["step"], name)
        for name in {"loss", "grad_norm"} & mine.keys():
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-5)
    files = [
        sorted(str(each.relative_to(run.path)) for each in run.path.rglob("*")) for run in (alone, shared)
    ]
    assert files[0] == files[1]
    mine, theirs = (load_file(run.model_path / "model.safetensors") for run in (alone, shared))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-4
    summaries = [run.summary() for run in (alone, shared)]
    assert summaries[0]["sampled_tokens"] == summaries[1]["sampled_tokens"]


@pytest.mark.slow
def test_two_ranks_stop_the_same_groups_after_their_first_attempts_as_one(
    ranks: Ranks, require_all_well: RequireAllWell, letters_program: ModuleType, tmp_path: Path
) -> None:
    changes = {"steps": 2, "filters": {"first_attempts": 2}, "rollout": {"group_size": 5}}
    changes["evaluation"] = {"num_tasks": 1, "every_steps": 0}
    require_all_well(ranks("letters", [tmp_path / "together", json.dumps(changes)], 2))
    letters_program.play(tmp_path / "alone", changes)
    together, alone = (RunDirectory.read(tmp_path / name) for name in ("together", "alone"))
    assert sampled(together) == sampled(alone)
    numbers = [
        [(line["episodes"], line["attempts_not_played"]) for line in read_metrics(run.metrics_path)[-3:-1]]
        for run in (together, alone)
    ]
    assert numbers[0] == numbers[1]
    assert 0 < sum(not_played for _, not_played in numbers[0]) < 18, "some groups stop, some go on"


def test_a_run_of_two_ranks_is_replayed_by_two_to_the_last_bit_and_by_one_it_is_refused(
    ranks: Ranks, require_all_well: RequireAllWell, letters_program: ModuleType, together: Path
) -> None:
    require_all_well(ranks("replayed", [together / "run"], 2))
    with pytest.raises(ConfigError, match=r"2 processes .* 1.*--nproc 2"):
        letters_program.replay_again(str(together / "run"))


def sampled(run: RunDirectory) -> list[Any]:
    """What the policy wrote in every episode of a run."""
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        return [
            (
                phase,
                each.task_id,
                each.rollout_idx,
                [step.response_ids for step in each.trajectories[0].steps],
            )
            for phase in store.phases()
            for each in store.episodes(phase)
        ]


@pytest.mark.slow
def test_one_to_four_ranks_update_alike_for_twenty_steps(
    ranks: Ranks,
    require_all_well: RequireAllWell,
    require_same: RequireSame,
    alone_for_twenty_steps: Any,
    smallest_model: Path,
    tmp_path: Path,
) -> None:
    for num_ranks in (1, 2, 3, 4):
        require_all_well(ranks("recorded", [smallest_model, tmp_path / str(num_ranks), 20], num_ranks))
        require_same(alone_for_twenty_steps, torch.load(tmp_path / str(num_ranks), weights_only=False))


# ---- who computes which rows -----------------------------------------------------------------------------


def row(index: int, task: int, num_prompt: int, num_sampled: int) -> WeightedRow:
    num_tokens = num_prompt + num_sampled
    sampled_T = np.arange(num_tokens) >= num_prompt
    nothing_T = np.zeros(num_tokens, dtype=np.float32)
    sample = TrainingSample(
        token_ids_T=np.where(sampled_T, index + 10, task + 5),
        policy_versions_T=np.where(sampled_T, 0, -1),
        logprobs_T=nothing_T,
        advantages_T=nothing_T,
        group_key=(f"t{task}", "agent"),
        order_key=(f"t{task}", index, 0, 0),
    )
    return WeightedRow(index=index, sample=sample, weights_T=sampled_T.astype(np.float64))


rows_of_groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 60), min_size=1, max_size=6)),
    min_size=1,
    max_size=6,
).map(
    lambda groups: [
        row(100 * task + attempt, task, prompt, length)
        for task, (prompt, lengths) in enumerate(groups)
        for attempt, length in enumerate(lengths)
    ]
)


@given(rows_of_groups, st.integers(1, 4), st.booleans())
def test_every_row_is_on_one_rank_and_no_rank_has_much_more_than_another(
    rows: list[WeightedRow], num_ranks: int, whole_groups: bool
) -> None:
    shares = rank_shares(rows, num_ranks, whole_groups=whole_groups)
    assert len(shares) == num_ranks
    assert sorted(each.index for share in shares for each in share) == sorted(each.index for each in rows)
    if whole_groups:
        homes = {(each.sample.group_key, number) for number, share in enumerate(shares) for each in share}
        assert len(homes) == len({group for group, _ in homes})
        return
    if len(rows) >= num_ranks:
        assert all(shares), "a rank has nothing to do"
    # A row moves wherever that helps, so the difference is at most a row with its prompt.
    tokens = [sum(each.last + 1 for each in share) for share in shares]
    shared = [_computed(share) for share in shares]
    assert max(shared) - min(shared) <= 2 * max(each.last + 1 for each in rows), tokens


def _computed(share: list[WeightedRow]) -> int:
    """Tokens of a forward pass: a prompt that several rows share counts once."""
    by_task: dict[tuple[str, str], list[WeightedRow]] = {}
    for each in share:
        by_task.setdefault(each.sample.group_key, []).append(each)
    return sum(
        int(members[0].places[0]) + sum(each.last + 1 - int(each.places[0]) for each in members)
        for members in by_task.values()
    )


def test_the_same_rows_in_another_order_are_shared_out_alike() -> None:
    rows = [row(index, index % 3, 5, 3 + index) for index in range(12)]
    there = [sorted(each.index for each in share) for share in rank_shares(rows, 3)]
    back = [sorted(each.index for each in share) for share in rank_shares(rows[::-1], 3)]
    assert sorted(there) == sorted(back)
