"""Stored episodes, judged again: without the model, by the same grader mended or by another.

store of A ──episodes──► judge ──► store of B, with B's config naming A

What the model said stays as it is; only rewards, grades and `is_correct` change. Attempts that failed stay
failed, and so does one that the judge cannot judge now: never a zero.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.eval.judging import pay, verdict
from rllm.eval.plan import require_evaluation
from rllm.eval.report import NO_PRICES, Prices, details_of, report_of, require_ks
from rllm.eval.results import Result, newest_episodes, result_of
from rllm.rewards.evaluator import Evaluator
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode

_BATCH = 64
"""Episodes that are in memory, and judged side by side."""


@dataclass(kw_only=True, slots=True)
class Rescored:
    """The result of judging an evaluation again."""

    report: dict[str, Any] = field(default_factory=dict[str, Any])
    judged: int = 0
    """Episodes that were judged again; those that had failed are not."""
    changed: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Way -> the episodes whose `is_correct` is another now."""


def rescore(
    source: Path,
    target: Path,
    evaluator: Evaluator,
    *,
    by: str = "",
    evaluator_hash: str = "",
    ks: Sequence[int] = (),
    prices: Prices = NO_PRICES,
) -> Rescored:
    """Judge every episode of the evaluation in `source`, and keep the result in `target`, a new directory.

    `by` is what the stamp calls the judge. Raises ConfigError for tasks that it cannot judge at all.
    """
    run = RunDirectory.read(source)
    config = run.config()
    require_evaluation(config, source)
    require_ks(ks, config["attempts"])
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose a new directory with --output.")
    stamp = {**config, "evaluator": by or evaluator.name, "evaluator_hash": evaluator_hash}
    rescoring = Rescored()
    reports: dict[str, Any] = {}
    with (
        EpisodeStore.open(run.store_path, read_only=True) as old,
        RunDirectory.create_or_open(target) as target_run,
        ThreadPoolExecutor(_BATCH) as threads,
    ):
        with EpisodeStore.open(target_run.store_path) as new:
            for way in (each for each in config["ways"] if each in old.phases()):
                results: list[Result] = []
                for number, batch in enumerate(_batches(old, way)):
                    results += _judge_again(batch, evaluator, way, rescoring, threads)
                    new.save_episodes(way, number, batch)
                reports[way] = {**report_of(results).to_dict(), **details_of(results, ks=ks, prices=prices)}
        # Last, so that nobody takes a half for the whole.
        target_run.write_config({**stamp, "rescored_from": str(source)})
        rescoring.report = {"stamp": target_run.config(), "reports": reports}
        target_run.write_summary(rescoring.report)
    return rescoring


def _batches(store: EpisodeStore, way: str) -> Iterator[list[Episode]]:
    episodes = newest_episodes(store, way)
    while batch := list(islice(episodes, _BATCH)):
        yield batch


def _judge_again(
    batch: Sequence[Episode], evaluator: Evaluator, way: str, rescoring: Rescored, threads: ThreadPoolExecutor
) -> list[Result]:
    before = [result_of(episode) for episode in batch]
    again = [episode for episode, result in zip(batch, before, strict=True) if not result.has_failed]
    outputs = list(threads.map(partial(verdict, evaluator), again))
    for episode, output in zip(again, outputs, strict=True):
        pay(episode, output)
    rescoring.judged += len(again)
    results = [result_of(episode) for episode in batch]
    for result, old in zip(results, before, strict=True):
        if result.is_correct != old.is_correct:
            rescoring.changed.setdefault(way, []).append(str(result.episode))
    return results
