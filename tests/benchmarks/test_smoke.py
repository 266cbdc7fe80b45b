"""Every script in benchmarks/ runs: a figure that nobody can measure again is none.

What takes minutes or another environment is asked for its help, which imports all that it works with.
"""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rllm.environments.web.chromium import find_chromium
from rllm.errors import ConfigError, MissingExtraError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL: dict[str, list[str]] = {
    "algorithm_curves.py": ["--quick", "--alone", "--json"],
    "algorithms.py": ["--quick", "--json"],
    "asynchronous.py": ["--quick", "--steps", "3", "--json"],
    "engine.py": ["--quick", "--at-once", "8", "--json"],
    "eval.py": ["--examples", "20", "--turns", "1", "--json"],
    "fleet.py": ["--quick", "--json"],
    "gpu.py": ["--dry", "--json"],
    "gpu_all.py": ["--dry", "--json"],
    "graders.py": ["--quick", "--json"],
    "logits.py": ["--tokens", "512", "--width", "8", "--losses", "selected", "--json"],
    "inference.py": ["--quick", "--sizes", "1", "--json"],
    "serving_memory.py": ["--quick", "--json"],
    "simulate_cluster.py": ["--quick", "--json"],
    "view.py": ["--episodes", "1024", "--turns", "60", "--repeats", "1", "--json"],
    "worlds.py": ["--mb", "1", "--repeats", "3", "--live", "2"],
    "worker.py": ["--quick", "--at-once", "8", "--json"],
    "train_step.py": ["--turns", "1", "--turn-steps", "1", "--alone", "--json"],
}
PARTS = {"engine_peer", "engine_model", "engine_probe", "engine_rllm", "engine_tables", "eval_inspect"}
PARTS |= {f"gateway_{name}" for name in ("forwarder", "in_process", "load", "peer", "tables", "upstream")}
PARTS |= {f"learning_{name}" for name in ("blocks", "figures", "floors", "tables")}
PARTS |= {"cluster_events", "cluster_runs", "bench_results"}
PARTS |= {f"algorithm_{name}" for name in ("tables", "trl", "variants")}
PARTS |= {"trl_side", "trl_learning_side", "trl_supervised_side"}
"""Started, or imported, by the others."""
ALL = sorted(path.name for path in BENCHMARKS.glob("*.py") if path.stem not in PARTS)


def _run(script: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    return done.stdout


@pytest.mark.slow
def test_a_training_step_is_measured_on_prompts_of_the_length_that_is_asked_for() -> None:
    """Without TRL; with it, the same prompts go to both sides."""
    figures = json.loads(_run("train_step.py", *SMALL["train_step.py"]))
    assert [row["prompt"] for row in figures["rows"]] == [32, 192]
    assert all(row["rllm_cpu_s"] > 0.0 for row in figures["rows"])


def test_every_name_that_a_script_imports_of_this_package_is_there() -> None:
    """Runs of all scripts take minutes and are slow tests; what they import is looked at every time."""
    missing: list[str] = []
    for path in sorted((*BENCHMARKS.glob("*.py"), *(BENCHMARKS.parent / "examples").rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rllm":
                try:
                    module = importlib.import_module(str(node.module))
                except MissingExtraError:
                    continue
                names = [each.name for each in node.names if not hasattr(module, each.name)]
                missing += [f"{path.name}:{node.lineno} {node.module}.{name}" for name in names]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(SMALL))
def test_a_benchmark_runs_at_its_smallest(script: str) -> None:
    figures: Any = json.loads(_run(script, *SMALL[script]))
    assert figures


@pytest.mark.slow
def test_websites_are_measured() -> None:
    pytest.importorskip("playwright")
    try:
        find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))
    figures = json.loads(_run("web.py", "--quick", "--json"))
    assert [row["num_contexts"] for row in figures["rows"]] == [1, 2]
    assert all(row["cpu_ms_per_step"] > 0 for row in figures["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(set(ALL) - set(SMALL)))
def test_a_benchmark_that_takes_minutes_imports_all_that_it_works_with(script: str) -> None:
    assert "usage:" in _run(script, "--help")


def test_the_page_names_every_benchmark() -> None:
    page = (BENCHMARKS / "README.md").read_text()
    assert [name for name in ALL if f"`{name}`" not in page] == []
