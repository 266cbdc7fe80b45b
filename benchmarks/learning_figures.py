"""From a finished run to its figures, and from the runs of a task to what they show.

    run ──► store: what the same test tasks paid before and after ──┐
    world ──► identity and baselines of each of those tasks ────────┴──► Outcomes ──► score, skill, intervals

Score is 100 · (return - random) / (optimum - random). Skill is what sampled success after training is above
the greatest of the baselines and of the greedy success before it. Intervals are 95 % percentile ones over
instances that are drawn anew (Efron 1979); tasks with one identity are one instance, whatever their number,
and so are the attempts at it with several seeds.
"""

import importlib.util
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rllm.environments.world import OPTIMUM, RANDOM, task_content
from rllm.eval.tasks import world_of
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.types.episode import Episode

RESAMPLES = 2_000
Identity = Callable[[Mapping[str, Any]], str]
Interval = tuple[float, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class Outcomes:
    """What N test tasks paid, with one seed."""

    identities_N: list[str]
    before_N: np.ndarray
    """Sampled, before reinforcement."""
    greedy_N: np.ndarray
    """Likeliest tokens, before reinforcement."""
    after_N: np.ndarray
    baselines: dict[str, np.ndarray]
    """Name -> [N] expected return of a policy without skill, of `random` and of the optimum."""

    @property
    def best_baseline(self) -> str:
        """The policy without skill that is paid most."""
        simple = [name for name in self.baselines if name != OPTIMUM]
        return max(simple, key=lambda name: self.baselines[name].mean())

    @property
    def score_terms(self) -> list[np.ndarray]:
        """Numerator and denominator of the score."""
        random_N = self.baselines[RANDOM]
        return [self.after_N - random_N, self.baselines[OPTIMUM] - random_N]

    @property
    def gains_N(self) -> np.ndarray:
        """What each task paid above the best that needed no reinforcement."""
        rivals = [self.greedy_N, *([self.baselines[self.best_baseline]] if self.baselines else [])]
        return self.after_N - max(rivals, key=lambda rival_N: rival_N.mean())


@dataclass(kw_only=True, slots=True, frozen=True)
class TaskKnowledge:
    """What is known of a block's tasks without any model."""

    identity: Identity
    baselines: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Sequence[float]]] | None


def knowledge_of(environment: str, file: Path | None = None) -> TaskKnowledge:
    """Of a world by name, or of an example: the functions `identity` and `baselines` of its file, if any."""
    if file is None:
        world = world_of(environment)
        return TaskKnowledge(identity=world.identity, baselines=world.baselines)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return TaskKnowledge(
        identity=getattr(module, "identity", task_content), baselines=getattr(module, "baselines", None)
    )


def worth(episode: Episode) -> float:
    """What it was paid; where several roles are paid, each in its own way, whether it succeeded."""
    return episode.reward if len(episode.trajectories) == 1 else float(episode.is_correct)


def outcomes_of(run: Path, knowledge: TaskKnowledge) -> Outcomes:
    """Of the run's own report; tasks in the order of the store."""
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        phases = [list(store.episodes(phase)) for phase in ("before", "before.greedy", "after")]
    names = [[each.task_id for each in episodes] for episodes in phases]
    if names[0] != names[1] or names[0] != names[2]:
        raise ValueError(f"{run} reports other tasks before than after.")
    tasks = [each.task for each in phases[0]]
    found = {} if knowledge.baselines is None else knowledge.baselines(tasks)
    before_N, greedy_N, after_N = (np.array(list(map(worth, episodes))) for episodes in phases)
    return Outcomes(
        identities_N=[knowledge.identity(task) for task in tasks],
        before_N=before_N,
        greedy_N=greedy_N,
        after_N=after_N,
        baselines={name: np.asarray(values, dtype=np.float64) for name, values in found.items()},
    )


def cluster_interval(
    statistic: Callable[..., np.ndarray], identities_N: Sequence[str], *columns: np.ndarray
) -> Interval:
    """95 % percentile interval of `statistic(*sums)`, a function of the columns' sums over instances that are
    drawn with replacement."""
    places = {name: place for place, name in enumerate(dict.fromkeys(identities_N))}
    cluster_N = np.array([places[name] for name in identities_N])
    sums_CK = np.stack([np.bincount(cluster_N, weights=each, minlength=len(places)) for each in columns], 1)
    rng = np.random.default_rng(0)
    drawn_RC = rng.multinomial(len(places), np.full(len(places), 1 / len(places)), size=RESAMPLES)
    low, high = np.quantile(statistic(*(drawn_RC @ sums_CK).T), (0.025, 0.975))
    return float(low), float(high)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return 100.0 * above / below


def score_of(outcomes: Sequence[Outcomes]) -> dict[str, Any] | None:
    """Of one seed or of several together; None where nobody knows the optimum."""
    if not all({RANDOM, OPTIMUM} <= each.baselines.keys() for each in outcomes):
        return None
    terms = [np.concatenate(parts) for parts in zip(*(each.score_terms for each in outcomes), strict=True)]
    interval = cluster_interval(_ratio, _identities(outcomes), *terms)
    return _rounded(float(_ratio(terms[0].sum(), terms[1].sum())), interval)


def skill_of(outcomes: Sequence[Outcomes]) -> dict[str, Any]:
    """In points of success; the rival is that of each seed."""
    gains_N = np.concatenate([each.gains_N for each in outcomes])
    interval = cluster_interval(_ratio, _identities(outcomes), gains_N, np.ones_like(gains_N))
    return _rounded(100.0 * float(gains_N.mean()), interval)


def _identities(outcomes: Sequence[Outcomes]) -> list[str]:
    return [name for each in outcomes for name in each.identities_N]


def _rounded(value: float, interval: Interval) -> dict[str, Any]:
    return {"value": round(value, 2), "interval": [round(end, 2) for end in interval]}


def effective_size(identities_N: Sequence[str]) -> float:
    """How many different tasks tell as much as these with their repeats: n² / Σ (repeats of each)²."""
    _, counts = np.unique(np.asarray(identities_N), return_counts=True)
    return round(float(len(identities_N) ** 2 / (counts**2).sum()), 1)


def num_parameters(model: Path) -> int:
    """Numbers in a model directory's weights, by the headers of its safetensors files."""
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes = [each["shape"] for name, each in header.items() if name != "__metadata__"]
        total += sum(int(np.prod(shape)) for shape in shapes)
    return total


def parameters_of(run: Path) -> int:
    """Of all models that the run trained."""
    models = [run / "model", *sorted((run / "models").glob("*"))]
    return sum(num_parameters(model) for model in models if model.is_dir())


def curve_of(run: Path) -> list[list[float]]:
    """[step, sampled success, low, high, greedy success] on validation tasks."""
    names = ("heldout_success", "heldout_success_low", "heldout_success_high", "heldout_greedy")
    return [
        [line["step"] + 1, *(round(line[name], 4) for name in names)]
        for line in read_metrics(run / "metrics.jsonl")
        if line["phase"] == "train" and names[0] in line
    ]


def run_figures(run: Path, outcomes: Outcomes, earlier: Sequence[Path] = ()) -> dict[str, Any]:
    """What the table says of one seed; `earlier`: runs whose seconds count as well."""
    summary = json.loads((run / "summary.json").read_text())
    wall_s = sum(json.loads((each / "summary.json").read_text())["wall_s"] for each in (run, *earlier))
    before, after = summary["before"], summary["after"]
    return {
        "start": _success(before, "success"),
        "start_greedy": _success(before, "greedy"),
        "trained": _success(after, "success"),
        "trained_greedy": _success(after, "greedy"),
        "return": round(float(outcomes.after_N.mean()), 4),
        "score": score_of([outcomes]),
        "skill": skill_of([outcomes]),
        "wall_s": round(wall_s, 1),
        "curve": curve_of(run),
    }


def _success(report: Mapping[str, Any], way: str) -> dict[str, Any]:
    return _rounded(
        100.0 * report[way], (100.0 * report[f"{way}_interval"][0], 100.0 * report[f"{way}_interval"][1])
    )
