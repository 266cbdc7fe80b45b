"""Maps are solvable, drawn by number alone, and no two splits share one."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import is_valid
from hypothesis import given
from hypothesis import strategies as st

from rllm.environments.frozenlake import (
    DROWNED,
    WORLD,
    FrozenLakeEnv,
    demonstration,
    expert_move,
    lake_tasks,
)
from rllm.environments.lake_maps import SPLITS, lake_map, split_of
from rllm.environments.lake_values import MOVES
from rllm.errors import ConfigError


def test_no_map_is_in_two_splits() -> None:
    maps = {split: {tuple(lake_map(split, index)) for index in range(800)} for split in SPLITS}
    assert all(len(each) > 100 for each in maps.values())
    for split, rows in maps.items():
        others = set().union(*(maps[other] for other in SPLITS if other != split))
        assert not rows & others
        assert {split_of(each) for each in rows} == {split}


@pytest.mark.parametrize("size", range(3, 9))
def test_the_lake_without_holes_is_for_training(size: int) -> None:
    rows = ["S" + "F" * (size - 1), *["F" * size] * (size - 2), "F" * (size - 1) + "G"]
    assert split_of(rows) == "train"


def grids_alike(rows: Sequence[str]) -> set[str]:
    """The eight rotations and reflections of a map, by numpy."""
    grid = np.array([list(row) for row in rows])
    images = [turned for side in (grid, grid.T) for turned in (np.rot90(side, k) for k in range(4))]
    return {"\n".join("".join(row) for row in image) for image in images}


def test_no_lake_of_one_split_is_a_mirrored_one_of_another() -> None:
    drawn = {split: [lake_map(split, index, size=3 + index % 2) for index in range(200)] for split in SPLITS}
    alike = {split: set().union(*map(grids_alike, maps)) for split, maps in drawn.items()}
    assert all(len(grids_alike(maps[0])) > 1 for maps in drawn.values())
    for split in SPLITS:
        assert not alike[split] & set().union(*(alike[other] for other in SPLITS if other != split))


@pytest.mark.parametrize("split", ["validation", "test"])
def test_held_out_lakes_of_several_sizes_differ_by_more_than_reflection(split: str) -> None:
    tasks = WORLD.tasks(split, 256, size=[3, 4, 5, 6], max_steps=12)
    kinds = Counter(WORLD.kind(task) for task in tasks)
    maps = [FrozenLakeEnv.from_dict(task).desc for task in tasks]
    assert len({min(grids_alike(rows)) for rows in maps}) == 256
    assert len({WORLD.identity(task) for task in tasks}) == 256
    assert set(kinds) == {"3x3", "4x4", "5x5", "6x6"}
    assert min(kinds[size] for size in ("4x4", "5x5", "6x6")) > 50
    assert tasks[:40] == WORLD.tasks(split, 40, size=[3, 4, 5, 6], max_steps=12)


def test_of_a_size_with_few_lakes_there_are_fewer_tasks_than_were_asked_for() -> None:
    tasks = lake_tasks("test", 100, size=3, max_steps=12)
    every_way = {
        min(grids_alike(rows))
        for holes in itertools.product("FH", repeat=7)
        if split_of(rows := [f"S{''.join(holes[:2])}", "".join(holes[2:5]), f"{''.join(holes[5:])}G"])
        == "test"
        and is_valid([list(row) for row in rows], 3)
    }
    assert {min(grids_alike(FrozenLakeEnv.from_dict(task).desc)) for task in tasks} <= every_way
    assert len(tasks) == len(every_way) == 8


def test_the_same_lake_is_another_task_when_it_is_slippery_or_there_is_more_time() -> None:
    rows = ["SFF", "FHF", "FFG"]
    ways = [{"desc": rows, "max_steps": 8}, {"desc": rows}, {"desc": ["GFF", "FHF", "FFS"]}]
    others = [{"desc": rows, "max_steps": 9}, {"desc": rows, "is_slippery": True}]
    assert [len({WORLD.identity(task) for task in tasks}) for tasks in (ways, others)] == [1, 2]
    assert not {WORLD.identity(task) for task in ways} & {WORLD.identity(task) for task in others}


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ([], "`size` is an empty list"),
        (None, "`size` is None"),
        ("4", "`size` is '4'"),
        ([4, 9], "`size` is 9"),
    ],
)
def test_sizes_that_no_lake_has_are_refused(size: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lake_tasks("train", 8, size=size, max_steps=20)


def test_half_of_all_maps_train_and_a_quarter_each_validates_and_tests() -> None:
    rng = np.random.default_rng(0)
    counts = Counter(
        split_of(["".join(row) for row in rng.choice(["F", "H"], size=(8, 8), p=[0.8, 0.2])])
        for _ in range(4000)
    )
    assert 1800 < counts["train"] < 2200
    assert 880 < counts["validation"] < 1120
    assert 880 < counts["test"] < 1120


@given(
    split=st.sampled_from(SPLITS),
    index=st.integers(0, 2**63 - 1),
    size=st.integers(4, 8),
    p=st.floats(0.6, 0.95),
    spare=st.integers(0, 20),
)
def test_every_drawn_map_is_a_solvable_lake(split: str, index: int, size: int, p: float, spare: int) -> None:
    max_steps = 2 * (size - 1) + spare
    rows = lake_map(split, index, size=size, p=p, max_steps=max_steps)
    assert [len(row) for row in rows] == [size] * size
    cells = "".join(rows)
    assert (cells[0], cells[-1]) == ("S", "G")
    assert set(cells[1:-1]) <= {"F", "H"}
    assert is_valid([list(row) for row in rows], size)
    env = FrozenLakeEnv(rows, max_steps=max_steps)
    assert arrives(env)


def arrives(env: FrozenLakeEnv, seed: int = 0) -> bool:
    """Whether the expert reaches the goal before the limit."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)
    while True:
        move = expert_move(env.desc, env.position, rng, is_slippery=env.is_slippery)
        _, reward, done, _ = env.step(move)
        if done:
            return reward == 1.0


def test_a_map_depends_on_its_number_and_not_on_what_was_drawn_before() -> None:
    for index in range(40):
        lake_map("test", index, size=7, max_steps=16)
    drawn_in_a_fresh_process = ["SFHFFFF", "FFFFFFF", "HFHHFFF", "FHFFFHF", "HFFFFHF", "FFFFFFF", "FFFFFFG"]
    assert lake_map("test", 41, size=7, max_steps=16) == drawn_in_a_fresh_process


def test_a_caller_may_change_the_map_it_got() -> None:
    rows = lake_map("train", 0)
    rows[0] = "HHHH"
    assert lake_map("train", 0)[0] != "HHHH"


def test_ice_comes_up_as_often_as_asked() -> None:
    cells = "".join("".join(lake_map("train", index, size=8, p=0.9, max_steps=30)) for index in range(300))
    assert 0.88 < cells.count("F") / (cells.count("F") + cells.count("H")) < 0.93


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_lake_that_cannot_be_drawn_for_a_split_is_an_error_and_no_endless_loop(split: str) -> None:
    with pytest.raises(ConfigError, match=rf"`p` 1\.0 .*{split} .*`max_steps`"):
        lake_map(split, 0, p=1.0)


def test_tasks_rebuild_their_maps_through_json() -> None:
    tasks = lake_tasks("validation", 3, start=7, size=5, p=0.75, is_slippery=True, max_steps=11)
    assert [task["task_id"] for task in tasks] == [f"frozenlake-validation-{index}" for index in (7, 8, 9)]
    for index, task in zip((7, 8, 9), json.loads(json.dumps(tasks)), strict=True):
        env = FrozenLakeEnv.from_dict(task)
        assert list(env.desc) == lake_map("validation", index, size=5, p=0.75, max_steps=11)
        assert env.is_slippery


def test_no_tasks_are_a_list_of_none() -> None:
    assert lake_tasks("train", 0) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"count": -1}, "`count` is -1"),
        ({"count": 1, "start": -2}, "-2"),
        ({"count": 1, "size": 8}, "`max_steps`"),
    ],
)
def test_tasks_that_could_not_be_played_are_refused_before_any_is(
    arguments: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        lake_tasks("train", **arguments)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("size", "max_steps"), [(4, 6), (4, 8), (5, 8), (6, 12), (8, 16)])
def test_the_expert_solves_every_map_on_firm_ice_within_the_limit(
    split: str, size: int, max_steps: int
) -> None:
    envs = (FrozenLakeEnv(split=split, seed=index, size=size, max_steps=max_steps) for index in range(200))
    assert all(arrives(env, seed=index) for index, env in enumerate(envs))


def test_the_expert_takes_every_shortest_way_equally_often() -> None:
    rows = ["SFF", "FFF", "FFG"]
    rng = np.random.default_rng(0)
    counts = Counter(expert_move(rows, (0, 0), rng) for _ in range(1000))
    assert set(counts) == {"Down", "Right"}
    assert 430 < counts["Down"] < 570
    assert {expert_move(rows, (2, 0), rng) for _ in range(50)} == {"Right"}


def test_the_expert_finds_its_way_back_from_a_detour() -> None:
    rng = np.random.default_rng(0)
    assert expert_move(["SHF", "FHF", "FFG"], (0, 0), rng) == "Down"
    assert expert_move(["SHF", "FHF", "FFG"], (0, 2), rng) == "Down"


def test_the_expert_without_a_way_draws_from_all_moves() -> None:
    rng = np.random.default_rng(0)
    assert {expert_move(["SH", "HG"], (0, 0), rng) for _ in range(100)} == set(MOVES)


def test_on_slippery_ice_the_expert_keeps_away_from_holes() -> None:
    # Beside the hole of the second row only Left never slips into it: it may become Up, Left or Down.
    rng = np.random.default_rng(0)
    rows = ["SFFF", "FHFH", "FFFH", "HFFG"]
    assert expert_move(rows, (1, 0), rng, is_slippery=True) == "Left"


def test_on_slippery_ice_the_expert_arrives_far_more_often_than_the_shortest_path() -> None:
    rows = ["SFFF", "FHFH", "FFFH", "HFFG"]

    def arrival_rate(is_careful: bool) -> float:
        rng = np.random.default_rng(0)
        env = FrozenLakeEnv(rows, is_slippery=True, max_steps=200)
        num_arrived = 0
        for seed in range(150):
            env.reset(seed=seed)
            over = False
            while not over:
                move = expert_move(rows, env.position, rng, is_slippery=is_careful)
                _, reward, done, _ = env.step(move)
                over = done
            num_arrived += reward == 1.0
        return num_arrived / 150

    assert arrival_rate(is_careful=True) > 0.6 > 0.4 > arrival_rate(is_careful=False)


def test_a_demonstration_without_noise_replays_to_the_goal() -> None:
    rng = np.random.default_rng(0)
    for task in lake_tasks("train", 50, size=5, max_steps=10):
        env = FrozenLakeEnv.from_dict(task)
        observation, _ = env.reset()
        reward = 0.0
        for seen, move in demonstration(task, noise=0.0, rng=rng):
            assert seen == observation
            observation, reward, *_ = env.step(move)
        assert reward == 1.0


def test_noise_is_recorded_as_if_it_were_meant() -> None:
    (task,) = lake_tasks("train", 1)
    rng = np.random.default_rng(0)
    moves = Counter(move for _ in range(300) for _, move in demonstration(task, noise=1.0, rng=rng))
    assert set(moves) == set(MOVES)
    assert max(moves.values()) < 1.3 * min(moves.values())


def test_an_expert_that_strolls_never_drowns() -> None:
    rng = np.random.default_rng(0)
    moves: Counter[str] = Counter()
    for task in lake_tasks("train", 100, p=0.65):
        env = FrozenLakeEnv.from_dict(task)
        env.reset()
        for _, move in demonstration(task, noise=1.0, rng=rng, strolls=True):
            before = env.position
            observation, *_ = env.step(move)
            assert DROWNED not in observation
            assert env.position != before
            moves[move] += 1
    assert set(moves) == set(MOVES)


def test_a_hasty_expert_walks_on_slippery_ice_as_if_it_were_firm() -> None:
    rows = ["SFFF", "FHFH", "FFFH", "HFFG"]
    rng = np.random.default_rng(0)
    task = {"desc": rows, "is_slippery": True, "max_steps": 9}
    for _ in range(30):
        for seen, move in demonstration(task, noise=1.0, rng=rng, hasty=True):
            place = seen.replace("\n", "").index("P")
            assert move in {expert_move(rows, divmod(place, 4), rng) for _ in range(9)}
    first = {demonstration(task, noise=0.5, rng=rng, hasty=True)[0][1] for _ in range(60)}
    careful = {expert_move(rows, (0, 0), rng, is_slippery=True) for _ in range(20)}
    assert first == {"Right", "Down"} | careful > {"Right", "Down"}


@pytest.mark.parametrize("arguments", [{"hasty": True}, {"hasty": True, "strolls": True}, {"hasty": "yes"}])
def test_haste_is_refused_where_it_is_no_mistake(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="`hasty` is"):
        demonstration(lake_tasks("train", 1)[0], noise=0.5, rng=np.random.default_rng(0), **arguments)


def test_a_short_sighted_expert_knows_the_way_only_near_the_goal() -> None:
    far = ["SFFFF", "FFFFF", "FFFFF", "FFFFF", "FFFFG"]
    near = ["FFFFF", "FFFFF", "FFFFF", "FFFFF", "FFSFG"]
    ways = {
        name: {
            demonstration(
                {"desc": desc, "max_steps": 8},
                noise=0.0,
                rng=np.random.default_rng(seed),
                sight=3,
                strolls=True,
            )[0][1]
            for seed in range(40)
        }
        for name, desc in {"far": far, "near": near}.items()
    }
    assert ways == {"far": {"Right", "Down"}, "near": {"Right"}}


def test_random_starts_make_many_more_lakes_of_the_same_split() -> None:
    corners, scattered = (
        [tuple(lake_map("train", index, random_start=where)) for index in range(1500)]
        for where in (False, True)
    )
    assert len(set(scattered)) > 2 * len(set(corners))
    for rows in scattered:
        assert split_of(rows) == "train"
        assert ("".join(rows).count("S"), "".join(rows).count("G")) == (1, 1)


def test_another_start_does_not_move_a_lake_to_another_split() -> None:
    for index in range(200):
        rows = lake_map("test", index)
        cells = "".join(rows)
        place = cells.index("F")
        moved = f"F{cells[1:place]}S{cells[place + 1 :]}"
        assert split_of([moved[row * 4 : row * 4 + 4] for row in range(4)]) == "test"


def test_a_demonstration_is_a_function_of_its_generator() -> None:
    (task,) = lake_tasks("train", 1, is_slippery=True)
    first, second = (demonstration(task, noise=0.3, rng=np.random.default_rng(5)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("noise", [-0.1, 1.1, float("nan")])
def test_noise_that_is_no_probability_is_refused(noise: float) -> None:
    (task,) = lake_tasks("train", 1)
    with pytest.raises(ConfigError, match="`noise` is"):
        demonstration(task, noise=noise, rng=np.random.default_rng(0))


@pytest.mark.parametrize("sight", [-1, 2.5, "far", True])
def test_sight_that_is_no_number_of_moves_is_refused(sight: Any) -> None:
    task = lake_tasks("train", 1)[0]
    with pytest.raises(ConfigError, match="`sight` is"):
        demonstration(task, noise=0.0, rng=np.random.default_rng(0), sight=sight)
