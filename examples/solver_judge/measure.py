"""What solver and judge learned from rewards, each asked the same held-out questions before and after.

    imitation/models ─────┬─ solver: the test problems; judge: pairs with one right answer ──► measured.json
    reinforcement/models ─┘
    every training step ──► share of right answers, and of right picks where there was a choice ──► curves.png

python measure.py runs/solver_judge
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from solver_judge import LETTERS, is_right, to_judge, to_solver

from rllm import Episode, SamplingParams
from rllm.eval.statistics import wilson_interval
from rllm.inference.local.client import LocalClient
from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore

Question = tuple[list[dict[str, Any]], Callable[[str], bool]]
"""What is asked, and whether an answer to it is right."""


def answers_of(episode: Episode) -> list[str]:
    return [trajectory.output for trajectory in episode.trajectories if trajectory.name == "solver"]


def picks_of(episode: Episode) -> list[float]:
    """What the judge was paid for each of its picks."""
    return [each.reward or 0.0 for each in episode.trajectories if each.name == "judge"]


def has_a_choice(episode: Episode) -> bool:
    """Whether exactly one of the two answers is right: elsewhere a judge can neither win nor lose."""
    return sum(is_right(episode.task, answer) for answer in answers_of(episode)) == 1


def questions(run: Path) -> dict[str, list[Question]]:
    """The test problems for the solver; for the judge the answers to them that were given before
    reinforcement, so that a better solver makes its questions neither harder nor easier."""
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        episodes = list(store.episodes("before"))

    def right(task: dict[str, Any]) -> Callable[[str], bool]:
        return lambda answer: is_right(task, answer)

    def picks(task: dict[str, Any], pair: list[str]) -> Callable[[str], bool]:
        return lambda letter: letter in set(LETTERS) and is_right(task, pair[LETTERS.index(letter)])

    return {
        "solver": [(to_solver(each.task), right(each.task)) for each in episodes],
        "judge": [
            (to_judge(each.task, answers_of(each)), picks(each.task, answers_of(each)))
            for each in episodes
            if has_a_choice(each)
        ],
    }


async def measured(model: Path, asked: list[Question]) -> dict[str, dict[str, float]]:
    """Share of right answers with its 95 % interval: sampled at temperature 1, and greedy."""
    client = LocalClient(load_model(model), max_context=64)
    results: dict[str, dict[str, float]] = {}
    for way, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        ask = [SamplingParams(temperature=temperature, max_tokens=8, seed=seed) for seed in range(len(asked))]
        outputs = await asyncio.gather(
            *(client.get_model_response(each[0], how) for each, how in zip(asked, ask, strict=True))
        )
        right = sum(good(output.text) for output, (_, good) in zip(outputs, asked, strict=True))
        low, high = wilson_interval(right, len(asked))
        results[way] = {"share": right / max(1, len(asked)), "low": low, "high": high, "asked": len(asked)}
    await client.close()
    return results


def curves(run: Path) -> dict[str, list[float]]:
    """By training step: share of right answers of the solver, and of right picks where there was a choice."""
    shares: dict[str, list[float]] = {"solver": [], "judge": []}
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        step = 0
        while episodes := list(store.episodes("train", step)):
            graded = [is_right(each.task, answer) for each in episodes for answer in answers_of(each)]
            chosen = [paid > 0.0 for each in episodes if has_a_choice(each) for paid in picks_of(each)]
            shares["solver"].append(sum(graded) / len(graded))
            shares["judge"].append(sum(chosen) / max(1, len(chosen)))
            step += 1
    return shares


def draw(shares: dict[str, list[float]], results: dict[str, Any], path: Path) -> None:
    """Training batches as lines; held-out questions, before and after, as points with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    last = len(shares["solver"])
    for role, color in (("solver", "tab:blue"), ("judge", "tab:orange")):
        axes.plot(range(1, last + 1), shares[role], color=color, alpha=0.5, label=f"{role}, training batches")
        for way, marker in (("sampled", "o"), ("greedy", "s")):
            ends = [results[when][role][way] for when in ("imitation", "reinforcement")]
            middle = [end["share"] for end in ends]
            reach = [
                [end["share"] - end["low"] for end in ends],
                [end["high"] - end["share"] for end in ends],
            ]
            axes.errorbar(
                [0, last], middle, reach, color=color, marker=marker, linestyle="", capsize=3,
                label=f"{role}, held out, {way}",
            )  # fmt: skip
    axes.set(xlabel="step of reinforcement", ylabel="share that is right", ylim=(0, 1))
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    where = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/solver_judge")
    if not (where / "reinforcement" / "summary.json").is_file():
        sys.exit(f"{where} holds no finished run of both phases; train first: python solver_judge.py {where}")
    asked = questions(where / "reinforcement")
    found = {
        when: {role: asyncio.run(measured(where / when / "models" / role, asked[role])) for role in asked}
        for when in ("imitation", "reinforcement")
    }
    (where / "measured.json").write_text(json.dumps(found, indent=2))
    draw(curves(where / "reinforcement"), found, where / "curves.png")
    for when, by_role in found.items():
        for role, ways in by_role.items():
            for way, got in ways.items():
                share = f"{got['share']:.1%} ({got['low']:.1%} to {got['high']:.1%}) of {got['asked']:.0f}"
                print(f"{role}, after {when}, {way}: {share}")
