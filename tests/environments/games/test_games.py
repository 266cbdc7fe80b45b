"""What holds for every game: nothing but a win pays, nothing illegal moves anything, experts win, splits are
apart.
"""

import json
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.environments.base import CUT_OFF
from rllm.environments.checks import check_env, lost_in_json
from rllm.environments.games import Game, GameEnv
from rllm.environments.games.game import SPLITS, drawn_instance, split_of
from rllm.environments.worlds import WORLDS, world_named
from rllm.errors import AgentError, ConfigError
from rllm.types.episode import Action

NAMES = sorted(name for name, home in WORLDS.items() if ".games." in home)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("2048", {"target": 64, "max_turns": 80}),
    ("connect-four", {"opponent": "careful"}),
    ("guess-number", {"max_number": 20, "length": 15}),
    ("hanoi", {"num_disks": 5, "max_turns": 40}),
    ("lights-out", {"size": 4, "max_turns": 20}),
    ("mastermind", {"length": 3, "num_digits": 4}),
    ("maze", {"size": 3}),
    ("dark-maze", {"size": 3}),
    ("minesweeper", {"size": 6, "num_mines": 5}),
    ("n-queens", {"size": 7}),
    ("sokoban", {"num_boxes": 1, "size": 5, "num_walls": 0}),
    ("tic-tac-toe", {"opponent": "perfect"}),
]
MANY = 2**62
CHANCE = ("blackjack",)
"""Nobody wins them whenever they like, and a loss costs as much as a win pays."""


def no_noise() -> np.random.Generator:
    return np.random.default_rng(0)


def env_class_of(name: str) -> type[GameEnv]:
    env_class = world_named(name).env_class
    assert issubclass(env_class, GameEnv)
    return env_class


def game_of(name: str) -> type[Game]:
    return env_class_of(name).game_class


def env_of(name: str, split: str = "train", index: int = 0, **arguments: Any) -> GameEnv:
    return env_class_of(name).from_dict(world_named(name).tasks(split, 1, start=index, **arguments)[0])


def shown(name: str, task: dict[str, Any], noise: float, rng: np.random.Generator) -> list[str]:
    """The moves of the expert."""
    demonstrate = world_named(name).demonstrate
    assert demonstrate is not None
    return [str(answer) for _, answer in demonstrate(task, noise=noise, rng=rng)]


def played(env: GameEnv, moves: list[str]) -> list[tuple[Any, ...]]:
    """The whole episode: what the reset shows, and all that each move comes to until it is over."""
    seen: list[tuple[Any, ...]] = [env.reset()]
    for move in moves:
        seen.append(env.step(move))
        if seen[-1][2]:
            break
    return seen


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "arguments"), [each for each in VARIANTS if each[0] not in CHANCE])
def test_the_expert_scores_one_on_every_task_and_without_its_last_move_on_none(
    name: str, arguments: dict[str, Any], split: str
) -> None:
    world = world_named(name)
    tasks = world.tasks(split, 4, **arguments)
    assert [task["task_id"] for task in tasks] == [f"{name}-{split}-{index}" for index in range(4)]
    assert world.demonstrate is not None
    for task in json.loads(json.dumps(tasks)):
        turns = world.demonstrate(task, noise=0.0, rng=no_noise())
        env = world.env_class.from_dict(task)
        assert isinstance(env, GameEnv)
        assert env.reset()[0] == turns[0][0]
        rewards: list[float] = []
        outcome = ""
        for position, (_, move) in enumerate(turns, start=1):
            observation, reward, done, info = env.step(move)
            rewards.append(reward)
            assert info["valid"]
            assert CUT_OFF not in info
            assert done == (position == len(turns))
            if not done:
                assert observation == turns[position][0]
                assert info["outcome"] == "playing"
            outcome = info["outcome"]
        assert rewards == [*[0.0] * (len(turns) - 1), 1.0]
        assert outcome == "won"
        env.reset()
        assert sum(env.step(move)[1] for _, move in turns[:-1]) == 0.0


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_no_instance_is_in_two_splits(name: str, arguments: dict[str, Any]) -> None:
    drawn = {
        split: {json.dumps(drawn_instance(game_of(name), split, index, **arguments)) for index in range(8)}
        for split in SPLITS
    }
    for split, instances in drawn.items():
        assert len(instances) > 2
        assert all(split_of(game_of(name), json.loads(each)) == split for each in instances)
        assert not instances & set().union(*(drawn[other] for other in SPLITS if other != split))


@pytest.mark.parametrize("name", ["hanoi", "sudoku", "tic-tac-toe", "lights-out"])
def test_evaluation_tasks_repeat_no_instance_while_there_are_others(name: str) -> None:
    world = world_named(name)
    tasks = world.tasks("test", 100)
    named = [world.identity(task) for task in tasks]
    distinct = len(set(named))
    assert len(set(named[:distinct])) == distinct, "it repeats only when all have come up"
    assert named == [world.identity(task) for task in world.tasks("test", 100)]
    assert world.identity(world.tasks("test", 1, start=70)[0]) == named[70]
    assert distinct == {"hanoi": 100, "sudoku": 100, "tic-tac-toe": 75, "lights-out": 100}[name]


SYMMETRIC: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (
        "hanoi",
        {"disks": "AAB", "goal": "CCC"},
        {"disks": "CCA", "goal": "BBB"},
        {"disks": "AAB", "goal": "AAA"},
    ),
    (
        "lights-out",
        {"rows": ["OO.", "...", "..."]},
        {"rows": ["...", "..O", "..O"]},
        {"rows": [".O.", "...", ".O."]},
    ),
    ("n-queens", {"queens": [0, *[-1] * 4]}, {"queens": [*[-1] * 4, 4]}, {"queens": [1, *[-1] * 4]}),
    (
        "minesweeper",
        {"size": 3, "mines": [[0, 0]], "opened": [1, 1]},
        {"size": 3, "mines": [[0, 2]], "opened": [1, 1]},
        {"size": 3, "mines": [[0, 1]], "opened": [1, 1]},
    ),
    (
        "sudoku",
        {"rows": ["12c4", "3412", "2143", "4321"]},
        {"rows": ["4321", "1234", "3412", "214p"]},
        {"rows": ["12c4", "3412", "2143", "432p"]},
    ),
    (
        "tic-tac-toe",
        {"board": "O........", "seed": 1, "opponent": "random"},
        {"board": "......O..", "seed": 2, "opponent": "random"},
        {"board": "....O....", "seed": 1, "opponent": "random"},
    ),
    (
        "connect-four",
        {"played": "12", "seed": 1, "opponent": "random"},
        {"played": "76", "seed": 5, "opponent": "random"},
        {"played": "21", "seed": 1, "opponent": "random"},
    ),
    *(
        (
            name,
            {"rows": ["#####", "#P.G#", "#.###", "#...#", "#####"]},
            {"rows": ["#####", "#...#", "###.#", "#G.P#", "#####"]},
            {"rows": ["#####", "#G.P#", "#.###", "#...#", "#####"]},
        )
        for name in ("maze", "dark-maze")
    ),
    (
        "sokoban",
        {"rows": ["#####", "#@$.#", "#___#", "#___#", "#####"]},
        {"rows": ["#####", "#__.#", "#__$#", "#__@#", "#####"]},
        {"rows": ["#####", "#@$_#", "#__.#", "#___#", "#####"]},
    ),
    ("sokoban", *({"rows": ["######", row, "######"]} for row in ("#@$._#", "#@$._#", "#@_$.#"))),
    (
        "blackjack",
        {"player": ["K", "2"], "dealer": ["5", "A"], "deck": ["7"]},
        {"player": ["2", "J"], "dealer": ["5", "3"], "deck": ["8"]},
        {"player": ["2", "J"], "dealer": ["6", "3"], "deck": ["8"]},
    ),
]
"""An instance, another one that is the same, and one that is not."""


@pytest.mark.parametrize(("name", "one", "same", "other"), SYMMETRIC)
def test_what_changes_nothing_makes_no_new_instance(
    name: str, one: dict[str, Any], same: dict[str, Any], other: dict[str, Any]
) -> None:
    identity = world_named(name).identity
    if name == "sudoku":  # instances write a dot where a player reads a name
        one, same, other = (
            {"rows": ["".join(each if each.isdigit() else "." for each in row) for row in given["rows"]]}
            for given in (one, same, other)
        )
    assert identity({"instance": one}) == identity({"instance": same}) != identity({"instance": other})
    assert split_of(game_of(name), one) == split_of(game_of(name), same)


def test_the_contract_of_environments_holds(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            env = env_of(name)
            env.reset()
            check_env(env, env.game.expert_move())
            check_env(env, "nonsense")
            check_env(env, Action(action=7))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(index=st.integers(0, 50), choices=st.lists(st.integers(0, 10**6), max_size=30), seed=st.integers(0, 9))
def test_an_episode_is_a_function_of_task_and_moves(
    name: str, index: int, choices: list[int], seed: int
) -> None:
    env = env_of(name, index=index)
    observation, _ = env.reset(seed=seed)
    moves: list[str] = []
    for choice in choices:
        legal = env.game.moves()
        assert len(set(legal)) == len(legal) > 0
        moves.append(legal[choice % len(legal)])
        observation, reward, done, info = env.step(moves[-1])
        assert info["valid"], f"{moves[-1]} was said to be legal: {observation}"
        assert reward in (0.0, 1.0, env.game.losing_pays)
        assert (reward == 1.0) == env.game.is_won == (info["outcome"] == "won")
        assert lost_in_json([observation, info]) is None
        if done:
            break
    again = env_of(name, index=index)
    assert played(env, moves) == played(again, moves)


NEARLY_MOVES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=string.digits + " ,", max_size=8),
    st.text(alphabet=string.ascii_letters, min_size=5, max_size=5),
    st.sampled_from(
        [
            *(
                "",
                "up!",
                "Up Down",
                "go Up",
                "1 2 3",
                "0 0",
                "99 99",
                "-1",
                "1.0",
                "A A",
                "A D",
                "AB",
                "Hit me",
            ),
            *(
                "<answer>Up</answer>",
                "[1 2]",
                "１",
                "²",
                "1\n2",
                "0 1",
                "Stand Hit",
                "eight",
                "１ ２",
                "ＵＰ",
            ),
        ]
    ),
)
"""Text that is no move, or one by accident."""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(
    index=st.integers(0, 20), moves=st.lists(NEARLY_MOVES, min_size=1, max_size=4), ahead=st.integers(0, 3)
)
def test_what_is_no_legal_move_changes_nothing_and_is_counted(
    name: str, index: int, moves: list[str], ahead: int
) -> None:
    env = env_of(name, index=index, max_invalid=len(moves) + 1)
    env.reset()
    for _ in range(ahead):
        if not (env.game.is_won or env.game.is_lost):
            env.step(env.game.expert_move())
    num_invalid = 0
    for move in moves:
        if env.game.is_won or env.game.is_lost or env._over:
            break
        before, expert_before = env.game.board(), env.game.expert_move()
        observation, reward, _, info = env.step(move)
        if info["valid"]:
            continue
        num_invalid += 1
        assert (env.game.board(), env.game.expert_move()) == (before, expert_before)
        assert observation.startswith("Invalid move: ")
        assert before in observation
        assert (reward, info["invalid_moves"]) == (env.game.losing_pays if env._over else 0.0, num_invalid)


@pytest.mark.parametrize("name", NAMES)
def test_junk_never_scores_and_the_last_invalid_move_loses(name: str) -> None:
    for index in range(5):
        env = env_of(name, index=index)
        rewards, infos = zip(*[each[1::2] for each in played(env, ["I would go Up"] * 9)[1:]], strict=True)
        assert rewards == (0.0, 0.0, env.game.losing_pays)
        assert [info["outcome"] for info in infos] == ["playing", "playing", "lost"]
        assert [info["invalid_moves"] for info in infos] == [1, 2, 3]
        with pytest.raises(AgentError, match="reset"):
            env.step("Up")


@pytest.mark.parametrize("name", NAMES)
def test_turns_run_out(name: str) -> None:
    env = env_of(name)
    env = type(env)(env._instance, max_turns=1, max_invalid=9)
    env.reset()
    _, reward, done, info = env.step("nonsense")
    assert (reward, done, info[CUT_OFF], info["outcome"]) == (
        env.game.losing_pays,
        True,
        True,
        "out_of_turns",
    )


@pytest.mark.parametrize("name", NAMES)
def test_with_shaping_nothing_but_a_win_is_above_zero(name: str) -> None:
    if env_of(name).game.progress() is None:
        with pytest.raises(ConfigError, match="progress"):
            env_of(name, shaping=0.5)
        return
    for index in range(3):
        task = world_named(name).tasks("train", 1, start=index, shaping=0.5)[0]
        env, moves = env_class_of(name).from_dict(task), shown(name, task, 0.0, no_noise())
        assert [each[1] for each in played(env, moves)[1:]] == [*[0.0] * (len(moves) - 1), 1.0]
        lost = played(env, [moves[0], *["nonsense"] * 3])
        if len(moves) > 1:
            assert -0.5 <= lost[-1][1] <= 0.0


def test_a_mistaken_expert_plays_on_with_legal_moves(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            rng = np.random.default_rng(3)
            for task in world_named(name).tasks("train", 4):
                seen = played(env_class_of(name).from_dict(task), shown(name, task, 0.5, rng))
                assert all(each[3]["valid"] for each in seen[1:])
                assert seen[-1][2]


@pytest.mark.parametrize(("habit", "place"), [("first", 0), ("last", -1)])
def test_an_expert_with_a_habit_plays_the_same_bad_move_and_no_other(habit: str, place: int) -> None:
    world, rng = world_named("sudoku"), np.random.default_rng(3)
    assert world.demonstrate is not None
    counts = {"expert": 0, "habit": 0}
    for task in world.tasks("train", 20):
        env = env_class_of("sudoku").from_dict(task)
        env.reset()
        for _, move in world.demonstrate(task, noise=0.5, rng=rng, habit=habit):
            bad, good = env.game.moves()[place], env.game.expert_move()
            assert move in (bad, good)
            counts["expert" if move == good else "habit"] += 1
            env.step(move)
    assert min(counts.values()) > 10
    with pytest.raises(ConfigError, match="first or last"):
        world.demonstrate(world.tasks("train", 1)[0], noise=0.5, rng=rng, habit="middle")


def test_an_expert_may_have_its_habit_for_whole_games() -> None:
    world, rng = world_named("guess-number"), np.random.default_rng(3)
    assert world.demonstrate is not None
    num_bad = 0
    for task in world.tasks("train", 200):
        env = env_class_of("guess-number").from_dict(task)
        env.reset()
        follows = {"expert": True, "habit": True}
        for _, move in world.demonstrate(task, noise=0.7, rng=rng, habit="first", whole_games=True):
            follows["expert"] &= move == env.game.expert_move()
            follows["habit"] &= move == env.game.moves()[0]
            env.step(move)
        assert any(follows.values())
        num_bad += not follows["expert"]
    assert num_bad == pytest.approx(200 * 0.7, abs=25)


@pytest.mark.parametrize("name", NAMES)
def test_rules_stand_above_the_first_board_and_nowhere_else(name: str) -> None:
    env = env_of(name)
    first, _ = env.reset()
    assert first == f"{env.game.rules} You have {env.max_turns} turns.\n\n{env.game.board()}"
    assert "Answer with" in env.game.rules
    assert env.game.rules not in env.step(env.game.expert_move())[0]
    quiet = env_of(name, show_rules=False)
    assert quiet.reset()[0] == env_of(name).game.board()


def test_a_task_that_cannot_be_honoured_is_refused(subtests: pytest.Subtests) -> None:
    for change, complaint in [
        ({"max_turn": 3}, "did you mean `max_turns`"),
        ({"splitt": "train"}, "did you mean `split`"),
        ({"colour": 3}, "it takes"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": True}, "max_turns"),
        ({"max_invalid": 0}, "max_invalid"),
        ({"shaping": 2}, "shaping"),
        ({"show_rules": "no"}, "show_rules"),
        ({"split": "dev"}, "split"),
        ({"index": -1}, "index"),
        ({"index": 0.5}, "index"),
        ({"instance": {}}, "does not know `split`"),
    ]:
        with subtests.test(change=change, complaint=complaint):
            for name in NAMES:
                with pytest.raises(ConfigError, match=complaint):
                    env_class_of(name).from_dict({"split": "train", "index": 0} | change)


def test_tasks_without_an_instance_are_refused() -> None:
    for task, complaint in (
        ({}, "needs `split` and `index`"),
        ({"instance": 3}, "must be an object"),
        ({"instance": {}}, "lacks `rows`"),
        ({"instance": {"row": []}}, "did you mean `rows`"),
        ({"instance": {"rows": ["G.P", "###", "P.."]}}, "one P and one G"),
        ({"instance": {"rows": ["G#P"]}}, "no way leads"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            env_class_of("maze").from_dict(task)
    with pytest.raises(ConfigError, match="over"):
        env_class_of("sokoban").from_dict({"instance": {"rows": ["#####", "#@*_#", "#####"]}})
    with pytest.raises(ConfigError, match="did you mean `num_boxes`"):
        world_named("sokoban").tasks("train", 1, num_box=1)
    with pytest.raises(ConfigError, match="counted from 0"):
        world_named("maze").tasks("train", -1)
    with pytest.raises(ConfigError, match="noise"):
        shown("maze", {"split": "train", "index": 0}, 1.5, no_noise())


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("2048", {"target": 63}),
    ("2048", {"size": 9}),
    ("connect-four", {"opponent": "god"}),
    ("guess-number", {"max_number": 1}),
    ("guess-number", {"max_number": 20}),
    ("hanoi", {"num_disks": 99}),
    ("hanoi", {"num_disks": 8, "max_turns": 1}),
    ("lights-out", {"size": 1}),
    ("mastermind", {"length": 9}),
    ("dark-maze", {"min_distance": 0}),
    ("dark-maze", {"min_distance": 9, "size": 3}),
    ("maze", {"size": 1}),
    ("maze", {"size": [3]}),
    ("minesweeper", {"num_mines": 0}),
    ("n-queens", {"num_given": 8}),
    ("sokoban", {"num_boxes": 0}),
    ("sokoban", {"num_walls": 1.5}),
    ("sudoku", {"num_empty": 16}),
    ("tic-tac-toe", {"opponent": "careful"}),
]


def test_what_cannot_be_drawn_is_refused_before_work_starts(subtests: pytest.Subtests) -> None:
    for name, arguments in IMPOSSIBLE:
        with (
            subtests.test(name=name, arguments=arguments),
            pytest.raises(ConfigError, match=next(iter(arguments))),
        ):
            world_named(name).tasks("train", 1, **arguments)


def test_any_number_names_an_instance_and_tasks_cost_nothing_before_they_are_played(
    subtests: pytest.Subtests,
) -> None:
    for name in NAMES:
        with subtests.test(name=name):
            game = game_of(name)
            assert drawn_instance(game, "test", MANY) == drawn_instance(game, "test", MANY)
            assert len(world_named(name).tasks("train", 10_000)) == 10_000
            assert issubclass(game, Game)
            assert set(drawn_instance(game, "train", 5)) == set(game.instance_keys)
