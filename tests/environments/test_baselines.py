"""What simple policies come to: of every game, of single questions, and by hand where that is easy."""

from statistics import mean
from typing import Any

import pytest

from rllm.environments.answers import answer_baselines, task_oracle
from rllm.environments.games.blackjack import BlackjackEnv, worth
from rllm.environments.games.game import drawn_instance
from rllm.environments.games.hanoi import Hanoi
from rllm.environments.world import OPTIMUM, RANDOM
from rllm.environments.worlds import WORLDS, world_named

GAMES = sorted(name for name, home in WORLDS.items() if ".games." in home)


def baselines_of(name: str, tasks: list[dict[str, Any]]) -> dict[str, list[float]]:
    baselines = world_named(name).baselines
    assert baselines is not None
    return {policy: list(returns) for policy, returns in baselines(tasks).items()}


@pytest.mark.parametrize("name", GAMES)
def test_a_game_knows_what_chance_and_the_best_come_to(name: str) -> None:
    tasks = world_named(name).tasks("validation", 6)
    returns = baselines_of(name, tasks)
    assert {RANDOM, OPTIMUM} < set(returns)
    for values in returns.values():
        assert len(values) == len(tasks)
    assert all(best >= other for other, best in zip(returns[RANDOM], returns[OPTIMUM], strict=True))
    assert baselines_of(name, tasks) == returns, "the same tasks have the same baselines"


def test_one_instance_under_two_names_has_one_return() -> None:
    world = world_named("hanoi")
    tasks = world.tasks("validation", 64, num_disks=3)
    returns = baselines_of("hanoi", tasks)[RANDOM]
    by_identity: dict[str, set[float]] = {}
    for task, value in zip(tasks, returns, strict=True):
        by_identity.setdefault(world.identity(task), set()).add(value)
    positions = {str(drawn_instance(Hanoi, "validation", index, num_disks=3)) for index in range(64)}
    assert len(by_identity) == len(positions) < 64
    assert all(len(values) == 1 for values in by_identity.values())


def test_always_stand_wins_where_the_dealer_comes_to_less() -> None:
    tasks = world_named("blackjack").tasks("validation", 32)
    stands = baselines_of("blackjack", tasks)["always Stand"]
    for task, value in zip(tasks, stands, strict=True):
        instance = BlackjackEnv.from_dict(task).instance
        player, dealer, rest = instance["player"], list(instance["dealer"]), list(instance["deck"])
        while worth(dealer) < 17:
            dealer.append(rest.pop(0))
        end = 0 if worth(dealer) > 21 else worth(dealer)
        assert value == float(worth(player) > end) - float(worth(player) < end)


def test_of_questions_the_commonest_answer_is_the_best_constant() -> None:
    tasks = [{"oracle": answer} for answer in ("7", "7", "3", "7")]
    returns = answer_baselines(task_oracle)(tasks)
    assert returns == {
        "random": [2 / 3, 2 / 3, 0.0, 2 / 3],
        "always 7": [1.0, 1.0, 0.0, 1.0],
        "optimum": [1.0, 1.0, 1.0, 1.0],
    }
    # Of the 4 * 3 ordered pairs of tasks, 3 * 2 share an answer.
    assert mean(returns["random"]) == pytest.approx(6 / 12)


def test_a_samples_own_answers_are_worth_nothing_to_simple_policies() -> None:
    programs = [{"oracle": f"print({number})"} for number in range(4)]
    assert answer_baselines(task_oracle)(programs) == {"random": [0.0] * 4, "optimum": [1.0] * 4}
    assert answer_baselines(task_oracle)(programs[:1]) == {"random": [0.0], "optimum": [1.0]}
    assert "always A" in answer_baselines(task_oracle)([{"oracle": answer} for answer in "AABC"])


def test_questions_without_a_right_answer_have_no_baselines() -> None:
    assert answer_baselines(task_oracle)([{"oracle": "7"}, {"question": "why?"}]) == {}
