"""The common use of a cell's processes, read from /proc: memory, processor time, their number.

The kernel's own limits are per process (rlimits); these sums are what a program made of many processes is
held to. Runs inside the sandbox.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # `typing` is a megabyte of every idle sandbox
if TYPE_CHECKING:
    from typing import Any

PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024
TICKS_S = os.sysconf("SC_CLK_TCK")
LEAST_SOCKETS = 64
"""That any program may have, with however little memory."""


def members(is_bare: bool, init: int) -> list[int]:
    """Process ids of all that descends from the cell's init, without it.

    With namespaces that is every process but pid 1, this one and `init`: the cell is alone in here.
    """
    everyone = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    if not is_bare:
        return [pid for pid in everyone if pid not in (1, init, os.getpid())]
    parents = {}
    for pid in everyone:
        fields = _stat(pid)
        if fields:
            parents[pid] = int(fields[1])
    family, grew = {init}, True
    while grew:
        children = {pid for pid, parent in parents.items() if parent in family} - family
        family |= children
        grew = bool(children)
    return sorted(family - {init})


def excess(pids: list[int], init: int, limits: dict[str, Any], *, is_bare: bool) -> str | None:
    """Which limit the processes of a cell exceed together: "memory", "cpu" or "processes"; None if none.

    What the kernel holds for a socket, up to 0.4 MiB, is in no process: there may be one socket for each MiB.
    """
    resident_kb: dict[int, int] = {}
    orphans = _stat(init)[13:15]  # what the init has reaped, it is the only one that knows
    cpu_s, threads = sum(int(value) for value in orphans) / TICKS_S, 0
    for pid in pids:
        fields = _stat(pid)
        if fields:
            cpu_s += sum(int(value) for value in fields[11:15]) / TICKS_S
            threads += int(fields[17])
            resident_kb[pid] = int(fields[21]) * PAGE_KB
    if threads > limits["processes"] + 1:
        return "processes"
    if cpu_s > limits["cpu_s"]:
        return "cpu"
    if not is_bare and sockets() > max(LEAST_SOCKETS, limits["memory_mb"]):
        return "memory"
    # Resident pages count shared ones once for each process; the fair share is exact and costs more to ask
    # for.
    limit_kb = limits["memory_mb"] * 1024
    if sum(resident_kb.values()) > limit_kb:
        fair_kb = sum(_fair_share_kb(pid, most_kb=most_kb) for pid, most_kb in resident_kb.items())
        if fair_kb > limit_kb:
            return "memory"
    return None


def sockets() -> int:
    """The number of sockets in this network namespace, also those whose descriptor is on its way in
    another."""
    with open("/proc/net/sockstat", encoding="ascii") as stream:
        return int(stream.readline().split()[2])


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, from `state` on; empty for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _fair_share_kb(pid: int, *, most_kb: int) -> int:
    """Its memory in KiB, a page of n processes counted as 1/n; `most_kb` where the kernel does not say."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("Pss:"):
                    return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass  # gone, or a zombie, whose memory is given back already
    except PermissionError:
        return most_kb
    return 0
