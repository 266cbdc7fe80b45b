"""FrozenLake moves as Gymnasium's, shows a grid of text, and takes nothing but the four words for a move."""

from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv as GymFrozenLake
from hypothesis import given
from hypothesis import strategies as st

from rllm.environments.base import CUT_OFF, unpack_step
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.environments.lake_maps import lake_map
from rllm.environments.lake_values import MOVES
from rllm.errors import AgentError, ConfigError
from rllm.types import Action


def state_of(env: FrozenLakeEnv) -> int:
    row, column = env.position
    return row * len(env.desc[0]) + column


def shown(rows: Any, state: int) -> str:
    """The grid as a reader of Gymnasium's state would draw it, written apart from the code under test."""
    cells = [list(row.replace("S", "F")) for row in rows]
    row, column = divmod(state, len(rows[0]))
    cells[row][column] = {"F": "P", "H": "X", "G": "W"}[cells[row][column]]
    return "\n".join("".join(line) for line in cells)


@pytest.mark.parametrize("is_slippery", [False, True])
def test_random_episodes_are_gymnasiums_own_step_by_step(is_slippery: bool) -> None:
    rng = np.random.default_rng(0)
    for index in range(150):
        size = 4 + index % 5
        env = FrozenLakeEnv(size=size, seed=index, is_slippery=is_slippery, max_steps=60)
        gym = GymFrozenLake(desc=list(env.desc), is_slippery=is_slippery)
        for episode in range(2):
            seed = 1000 * index + episode
            state, _ = gym.reset(seed=seed)
            observation, _ = env.reset(seed=seed)
            terminated, num_steps = False, 0
            while not terminated and num_steps < 60:
                assert state_of(env) == state
                assert observation == shown(env.desc, state)
                move = int(rng.integers(4))
                before = state
                state, reward, terminated, _, _ = gym.step(move)
                observation, ours, done, info = env.step(MOVES[move])
                num_steps += 1
                cut_off = not terminated and num_steps == 60
                assert (ours, done) == (reward, terminated or cut_off)
                assert info.get(CUT_OFF, False) == cut_off
                assert (info["effective"], info["valid"]) == (state != before, True)


def test_slips_are_a_function_of_the_seed_and_the_moves() -> None:
    def walk(seed: int | None, env: FrozenLakeEnv) -> list[str]:
        seen = [env.reset(seed=seed)[0]]
        done = False
        while not done:
            observation, _, done, _ = env.step("Down")
            seen.append(observation)
        return seen

    rows = ["SFFF", "FFFF", "FFFF", "FFFG"]
    make = lambda seed=0: FrozenLakeEnv(rows, is_slippery=True, max_steps=20, seed=seed)  # noqa: E731
    used = make()
    walk(1, used)
    assert walk(5, used) == walk(5, make(seed=9)) == walk(5, make())
    assert len({tuple(walk(seed, used)) for seed in range(10)}) > 5
    assert walk(None, make()) == walk(None, make())
    again = make()
    assert walk(None, again) != walk(None, again)


def test_a_whole_episode_reads_as_text() -> None:
    env = FrozenLakeEnv(["SFF", "HFH", "FFG"])
    assert env.reset() == ("PFF\nHFH\nFFG", {})
    assert env.step("Right")[0] == "FPF\nHFH\nFFG"
    assert env.step("Down")[0] == "FFF\nHPH\nFFG"
    assert env.step("Down")[0] == "FFF\nHFH\nFPG"
    assert env.step("Right") == ("FFF\nHFH\nFFW", 1.0, True, {"effective": True, "valid": True})


def test_a_hole_ends_the_episode_without_a_reward() -> None:
    env = FrozenLakeEnv(["SF", "HG"])
    env.reset()
    assert env.step(Action("Down")) == ("FF\nXG", 0.0, True, {"effective": True, "valid": True})


def test_a_wall_spends_the_turn_and_is_a_valid_move() -> None:
    env = FrozenLakeEnv(["SF", "HG"])
    start, _ = env.reset()
    assert env.step("Left") == (start, 0.0, False, {"effective": False, "valid": True})


@pytest.mark.parametrize("word", ["Right", "right", "RIGHT", Action("Right"), Action("rIgHt")])
def test_the_four_words_count_in_any_case(word: Any) -> None:
    env = FrozenLakeEnv(["SF", "HG"])
    env.reset()
    assert env.step(word)[0] == "FP\nHG"


@given(
    st.one_of(
        st.text().filter(lambda text: text.lower() not in {"up", "down", "left", "right"}),
        st.sampled_from(
            [None, 2, 1.5, True, ["Right"], {"move": "Right"}, b"Right", Action(2), Action(None)]
        ),
        st.sampled_from(
            [" Right", "Right.", "Right Right", "Go Right", "R", "Action: Right", Action("Right\n")]
        ),
    )
)
def test_anything_else_spends_the_turn_and_moves_nothing(action: Any) -> None:
    env = FrozenLakeEnv(["SF", "HG"], max_steps=2)
    start, _ = env.reset()
    assert env.step(action) == (start, 0.0, False, {"effective": False, "valid": False})
    ended = {"effective": False, "valid": False, CUT_OFF: True}
    assert env.step(action) == (start, 0.0, True, ended)


def test_the_last_move_cuts_off_unless_it_ends_the_episode() -> None:
    env = FrozenLakeEnv(["SF", "HG"], max_steps=2)
    env.reset()
    env.step("Right")
    arrived = unpack_step(env, env.step("Down"))
    assert (arrived.reward, arrived.done, arrived.truncated) == (1.0, True, False)
    env.reset()
    env.step("Right")
    cut_off = unpack_step(env, env.step("Left"))
    assert (cut_off.reward, cut_off.done, cut_off.truncated) == (0.0, True, True)


def test_a_given_map_is_still_there_after_a_reset() -> None:
    rows = ("SFH", "FFG")
    env = FrozenLakeEnv(rows, size=8, seed=3, max_steps=1)
    for seed in (None, 1, 2):
        assert env.reset(seed=seed)[0] == "PFH\nFFG"
        assert env.desc == rows
        env.step("Right")


@pytest.mark.parametrize("ending", ["Down", "Left"], ids=["terminated", "truncated"])
def test_there_is_no_step_outside_an_episode(ending: str) -> None:
    env = FrozenLakeEnv(["SF", "HG"], max_steps=1)
    with pytest.raises(AgentError, match="call reset first"):
        env.step("Right")
    env.reset()
    env.step(ending)
    with pytest.raises(AgentError, match="call reset first"):
        env.step("Right")


def test_two_environments_on_one_map_share_no_state() -> None:
    first, second = FrozenLakeEnv(), FrozenLakeEnv()
    start, _ = first.reset()
    second.reset()
    for move in ("Right", "Down"):
        first.step(move)
    assert second.step("nothing")[0] == start


def test_a_task_rebuilds_the_environment_whatever_its_row_is_called() -> None:
    task = {"task_id": "lake", "uid": "7_5_0.7", "index": 3, "size": 5, "p": 0.7, "seed": 7, "split": "test"}
    env = FrozenLakeEnv.from_dict(task)
    assert list(env.desc) == lake_map("test", 7, size=5, p=0.7)
    assert FrozenLakeEnv.from_dict({}).desc == FrozenLakeEnv().desc
    assert FrozenLakeEnv.from_dict({"desc": ["SF", "HG"]}).desc == ("SF", "HG")


@pytest.mark.parametrize(
    ("key", "mend"),
    [("is_slipery", "did you mean `is_slippery`"), ("max_step", "`max_steps`"), ("zzz", "it takes size")],
)
def test_an_unknown_key_of_a_task_is_refused(key: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=f"does not know `{key}`.*{mend}"):
        FrozenLakeEnv.from_dict({"size": 4, key: 1})


def test_an_impossible_argument_is_refused_with_its_value(subtests: pytest.Subtests) -> None:
    for arguments, named in [
        ({"size": 2}, r"`size`.*2.*3.*8 cells"),
        ({"size": 9}, r"`size` is 9"),
        ({"size": "4"}, r"`size` is '4'"),
        ({"size": 8}, r"`max_steps`.*8.*14"),
        ({"max_steps": 5}, r"`max_steps`.*5.*6"),
        ({"max_steps": None}, r"`max_steps` is None"),
        ({"p": 0.0}, r"`p` is 0\.0"),
        ({"p": 1.5}, r"`p` is 1\.5"),
        ({"p": float("nan")}, r"`p` is nan"),
        ({"split": "dev"}, r"`split` is 'dev'; FrozenLake has train, validation, test"),
        ({"seed": -1}, r"`seed` is -1"),
        ({"seed": [1]}, r"`seed` is \[1\]"),
        ({"desc": "SFFG"}, r"`desc` is 'SFFG'"),
        ({"desc": 4}, r"`desc` is 4"),
        ({"desc": [1, 2]}, r"`desc` is \[1, 2\]"),
        ({"desc": []}, r"`desc` is \[\]"),
        ({"desc": ["SF", "HGF"]}, r"equally long"),
        ({"desc": ["SS", "HG"]}, r"one S"),
        ({"desc": ["SF", "HF"]}, r"at least one G"),
        ({"desc": ["SF", "xG"]}, r"made of F and H"),
        ({"desc": ["SF", "HG"], "max_steps": 0}, r"`max_steps` is 0"),
    ]:
        with subtests.test(arguments=arguments, named=named), pytest.raises(ConfigError, match=named):
            FrozenLakeEnv(**arguments)
