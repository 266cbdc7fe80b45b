"""From finished runs to the figures of a task.

    run ──► summary.json: rates ───────────────────────────┐
    run ──► store: what the test tasks paid ──► score, skill ──► figures of one seed
    runs ──► stores ──► score and skill of all seeds together

What score and skill are, and how their intervals are made, is `rllm.eval.skill`'s to say. All seeds together
are compared task by task: each has the mean of what the seeds made of it.
"""

import importlib.util
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllm.environments.base import BaseEnv
from rllm.environments.world import OPTIMUM, RANDOM, World
from rllm.eval.evaluate import results_on
from rllm.eval.results import Result
from rllm.eval.skill import by_kind, measure_of, score_of, skill_of, values_of
from rllm.eval.task_facts import TaskFacts, task_facts
from rllm.eval.tasks import world_of
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics

PHASES = ("before", "before.greedy", "after")


@dataclass(kw_only=True, slots=True, frozen=True)
class Played:
    """What the reported tasks of some runs came to; every run reports the same ones."""

    before: list[Result]
    greedy: list[Result]
    after: list[Result]
    facts: TaskFacts


def world_behind(environment: str, file: Path | None = None) -> World | None:
    """The world by its name, or what the functions `identity`, `kind` and `baselines` of an example's file
    know; None of a file without them."""
    if file is None:
        return world_of(environment)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fields = {
        name: getattr(module, name) for name in ("identity", "kind", "baselines") if hasattr(module, name)
    }
    return World(env_class=BaseEnv, tasks=module.tasks, **fields) if fields else None


def played_by(runs: Sequence[Path], world: World | None) -> Played:
    """Of one run or of several."""
    results: dict[str, list[Result]] = {phase: [] for phase in PHASES}
    facts = TaskFacts()
    for run in runs:
        with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
            episodes = {phase: list(store.episodes(phase)) for phase in PHASES}
        if not facts.instances:
            facts = task_facts([each.task for each in episodes[PHASES[0]]], world)
        for phase, mine in episodes.items():
            results[phase] += results_on(mine, facts)
    before, greedy, after = results.values()
    if {each.episode.task_id for each in after} != set(facts.instances):
        raise ValueError(f"{', '.join(map(str, runs))} report different tasks.")
    return Played(before=before, greedy=greedy, after=after, facts=facts)


def score_together(played: Played) -> dict[str, Any] | None:
    """None where nobody knows what chance or the best come to."""
    found = score_of(played.after, played.facts)
    return _figure(found["score"], found["score_interval"]) if found else None


def skill_together(played: Played) -> dict[str, Any]:
    """In points."""
    measure = measure_of(played.before, played.greedy, played.after)
    references = {name: each for name, each in played.facts.baselines.items() if name != OPTIMUM}
    references["before, greedy"] = values_of(played.greedy, measure)
    skill, _ = skill_of(values_of(played.after, measure), references, played.facts.instances)
    return _figure(100.0 * skill.value, [100.0 * end for end in skill.interval])


def task_figures(runs: Sequence[Path], world: World | None) -> dict[str, Any]:
    """What holds for all seeds of a task."""
    if not runs:
        return {
            "score": None,
            "skill": None,
            "baselines": {},
            "best_baseline": "",
            "best_baseline_score": None,
        }
    played = played_by(runs, world)
    means = played.facts.means()
    best = max((name for name in means if name != OPTIMUM), key=lambda name: means[name], default="")
    score = None
    if {RANDOM, OPTIMUM} <= means.keys() and means[OPTIMUM] > means[RANDOM]:
        score = round(100.0 * (means[best] - means[RANDOM]) / (means[OPTIMUM] - means[RANDOM]), 1)
    return {
        "parameters": parameters_of(runs[0]),
        "tasks": len(played.facts.instances),
        "distinct": played.facts.distinct,
        "effective": round(played.facts.effective_size, 1),
        "score": score_together(played),
        "skill": skill_together(played),
        "baselines": {name: round(mean, 4) for name, mean in means.items()},
        "best_baseline": best,
        "best_baseline_score": score,
    }


def run_figures(run: Path, world: World | None, earlier: Sequence[Path] = ()) -> dict[str, Any]:
    """What the table says of one seed; `earlier`: runs whose seconds count as well."""
    summary, played = _summary(run), played_by([run], world)
    measure = measure_of(played.before, played.after)
    kinds = by_kind(values_of(played.before, measure), values_of(played.after, measure), played.facts)
    return {
        "start": _rate(summary["before"], "success"),
        "start_greedy": _rate(summary["before"], "greedy"),
        "trained": _rate(summary["after"], "success"),
        "trained_greedy": _rate(summary["after"], "greedy"),
        "score": score_together(played),
        "skill": skill_together(played),
        "kinds": {each["kind"]: [round(each[when], 4) for when in ("before", "after")] for each in kinds},
        "wall_s": round(sum(_summary(each)["wall_s"] for each in (run, *earlier)), 1),
        "curve": curve_of(run),
    }


def curve_of(run: Path) -> list[list[float]]:
    """[step, sampled success, low, high, greedy success] on validation tasks."""
    names = ("heldout_success", "heldout_success_low", "heldout_success_high", "heldout_greedy")
    return [
        [line["step"] + 1, *(round(line[name], 4) for name in names)]
        for line in read_metrics(run / "metrics.jsonl")
        if line["phase"] == "train" and names[0] in line
    ]


def parameters_of(run: Path) -> int:
    """Of all models that the run trained."""
    models = [run / "model", *sorted((run / "models").glob("*"))]
    return sum(num_parameters(model) for model in models if model.is_dir())


def num_parameters(model: Path) -> int:
    """Numbers in a model directory's weights, by the headers of its safetensors files."""
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes = [each["shape"] for name, each in header.items() if name != "__metadata__"]
        total += sum(int(np.prod(shape)) for shape in shapes)
    return total


def _summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def _rate(report: Mapping[str, Any], way: str) -> dict[str, Any]:
    return _figure(100.0 * report[way], [100.0 * end for end in report[f"{way}_interval"]])


def _figure(value: float, interval: Sequence[float]) -> dict[str, Any]:
    return {"value": round(value, 2), "interval": [round(end, 2) for end in interval]}
