"""The tasks of a benchmark, whatever it is made of.

    a world        ──► world.tasks(split, count, start=…)
    published rows ──► registered here, or installed, or pulled now ──transform──► questions ──► tasks

Rows that are not here yet are fetched when they are first asked for, and kept.
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rllm.data.dataset import Dataset
from rllm.data.downloads import download, unpack
from rllm.data.questions import Question, Row, question_task
from rllm.data.registry import DatasetRegistry
from rllm.data.row_filter import RowFilter
from rllm.data.sources import ArchiveSource, PackageSource, Split, pull
from rllm.data.transforms.registry import transform_named
from rllm.environments.answers import answer_baselines, task_oracle
from rllm.environments.follow_ups import FollowUpEnvironment
from rllm.environments.single_turn import SingleTurnEnvironment
from rllm.environments.world import World
from rllm.environments.worlds import world_named
from rllm.environments.wrong_answers import stray
from rllm.errors import ConfigError, MissingExtraError
from rllm.eval.catalogue import (
    FOLLOW_UPS,
    LIVE_WEB,
    SWE,
    TASK_DIRECTORY,
    Benchmark,
    benchmark_named,
    benchmark_names,
)
from rllm.eval.task_facts import MIN_DISTINCT, task_facts
from rllm.types.draws import draw_seed

NUM_TASKS = 256
"""Tasks that a benchmark without an end is measured on, where nobody says how many."""
_SEED_STRIDE = 10_000_000
"""Tasks of a world that one seed has for itself."""
HELD_OUT_EVERY = 20
HELD_OUT = {"validation": 19, "test": 9}
"""The place of the first held-out row for each split that is not published: of published training rows every
twentieth is held out."""

Progress = Callable[[str], None]


def benchmark_tasks(
    benchmark: Benchmark,
    split: str = "",
    count: int | None = None,
    *,
    seed: int = 0,
    on_progress: Progress = lambda what: None,
    as_task: Callable[[Benchmark, str, int, Mapping[str, Any]], dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """`count` tasks of a split; all of them without `count`, NUM_TASKS where there is no end.

    `as_task` makes a task of a published row; `task_of_row` by default. The seed says which: other tasks of a
    world, another random part of published rows. A part is in the order of the rows. Rows that are not here
    yet are pulled. Raises ConfigError for a split that there is not.
    """
    split = split or benchmark.eval_split
    if not benchmark.asks_questions:
        _require_split(benchmark, split)
        world = benchmark_world(benchmark)
        if benchmark.environment in (
            TASK_DIRECTORY,
            SWE,
            LIVE_WEB,
        ):  # as many as there are, the same for every seed
            return world.tasks(split, sys.maxsize if count is None else count, **benchmark.task)
        return world.tasks(
            split, NUM_TASKS if count is None else count, start=seed * _SEED_STRIDE, **benchmark.task
        )
    rows = benchmark_rows(benchmark, split, on_progress=on_progress)
    places = kept_places(benchmark, rows)
    if count is not None and count < len(places):
        places = [places[number] for number in _draw_rows(len(places), count, seed, split)]
    make = as_task or task_of_row
    return [make(benchmark, split, place, rows[place]) for place in places]


def instance_counts(benchmark: Benchmark) -> dict[str, Any] | None:
    """The number of instances that a world's measured tasks have; None for rows, which are counted, and for a
    world whose package is not installed."""
    if benchmark.asks_questions or benchmark.environment in (TASK_DIRECTORY, SWE, LIVE_WEB):
        return None
    try:
        world = benchmark_world(benchmark)
        facts = task_facts(benchmark_tasks(benchmark), world, with_baselines=False)
    except MissingExtraError:
        return None
    counts = facts.to_dict()
    return {
        "split": benchmark.eval_split,
        **{name: counts[name] for name in ("reported", "distinct", "effective_size")},
        "few": facts.distinct < MIN_DISTINCT,
    }


def benchmark_rows(benchmark: Benchmark, split: str, *, on_progress: Progress = lambda what: None) -> Dataset:
    """The rows as they are published: registered here, in an installed package, or pulled and registered
    now."""
    _require_split(benchmark, split)
    rows = DatasetRegistry.load_dataset(benchmark.name, split)
    if rows is not None:
        return rows
    if isinstance(benchmark.source, PackageSource):
        return Dataset(pull(benchmark.source, benchmark.splits[split]).rows, benchmark.name, split)
    return pull_benchmark(benchmark, split, on_progress=on_progress)


def kept_places(benchmark: Benchmark, rows: Dataset) -> list[int]:
    """Return the places of the rows that the benchmark's `keep` lets pass."""
    if not benchmark.keep:
        return [*range(len(rows))]
    keep = RowFilter(benchmark.keep, rows.columns)
    return [place for place, row in enumerate(rows) if keep(row)]


def pull_benchmark(
    benchmark: Benchmark,
    split: str,
    *,
    revision: str = "",
    endpoint: str | None = None,
    on_progress: Progress = lambda what: None,
) -> Dataset:
    """Fetch the rows of a split and register them under the benchmark's name."""
    _require_split(benchmark, split)
    if benchmark.source is None:
        raise ConfigError(f"`{benchmark.name}` makes its tasks itself; there is nothing to pull.")
    pull_result = pull(
        benchmark.source,
        benchmark.splits[split],
        revision=revision,
        endpoint=endpoint,
        on_progress=on_progress,
    )
    _require_same_file(benchmark, split, pull_result.facts)
    return DatasetRegistry.register_dataset(
        benchmark.name,
        pull_result.rows,
        split,
        source=benchmark.source.address,
        description=benchmark.description,
        category=benchmark.category,
        details=pull_result.facts,
    )


def source_facts(benchmark: Benchmark, split: str) -> dict[str, str]:
    """The source of a split's rows, as it was written down when they were pulled or registered: address,
    commit or checksum of the file, and checksum of the rows. Empty for worlds."""
    info = DatasetRegistry.get_dataset_info(benchmark.name) or {}
    if isinstance(benchmark.source, PackageSource):
        return {name: str(value) for name, value in pull(benchmark.source, Split()).facts.items()}
    entry = info.get("splits", {}).get(split, {})
    return {name: str(entry[name]) for name in _SOURCE_FACTS if entry.get(name)}


_SOURCE_FACTS = ("address", "revision", "file_sha256", "sha256")


def _require_same_file(benchmark: Benchmark, split: str, facts: Mapping[str, Any]) -> None:
    """Raises ConfigError for a file without a checksum in the catalogue that is another one than at first."""
    first = source_facts(benchmark, split).get("file_sha256")
    if first and facts.get("file_sha256", first) != first:
        raise ConfigError(
            f"{facts['address']} is another file than the one that `{benchmark.name}` was pulled from first "
            f"(sha256 {facts['file_sha256'][:16]}… instead of {first[:16]}…), so scores would not be "
            f"comparable. What is here was kept; to take the new one: rllm dataset remove {benchmark.name}"
        )


def question_of_row(benchmark: Benchmark, split: str, number: int, row: Mapping[str, Any]) -> Question:
    """The question of a row. Raises ConfigError that names the row's number and the field."""
    read = Row(values=row, number=number, dataset=f"{benchmark.name} ({split})", fields=benchmark.fields)
    return transform_named(benchmark.transform)(read, benchmark.options)


def task_of_row(benchmark: Benchmark, split: str, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """The task that a row stands for. Raises ConfigError that names the row's number and the field."""
    return question_task(
        question_of_row(benchmark, split, number, row),
        task_id=f"{benchmark.name}-{split}-{number}",
        prompt=benchmark.prompt,
        system=benchmark.system,
        grader=benchmark.evaluator,
        grader_args=benchmark.evaluator_args,
    )


def dataset_hash(tasks: list[dict[str, Any]]) -> str:
    """A hash that is equal for evaluations of the same tasks: of ids and questions, in order."""
    digest = hashlib.sha256()
    for task in tasks:
        question = task.get("question", task.get("messages", sorted(task.items(), key=lambda each: each[0])))
        digest.update(f"{task.get('task_id')}\n{question!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def world_of(name: str) -> World:
    """The world that a configuration names: one of `environments.worlds`, or a benchmark of questions."""
    if name in benchmark_names() or DatasetRegistry.dataset_exists(name):
        return benchmark_world(benchmark_named(name))
    return world_named(name)


def benchmark_world(benchmark: Benchmark) -> World:
    """The world that training and evaluation by name play."""
    if benchmark.environment == TASK_DIRECTORY and benchmark.source is not None:
        world = world_named(TASK_DIRECTORY)
        return replace(
            world,
            tasks=partial(_unpacked_tasks, world, benchmark),
            skipped=partial(_unpacked_skips, world, benchmark),
        )
    if not benchmark.asks_questions:
        return world_named(benchmark.environment)
    return World(
        env_class=FollowUpEnvironment if benchmark.environment == FOLLOW_UPS else SingleTurnEnvironment,
        tasks=partial(_question_tasks, benchmark),
        demonstrate=_with_demonstrations,
        baselines=answer_baselines(task_oracle),
    )


def world_name(benchmark: Benchmark) -> str:
    """The name of its world in a configuration: `world_of` finds it again."""
    return benchmark.name if benchmark.asks_questions else benchmark.environment


def _question_tasks(benchmark: Benchmark, split: str, count: int, *, start: int = 0) -> list[dict[str, Any]]:
    """Up to `count` tasks from `start` on, counted around the end: there are no more than the rows.

    A `test` or `validation` split that nobody published is every twentieth row of `train`, which `train` then
    lacks.
    """
    held_out = {name: place for name, place in HELD_OUT.items() if name not in benchmark.splits}
    published_split = "train" if split in held_out else split
    rows = _kept_rows(benchmark.name, published_split)
    places = [
        place
        for place in kept_places(benchmark, rows)
        if published_split != "train" or _part_of(place, held_out) == split
    ]
    if not places:
        raise ConfigError(
            f"`{benchmark.name}` has {len(rows)} rows of `train`, too few to hold out a {split} split: it "
            f"takes every {HELD_OUT_EVERY}th, so there must be {held_out.get(split, 0) + 1}."
            + _registering(benchmark, split)
        )
    begin = start % len(places)
    selection = [*places[begin:], *places[:begin]][:count]
    return [task_of_row(benchmark, published_split, place, rows[place]) for place in selection]


def _part_of(place: int, held_out: Mapping[str, int]) -> str:
    return next((name for name, left in held_out.items() if place % HELD_OUT_EVERY == left), "train")


@lru_cache(maxsize=4)
def _kept_rows(name: str, split: str) -> Dataset:
    return benchmark_rows(benchmark_named(name), split)


def _with_demonstrations(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator
) -> list[tuple[Any, str]]:
    """The right answer of a row, which is all that an expert of questions knows.

    With probability `noise` its digits are others. Raises ConfigError for rows without a right answer.
    """
    answer = task.get("oracle")
    if answer is None:
        raise ConfigError(
            f"The task {task.get('task_id')} has no worked answer to imitate; set `warm_start.steps` to 0."
        )
    return [(task.get("messages", task.get("question")), stray(answer, noise, rng))]


def _unpacked_tasks(
    world: World, benchmark: Benchmark, split: str, count: int, *, start: int = 0
) -> list[dict[str, Any]]:
    """Tasks of an archive of task directories, unpacked where its download is kept."""
    return world.tasks(split, count, start=start, path=_unpacked_folder(benchmark))


def _unpacked_skips(world: World, benchmark: Benchmark, split: str) -> dict[str, str]:
    return world.skipped(split, path=_unpacked_folder(benchmark)) if world.skipped is not None else {}


def _unpacked_folder(benchmark: Benchmark) -> str:
    if not isinstance(benchmark.source, ArchiveSource):
        raise ConfigError(f"The source of `{benchmark.name}` is no archive; task directories come in one.")
    return str(unpack(download(benchmark.source.url, sha256=benchmark.source.sha256)))


def _require_split(benchmark: Benchmark, split: str) -> None:
    if split not in benchmark.splits:
        elsewhere = " Train on another benchmark and measure on this one." if split == "train" else ""
        raise ConfigError(
            f"`{benchmark.name}` has no split `{split}`; it has {', '.join(benchmark.splits)}."
            + (_registering(benchmark, split) or elsewhere)
        )


def _registering(benchmark: Benchmark, split: str) -> str:
    """The command that adds a missing split to a data set of the user's own."""
    if benchmark.name in benchmark_names() or not DatasetRegistry.dataset_exists(benchmark.name):
        return ""
    return f" Register its rows: rllm dataset register {benchmark.name} FILE --split {split}"


def _draw_rows(rows: int, count: int, seed: int, split: str) -> list[int]:
    rng = np.random.default_rng(draw_seed(seed, "benchmark", split))
    return sorted(int(place) for place in rng.permutation(rows)[:count])
