"""The rules of single games, against positions that were worked out by hand or by another way of counting."""

from functools import cache
from itertools import combinations, product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllm.environments.games import Game, InvalidMove
from rllm.environments.games.blackjack import Blackjack, BlackjackEnv, hit_pays, stand_pays, worth
from rllm.environments.games.connect_four import ConnectFour, _has_four
from rllm.environments.games.dark_maze import DarkMaze
from rllm.environments.games.game import drawn_instance, expert_wins
from rllm.environments.games.guess_number import GuessNumber, GuessNumberEnv
from rllm.environments.games.hanoi import Hanoi
from rllm.environments.games.lights_out import LightsOut
from rllm.environments.games.mastermind import Mastermind, answer_to
from rllm.environments.games.maze import Maze
from rllm.environments.games.minesweeper import Minesweeper
from rllm.environments.games.n_queens import NQueens, _solutions
from rllm.environments.games.sokoban import Sokoban
from rllm.environments.games.sudoku import Sudoku as SudokuGame
from rllm.environments.games.sudoku import _all_grids
from rllm.environments.games.tic_tac_toe import TicTacToe
from rllm.environments.games.twenty48 import Twenty48, _slid
from rllm.environments.games.wordle import Wordle, answers, guesses, marks_of
from rllm.environments.world import RANDOM
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError


def num_expert_moves(game: Game) -> int:
    count = 0
    while not game.is_won:
        assert not game.is_lost
        game.play(game.expert_move())
        count += 1
    return count


def test_letters_are_marked_as_often_as_the_word_has_them(subtests: pytest.Subtests) -> None:
    for guess, word, marks in [
        ("crane", "crane", "GGGGG"),
        ("llama", "label", "GYY--"),
        ("speed", "erase", "Y-YY-"),
        ("geese", "eagle", "YY--G"),
        ("mamma", "madam", "GGY-Y"),
        ("fuzzy", "light", "-----"),
    ]:
        with subtests.test(guess=guess, word=word, marks=marks):
            assert marks_of(guess, word) == marks


def test_the_words_are_words_and_the_expert_finds_each() -> None:
    assert len(answers()) >= 300
    assert len(guesses()) > 2 * len(answers())
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in guesses())
    assert len(set(answers())) == len(answers())
    for word in answers()[::7]:
        assert expert_wins(Wordle({"word": word}), 6), word


@pytest.mark.slow
def test_the_expert_finds_every_word() -> None:
    assert [word for word in answers() if not expert_wins(Wordle({"word": word}), 6)] == []


@settings(deadline=None)
@given(st.text("123456", min_size=4, max_size=4), st.text("123456", min_size=4, max_size=4))
def test_a_mastermind_answer_counts_matched_pairs(guess: str, code: str) -> None:
    exact = sum(one == other for one, other in zip(guess, code, strict=True))
    common = sum(min(guess.count(digit), code.count(digit)) for digit in "123456")
    assert answer_to(guess, code) == answer_to(code, guess) == (exact, common - exact)


@pytest.mark.slow
def test_the_expert_breaks_every_code() -> None:
    for code in product("123456", repeat=4):
        assert expert_wins(Mastermind({"code": "".join(code), "num_digits": 6}), 10)


def test_halving_finds_every_number_in_as_many_guesses_as_the_length_has_binary_digits(
    subtests: pytest.Subtests,
) -> None:
    for length in (2, 3, 7, 8, 31, 32):
        with subtests.test(length=length):
            games = [{"low": 60, "high": 59 + length, "number": 60 + place} for place in range(length)]
            assert max(num_expert_moves(GuessNumber(game)) for game in games) == length.bit_length()
            assert GuessNumber.turns_for(games[0]) == length.bit_length()


def test_what_random_guesses_come_to_is_what_counting_them_gives() -> None:
    @cache
    def wins(length: int, place: int, turns: int) -> float:
        """How likely number `place` of `length` is hit; guesses are any number that is left."""
        if turns == 0:
            return 0.0
        below = sum(wins(length - guess, place - guess, turns - 1) for guess in range(1, place))
        above = sum(wins(guess - 1, place, turns - 1) for guess in range(place + 1, length + 1))
        return (1 + below + above) / length

    world = world_named("guess-number")
    assert world.baselines is not None
    tasks = world.tasks("validation", 64)
    games = [GuessNumberEnv.from_dict(task).instance for task in tasks]
    expected = [wins(game["high"] - game["low"] + 1, game["number"] - game["low"] + 1, 5) for game in games]
    assert np.mean(world.baselines(tasks)[RANDOM]) == pytest.approx(np.mean(expected), abs=0.04)


def test_a_guess_narrows_what_is_shown_and_only_the_interval_may_be_named() -> None:
    game = GuessNumber({"low": 37, "high": 49, "number": 41})
    assert game.board() == "37 to 49"
    assert (game.play("43"), game.board()) == ("lower", "37 to 42")
    assert (game.play("39"), game.board()) == ("higher", "40 to 42")
    assert (game.play("38"), game.board()) == ("higher", "40 to 42")
    for guess in ("36", "50", "forty"):
        with pytest.raises(InvalidMove):
            game.play(guess)
    assert (game.play("41"), game.is_won) == ("right", True)


@pytest.mark.parametrize("num_disks", [1, 2, 3, 4])
def test_hanoi_takes_the_fewest_moves_from_everywhere(num_disks: int) -> None:
    """As is known: to bring all disks to one peg, the largest that is not home waits for the smaller ones."""
    for disks in map("".join, product("ABC", repeat=num_disks)):
        if disks == "C" * num_disks:
            continue
        assert num_expert_moves(Hanoi({"disks": disks, "goal": "C" * num_disks})) == fewest_hanoi_moves(disks)


def fewest_hanoi_moves(disks: str, goal: str = "C") -> int:
    if not disks:
        return 0
    if disks[0] == goal:
        return fewest_hanoi_moves(disks[1:], goal)
    (spare,) = set("ABC") - {disks[0], goal}
    return fewest_hanoi_moves(disks[1:], spare) + 1 + 2 ** len(disks[1:]) - 1


def test_from_one_arrangement_to_another_takes_as_long_as_back() -> None:
    for disks, goal in (("ABC", "CBA"), ("AABC", "CBBA"), ("ABBA", "BAAB")):
        there, back = (
            num_expert_moves(Hanoi({"disks": a, "goal": b})) for a, b in ((disks, goal), (goal, disks))
        )
        assert there == back


def test_queens_have_as_many_solutions_as_is_known() -> None:
    assert [len(_solutions(size)) for size in range(4, 10)] == [2, 10, 4, 40, 92, 352]
    game = NQueens({"queens": [1, -1, -1, 2]})
    assert game.board() == "2..3"
    with pytest.raises(InvalidMove, match="queen at 1 2"):
        game.play("2")
    game.play("4")
    game.play("1")
    assert game.is_won
    assert game.board() == "2413"


def test_aces_count_what_is_best(subtests: pytest.Subtests) -> None:
    for cards, total in (
        ("A K", 21),
        ("A A", 12),
        ("A A 9", 21),
        ("A 9 5", 15),
        ("10 J 2", 22),
        ("A A A A", 14),
    ):
        with subtests.test(cards=cards, total=total):
            assert worth(cards.split()) == total


def hand(cards: str, moves: list[str]) -> Blackjack:
    dealt = cards.split()
    game = Blackjack({"player": dealt[0:4:2], "dealer": dealt[1:4:2], "deck": dealt[4:]})
    for move in moves:
        game.play(move)
    return game


@pytest.mark.parametrize(
    ("cards", "moves", "end"),
    [
        ("10 9 9 8", ["Stand"], "won"),  # 19 against 17
        ("10 9 7 8", ["Stand"], "drawn"),
        ("10 9 6 8", ["Stand"], "lost"),
        ("10 9 7 7 K", ["Stand"], "won"),  # the dealer draws above 21
        ("10 9 7 8 4", ["Hit", "stand"], "won"),  # 21 against 17
        ("10 9 7 8 5", ["HIT"], "lost"),  # 22
    ],
)
def test_a_hand_is_won_by_beating_the_dealer(cards: str, moves: list[str], end: str) -> None:
    game = hand(cards, moves)
    assert [game.is_won, game.is_drawn, game.is_lost] == [end == each for each in ("won", "drawn", "lost")]
    dealt = cards.split()
    env = BlackjackEnv({"player": dealt[0:4:2], "dealer": dealt[1:4:2], "deck": dealt[4:]})
    env.reset()
    *_, (_, reward, done, info) = [env.step(move) for move in moves]
    assert (reward, done, info["outcome"]) == ({"won": 1.0, "drawn": 0.0, "lost": -1.0}[end], True, end)


def test_the_expert_plays_what_every_book_on_blackjack_says(subtests: pytest.Subtests) -> None:
    for player, dealer, best in [
        ("10 6", "6", "Stand"),
        ("10 6", "10", "Hit"),
        ("10 2", "4", "Stand"),
        ("10 2", "3", "Hit"),
        ("A 7", "9", "Hit"),
        ("A 7", "8", "Stand"),
        ("A 6", "2", "Hit"),
        ("10 7", "A", "Stand"),
    ]:
        with subtests.test(player=player, dealer=dealer, best=best):
            deck = ["5", "5"]
            for hidden in ("2", "K"):  # it does not see the dealer's other card
                game = Blackjack({"player": player.split(), "dealer": [dealer, hidden], "deck": deck})
                assert game.expert_move() == best


def test_to_play_the_best_pays_what_exact_expectation_says() -> None:
    """Played out with drawn cards, standing and hitting come to what the sums over all cards say."""
    rng, ranks = Random(1), ["A", *map(str, range(2, 11)), "J", "Q", "K"]
    for player, dealer in (("10 6", "10"), ("A 4", "5"), ("9 9", "7")):
        cards = player.split()
        for first, exact in (
            ("Stand", stand_pays(worth(cards), int(dealer))),
            (
                "Hit",
                hit_pays((sum(1 if card == "A" else int(card) for card in cards), "A" in cards), int(dealer)),
            ),
        ):
            total = 0.0
            for _ in range(1500):
                game = Blackjack(
                    {"player": cards, "dealer": [dealer, rng.choice(ranks)], "deck": rng.choices(ranks, k=20)}
                )
                game.play(first)
                while not (game.is_won or game.is_drawn or game.is_lost):
                    game.play(game.expert_move())
                total += game.is_won - game.is_lost
            assert total / 1500 == pytest.approx(exact, abs=0.08)


def test_the_dealers_second_card_is_hidden_until_the_player_stands() -> None:
    game = hand("10 9 7 8 4 2", [])
    assert game.board() == "You: 10 7 (17)\nDealer: 9 ?"
    game.play("Stand")
    assert game.board() == "You: 10 7 (17)\nDealer: 9 8 (17)"


@pytest.mark.parametrize(
    ("row", "slid"),
    [
        ((2, 2, 2, 2), (4, 4, 0, 0)),
        ((4, 2, 2, 0), (4, 4, 0, 0)),
        ((2, 0, 2, 4), (4, 4, 0, 0)),
        ((0, 0, 0, 2), (2, 0, 0, 0)),
    ],
)
def test_each_tile_merges_once(row: tuple[int, ...], slid: tuple[int, ...]) -> None:
    assert _slid(row) == slid


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6), moves=st.lists(st.sampled_from(["Up", "Down", "Left", "Right"]), max_size=25)
)
def test_a_move_of_2048_adds_one_new_tile(seed: int, moves: list[str]) -> None:
    game = Twenty48({"seed": seed, "size": 4, "target": 2048})
    for move in moves:
        before = sum(map(sum, game._grid))
        try:
            game.play(move)
        except InvalidMove:
            assert sum(map(sum, game._grid)) == before
        else:
            assert sum(map(sum, game._grid)) - before in (2, 4)


@settings(deadline=None)
@given(cells=st.sets(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=30))
def test_four_in_a_line_is_found_exactly_where_it_is(cells: set[tuple[int, int]]) -> None:
    lines = (
        [(row + step * down, column + step * right) for step in range(4)]
        for row, column in cells
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
    )
    bits = sum(1 << (7 * column + row) for row, column in cells)
    assert _has_four(bits) == any(all(cell in cells for cell in line) for line in lines)


@pytest.mark.parametrize("index", range(5))
def test_the_careful_opponent_takes_a_win_and_prevents_one(index: int) -> None:
    game = ConnectFour({"played": "", "seed": index, "opponent": "careful"})
    for _ in range(3):
        game.play("4")
        if game.board().splitlines()[5 - 3].split()[3] == "O":
            break
    assert not game.is_won
    column = [line.split()[3] for line in game.board().splitlines()[:6]][::-1]
    assert column[:4] != ["X"] * 4
    if column[:3] == ["X"] * 3:
        assert column[3] == "O"


def test_nobody_beats_the_perfect_opponent_and_a_draw_is_enough() -> None:
    def all_ends(game: TicTacToe, moves: list[str]) -> list[tuple[bool, list[str]]]:
        if game.is_won or game.is_lost:
            return [(game.is_won, game.board().split())]
        found = []
        for move in game.moves():
            following = TicTacToe({"board": "." * 9, "seed": 3, "opponent": "perfect"})
            for each in (*moves, move):
                following.play(each)
            found += all_ends(following, [*moves, move])
        return found

    lines = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
    for won, cells in all_ends(TicTacToe({"board": "." * 9, "seed": 3, "opponent": "perfect"}), []):
        assert not any(all(cells[place] == "X" for place in line) for line in lines)
        assert won == (not any(all(cells[place] == "O" for place in line) for line in lines))


def mines_that_fit(game: Minesweeper) -> list[set[tuple[int, int]]]:
    """Every way to lay the mines that agrees with what is open: by trying all."""
    hidden = game._hidden_places()
    found = []
    for mines in map(set, combinations(hidden, len(game._mines))):
        shown = ((place, game._num_around(place)) for place in game._open)
        if all(sum(each in mines for each in game._around(place)) == number for place, number in shown):
            found.append(mines)
    return found


@pytest.mark.parametrize("index", range(4))
def test_what_the_minesweeper_opens_is_safe_in_every_way_that_fits(index: int) -> None:
    instance = drawn_instance(Minesweeper, "train", index, size=4, num_mines=3)
    game = Minesweeper(instance)
    while not game.is_won:
        move = game.expert_move()
        row, column = (int(each) - 1 for each in move.split())
        assert all((row, column) not in mines for mines in mines_that_fit(game))
        game.play(move)


def test_a_mine_loses() -> None:
    game = Minesweeper({"size": 3, "mines": [[0, 0]], "opened": [0, 1]})
    assert game.board() == ". 1 .\n. . .\n. . ."
    assert game.play("1 1") == "That was a mine."
    assert game.is_lost
    assert not game.is_won


def test_boxes_are_pushed_and_never_pulled() -> None:
    game = Sokoban({"rows": ["######", "#@$_.#", "#____#", "######"]})
    with pytest.raises(InvalidMove, match="in the way"):
        game.play("Up")
    game.play("Right")
    assert game.board() == "######\n#_@$.#\n#____#\n######"
    game.play("Right")
    assert game.is_won
    assert game.board().splitlines()[1] == "#__@*#"
    stuck = Sokoban({"rows": ["######", "#_$@_#", "#__._#", "######"]})
    stuck.play("Left")
    assert stuck.is_lost


@pytest.mark.parametrize("index", range(5))
def test_a_sudoku_in_order_never_leaves_a_choice_at_the_first_empty_place(index: int) -> None:
    game = SudokuGame(drawn_instance(SudokuGame, "train", index, in_order=True))
    while not game.is_won:
        grid = game._grid
        place = grid.index(".")
        row, column = divmod(place, 4)
        peers = {
            grid[4 * r + c]
            for r in range(4)
            for c in range(4)
            if r == row or c == column or (r // 2, c // 2) == (row // 2, column // 2)
        }
        (digit,) = set("1234") - peers
        game.play(f"{'abcdefghijklmnop'[place]}{digit}")


def test_in_the_dark_one_is_told_the_open_ways_alone() -> None:
    game = DarkMaze({"rows": ["#####", "#P.G#", "#.###", "#...#", "#####"]})
    assert game.board() == "Down Right"
    game.play("Down")
    assert game.board() == "Up Right", "on past the straight corridor, to the corner"
    with pytest.raises(InvalidMove, match="wall"):
        game.play("Left")
    assert game.board() == "Up Right"
    game.play("Right")
    assert game.board() == "Left", "a dead end"
    for move in ("Left", "Up"):
        game.play(move)
    assert not game.is_won
    game.play("Right")
    assert game.is_won


def test_in_the_dark_one_does_not_walk_past_a_side_way_or_the_goal() -> None:
    game = DarkMaze({"rows": ["#######", "#P.G..#", "#######"]})
    game.play("Right")
    assert game.is_won
    game = DarkMaze({"rows": ["#########", "#P.....G#", "###.#####", "###.#####", "#########"]})
    game.play("Right")
    assert game.board() == "Down Left Right"


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_expert_in_the_dark_keeps_a_hand_on_the_wall_and_always_arrives(size: int) -> None:
    around = ("Up", "Left", "Down", "Right")
    for index in range(40):
        game = DarkMaze(drawn_instance(DarkMaze, "train", index, size=size))
        heading, num_turns = 0, 0
        while not game.is_won:
            open_ways = game.board().split()
            turns = [(heading + turn) % 4 for turn in (1, 0, 3, 2)]  # left, ahead, right, back
            heading = next(each for each in turns if around[each] in open_ways)
            assert game.expert_move() == around[heading], "from what the player sees and remembers, no more"
            game.play(around[heading])
            num_turns += 1
        assert num_turns <= DarkMaze.turns_for({"size": size})


@pytest.mark.parametrize("min_distance", [1, 5, 8])
def test_the_goal_of_a_maze_is_as_many_cells_away_as_it_shall_be(min_distance: int) -> None:
    distances = [
        num_expert_moves(Maze(drawn_instance(Maze, "train", index, size=4, min_distance=min_distance)))
        for index in range(30)
    ]
    assert 2 * min_distance <= min(distances) < 2 * min_distance + 4


def test_there_are_288_full_sudokus_of_four_by_four() -> None:
    assert len(set(_all_grids())) == 288


def test_a_press_turns_a_light_and_those_beside_it() -> None:
    game = LightsOut({"rows": ["...", "OOO", ".O."]})
    game.play("B")
    assert game.board() == "ABC\nD.F\n.H."
    game.play("b")
    for move in ("E", "B", "B"):
        game.play(move)
    assert game.board() == ".B.\n...\n..."
    with pytest.raises(InvalidMove, match="not one of A, B, C"):
        game.play("J")


@pytest.mark.parametrize("rows", [["O..", "O..", "O.."], ["OO.", "O.O", ".OO"], ["OOO", "OOO", "OOO"]])
def test_lights_go_out_from_the_first_row_to_the_last(rows: list[str]) -> None:
    game = LightsOut({"rows": rows})
    moves: list[str] = []
    while not game.is_won:
        moves.append(game.expert_move())
        game.play(moves[-1])
    assert moves == sorted(set(moves)), "row by row, no place twice"
    solutions = [
        presses
        for count in range(10)
        for presses in combinations("ABCDEFGHI", count)
        if _is_dark_after(rows, presses)
    ]
    assert tuple(moves) in solutions


def _is_dark_after(rows: list[str], presses: tuple[str, ...]) -> bool:
    game = LightsOut({"rows": rows})
    for press in presses:
        game.play(press)
    return game.is_won


@pytest.mark.parametrize("size", [3, 4, 5])
def test_drawn_lights_go_out_for_who_presses_below_the_first_that_is_on(size: int) -> None:
    names = "ABCDEFGHIJKLMNOPQRSTUVWXY"
    for index in range(40):
        game = LightsOut(drawn_instance(LightsOut, "train", index, size=size, max_presses=5))
        num_presses = 0
        while not game.is_won:
            first_on = next(each for each in game.board() if each in names)
            below = names[names.index(first_on) + size]
            assert game.expert_move() == below
            game.play(below)
            num_presses += 1
        assert 3 <= num_presses <= 5


BROKEN: list[tuple[type[Game], dict[str, Any]]] = [
    (Blackjack, {"player": ["1", "2"], "dealer": ["3", "4"], "deck": []}),
    (Blackjack, {"player": "A K", "dealer": ["3", "4"], "deck": []}),
    (Blackjack, {"player": ["A"], "dealer": ["3", "4"], "deck": []}),
    (ConnectFour, {"played": "", "seed": -1, "opponent": "random"}),
    (ConnectFour, {"played": "8", "seed": 1, "opponent": "random"}),
    (ConnectFour, {"played": "1111111", "seed": 1, "opponent": "random"}),
    (GuessNumber, {"number": 101, "max_number": 100}),
    (GuessNumber, {"number": "5", "max_number": 100}),
    (Hanoi, {"disks": "ABD", "goal": "A"}),
    (Hanoi, {"disks": "AAA", "goal": "AAA"}),
    (Hanoi, {"disks": "AAA", "goal": "AB"}),
    (LightsOut, {"rows": ["O.", "XX"]}),
    (LightsOut, {"rows": ["O...", "....", "....", "...."]}),
    (Mastermind, {"code": "1237", "num_digits": 6}),
    (Mastermind, {"code": 1234, "num_digits": 6}),
    (Minesweeper, {"size": 3, "mines": [[0, 3]], "opened": [0, 0]}),
    (Minesweeper, {"size": 3, "mines": [[0, 0]], "opened": [0, 0]}),
    (Minesweeper, {"size": 3, "mines": [], "opened": [0, 0]}),
    (Minesweeper, {"size": 3, "mines": [7], "opened": [0, 0]}),
    (NQueens, {"queens": [0, 1, -1, -1]}),
    (NQueens, {"queens": [1, 3, 0, 2]}),
    (NQueens, {"queens": [9, -1, -1, -1]}),
    (Sokoban, {"rows": ["#@$#"]}),
    (Sokoban, {"rows": ["#@@$.#"]}),
    (Sokoban, {"rows": "#@$.#"}),
    (SudokuGame, {"rows": ["1...", "1...", "....", "...."]}),
    (SudokuGame, {"rows": ["1...", "....", "....", "...."]}),
    (SudokuGame, {"rows": ["1234", "3412", "2143", "432x"]}),
    (TicTacToe, {"seed": 1, "opponent": "random"}),
    (TicTacToe, {"board": "........", "seed": 1, "opponent": "random"}),
    (TicTacToe, {"board": "X........", "seed": 1, "opponent": "random"}),
    (Twenty48, {"seed": 1, "size": 4, "target": 48}),
    (Wordle, {"word": "qqqqq"}),
]


def test_what_is_no_instance_is_refused(subtests: pytest.Subtests) -> None:
    for game, instance in BROKEN:
        with subtests.test(game=game, instance=instance), pytest.raises(ConfigError):
            game(instance)
