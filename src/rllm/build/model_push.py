"""A model to the hub, with a model card that is made of its run: `rllm model push`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rllm.build.models import local_model_path, model_directory
from rllm.data.hub import push_directory
from rllm.store.run_directory import RunDirectory, is_run

STAGES = {"untrained": "before training", "before": "before reinforcement", "after": "after training"}
SETTINGS = ("steps", "epochs", "seed", "optimizer.learning_rate", "algorithm.estimator", "lora.rank")


def push_model(name: str, repo: str, *, private: bool) -> str:
    """Upload a model directory, or the trained model of a run, with its card. Returns the address."""
    from rllm.models.directory import copy_model_directory  # with torch

    path = local_model_path(name)
    with TemporaryDirectory(prefix="rllm-push-") as parent:
        target = Path(parent) / "model"
        copy_model_directory(model_directory(path), target)
        (target / "README.md").write_text(model_card(path, repo), encoding="utf-8")
        return push_directory(target, repo, private=private)


def model_card(path: Path, repo: str) -> str:
    """Return the README of a model: data, settings, and figures with intervals, where it comes from a run."""
    head = ["---", "library_name: transformers", "tags: [rllm]", "---", f"# {repo.rpartition('/')[2]}", ""]
    if not is_run(path):
        return "\n".join([*head, "A model in Hugging Face format, uploaded with rLLM.", ""])
    run = RunDirectory.read(path)
    summary: dict[str, Any] = run.summary() or {}
    config: dict[str, Any] = json.loads(run.config_path.read_text())
    lines = [*head, "Trained with rLLM.", "", "## Data", "", f"- {_data(config)}", ""]
    lines += ["## Settings", "", "| setting | value |", "|---|---|"]
    lines += [f"| `{key}` | {value} |" for key in SETTINGS if (value := _value(config, key)) is not None]
    figures = [
        f"| {label} | {_rate(report, 'success')} | {_rate(report, 'greedy')} |"
        for stage, label in STAGES.items()
        if isinstance(report := summary.get(stage), dict) and "success" in report
    ]
    if figures:
        lines += ["", "## Figures", "", "Held-out tasks, with intervals of 95 %.", ""]
        lines += ["| | sampled success | greedy success |", "|---|---|---|", *figures]
    return "\n".join([*lines, ""])


def _value(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _data(config: dict[str, Any]) -> str:
    """Return the name of the rows or the environment that a run was made with."""
    names = (_value(config, key) for key in ("data.dataset", "data.run", "task.dataset", "task.environment"))
    return str(next((Path(str(name)).name for name in names if name), "not recorded"))


def _rate(report: dict[str, Any], way: str) -> str:
    rate, interval = report.get(way), report.get(f"{way}_interval")
    if rate is None:
        return "–"
    bounds = f" ({100 * interval[0]:.1f}–{100 * interval[1]:.1f})" if interval else ""
    return f"{100 * rate:.1f} %{bounds}"
