"""Several runs beside each other: their curves, the settings in which they differ, and their tasks in pairs.

runs ──► config.json   ──► keys with several values
     ──► metrics.jsonl ──► training curves
     ──► store.sqlite  ──► the same tasks of the first and each other one ──► difference with its interval
"""

from collections.abc import Mapping
from typing import Any

from rllm.errors import ConfigError
from rllm.eval.comparison import compare
from rllm.eval.results import Result, newest_episodes, result_of
from rllm.store.browsing import EpisodeBrowser
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.view.query import Query
from rllm.view.run_facts import facts_of
from rllm.view.run_pages import series_of
from rllm.view.sources import Sources

MAX_RUNS = 64
PHASES = ("after", "sampled", "greedy", "after.greedy", "before")
"""Phases in which two runs may have attempted the same tasks, the one that says most first."""


def comparison_page(sources: Sources, query: Query) -> dict[str, Any]:
    """Two runs or more by `run`."""
    keys = list(dict.fromkeys(query.texts("run")))
    if not 2 <= len(keys) <= MAX_RUNS:
        raise ConfigError(f"{len(keys)} runs are to be compared; choose 2 to {MAX_RUNS}.")
    runs = {key: sources.run(key) for key in keys}
    return {
        "runs": [
            {
                "key": key,
                "facts": facts_of(run).to_dict(),
                "series": series_of(read_metrics(run.metrics_path)).get(TRAIN_PHASE, {}),
            }
            for key, run in runs.items()
        ],
        "differences": differing_keys({key: run.config() for key, run in runs.items()}),
        "pairs": [{"first": keys[0], "second": key, **_pair(runs[keys[0]], runs[key])} for key in keys[1:]],
    }


def _pair(first: RunDirectory, second: RunDirectory) -> dict[str, Any]:
    phases = [_phases(first), _phases(second)]
    phase = next((name for name in PHASES if all(name in each for each in phases)), None)
    if phase is None:
        return {"error": "They have no phase with the same tasks: neither was measured yet."}
    try:
        comparison = compare(_results(first, phase), _results(second, phase))
    except ConfigError as error:
        return {"error": str(error)}
    return {"phase": phase, "comparison": comparison.to_dict()}


def _phases(run: RunDirectory) -> list[str]:
    if not run.store_path.is_file():
        return []
    with EpisodeBrowser.open(run.store_path) as browser:
        return [phase.name for phase in browser.phases()]


def _results(run: RunDirectory, phase: str) -> list[Result]:
    with EpisodeStore.open(run.store_path, read_only=True) as store:
        return [result_of(episode) for episode in newest_episodes(store, phase)]


def differing_keys(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Key -> run -> value, for every key whose value is not the same in all runs."""
    flat = {run: _flat_keys(config) for run, config in configs.items()}
    keys = dict.fromkeys(key for each in flat.values() for key in each)
    values = {key: {run: each.get(key) for run, each in flat.items()} for key in keys}
    return {
        key: by_run for key, by_run in values.items() if len({repr(each) for each in by_run.values()}) > 1
    }


def _flat_keys(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        )
    return flat
