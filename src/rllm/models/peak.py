"""The most that this machine computes and reads, measured.

    products of square matrices, doubling until the time is over      ──► floating-point operations a second
    a matrix times a vector, as many bytes as a model's weights       ──► bytes read a second

Both take the best of several tries within a fixed time, because a neighbour can only slow them down. A matrix
of a small model stays in the processor's caches, as its weights do between two steps of the sampler.
"""

import time
from collections.abc import Callable

import torch

from rllm.models.devices import dtype_named, wait_for

FIRST_SIZE, LARGEST_SIZE = 256, 8192
"""Sides of square matrices."""
LONGEST_S = 0.12
"""The most time of each of the two measurements, beyond the last try."""
NUM_TRIES = 6
MIN_BYTES, MAX_BYTES = 1 << 20, 1 << 28
"""The size of the matrix that is read."""
ROW = 1024


def peak_flops(device_name: str, dtype_name: str) -> float:
    """Floating-point operations a second of a matrix product, by torch's current number of threads."""
    device, dtype = torch.device(device_name), dtype_named(dtype_name)
    deadline_s = time.perf_counter() + LONGEST_S
    size, best = FIRST_SIZE, 0.0
    while True:
        left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(left)
        best_s = _best_s(lambda a=left, b=right, out=product: torch.mm(a, b, out=out), device, deadline_s)
        # The best of all sizes: a small product may have waited for a core in each of its tries.
        best = max(best, 2.0 * size**3 / best_s)
        if size >= LARGEST_SIZE or time.perf_counter() >= deadline_s:
            return best
        size *= 2


def peak_bytes_per_s(device_name: str, dtype_name: str, num_bytes: int) -> float:
    """Bytes a second that a matrix of about so many bytes is read with, by torch's current threads."""
    device, dtype = torch.device(device_name), dtype_named(dtype_name)
    deadline_s = time.perf_counter() + LONGEST_S
    num_bytes = min(max(num_bytes, MIN_BYTES), MAX_BYTES)
    num_rows = num_bytes // (ROW * dtype.itemsize)
    matrix = torch.ones(num_rows, ROW, device=device, dtype=dtype)
    vector = torch.ones(ROW, device=device, dtype=dtype)
    product = torch.empty(num_rows, device=device, dtype=dtype)
    best_s = _best_s(lambda: torch.mv(matrix, vector, out=product), device, deadline_s)
    return num_rows * ROW * dtype.itemsize / best_s


def _best_s(work: Callable[[], object], device: torch.device, deadline_s: float) -> float:
    """Seconds of the best try; at least one behind a first that finds the kernel."""
    work()
    wait_for(device)
    best_s = float("inf")
    for _ in range(NUM_TRIES):
        started_s = time.perf_counter()
        work()
        wait_for(device)
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - started_s)
        if now_s >= deadline_s:
            break
    return best_s
