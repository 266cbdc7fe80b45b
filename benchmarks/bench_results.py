"""What a script measured on a machine, kept in `results/`: the source of every table that `report.py` draws.

script ──► figures, as JSON ──keep──► results/SCRIPT-MACHINE.json ──load──► report.py
"""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from rllm.files.atomic import write_atomic
from rllm.models.devices import usable_cores
from rllm.models.kernels import processor_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def keep(script: str, figures: dict[str, Any], device: str = "cpu") -> Path:
    """Write what `script` measured on this machine; returns where. What it measured here before, of the same
    name, is replaced, other figures of it stay."""
    machine = machine_facts(device)
    name = re.sub(r"\W+", "-", f"{machine['processor']}-{machine['cores']}-cores".lower()).strip("-")
    path = RESULTS / f"{script}-{name}.json"
    before = json.loads(path.read_text())["figures"] if path.exists() else {}
    record = {"script": script, "machine": machine, "figures": before | figures}
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    return path


def load(script: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """The records of a script, one a machine."""
    records = (json.loads(path.read_text()) for path in sorted(results.glob(f"{script}-*.json")))
    return [each for each in records if each.get("script") == script]


def machine_facts(device: str) -> dict[str, Any]:
    """What a reader has to know of the machine: figures of two are never compared."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "processor": processor_name(device),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
    }
