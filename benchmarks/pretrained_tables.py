"""Tables of what a pretrained model learns: results/learn_pretrained/ and results/pretrained_screen.json."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learning_blocks import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "learn_pretrained"
SCREEN = ROOT / "benchmarks" / "results" / "pretrained_screen.json"
BESIDE_TRL = ROOT / "benchmarks" / "results" / "pretrained_trl.json"
EXAMPLES = ROOT / "examples" / "pretrained"
NUM_SEEDS = 3
ABOUT = {
    "calculator": ("a calculator as a tool", "MCP server", "4"),
    "constraints": ("constraints on a sentence", "agent and environment", "1"),
    "documents": ("a place, by search from page to page", "LangGraph", "4"),
    "extract": ("JSON of a schema", "`openai` program", "1"),
    "lights": ("a game with rules in its prompt", "agent and environment", "4"),
    "relay": ("two agents, one note", "workflow", "2"),
    "sql": ("SQL on SQLite in the sandbox", "agent and environment", "2"),
    "word_problems": ("word problems", "OpenAI Agents SDK", "1"),
}
"""Example -> what is learned, the way in, turns of an episode."""


VARIANTS = {"lora": "SmolLM2-135M-Instruct, an adapter of rank 16", "gemma3": "Gemma 3 270M, all weights"}
"""Variant -> the model and its trained part."""


def load_runs(folder: Path = RESULTS, *, variants: bool = False) -> list[dict[str, Any]]:
    """Return the results of the tasks as they are shipped, or with `variants` of the others."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [run for run in runs if bool(run.get("variant")) == variants]


def learned_table(page: Path, runs: Sequence[Mapping[str, Any]]) -> str:
    """One row a run, each task with a link to its file; says how many runs are missing."""
    lines = [
        "| task | way in | turns | seed | pass@1 before (greedy) | after (greedy) | pass@8 | best constant "
        "| weakest kind after | groups with signal | different answers | CPU s |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(_row(page, run) for run in runs),
    ]
    missing = sorted({*ABOUT} - {run["task"] for run in runs})
    num_wanted = NUM_SEEDS * len(ABOUT)
    finished = f"{len(runs)} of {num_wanted} runs are finished"
    partial = [] if len(runs) >= num_wanted else [f"**This table is partial: {finished}.**"]
    if missing:
        partial.append(f"Without a reported run so far: {', '.join(missing)}.")
    commits = ", ".join(sorted({run["commit"] for run in runs})) or "none"
    return "\n".join(
        [*lines, "", *partial, f"In percent, with 95 % intervals over test instances; commits: {commits}."]
    )


def variant_table(page: Path, runs: Sequence[Mapping[str, Any]]) -> str:
    """One row a run with another model or an adapter."""
    lines = [
        "| task | model | rate | seed | pass@1 before (greedy) | after (greedy) | pass@8 | CPU s |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        link = os.path.relpath(EXAMPLES / f"{run['task']}.py", page.parent)
        cells = [
            f"[{run['task']}]({link})",
            VARIANTS[run["variant"]],
            f"{run['settings']['optimizer.learning_rate']:g}",
            str(run["seed"]),
            *_success_cells(run),
            f"{run['cpu_s']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _success_cells(run: Mapping[str, Any]) -> list[str]:
    """Return pass@1 before and after, with greedy success, and pass@8."""
    return [
        f"{_figure(run['start'])} ({run['start_greedy']['value']:.0f})",
        f"{_figure(run['trained'])} ({run['trained_greedy']['value']:.0f})",
        f"{run['pass_at_8']['before']:.0f} → {run['pass_at_8']['after']:.0f}",
    ]


def _row(page: Path, run: Mapping[str, Any]) -> str:
    _, way, turns = ABOUT[run["task"]]
    link = os.path.relpath(EXAMPLES / f"{run['task']}.py", page.parent)
    start = f"| [{run['task']}]({link}) | {way} | {turns} | {run['seed']} "
    weakest = min(run["kinds"], key=lambda kind: run["kinds"][kind][1])
    cells = [
        *_success_cells(run),
        f"{run['constant']:.0f}",
        f"{weakest}: {100 * run['kinds'][weakest][1]:.0f}",
        f"{100 * run['groups_with_signal']:.0f}",
        f"{100 * run['different_answers']['before']:.0f} → {100 * run['different_answers']['after']:.0f}",
        f"{run['cpu_s']:.0f}",
    ]
    return f"{start}| {' | '.join(cells)} |"


def _figure(figure: Mapping[str, Any]) -> str:
    low, high = figure["interval"]
    return f"{figure['value']:.0f} ({low:.0f} to {high:.0f})"


def trl_table(results: Sequence[Mapping[str, Any]]) -> str:
    """One row a task and seed: success after training by both sides, and the CPU seconds of training."""
    lines = [
        "| task | seed | rLLM: pass@1 (greedy) | TRL: pass@1 (greedy) | rLLM CPU s | TRL CPU s | ratio |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        ours, theirs = result["rllm"], result["trl"]
        cells = [
            result["task"],
            str(result["seed"]),
            *(_side(side) for side in (ours, theirs)),
            *(f"{side['cpu_s']:.0f}" for side in (ours, theirs)),
            f"{theirs['cpu_s'] / ours['cpu_s']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    commits = ", ".join(sorted({result["commit"] for result in results})) or "none"
    return "\n".join(
        [*lines, "", f"In percent, with 95 % intervals over test instances; commits: {commits}."]
    )


def _side(side: Mapping[str, Any]) -> str:
    low, high = (100 * end for end in side["success_interval"])
    return f"{100 * side['success']:.0f} ({low:.0f} to {high:.0f}) ({100 * side['greedy']:.0f})"


def screen_table(trials: Sequence[Mapping[str, Any]]) -> str:
    """Everything that was tried on the development seed and validation instances."""
    lines = [
        "| task | setting | steps | success before → after | entropy, first → last step | CPU s | |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for trial in trials:
        rates = f"{_rate(trial.get('before'))} → {_rate(trial.get('after'))}"
        entropy = " → ".join(f"{value:.2f}" for value in trial.get("entropy", [])) or "-"
        cells = [
            trial["task"],
            trial["setting"],
            str(trial["steps"]),
            rates,
            entropy,
            f"{trial['cpu_s']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} | {trial.get('remark', '')} |")
    return "\n".join(lines)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"


def pretrained_text(kind: str, page: Path) -> str:
    """Of one mark: `pretrained` is what was learned, `variants` with other models and adapters, `beside`
    what TRL learns, `screened` what was tried."""
    if kind == "beside":
        return trl_table(json.loads(BESIDE_TRL.read_text()) if BESIDE_TRL.exists() else [])
    if kind == "variants":
        return variant_table(page, load_runs(variants=True))
    if kind == "screened":
        return screen_table(json.loads(SCREEN.read_text()) if SCREEN.exists() else [])
    return learned_table(page, load_runs())
