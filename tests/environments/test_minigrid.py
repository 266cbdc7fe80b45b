"""MiniGrid and BabyAI in words: the view is MiniGrid's own, its bot wins, and nothing is printed."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("minigrid")

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.environments.checks import check_env
from rllm.environments.games import GameEnv
from rllm.environments.games.game import SPLITS, drawn_instance
from rllm.environments.minigrid import MOVES, GridLevel, GridLevelEnv, has_expert
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError

PLAYED = [
    *(
        "babyai/GoToRedBall",
        "babyai/GoToLocalS5N2",
        "babyai/OpenDoor",
        "babyai/PickupDist",
        "babyai/PutNextS4N1",
    ),
    *(
        "minigrid/Empty-Random-5x5",
        "minigrid/LavaCrossingS9N1",
        "minigrid/FourRooms",
        "minigrid/MultiRoom-N2-S4",
    ),
]


def env_of(name: str, index: int = 0, split: str = "train") -> GameEnv:
    env = world_named(name).env_class.from_dict(world_named(name).tasks(split, 1, start=index)[0])
    assert isinstance(env, GameEnv)
    return env


@pytest.mark.parametrize("name", PLAYED)
def test_the_expert_scores_one_and_without_its_last_move_nothing(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world = world_named(name)
    assert world.demonstrate is not None
    for split in SPLITS:
        for task in world.tasks(split, 4):
            turns = world.demonstrate(task, noise=0.0, rng=np.random.default_rng(0))
            env = world.env_class.from_dict(task)
            env.reset()
            rewards = [env.step(move)[1] for _, move in turns]
            assert rewards == [*[0.0] * (len(turns) - 1), 1.0]
            env.reset()
            assert sum(env.step(move)[1] for _, move in turns[:-1]) == 0.0
    assert capsys.readouterr().out == ""


def test_a_mistaken_expert_plays_on(subtests: pytest.Subtests) -> None:
    for name in PLAYED:
        with subtests.test(name=name):
            world, rng = world_named(name), np.random.default_rng(1)
            assert world.demonstrate is not None
            for task in world.tasks("train", 3):
                turns = world.demonstrate(task, noise=0.4, rng=rng)
                assert all(move in MOVES for _, move in turns)


@pytest.mark.parametrize("name", PLAYED[:4])
def test_the_contract_of_environments_holds(name: str) -> None:
    env = env_of(name)
    for action in ("forward", "Left", "fly", 3):
        check_env(env, action)


def test_splits_share_no_level_whatever_its_seed() -> None:
    drawn = {
        split: {
            str(
                GridLevel.identity(drawn_instance(GridLevel, split, index, level="BabyAI-GoToRedBallNoDists"))
            )
            for index in range(25)
        }
        for split in SPLITS
    }
    for split, levels in drawn.items():
        assert len(levels) > 10
        assert not levels & set().union(*(drawn[other] for other in SPLITS if other != split))


def test_what_is_in_view_is_told_in_words() -> None:
    env = GridLevelEnv({"level": "MiniGrid-Empty-5x5", "seed": 1}, show_rules=False)
    lines = env.reset()[0].splitlines()
    assert lines[0] == "Mission: get to the green goal square"
    assert lines[-2:] == ["In view: goal 2 ahead, 2 right", "In your hands: nothing"]
    grid = [line.split() for line in lines[1:8]]
    assert grid[6][3] == "^"
    assert grid[4][5] == "G"
    assert env.step("forward")[0].splitlines()[-2] == "In view: goal 1 ahead, 2 right"
    assert env.step("right")[0].splitlines()[-2] == "In view: goal 2 ahead, 1 left"


def test_what_is_no_word_of_the_game_changes_nothing() -> None:
    env = env_of("babyai/GoToObj")
    env.reset()
    board = env.game.board()
    for move in ("go forward", "", "forward forward"):
        observation, reward, _, info = env.step(move)
        assert (env.game.board(), reward, info["valid"]) == (board, 0.0, False)
        assert board in observation
    assert info["outcome"] == "lost"


def test_levels_that_nobody_knows_how_to_win_have_no_expert() -> None:
    assert has_expert("BabyAI-GoToRedBall")
    assert has_expert("MiniGrid-LavaCrossingS9N1")
    for name in ("babyai/KeyInBox", "minigrid/Fetch-5x5-N2"):
        world = world_named(name)
        assert world.demonstrate is None
        assert world.env_class.from_dict(world.tasks("test", 1)[0]).reset()[0]


def test_a_bot_that_would_plan_for_ever_gives_up_and_its_level_is_not_drawn() -> None:
    game = GridLevel({"level": "BabyAI-UnlockToUnlock", "seed": 4})
    while not game.expert_gave_up:
        assert not game.is_won
        game.play(game.expert_move())
    world = world_named("babyai/UnlockToUnlock")
    assert world.demonstrate is not None
    for task in world.tasks("train", 2):
        turns = world.demonstrate(task, noise=0.3, rng=np.random.default_rng(0))
        assert turns


def test_an_unknown_level_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean `BabyAI-GoToRedBall`"):
        world_named("babyai/GoToRedBal").tasks("train", 1)
    with pytest.raises(ConfigError, match="MiniGrid has no level `MiniGrid-xyzzy`"):
        world_named("minigrid/xyzzy").tasks("train", 1)


def test_without_the_map_the_player_sees_the_mission_and_a_list() -> None:
    world = world_named("babyai/GoToLocalS6N2")
    instance = {"level": "BabyAI-GoToLocalS6N2", "seed": 3}
    mission, things = GridLevelEnv({**instance, "show_map": False}, show_rules=False).reset()[0].split("\n")
    assert mission.startswith("go to ")
    with_map = GridLevelEnv(instance, show_rules=False).reset()[0]
    assert f"Mission: {mission}" in with_map
    assert f"In view: {things}" in with_map
    assert world.tasks("train", 1, show_map=False)[0]["show_map"] is False
    with pytest.raises(ConfigError, match="show_map"):
        GridLevelEnv({**instance, "show_map": "no"})


def test_the_red_ball_is_met_by_chance_seldom_and_never_by_its_experts_habit(tmp_path: Path) -> None:
    config = training_config("babyai-red-ball", None, ("evaluation.num_tasks=16",))
    run = build_run(config, tmp_path / "run")
    world, tasks = world_named("babyai/GoToRedBallNoDists"), list(run.tasks.heldout)
    assert len(set(map(world.identity, tasks))) == 16
    assert world.baselines is not None
    means = {name: np.mean(returns) for name, returns in world.baselines(tasks).items()}
    assert means.pop("optimum") == 1.0
    assert max(means.values()) < 0.25
    assert means["always left"] == 0.0
    turns = world.expert(config.warm_start.expert_args)(run.tasks.train[0], 1.0, np.random.default_rng(0))
    assert {move for _, move in turns} == {"left"}
    assert turns[0][0].startswith("go to the red ball\n")
