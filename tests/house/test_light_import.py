"""`import rllm` and the command's front door bring in no heavy library: help does not wait for torch."""

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import rllm

HEAVY = {
    "torch",
    "ray",
    "transformers",
    "tokenizers",
    "numpy",
    "matplotlib",
    "gymnasium",
    "starlette",
    "aiohttp",
    "orjson",
    "pydantic",
}

RunPython = Callable[..., subprocess.CompletedProcess[str]]

REPORT = """
import sys
before = set(sys.modules)
{code}
print("loaded:", *sorted(set(sys.modules) - before))
"""

HELP = """
from rllm.cli.main import main
sys.argv = ["rllm", "--help"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def modules_loaded_by(code: str, run_python: RunPython) -> set[str]:
    """What `code` adds to the modules of a Python that has just started."""
    done = run_python("-c", REPORT.format(code=code))
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


@pytest.mark.parametrize("module", ["rllm", "rllm.types", "rllm.errors"])
def test_the_ground_floor_needs_nothing_but_python(module: str, run_python: RunPython) -> None:
    loaded = modules_loaded_by(f"import {module}", run_python)
    assert module in loaded
    assert not loaded & (HEAVY | {"click", "rich"})


def test_importing_the_package_imports_no_room(run_python: RunPython) -> None:
    """But for the finder of published names, which waits for the first import of a room."""
    assert {name for name in modules_loaded_by("import rllm", run_python) if name.startswith("rllm.")} == {
        "rllm.published",
        "rllm.published.finder",
    }


@pytest.mark.parametrize("code", ["import rllm.cli.main", HELP], ids=["import", "help"])
def test_the_commands_front_door_brings_in_no_heavy_library(code: str, run_python: RunPython) -> None:
    assert not modules_loaded_by(code, run_python) & HEAVY


LEARNER = """
import rllm.trainer.loop
import rllm.trainer.backends.torch
import rllm.inference.local.client
from pathlib import Path
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.config.optimizer import OptimizerConfig
from rllm.trainer.backends.torch_optimizer import Optimizers, matrices_of_layers
create_model(Path({directory!r}))
model = load_model(Path({directory!r})).model
weights = dict(model.named_parameters())
for each in weights.values():
    each.grad = each.detach().clone()
Optimizers(weights, matrices_of_layers(model, weights), OptimizerConfig(name="muon")).step(0.01)
"""


def test_a_run_of_a_built_in_model_waits_for_torch_alone(run_python: RunPython, tmp_path: Path) -> None:
    """And not for transformers, torch's compiler or its sharding, of which each takes a second of CPU."""
    loaded = modules_loaded_by(LEARNER.format(directory=str(tmp_path / "new")), run_python)
    assert "torch" in loaded
    spared = {"transformers", "sympy", "scipy", "torch._dynamo", "torch.distributed.tensor"}
    assert not loaded & (spared | {"torch.distributed.fsdp", "torch.distributed.checkpoint"})


def names_shown_to_editors(source: str) -> dict[str, str]:
    """Name to module, as the package's TYPE_CHECKING block imports them."""
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def test_an_editor_is_shown_the_names_that_the_package_hands_on(checkout: Path) -> None:
    assert names_shown_to_editors((checkout / "src/rllm/__init__.py").read_text()) == rllm._HOME_OF


def test_a_name_handed_on_by_the_package_is_the_one_in_its_room(subtests: pytest.Subtests) -> None:
    for name in sorted(rllm._HOME_OF):
        with subtests.test(name=name):
            assert getattr(rllm, name).__name__ == name
            assert name in dir(rllm)


def test_the_package_knows_its_version() -> None:
    assert re.match(r"\d", rllm.__version__)


def test_the_package_refuses_a_name_it_does_not_have() -> None:
    with pytest.raises(AttributeError, match="no attribute `Nonsense`"):
        _ = rllm.Nonsense


def test_the_types_room_hands_on_its_arrays_too() -> None:
    from rllm import types
    from rllm.types.sample import TrainingSample

    assert types.TrainingSample is TrainingSample
    assert all(hasattr(types, name) for name in types.__all__)
    assert set(types.__all__) <= set(dir(types))
