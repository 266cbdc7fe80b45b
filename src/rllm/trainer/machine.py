"""The machine and the kernels that a run computes with, and shares of the machine's measured peak.

    models, optimizers ──► kernels, by name ─┐
    machine ──► matmul and memory, measured ─┴─► machine.json ──► a line at the start, `runs show`, summary
                                                     └──► update_flops, rollout_bytes ──► shares, each step

The peak is measured once: a run that goes on with the same machine and kernels takes it from its record. One
that goes on with others says so, and has both in its record.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rllm.config.schema import LOCAL, TrainConfig
from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory

if TYPE_CHECKING:
    from rllm.trainer.policies import Policies

log = logging.getLogger(__name__)

MEASURED = ("from_step", "peak_flops", "peak_bytes_per_s")
"""Fields of a `RunMachine` that do not tell it from another one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunMachine:
    """The machine and the kernels that a part of a run was computed with."""

    from_step: int = 0
    """Finished steps of the run, those of a warm start included, when it began to compute with them."""
    processor: str
    torch: str
    threads: int
    dtype: str
    """The data type of weights and activations of the trainer."""
    attention: str
    optimizer: str
    sampler: str
    sampler_dtype: str
    sampler_attention: str
    peak_flops: float = 0.0
    """Floating-point operations a second of a matrix product, measured."""
    peak_bytes_per_s: float = 0.0
    """Bytes a second that a matrix of the size of the largest policy is read with, measured."""

    def line(self) -> str:
        """One line for the screen."""
        sampler = f"{self.sampler} in {self.sampler_dtype}"
        if self.sampler_attention:
            sampler += f", attention {self.sampler_attention}"
        return (
            f"Computes on {self.processor} with {self.threads} thread{'s' * (self.threads > 1)}, torch "
            f"{self.torch}, {self.dtype}: attention {self.attention}; optimizer {self.optimizer}; "
            f"sampled by {sampler}; at most {self.peak_flops / 1e9:,.0f} GFLOP/s and "
            f"{self.peak_bytes_per_s / 1e9:,.1f} GB/s."
        )

    def changes_since(self, before: "RunMachine") -> list[str]:
        """The fields that are not as they were, with both values."""
        names = [each.name for each in fields(self) if each.name not in MEASURED]
        return [
            f"{name} {old} → {new}"
            for name in names
            if (old := getattr(before, name)) != (new := getattr(self, name))
        ]

    def shares(self, metrics: Mapping[str, Any], num_ranks: int) -> dict[str, float]:
        """Shares of the peak, of each `update_flops` and `rollout_bytes` among the metrics of a step."""
        shares: dict[str, float] = {}
        for name, share, seconds, peak in (
            ("update_flops", "update_flops_share", "update_s", self.peak_flops * num_ranks),
            ("rollout_bytes", "rollout_bandwidth_share", "rollout_busy_s", self.peak_bytes_per_s),
        ):
            for full_name in [each for each in metrics if each.endswith(name)]:
                prefix = full_name.removesuffix(name)
                if spent_s := metrics[prefix + seconds]:
                    shares[prefix + share] = metrics[full_name] / spent_s / peak
        return shares


def machines_of(directory: RunDirectory) -> list[RunMachine]:
    """Those that a run was computed with, the last one last; none before it began."""
    try:
        return [RunMachine(**each) for each in directory.machines()]
    except TypeError as error:
        raise ConfigError(
            f"{directory.machine_path} is damaged ({error}); remove it, and the run measures anew."
        ) from error


def keep_machine(directory: RunDirectory, mine: RunMachine, device: str, num_bytes: int) -> RunMachine:
    """`mine` with its peak, which is in the run's record from now on; the log names what is not as it was
    when the run stopped. `num_bytes`: of the matrix that is read.
    """
    before = machines_of(directory)
    changes = mine.changes_since(before[-1]) if before else []
    if before and not changes:
        return before[-1]
    if changes:
        log.warning("The run goes on with other kernels than it had: %s.", "; ".join(changes))
    flops, bytes_per_s = _peaks(device, mine.dtype, num_bytes, mine.threads)
    entry = replace(mine, peak_flops=flops, peak_bytes_per_s=bytes_per_s)
    directory.write_machines([asdict(each) for each in (*before, entry)])
    return entry


@cache  # runs that one process makes one after the other have the same machine
def _peaks(device: str, dtype: str, num_bytes: int, num_threads: int) -> tuple[float, float]:
    """(floating-point operations, bytes) a second at most, with torch's threads as they are."""
    from rllm.models.peak import peak_bytes_per_s, peak_flops

    return peak_flops(device, dtype), peak_bytes_per_s(device, dtype, num_bytes)


def machine_of(config: TrainConfig, policies: "Policies", from_step: int) -> RunMachine | None:
    """The machine, without its peak; None where a service computes."""
    from rllm.models.devices import num_threads
    from rllm.models.kernels import (
        attention_kernel,
        decoding_kernel,
        is_here,
        processor_name,
        torch_version,
    )
    from rllm.trainer.backends.packed import PackedUpdates

    models = [each.loaded_model for each in policies.values()]
    if not all(map(is_here, models)):
        return None
    sampler = "the built-in engine" if config.inference.engine == LOCAL else config.inference.engine
    if config.cluster.is_used:
        sampler = f"workers of {config.cluster.kind}"
    samples_here = config.inference.engine == LOCAL and not config.cluster.is_used
    learners = [each.backend for each in policies.values() if isinstance(each.backend, PackedUpdates)]
    return RunMachine(
        from_step=from_step,
        processor=processor_name(config.model.device),
        torch=torch_version(),
        threads=num_threads(),
        dtype=config.model.number_type,
        attention=_each(map(attention_kernel, models)) if config.backend == LOCAL else config.backend,
        optimizer=_each(each.optimizer_kernel for each in learners) if learners else config.backend,
        sampler=sampler,
        sampler_dtype=config.sampler_type,
        sampler_attention=_each(map(decoding_kernel, models)) if samples_here else "",
    )


def update_work(learners: Mapping[str, object]) -> dict[str, tuple[int, float]]:
    """Floating-point operations and seconds of all updates so far, by the place of each learner in a
    checkpoint; of those whose operations are known."""
    from rllm.trainer.backends.packed import PackedUpdates

    return {
        place: (each.work.flops, each.work.seconds)
        for place, each in learners.items()
        if isinstance(each, PackedUpdates)
    }


def updates_since(
    before: Mapping[str, tuple[int, float]], learners: Mapping[str, object]
) -> dict[str, float]:
    """`update_flops` and `update_s` of what each learner did since `before`: of several policies as
    `policy.NAME.update_flops`, of a critic as `critic.update_flops`."""
    metrics: dict[str, float] = {}
    for place, (flops, seconds) in update_work(learners).items():
        flops, seconds = flops - before[place][0], seconds - before[place][1]
        if flops:
            label = _label(place, is_only="" in learners)
            metrics |= {f"{label}update_flops": float(flops), f"{label}update_s": seconds}
    return metrics


def _label(place: str, *, is_only: bool) -> str:
    """The beginning of the names of a learner's metrics; `is_only`: its run has one policy."""
    if is_only:
        return f"{place}." if place else ""
    policy, _, critic = place.partition("/")
    return f"policy.{policy}.{'critic.' if critic else ''}"


def largest_bytes(policies: "Policies") -> int:
    """Bytes that a pass of the largest policy reads of its weights."""
    return max(bytes_of_pass(each.loaded_model.model) for each in policies.values())


def bytes_of_pass(model: Any) -> int:
    """Bytes of the weights that a pass reads whole: an embedding that is not the output layer is none."""
    num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    if getattr(model, "head", None) is not None:  # of the built-in decoder
        num_bytes -= model.embed.weight.numel() * model.embed.weight.element_size()
    return num_bytes


def _each(names: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(names))
