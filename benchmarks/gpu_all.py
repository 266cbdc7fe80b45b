"""Everything that this project has for a GPU, in ten minutes: `make gpu`.

    speed ─ agreement ─ runs (all weights, an adapter, 4 bits) ─ tests ──► results/gpu/CARD-TORCH.json

    python benchmarks/gpu_all.py [--dry] [--only NAME …] [--json]

Each check is a process with a limit of its own, so that one that hangs or fails costs no other its figures;
it runs under the Python that runs this script. Without a GPU, or with `--dry`, the same checks run their
code on the processor, nothing is kept, and what is not measured is listed. Exit code 1 when a check failed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_results import RESULTS, ROOT, machine_facts

from rllm.files.atomic import write_atomic

TIME_LIMIT_S = 570.0
"""For all checks together, on a machine with a GPU."""
SHORT_RUN = [
    *("warm_start.steps=20", "steps=5", "evaluation.num_tasks=64", "evaluation.every_steps=0"),
    *("rollout.tasks_per_step=16", "rollout.group_size=4"),
]
DRY_RUN = [
    *("warm_start.steps=1", "warm_start.episodes_per_step=4", "steps=1", "evaluation.num_tasks=4"),
    *("evaluation.every_steps=0", "rollout.tasks_per_step=2", "rollout.group_size=2"),
]
TESTS = ["tests/models/test_devices.py", "tests/distributed/test_cards.py", "tests/models/test_nccl.py"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Check:
    """One process, and what a reader learns from it."""

    name: str
    measures: str
    """What it measures on a GPU, and a dry run does not."""
    words: list[str]
    limit_s: float


@dataclass(kw_only=True, slots=True)
class CheckResult:
    """How a check ended."""

    name: str
    command: str
    status: str
    """`ok`, `failed` or `out of time`."""
    seconds: float
    figures: dict[str, Any]
    output_tail: str
    """The last lines of a check that failed."""


def checks(device: str, scratch: Path, *, dry: bool) -> list[Check]:
    """Return the checks in the order of their worth: what the time limit cuts is the least."""
    python = sys.executable
    gpu = [python, str(ROOT / "benchmarks" / "gpu.py"), "--json", *(["--dry"] if dry else [])]

    def run(name: str, measures: str, *settings: str) -> Check:
        words = [python, "-m", "rllm", "train", "frozenlake", "--json", "--output", str(scratch / name)]
        for setting in (f"model.device={device}", *(DRY_RUN if dry else SHORT_RUN), *settings):
            words += ["--set", setting]
        return Check(name=name, measures=measures, words=words, limit_s=120.0)

    adapter = ("lora.rank=8", "optimizer.name=adamw", "optimizer.learning_rate=1e-3")
    return [
        Check(
            name="speed",
            measures="matmul peak, tokens/s of training and sampling, peak memory, NCCL, two cards",
            words=gpu,
            limit_s=240.0,
        ),
        Check(
            name="agreement",
            measures="the gap between sampler and trainer in nats, in float32 and bfloat16",
            words=[*gpu, "--agreement"],
            limit_s=90.0,
        ),
        run("run", "a run of all weights on the card: success, seconds a step"),
        run("adapter", "a run of an adapter on the card", *adapter),
        run("4-bit", "an adapter over 4-bit weights, by bitsandbytes", *adapter, "lora.base_dtype=nf4"),
        Check(
            name="tests",
            measures="the tests of devices, cards and NCCL where there is a card",
            words=[python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *TESTS],
            limit_s=120.0,
        ),
    ]


def perform(check: Check, limit_s: float) -> CheckResult:
    """Run a check to its end or limit."""
    started_s = time.monotonic()
    try:
        done = subprocess.run(
            check.words, capture_output=True, text=True, timeout=limit_s, cwd=ROOT, check=False
        )
        status, output = ("ok" if done.returncode == 0 else "failed"), done.stdout
        errors = done.stderr
    except subprocess.TimeoutExpired as error:
        status, output, errors = "out of time", _text(error.stdout), _text(error.stderr)
    return CheckResult(
        name=check.name,
        command=" ".join(check.words[1:]),
        status=status,
        seconds=round(time.monotonic() - started_s, 1),
        figures=figures_of(output),
        output_tail="" if status == "ok" else f"{output[-1_500:]}\n{errors[-1_500:]}".strip(),
    )


def figures_of(output: str) -> dict[str, Any]:
    """Return the JSON object that a check prints, or the last line of one that prints none."""
    try:
        record = json.loads(output)
    except ValueError:
        lines = output.strip().splitlines()
        return {"last line": lines[-1]} if lines else {}
    return record if isinstance(record, dict) else {"record": record}


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def keep_results(results: list[CheckResult], directory: Path = RESULTS / "gpu") -> Path:
    """Write the results of this machine's card and torch; those of checks that did not run now stay."""
    facts = machine_facts("cuda")
    path = directory / f"{_slug(torch.cuda.get_device_name())}-torch-{_slug(torch.__version__)}.json"
    before = json.loads(path.read_text())["checks"] if path.exists() else {}
    facts |= {"cards": torch.cuda.device_count(), "cuda": torch.version.cuda}
    now = {result.name: asdict(result) for result in results}
    directory.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({"machine": facts, "checks": before | now}, indent=1) + "\n")
    return path


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="run each check's code on the processor")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these checks alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dry = options.dry or not torch.cuda.is_available()
    deadline_s = time.monotonic() + TIME_LIMIT_S
    results: list[CheckResult] = []
    unmeasured: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        planned = checks("cpu" if dry else "cuda", Path(scratch), dry=dry)
        names = [check.name for check in planned]
        if strange := sorted(set(options.only) - set(names)):
            parser.error(f"--only names {', '.join(strange)}; there are {', '.join(names)}")
        for check in planned:
            left_s = deadline_s - time.monotonic()
            if (options.only and check.name not in options.only) or left_s < 5.0:
                unmeasured[check.name] = check.measures
                continue
            result = perform(check, min(check.limit_s, left_s))
            results.append(result)
            if dry or result.status != "ok":
                unmeasured[check.name] = check.measures
            if not options.json:
                print(f"{result.name:10} {result.status:12} {result.seconds:7.1f} s", flush=True)
                if result.output_tail:
                    print(result.output_tail, flush=True)
    path = None if dry else keep_results(results)
    if options.json:
        print(
            json.dumps({"dry": dry, "checks": [asdict(each) for each in results], "unmeasured": unmeasured})
        )
    else:
        _print_summary(dry, path, unmeasured)
    sys.exit(any(result.status != "ok" for result in results))


def _print_summary(dry: bool, path: Path | None, unmeasured: dict[str, str]) -> None:
    if dry:
        print(f"\nOn the processor, torch {torch.__version__}: the code of each check ran, nothing is kept.")
    else:
        print(f"\nKept in {path}")
    if unmeasured:
        print("Not measured on a GPU:")
    for name, measures in unmeasured.items():
        print(f"  {name:10} {measures}")


if __name__ == "__main__":
    main()
