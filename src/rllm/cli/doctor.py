"""`rllm doctor`: is this machine ready to train? What is there, and how to mend what is not.

Python, packages, devices, disk ──► findings ◄── a tiny model that samples and is scored again
"""

import asyncio
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.text import Text

from rllm.cli import doctor_algorithm, doctor_grader, doctor_tasks, doctor_web
from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.installed import EXTRAS, REQUIRED, is_older, rllm_version, version_of
from rllm.cli.terminal import facts, out, print_next
from rllm.errors import RllmError

OLDEST_PYTHON = (3, 11)
ROOM_FOR_RUNS_BYTES = 1_000_000_000
"""A few runs of the demo; with less a warning is due."""
NUM_SAMPLED = 8


class DoctorStatus(StrEnum):
    OK = "ok"
    MISSING = "missing"
    """An optional part that is not installed."""
    WARNING = "warning"
    BROKEN = "broken"
    """Something that is needed does not work; the command ends with exit code 1."""


@dataclass(kw_only=True, slots=True)
class DoctorFinding:
    name: str
    status: DoctorStatus
    detail: str
    """The finding and, where something is wrong, the mend."""
    is_for_training: bool = True
    """False for what only the gateway needs."""


@click.group(
    "doctor",
    cls=Group,
    invoke_without_command=True,
    epilog=example(
        "rllm doctor",
        "rllm doctor --json",
        "rllm doctor algorithm my_file.py:my_loss    check an algorithm",
        "rllm doctor grader math                     attack a grader",
        "rllm doctor tasks my-tasks                  check software-engineering tasks",
        "rllm doctor web                             check the browser",
    ),
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check that this machine is ready to train.

    Looks at Python, packages, devices and disk, then lets a tiny model sample a few tokens and compares their
    log-probabilities with a plain forward pass. Exit code 1 when something that is needed is broken.
    """
    if ctx.invoked_subcommand is not None:
        return
    findings = examine()
    if as_json:
        print_json({"findings": [asdict(each) for each in findings], "ready": _is_ready(findings)})
    else:
        _print_findings(findings)
    if any(each.status is DoctorStatus.BROKEN for each in findings):
        ctx.exit(1)


command.add_command(doctor_algorithm.command)
command.add_command(doctor_grader.command)
command.add_command(doctor_tasks.command)
command.add_command(doctor_web.command)


def examine() -> list[DoctorFinding]:
    """Everything the doctor looks at, in the order it is shown."""
    findings = [_python(), DoctorFinding(name="rllm", status=DoctorStatus.OK, detail=rllm_version())]
    findings += [
        _package(name, oldest, f"pip install '{name}>={oldest}'", DoctorStatus.BROKEN)
        for name, oldest in REQUIRED.items()
    ]
    for extra, packages in EXTRAS.items():
        looked_at = {each.name for each in findings}
        findings += [
            _package(name, oldest, f"pip install 'rllm[{extra}]'", DoctorStatus.MISSING, extra == "train")
            for name, oldest in packages.items()
            if name not in looked_at
        ]
    trainable = all(version_of(name) for name in EXTRAS["train"])
    findings += [*(_devices() if trainable else []), _disk()]
    findings.append(
        _self_test()
        if trainable
        else DoctorFinding(
            name="self test", status=DoctorStatus.MISSING, detail="needs the extra: pip install 'rllm[train]'"
        )
    )
    return findings


def _python() -> DoctorFinding:
    good = sys.version_info >= OLDEST_PYTHON
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return DoctorFinding(
        name="Python",
        status=DoctorStatus.OK if good else DoctorStatus.BROKEN,
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}"
        + ("" if good else f"; rllm needs {oldest} or newer"),
    )


def _package(
    name: str, oldest: str, install: str, status_if_absent: DoctorStatus, is_for_training: bool = True
) -> DoctorFinding:
    version = version_of(name)
    if version is None:
        return DoctorFinding(
            name=name,
            status=status_if_absent,
            detail=f"not installed; run: {install}",
            is_for_training=is_for_training,
        )
    if is_older(version, oldest):
        detail = f"{version}, but {oldest} or newer is needed; run: pip install --upgrade '{name}>={oldest}'"
        return DoctorFinding(name=name, status=DoctorStatus.BROKEN, detail=detail)
    return DoctorFinding(name=name, status=DoctorStatus.OK, detail=version)


def _devices() -> list[DoctorFinding]:
    # Brings torch: the doctor comes without it too.
    from rllm.models.devices import cuda_devices, num_threads, usable_cores

    cores = f"{num_threads()} torch threads, {usable_cores()} of {os.cpu_count()} cores to use"
    cuda = "; ".join(cuda_devices()) or "no device; models run on the CPU"
    return [
        DoctorFinding(name="CPU", status=DoctorStatus.OK, detail=cores),
        DoctorFinding(name="CUDA", status=DoctorStatus.OK, detail=cuda),
    ]


def _disk() -> DoctorFinding:
    free_bytes = shutil.disk_usage(Path.cwd()).free
    enough = free_bytes >= ROOM_FOR_RUNS_BYTES
    return DoctorFinding(
        name="disk",
        status=DoctorStatus.OK if enough else DoctorStatus.WARNING,
        detail=f"{free_bytes / 1e9:.1f} GB free here" + ("" if enough else "; free some before a long run"),
    )


def _self_test() -> DoctorFinding:
    from rllm.trainer.canary import TOLERANCE

    try:
        gap, num_tokens = asyncio.run(sample_and_score())
    except (RllmError, RuntimeError, OSError, ImportError) as error:
        return DoctorFinding(
            name="self test", status=DoctorStatus.BROKEN, detail=f"{type(error).__name__}: {error}"
        )
    agrees = gap <= TOLERANCE
    return DoctorFinding(
        name="self test",
        status=DoctorStatus.OK if agrees else DoctorStatus.BROKEN,
        detail=f"{num_tokens} tokens sampled; a plain forward pass agrees within {gap:.1e} nats"
        if agrees
        else f"log-probabilities differ from a plain forward pass by {gap:.1e} nats, limit {TOLERANCE:g}; "
        "install the torch that constraints.txt names",
    )


async def sample_and_score() -> tuple[float, int]:
    """(largest difference in nats, tokens sampled): the engine with its cache, a forward pass without."""
    import numpy as np

    from rllm.inference.local.client import LocalClient
    from rllm.models.builtin import create_model
    from rllm.models.directory import load_model
    from rllm.trainer.backends.torch import TorchBackend
    from rllm.types.messages import SamplingParams
    from rllm.types.sample import NOT_SAMPLED, TrainingSample

    with TemporaryDirectory() as folder:
        create_model(Path(folder) / "model")
        policy = load_model(Path(folder) / "model")
        client = LocalClient(policy, num_slots=2, max_context=64)
        try:
            output = await client.get_model_response(
                [{"role": "user", "content": "Which way?"}], SamplingParams(max_tokens=NUM_SAMPLED)
            )
        finally:
            await client.close()
    prompt, answer = output.prompt_ids, output.completion_ids
    row = TrainingSample(
        token_ids_T=np.array(prompt + answer),
        policy_versions_T=np.array([NOT_SAMPLED] * len(prompt) + [0] * len(answer)),
        logprobs_T=np.array([0.0] * len(prompt) + output.logprobs, dtype=np.float32),
        advantages_T=np.zeros(len(prompt) + len(answer), dtype=np.float32),
        group_key=("doctor", "agent"),
        order_key=("doctor", 0, 0, 0),
    )
    scored_T = TorchBackend(policy.model, publish=client.publish).score([row])[0]
    return float(np.abs(scored_T - row.logprobs_T).max()), len(answer)


def _is_ready(findings: list[DoctorFinding]) -> bool:
    """Whether `rllm train` of a benchmark would run here; programs need the gateway too."""
    ready = (DoctorStatus.OK, DoctorStatus.WARNING)
    return all(
        each.status in ready or (each.status is DoctorStatus.MISSING and not each.is_for_training)
        for each in findings
    )


_STYLES = {
    DoctorStatus.OK: "green",
    DoctorStatus.MISSING: "yellow",
    DoctorStatus.WARNING: "yellow",
    DoctorStatus.BROKEN: "bold red",
}


def _print_findings(findings: list[DoctorFinding]) -> None:
    console = out()
    console.print(
        facts(
            (each.name, Text.assemble((f"{each.status:<8}", _STYLES[each.status]), each.detail))
            for each in findings
        )
    )
    if _is_ready(findings):
        steps = [(["rllm", "train", "frozenlake"], "train an agent, in minutes")]
        if any(each.status is DoctorStatus.MISSING for each in findings):
            steps.append((["pip", "install", "rllm[gateway]"], "what programs and `rllm serve` need"))
        print_next(console, steps)
    elif any(each.status is DoctorStatus.BROKEN for each in findings):
        console.print("\nSomething that is needed does not work: mend what is marked broken.", style="red")
    else:
        print_next(console, [(["pip", "install", "rllm[train]"], "what training needs")])
