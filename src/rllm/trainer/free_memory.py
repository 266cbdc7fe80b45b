"""The memory of the machine, or of an accelerator, and the free part of it."""

import os
import resource
from pathlib import Path

CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""(limit of a container, memory that it uses): cgroup version 2, then 1."""
PAGE = os.sysconf("SC_PAGE_SIZE")


def machine_bytes(device: str) -> int:
    """Memory of a device; of the CPU the machine's, or what a container may use of it."""
    if device != "cpu":
        from rllm.models.devices import accelerator_bytes

        return accelerator_bytes(device)
    return min([os.sysconf("SC_PHYS_PAGES") * PAGE, *(limit for limit, _ in _containers())])


def peak_bytes(device: str) -> int:
    """Return the most memory of a device, in bytes, that this process had so far."""
    if device != "cpu":
        from rllm.models.devices import peak_accelerator_bytes

        return peak_accelerator_bytes(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def free_bytes(device: str) -> int:
    """Memory of a device that this process may have, with what it has already: free, or free at once when
    the system drops what it keeps of files."""
    if device != "cpu":
        from rllm.models.devices import free_accelerator_bytes

        return free_accelerator_bytes(device)
    whole, own = machine_bytes(device), _own_bytes()
    system = _counts(Path("/proc/meminfo"), factor=1024)
    # With swap a run is slow and not impossible.
    free = [system["MemAvailable"] + system["SwapFree"] + own] if "MemAvailable" in system else []
    for limit, usage in _containers():
        stat = _counts(usage.with_name("memory.stat"))
        of_files = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        free.append(limit - int(usage.read_text()) + of_files + own)
    return min([whole, *free])


def _containers() -> list[tuple[int, Path]]:
    """(limit, the file that holds what is used) of each container around this process."""
    containers: list[tuple[int, Path]] = []
    for limit, usage in ((Path(limit), Path(usage)) for limit, usage in CGROUPS):
        if limit.is_file() and usage.is_file() and (text := limit.read_text().strip()).isdigit():
            containers.append((int(text), usage))
    return containers


def _own_bytes() -> int:
    """Resident memory of this process that belongs to no file; 0 where the system does not tell."""
    path = Path("/proc/self/statm")
    if not path.is_file():
        return 0
    _, resident, of_files, *_ = map(int, path.read_text().split())
    return (resident - of_files) * PAGE


def _counts(path: Path, factor: int = 1) -> dict[str, int]:
    """The numbers of a file of lines `name number` or `name: number kB`."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {
        line.split()[0].rstrip(":"): factor * int(line.split()[1]) for line in lines if len(line.split()) > 1
    }
