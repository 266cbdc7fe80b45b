"""`make gpu`: a check that fails or hangs costs the others nothing, and says why."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def gpu_all() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu_all")
    sys.path.remove(str(BENCHMARKS))


def check_that_runs(gpu_all: ModuleType, program: str) -> object:
    return gpu_all.Check(name="c", measures="m", words=[sys.executable, "-c", program], limit_s=60.0)


def test_a_check_is_its_figures_or_the_end_of_what_it_printed(gpu_all: ModuleType) -> None:
    good = gpu_all.perform(check_that_runs(gpu_all, "print('{\"tokens_per_s\": 5}')"), 60.0)
    assert (good.status, good.figures, good.output_tail) == ("ok", {"tokens_per_s": 5}, "")
    bad = gpu_all.perform(check_that_runs(gpu_all, "raise SystemExit('no kernel image')"), 60.0)
    assert bad.status == "failed"
    assert "no kernel image" in bad.output_tail
    hanging = gpu_all.perform(check_that_runs(gpu_all, "while True: pass"), 0.5)
    assert hanging.status == "out of time"


def test_figures_are_kept_by_card_and_torch_and_those_of_other_checks_stay(
    gpu_all: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(gpu_all, "machine_facts", lambda device: {"torch": torch.__version__})
    for name in ("speed", "run"):
        result = gpu_all.perform(check_that_runs(gpu_all, "print('[1]')"), 60.0)
        result.name = name
        path = gpu_all.keep_results([result], tmp_path)
    assert path.name.startswith("nvidia-h200-torch-2.")
    record = json.loads(path.read_text())
    assert list(record["checks"]) == ["speed", "run"]
    assert record["checks"]["run"]["figures"] == {"record": [1]}


def test_all_checks_fit_into_ten_minutes_and_have_names(gpu_all: ModuleType, tmp_path: Path) -> None:
    assert gpu_all.TIME_LIMIT_S < 600
    for dry in (True, False):
        planned = gpu_all.checks("cpu" if dry else "cuda", tmp_path, dry=dry)
        assert len({check.name for check in planned}) == len(planned)
    words = [sys.executable, str(BENCHMARKS / "gpu_all.py"), "--only", "speeed"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "speeed" in done.stderr
