"""The time and the disk space that a run takes, before it begins.

    parameters, measured peak of the machine ──► tokens a second, sampled and learned from ──► a step, the run
    parameters, checkpoints that stay ─────────► bytes on disk

Times are of tokens alone, as many as the limits allow: answers that are shorter take less, and environments
and tools take theirs beside it.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rllm.config.schema import LOCAL, TrainConfig
from rllm.config.supervised import SupervisedConfig
from rllm.models.devices import use_threads
from rllm.models.peak import peak_bytes_per_s, peak_flops
from rllm.trainer.memory import FLOAT
from rllm.trainer.memory_plan import Parts, sampler_element, stored_parts

SAMPLING_SHARE, LEARNING_SHARE = 0.5, 0.7
"""Shares of the machine's measured peak that sampling and updates come to; measured with
SmolLM2-135M-Instruct on one thread of a CPU."""
EPISODE_BYTES = 2_000
"""Bytes of an episode in the store."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RunEstimate:
    """The rates of a run, and the most of its time and disk."""

    sampled_tokens_per_s: float
    """0 for a run on rows."""
    learned_tokens_per_s: float
    step_s: float
    """Seconds of a step, or of an update on rows."""
    run_s: float
    """Seconds of all steps, with the evaluations of a run that plays."""
    disk_bytes: int

    def facts(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def of_runs(self, num_runs: int) -> dict[str, float]:
        """Seconds and bytes of disk of so many such runs, one after the other."""
        return {"run_s": num_runs * self.run_s, "disk_bytes": num_runs * self.disk_bytes}


def estimate_run(config: TrainConfig, num_ranks: int) -> RunEstimate | None:
    """Estimate of a run that plays; None where it is computed elsewhere, or its models' sizes are unknown."""
    parts = stored_parts(config) if config.backend == LOCAL and config.inference.engine == LOCAL else None
    if parts is None:
        return None
    rollout, length = config.rollout, config.inference.max_context
    num_episodes = config.derived()["most_episodes_per_step"]
    answer = min(rollout.max_turns * rollout.max_tokens_per_turn or length, length)
    num_rows = max(1, min(num_episodes, config.inference.slots, rollout.num_parallel))
    learned_rate = num_ranks * _learned_rate(config, parts.weights)
    sampled_rate = num_ranks * _sampled_rate(config, parts.weights, num_rows)
    step_s = num_episodes * answer * (1.0 / sampled_rate + 1.0 / learned_rate)
    num_measured = num_evaluated(config)
    num_imitated = config.warm_start.steps * config.warm_start.episodes_per_step
    return RunEstimate(
        sampled_tokens_per_s=sampled_rate,
        learned_tokens_per_s=learned_rate,
        step_s=step_s,
        run_s=config.steps * step_s + answer * (num_measured / sampled_rate + num_imitated / learned_rate),
        disk_bytes=disk_bytes(config, parts) + EPISODE_BYTES * config.derived()["most_episodes_in_total"],
    )


def num_evaluated(config: TrainConfig) -> int:
    """Return the number of episodes of all evaluations of a run, each of them sampled and greedy."""
    evaluation = config.evaluation
    period = config.evaluation_period
    between = config.steps // period * evaluation.every_num_tasks if period else 0
    num_reports = 1 + evaluation.at_start * (2 if config.warm_start.steps else 1)
    return 2 * (num_reports * evaluation.num_tasks + between)


def estimate_rows(config: SupervisedConfig, quantities: Mapping[str, Any]) -> RunEstimate | None:
    """Estimate of a run on rows, by the quantities of its plan; None where these say nothing of tokens."""
    run = config.train_config()
    parts = stored_parts(run)
    if parts is None or "tokens_per_update" not in quantities:
        return None
    rate = _learned_rate(run, parts.weights)
    step_s = quantities["tokens_per_update"] / rate
    return RunEstimate(
        sampled_tokens_per_s=0.0,
        learned_tokens_per_s=rate,
        step_s=step_s,
        run_s=quantities["optimizer_updates"] * step_s,
        disk_bytes=disk_bytes(run, parts),
    )


def disk_bytes(config: TrainConfig, parts: Parts) -> int:
    """Bytes of the checkpoints that exist at one time, and of the models of a run."""
    # Its weights have as many bytes as gradients.
    checkpoint = parts.gradients + parts.optimizer + parts.critic
    references = 1 if config.algorithm.kl_coef and config.warm_start.steps else 0
    # Beside those that stay: the best one, and one that is being written.
    return (config.checkpoint.keep + 2) * checkpoint + (2 + references) * parts.weights


def disk_bytes_needed(config: TrainConfig, num_parameters: int) -> int:
    """The same before a run begins, also where the parts of its models are not known: there they are
    `num_parameters` float32 weights, with gradients and the two moments of AdamW."""
    parts = stored_parts(config) if config.backend == LOCAL else None
    if parts is None:
        weights = FLOAT * num_parameters
        critic = 4 * weights if config.critic.trunk == "separate" else 0
        parts = Parts(weights=weights, gradients=weights, optimizer=2 * weights, critic=critic)
    return disk_bytes(config, parts)


def _learned_rate(config: TrainConfig, weights: int) -> float:
    """Tokens a second that one process learns from; `weights` are the bytes of its models."""
    use_threads(config.threads)
    adapts = any(config.adapter_of(name).rank for name in config.named_policies)
    # Forward, the gradient of what enters, and of weights that are trained (Kaplan et al. 2020).
    flops_of_token = (4 if adapts else 6) * weights / _element(config)
    return LEARNING_SHARE * peak_flops(config.model.device, config.model.number_type) / flops_of_token


def _sampled_rate(config: TrainConfig, weights: int, num_rows: int) -> float:
    """Tokens a second of so many answers at the same time: a step reads all weights once."""
    use_threads(config.threads)
    device, parameters = config.model.device, weights / _element(config)
    num_bytes = round(parameters * sampler_element(config))
    computing_s = 2.0 * num_rows * parameters / peak_flops(device, config.sampler_type)
    reading_s = num_bytes / peak_bytes_per_s(device, config.sampler_type, num_bytes)
    return SAMPLING_SHARE * num_rows / max(computing_s, reading_s)


def _element(config: TrainConfig) -> int:
    """Bytes of a number in the trainer's weights."""
    return 2 if config.model.number_type == "bfloat16" else FLOAT
