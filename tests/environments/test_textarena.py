"""TextArena's games for one player: a win pays 1, a share of the way nothing, and refusals have their
reasons.
"""

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

if find_spec("textarena") is None:  # importing it takes long, and every worker of pytest reads this file
    pytest.skip("the extra `games` is not installed", allow_module_level=True)

from rllm.environments.checks import check_env
from rllm.environments.games import GameEnv
from rllm.environments.games.game import SPLITS, drawn_instance
from rllm.environments.textarena import REFUSED, SLOW, TURNS, TextArenaGame
from rllm.environments.textarena_experts import EXPERTS
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError

QUICK = sorted(TURNS.keys() - SLOW)


def env_of(title: str, index: int = 0, **arguments: Any) -> GameEnv:
    env = world_named(f"textarena/{title}")
    task = env.tasks("test", 1, start=index, **arguments)[0]
    made = env.env_class.from_dict(task)
    assert isinstance(made, GameEnv)
    return made


@pytest.mark.parametrize("title", sorted(EXPERTS))
def test_the_expert_scores_one_and_without_its_last_move_nothing(title: str) -> None:
    world = world_named(f"textarena/{title}")
    assert world.demonstrate is not None
    for split in SPLITS:
        for task in world.tasks(split, 3):
            turns = world.demonstrate(task, noise=0.0, rng=np.random.default_rng(0))
            env = world.env_class.from_dict(task)
            assert env.reset()[0] == turns[0][0]
            rewards = [env.step(move)[1] for _, move in turns]
            assert rewards == [*[0.0] * (len(turns) - 1), 1.0]


@pytest.mark.parametrize("title", QUICK)
def test_junk_is_an_invalid_move_and_never_pays(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    env = env_of(title)
    assert env.reset()[0].strip()
    infos = []
    for junk in ("[junk]", "I would say [1]", "[[", "", "[-1 -1]"):
        observation, reward, terminated, info = env.step(junk)
        assert reward == 0.0
        infos.append(info)
        if terminated:
            break
        assert observation.startswith("Invalid move: ")
    assert infos[-1]["outcome"] == "lost"
    assert infos[-1]["invalid_moves"] == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("title", QUICK)
def test_the_contract_of_environments_holds(title: str) -> None:
    before = random.getstate()
    env = env_of(title)
    for action in ("[junk]", "[1]", "[Up]", "[1 2]", 5):
        check_env(env, action)
    assert random.getstate() == before


def test_chance_belongs_to_the_game_alone() -> None:
    def boards(disturb: bool) -> list[str]:
        env, other = env_of("2048"), env_of("2048", index=1)
        other.reset()
        seen = [env.reset()[0]]
        for move in ("[Up]", "[Left]", "[Down]", "[Right]", "[Up]", "[Left]"):
            if disturb:
                random.seed(4)
                if other.step("[Down]")[2]:
                    other.reset()
            seen.append(env.step(move)[0])
        return seen

    assert boards(disturb=False) == boards(disturb=True)


def test_a_mine_ends_the_game() -> None:
    game = TextArenaGame({"title": "Minesweeper", "seed": 1})
    game.play("[4 4]")
    row, column = next(
        (row, column)
        for row, cells in enumerate(game._env.grid)
        for column, cell in enumerate(cells)
        if cell == -1
    )
    assert "mine" in game.play(f"[{row} {column}]")
    assert game.is_lost
    assert not game.is_won


def test_a_reward_that_is_text_is_no_win() -> None:
    game = TextArenaGame({"title": "ThreeCardMonte", "seed": 1})
    game._done, game._final_reward = True, "Bad action."
    assert game.is_lost


def test_every_shuffle_of_the_fifteen_puzzle_can_be_ordered() -> None:
    for index in range(8):
        board = TextArenaGame(drawn_instance(TextArenaGame, "train", index, title="FifteenPuzzle"))._env.board
        # Walk the gap to its corner: what is left is a permutation of 15 tiles, which has to be even.
        cells = [[0 if cell is None else cell for cell in row] for row in board]
        row, column = next((r, c) for r in range(4) for c in range(4) if cells[r][c] == 0)
        for following in [*[(r, column) for r in range(row + 1, 4)], *[(3, c) for c in range(column + 1, 4)]]:
            cells[row][column], cells[following[0]][following[1]] = cells[following[0]][following[1]], 0
            row, column = following
        tiles = [cell for line in cells for cell in line if cell]
        assert sum(tiles[i] > tiles[j] for j in range(15) for i in range(j)) % 2 == 0


def test_what_cannot_be_played_here_is_refused_with_the_reason(subtests: pytest.Subtests) -> None:
    for title in sorted(REFUSED):
        with (
            subtests.test(title=title),
            pytest.raises(ConfigError, match=f"textarena/{title} cannot be played: "),
        ):
            world_named(f"textarena/{title}").tasks("test", 1)


def test_an_unknown_game_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean `Mastermind`"):
        world_named("textarena/Mastermnd").tasks("test", 1)
    with pytest.raises(ConfigError, match="seed"):
        TextArenaGame({"title": "2048", "seed": -1})
