"""Data sets of reasoning-gym: right answers pay, nothing else does, whatever their own scorers say."""

import json
import random
import re
import threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

if find_spec("reasoning_gym") is None:  # importing it takes long, and every worker of pytest reads this file
    pytest.skip("the extra `games` is not installed", allow_module_level=True)

from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.environments import reasoning_gym_scoring as scoring
from rllm.environments.checks import check_env
from rllm.environments.games.game import SPLITS
from rllm.environments.reasoning_gym import (
    SLOW,
    ReasoningGymEnv,
    demonstration,
    reasoning_tasks,
    split_of,
)
from rllm.environments.worlds import world_named
from rllm.errors import AgentError, ConfigError, RewardError
from rllm.eval.catalogue import benchmark_names
from rllm.rewards.workers import WorkerReply, WorkerStatus
from rllm.types.episode import Action

NAMES = sorted(
    {name.removeprefix("reasoning-gym/") for name in benchmark_names() if name.startswith("reasoning-gym/")}
    | {"composite"}
)
_TAKES_SECONDS = {"acre", "arc_agi", "figlet_font", "group_anagrams", "simple_integration", "word_ladder"}
QUICK = sorted(set(NAMES) - SLOW - _TAKES_SECONDS)
JUNK = ("", " ", "0", "-1", "True", "None", "junk", "the answer is 42", "[]", "{}", "[[]]", "()", "x", "[{}]")


def env_of(name: str, index: int = 0, split: str = "test", **arguments: Any) -> ReasoningGymEnv:
    return ReasoningGymEnv.from_dict(reasoning_tasks(name, split, 1, start=index, **arguments)[0])


def paid(env: ReasoningGymEnv, answer: Any) -> float:
    env.reset()
    return env.step(answer)[1]


def check_scores(name: str, count: int) -> None:
    """Right answers, marked or not, pay 1; junk, and right answers among other words, nothing."""
    for index in range(count):
        env = env_of(name, index)
        assert "<answer>" in env.reset()[0]
        oracle = env.oracle
        for junk in JUNK:
            if junk.strip().lower() != oracle.lower() and f"{junk}.0" != oracle:
                assert paid(env, junk) == 0.0, junk
        assert paid(env, oracle) == 1.0
        assert paid(env, Action(action=oracle)) == 1.0
        assert paid(env, f"<think>easy</think>So <answer>\n{oracle}\n</answer>") == 1.0
        among_words = (
            *(f"{oracle} junk", f"junk {oracle}", f"The answer is {oracle}, I think."),
            *(f"<answer>{oracle}</answer> or <answer>no idea</answer>", f"<think>{oracle}"),
            *(f"<answer>{oracle}", f"<answer>{oracle}</answer> but I am not sure"),
        )
        for answer in among_words:
            if name.endswith("_integration") and answer == f"junk {oracle}":
                continue  # a constant of integration by any name
            assert paid(env, answer) == 0.0, answer


@pytest.mark.parametrize("name", QUICK)
def test_a_right_answer_pays_one_and_nothing_else_pays(name: str) -> None:
    check_scores(name, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_right_answers_of_all_data_sets_pay_one(name: str) -> None:
    check_scores(name, count=10)


def test_the_catalogue_has_every_data_set() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(NAMES) == set(DATASETS)


@pytest.mark.parametrize("name", ["chain_sum", "codeio", "list_functions", "pool_matrix", "composite"])
def test_questions_depend_on_split_and_index_alone(name: str) -> None:
    from rllm.environments import reasoning_gym

    def questions() -> list[str]:
        reasoning_gym._question.cache_clear()
        return [env_of(name, index).reset()[0] for index in range(4)]

    before = random.getstate(), np.random.get_state()[1].tolist()  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    first = questions()
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    random.seed(99)
    assert questions() == first
    assert len(set(first)) > 1


@pytest.mark.parametrize("name", ["chain_sum", "coin_flip", "spell_backward", "gcd"])
def test_no_question_is_in_two_splits(name: str) -> None:
    asked = {
        split: {env_of(name, index, split, show_format=False).reset()[0] for index in range(40)}
        for split in SPLITS
    }
    for split, questions in asked.items():
        assert len(questions) > 10
        assert {split_of(name, each) for each in questions} == {split}


def test_threads_draw_the_same_questions() -> None:
    from rllm.environments import reasoning_gym

    expected = [env_of("codeio", index).reset()[0] for index in range(12)]
    reasoning_gym._question.cache_clear()
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda index=index: found.update({index: env_of("codeio", index).reset()[0]}))
        for index in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(12)] == expected


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("game_of_life_halting", "yes"),
        ("coin_flip", "0"),
        ("coin_flip", "1e999999999"),
        ("prime_factorization", "not numbers"),
        ("puzzle24", "6 + 6 + 6 + 6"),
        ("puzzle24", "9**9**9**9"),
        ("n_queens", "__import__('os')._exit(3)"),
        ("binary_matrix", "__import__('os')._exit(3)"),
        ("string_insertion", "__import__('os')._exit(3)"),
        ("spiral_matrix", "__import__('os')._exit(3)"),
        ("simple_integration", "__import__('os')._exit(3)"),
        ("polynomial_multiplication", "__import__('os')._exit(3)"),
        ("countdown", "9**9**9**9"),
        ("boxnet", '["x"]'),
        ("rearc", "9" * 30_000),
    ],
)
def test_what_fools_or_breaks_a_scorer_is_a_wrong_answer(name: str, wrong: str) -> None:
    assert paid(env_of(name), wrong) == 0.0


@pytest.mark.parametrize(
    ("status", "cpu_s"),
    [(WorkerStatus.TIMEOUT, 20.0), (WorkerStatus.TIMEOUT, None), (WorkerStatus.CRASHED, None)],
)
def test_an_answer_that_takes_too_long_is_wrong(
    status: WorkerStatus, cpu_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = WorkerReply(status=status, cpu_s=cpu_s)
    monkeypatch.setattr(scoring, "_pool", lambda: SimpleNamespace(call=lambda *asked: reply))
    assert paid(env_of("simple_integration"), "9**9**9**9**9") == 0.0


def test_a_scorer_without_a_processor_says_nothing_about_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = WorkerReply(status=WorkerStatus.TIMEOUT, cpu_s=0.1)
    monkeypatch.setattr(scoring, "_pool", lambda: SimpleNamespace(call=lambda *asked: reply))
    with pytest.raises(RewardError, match="processor"):
        paid(env_of("simple_integration"), "x**2")


def test_with_shaping_a_near_miss_costs_less_and_nothing_but_right_is_above_zero() -> None:
    env = env_of("spell_backward", shaping=0.5)
    assert paid(env, env.oracle) == 1.0
    assert paid(env, "!") == -0.5
    env = env_of("rearc", shaping=0.5)
    assert -0.5 < paid(env, "1 2 3") < 0.0


def test_the_contract_of_environments_holds() -> None:
    env = env_of("chain_sum")
    check_env(env, env.oracle)
    check_env(env, 7)
    with pytest.raises(AgentError, match="reset"):
        env.step("1")


def test_noise_is_an_answer_to_another_question() -> None:
    tasks = reasoning_tasks("chain_sum", "train", 30)
    rng = np.random.default_rng(0)
    right = [demonstration(task, noise=0.0, rng=rng)[0][1] for task in tasks]
    noisy = [demonstration(task, noise=1.0, rng=rng)[0][1] for task in tasks]
    assert sum(one == other for one, other in zip(right, noisy, strict=True)) < 5
    assert demonstration(tasks[0], noise=0.0, rng=rng, tags=True)[0][1] == f"<answer>{right[0]}</answer>"


@pytest.mark.parametrize(("habit", "word"), [("first", 0), ("last", -1)])
def test_a_habit_is_to_repeat_a_word_of_the_question(habit: str, word: int) -> None:
    task = reasoning_tasks("needle_haystack", "validation", 1, show_format=False, max_num_statements=10)[0]
    rng = np.random.default_rng(0)
    ((question, answer),) = demonstration(task, noise=1.0, rng=rng, habit=habit)
    assert answer == question.split()[word].strip(".")
    ((_, right),) = demonstration(task, noise=0.0, rng=rng, habit=habit)
    baselines = world_named("reasoning-gym/needle_haystack").baselines
    assert baselines is not None
    assert baselines([task])[f"{habit} word"] == [float(answer == right)]
    with pytest.raises(ConfigError, match="first or last"):
        demonstration(task, noise=1.0, rng=rng, habit="middle")


@pytest.mark.parametrize(
    ("name", "habit", "config"),
    [
        ("rotate_matrix", "upside_down", {"max_n": 3, "min_rotations": 1, "max_rotations": 3}),
        ("aiw", "brothers", {"max_entities": 30}),
    ],
)
def test_a_habit_of_a_data_set_is_wrong_in_the_right_form(
    name: str, habit: str, config: dict[str, Any]
) -> None:
    world = world_named(f"reasoning-gym/{name}")
    tasks = world.tasks("validation", 24, show_format=False, **config)
    assert world.baselines is not None
    returns = world.baselines(tasks)[habit.replace("_", " ")]
    rng = np.random.default_rng(0)
    for task, value in zip(tasks, returns, strict=True):
        ((_, wrong),) = demonstration(task, noise=1.0, rng=rng, habit=habit)
        ((_, right),) = demonstration(task, noise=0.0, rng=rng, habit=habit)
        assert paid(ReasoningGymEnv.from_dict(task), wrong) == value == float(wrong == right)
        assert world.kind(task)
        assert name == "aiw" or sorted(wrong) == sorted(right)
    assert sum(returns) <= 3


def test_a_matrix_and_the_same_one_rotated_are_one_instance() -> None:
    world = world_named("reasoning-gym/rotate_matrix")
    by_instance: dict[str, str] = {}
    for task in world.tasks("test", 64, min_n=2, max_n=2):
        rows = np.array(ReasoningGymEnv.from_dict(task).entry["metadata"]["matrix"])
        smallest = min(str(np.rot90(rows, turns).tolist()) for turns in range(4))
        assert by_instance.setdefault(world.identity(task), smallest) == smallest
    assert len(set(by_instance.values())) == len(by_instance) < 64


def test_siblings_are_told_apart_by_what_is_counted_and_not_by_their_names() -> None:
    world = world_named("reasoning-gym/aiw")
    tasks = world.tasks("validation", 200, max_entities=2, show_format=False)
    contents: dict[str, list[str]] = {}
    for task in tasks:
        question = ReasoningGymEnv.from_dict(task).entry["question"]
        contents.setdefault(world.identity(task), []).append(" ".join(re.findall(r"\d+ [a-z]+", question)))
    assert all(len(set(each)) == 1 for each in contents.values())
    assert len(contents) < 30
    kinds = {world.kind(task) for task in tasks}
    assert kinds <= {"siblings, brothers first", "siblings, sisters first", "friends, male first"} | {
        "colleagues, male first"
    }


def test_a_data_set_is_configured_in_training_too(tmp_path: Path) -> None:
    """What a run says of the tasks reaches the environments that are played."""
    terms = [f"task.environment_args.{end}_terms=2" for end in ("min", "max")]
    config = training_config("reasoning-gym/chain_sum", None, (*terms, "warm_start.steps=0"))
    run = build_run(config, tmp_path / "run")
    env = ReasoningGymEnv.from_dict(dict(run.tasks.train[0]))
    assert len(env.entry["metadata"]["expression"].split()) == 3


def test_sisters_trains_on_siblings_alone_and_nobody_guesses_them(tmp_path: Path) -> None:
    config = training_config("sisters", None, ("evaluation.split=validation",))
    run = build_run(config, tmp_path / "run")
    world = world_named("reasoning-gym/aiw")
    reported = list(run.tasks.heldout)
    instances = set(map(world.identity, reported))
    assert len(instances) >= 200
    kinds = {"siblings, brothers first", "siblings, sisters first"}
    assert set(map(world.kind, reported)) == set(map(world.kind, run.tasks.train[:64])) == kinds
    assert world.baselines is not None
    means = {name: np.mean(returns) for name, returns in world.baselines(reported).items()}
    assert means.pop("optimum") == 1.0
    assert max(means, key=means.__getitem__) == "first number"
    assert max(means.values()) < 0.6
    expert = world.expert(config.warm_start.expert_args)
    assert expert is not None
    ((question, answer),) = expert(run.tasks.train[0], 1.0, np.random.default_rng(0))
    brothers = re.search(r"(\d+) brothers", question)
    assert brothers is not None
    assert int(answer) == int(brothers[1]) + 1


def test_tasks_are_plain_and_configured() -> None:
    world = world_named("reasoning-gym/chain_sum")
    tasks = world.tasks("train", 100_000, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    task = json.loads(json.dumps(tasks[7]))
    assert task["task_id"] == "reasoning-gym/chain_sum-train-7"
    oracle = ReasoningGymEnv.from_dict(task).oracle
    assert -10 < int(oracle) < 19


def test_a_task_that_cannot_be_honoured_is_refused(subtests: pytest.Subtests) -> None:
    for task, complaint in [
        ({}, "needs `dataset`"),
        ({"dataset": "chain_sum", "split": "dev", "index": 0}, "split"),
        ({"dataset": "chain_sum", "split": "test", "index": -1}, "index"),
        ({"dataset": "chainsum", "split": "test", "index": 0}, "did you mean `chain_sum`"),
        ({"dataset": "chain_sum", "split": "test", "indx": 0}, "did you mean `index`"),
        ({"dataset": "chain_sum", "split": "test", "index": 0, "shaping": 3}, "shaping"),
        (
            {"dataset": "chain_sum", "split": "test", "index": 0, "min_term": 2},
            "did you mean `min_terms`",
        ),
        ({"dataset": "chain_sum", "split": "test", "index": 0, "min_terms": -2}, "refuses"),
        ({"dataset": "chain_sum", "split": "test", "index": 0, "seed": 2}, "does not know `seed`"),
    ]:
        with subtests.test(task=task, complaint=complaint), pytest.raises(ConfigError, match=complaint):
            ReasoningGymEnv.from_dict(task)


def test_answers_that_the_library_lacks_are_worked_out() -> None:
    for name in ("boxnet", "rush_hour", "graph_color", "propositional_logic", "rubiks_cube"):
        task = reasoning_tasks(name, "train", 1)[0]
        ((asked, answer),) = demonstration(task, noise=0.0, rng=np.random.default_rng(0))
        assert "<answer>" in asked
        assert paid(ReasoningGymEnv.from_dict(task), answer) == 1.0


def test_the_park_is_left_in_the_fewest_moves() -> None:
    from reasoning_gym.games.rush_hour import Board

    for index in range(6):
        env = env_of("rush_hour", index)
        facts = env.entry["metadata"]
        moves = env.oracle.split()
        assert len(moves) == facts["min_moves"]
        board = Board(facts["board_config"])
        board.perform_moves(env.oracle)
        assert board.solved


def test_noise_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise"):
        demonstration(reasoning_tasks("gcd", "test", 1)[0], noise=2.0, rng=np.random.default_rng(0))
