"""The devices that torch computes on here."""

import ctypes
import math
import os
from pathlib import Path

import torch

from rllm.errors import ConfigError

CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""Microseconds of processor time, or `max`, and of the clock that they are given in (Linux, cgroup v2)."""


FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability of the first GPUs of NVIDIA with such instructions, Ampere's; before, torch emulates
them."""


def usable_cores() -> int:
    """Cores that this process may use: of the machine's, those that Slurm or a container leave it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if CGROUP_LIMIT.is_file():
        limit, period = CGROUP_LIMIT.read_text().split()
        if limit != "max":
            cores = min(cores, math.ceil(int(limit) / int(period)))
    return cores


def use_threads(num_threads: int, num_processes: int = 1) -> None:
    """Let torch work with so many threads; 0 is one per usable core, which so many processes share."""
    torch.set_num_threads(num_threads or max(1, usable_cores() // num_processes))


def dtype_named(name: str) -> torch.dtype:
    """The data type of that name; `auto` is float32."""
    return {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def require_number_type(device: str, name: str) -> None:
    """Raises ConfigError for a GPU that does not compute in the data type of that name."""
    if name != "bfloat16" or not device.startswith("cuda"):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FIRST_WITH_BFLOAT16:
        first, mine = (".".join(map(str, each)) for each in (FIRST_WITH_BFLOAT16, capability))
        gpu = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"`model.device` is {device!r}, a {gpu} of compute capability {mine}, and bfloat16 needs {first} "
            "or more; set `model.dtype` to float32."
        )


def wait_for(device: torch.device) -> None:
    """Return when all work that was given to `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back_memory() -> None:
    """Give the system the memory that this process has freed, where its C library is glibc, which would keep
    it: between tensors of other sizes it is of little use, and a run would grow from step to step."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def num_threads() -> int:
    """Threads of one torch operation on the CPU."""
    return torch.get_num_threads()


def cuda_devices() -> list[str]:
    """Name and memory of each CUDA device; none where torch is a CPU build or sees no driver."""
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{each.name}, {each.total_memory / 1e9:.0f} GB" for each in devices]


def gpu_number(device: str) -> int:
    """Which of the GPUs that this process sees `cuda` or `cuda:N` is."""
    number = torch.device(device).index
    return 0 if number is None else number


def require_device(device: str) -> None:
    """Raises ConfigError for one that this machine does not have."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where its build has no CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"`model.device` is {device!r}, which this machine cannot use ({reason}); set it to `cpu`."
        ) from error


def accelerator_bytes(device: str) -> int:
    """Memory of a CUDA device. Raises ConfigError for one that is not there."""
    require_device(device)
    return torch.cuda.get_device_properties(torch.device(device)).total_memory


def free_accelerator_bytes(device: str) -> int:
    """Memory of a CUDA device that is free, or that this process keeps for later use.

    Raises ConfigError for one that is not there.
    """
    require_device(device)
    number = torch.device(device)
    free, _ = torch.cuda.mem_get_info(number)
    return free + torch.cuda.memory_reserved(number)


def peak_accelerator_bytes(device: str) -> int:
    """Return the most memory of a CUDA device that this process had so far, in bytes."""
    require_device(device)
    return torch.cuda.max_memory_allocated(torch.device(device))
