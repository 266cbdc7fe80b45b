"""Muon, with its Newton-Schulz iterations in a precision that the machine is fast in.

    gradient ─► momentum ─► orthogonalize, in bfloat16 or float32 ─► step of one length for every shape

torch.optim.Muon always iterates in bfloat16. A CPU without such instructions emulates them: fifteen times the
time of float32 was measured. So the precision is measured once where a run begins, and the run keeps it.
"""

import time
from collections.abc import Iterable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from rllm.models.devices import dtype_named

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The coefficients of the quintic iteration; they make its slope at zero as steep as it can be (Jordan
2024)."""
NUM_ITERATIONS = 5
EPS = 1e-7
SIDE, NUM_TRIALS = 256, 5
"""The side of the matrix that the precision is measured on, and the number of trials: milliseconds, and the
same for every model."""
FAR_SLOWER = 3.0
"""Times as long as float32 takes: no further trial would make up for it."""
CLEARLY = 0.8
"""bfloat16 is taken where it needs less than this share of float32's time. With its own instructions it needs
0.4 to 0.5, without them 5 to 15 times as much, so that noise cannot turn the choice."""


class Spread(Protocol):
    """Where the rows of a matrix are."""

    def whole(self, weight: Tensor, rows: Tensor) -> Tensor:
        """The matrix of which `rows` are this process's, beside those of `weight`; all ranks have to be
        here."""
        ...

    def rows(self, weight: Tensor, whole: Tensor) -> Tensor:
        """This process's part of it."""
        ...


class InOnePlace(Spread):
    """Every matrix is whole."""

    def whole(self, weight: Tensor, rows: Tensor) -> Tensor:
        return rows

    def rows(self, weight: Tensor, whole: Tensor) -> Tensor:
        return whole


class Muon:
    """Jordan 2024, with Nesterov momentum; steps are scaled to the length of AdamW's (Liu et al. 2025,
    arXiv:2502.16982, "match RMS"). In bfloat16 it is torch.optim.Muon bit for bit, its state included."""

    def __init__(
        self,
        matrices: Iterable[Tensor],
        *,
        weight_decay: float,
        dtype: torch.dtype,
        spread: Spread | None = None,
    ) -> None:
        """`dtype`: of the Newton-Schulz iterations alone; momentum has the gradient's. `spread`: of matrices
        whose rows are on several ranks; each makes the whole direction and takes its rows of it."""
        self.weights = list(matrices)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._weight_decay = weight_decay
        self._dtype = dtype
        self._spread = spread or InOnePlace()

    @property
    def kernel(self) -> str:
        return f"Muon in {str(self._dtype).removeprefix('torch.')}"

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for weight in self.weights:
            if weight.grad is not None:
                self._move(weight, weight.grad, learning_rate)

    def _move(self, weight: Tensor, gradient: Tensor, learning_rate: float) -> None:
        state = self.state.setdefault(weight, {})
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        whole = self._spread.whole(weight, gradient.lerp(momentum, MOMENTUM))
        # The direction is one of the whole matrix, so it cannot be made of the rows of this rank alone.
        direction = orthogonal_factor(whole, self._dtype)
        weight.mul_(1 - learning_rate * self._weight_decay)
        rows = self._spread.rows(weight, direction)
        # The entries of an orthogonal factor have the root mean square 1 / sqrt(larger side), and AdamW's
        # steps about 0.2. The sides are those of the whole matrix, also where rows are on several ranks.
        weight.add_(rows, alpha=-learning_rate * 0.2 * max(direction.shape) ** 0.5)


def orthogonal_factor(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """`matrix` with all singular values between about 0.5 and 1.5: X ← aX + (bA + cA²)X with A = XXᵀ, five
    times, from X = M / ‖M‖ (Jordan 2024)."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(dtype, copy=True)
    # So that XXᵀ has the shorter side.
    x = x.T if is_tall else x
    # The Frobenius norm bounds the largest singular value, so all of them are at most 1 when the iteration
    # begins.
    x.div_(x.norm().clamp(min=EPS))
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def muon_dtype(setting: str, device: torch.device) -> torch.dtype:
    """The data type that `optimizer.muon_dtype` names; for `auto`, the faster one on this machine."""
    return dtype_named(faster_dtype(device.type) if setting == "auto" else setting)


@cache
def faster_dtype(device_type: str) -> str:
    """`bfloat16` or `float32`, whichever Newton-Schulz iterations are clearly faster in; bfloat16 on an
    accelerator. Measured once in a process, in CPU time, in which neighbours on the machine do not count."""
    if device_type != "cpu":
        return "bfloat16"
    matrix = torch.linspace(-1.0, 1.0, SIDE * SIDE).reshape(SIDE, SIDE)
    seconds = {name: float("inf") for name in ("float32", "bfloat16")}
    for _ in range(NUM_TRIALS):
        for name in seconds:
            start = time.process_time()
            orthogonal_factor(matrix, dtype_named(name))
            seconds[name] = min(seconds[name], time.process_time() - start)
        if seconds["bfloat16"] > FAR_SLOWER * seconds["float32"]:
            break  # a CPU without instructions for bfloat16: further trials take a second and change nothing
    return "bfloat16" if seconds["bfloat16"] < CLEARLY * seconds["float32"] else "float32"
