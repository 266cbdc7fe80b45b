"""Slots, cache, passes and checkpoints of a run ──► as large as the model and the free memory let them be.

    free memory − weights, gradients, optimizer ──► room ─┬─ half ──► keys and values of conversations
                                                          └─ half ──► a pass, by the measured bytes of a token

Models that rLLM made from random weights have the values that their tasks were tuned with, where these fit.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rllm.config.schema import DEFAULT_PERIOD, DEFAULT_SLOTS, LOCAL, TrainConfig
from rllm.distributed import world_size
from rllm.inference.local.cache import GROWTH, tokens_at_once
from rllm.models.builtin import PRESETS, builtin_preset
from rllm.trainer.backends.logprobs import LOGITS_MB
from rllm.trainer.backends.torch_memory import PassModel, pass_memory
from rllm.trainer.free_memory import free_bytes, machine_bytes
from rllm.trainer.memory import cache_bytes, readable
from rllm.trainer.memory_plan import (
    FRAGMENTS,
    Parts,
    learned_models,
    like_rows,
    plan_shape,
    sampler_element,
    stored_parts,
)

SHARE = 0.9
"""Share of the free memory that a run is fitted into."""
PASS_TOKENS, LEAST_PASS_TOKENS = 16_384, 128
"""Tokens of a pass at most: more make no pass faster; and at least."""
CPU_PASS_TOKENS = 1024
"""Tokens of a pass of a pretrained model on a CPU, which computes with as many as fast as with more."""
GROWING = 1.5
"""The cache while it grows beside what it will be: its keys, or its values, are there twice."""
LEAST_LOGITS_MB = 16.0
MEASURED_TOKENS, MEASURED_WORDS = 512, 64
"""Tokens of the pass that is measured, and words that its model knows."""
FAST_CHECKPOINT, MOST_STEPS = 100e6, 25
"""Bytes of a checkpoint for each step from one to the next, beyond DEFAULT_PERIOD; and steps at most."""

Values = Mapping[str, tuple[float | int, str]]
"""key -> (value, reason)"""


def fitting_values(config: TrainConfig, *, is_small: bool, plays: bool) -> Values:
    """Return the values of MEMORY_KEYS for a configuration whose other keys are chosen.

    `is_small`: its models were made here. `plays`: it samples, and does not only learn from rows.
    """
    if config.backend != LOCAL:
        return {"checkpoint.every_steps": (DEFAULT_PERIOD, "a service keeps it")}
    parts = stored_parts(config) if _are_here(config) else None
    if parts is None:
        return _without_sizes(config, is_small=is_small)
    room = max(0, round(SHARE * _free_for_each(config.model.device)) - parts.total)
    reason = f"{readable(room)} are free beside weights and optimizer"
    values = {"checkpoint.every_steps": _period(config, parts)}
    if plays:
        values |= _of_sampler(config, room // 2, reason, is_small=is_small)
    return values | _of_passes(config, room // 2, reason, is_small=is_small)


def _without_sizes(config: TrainConfig, *, is_small: bool) -> Values:
    """The values for models that the built-in decoder does not compute; the cache grows as it is needed."""
    tokens = CPU_PASS_TOKENS if config.model.device == "cpu" and not is_small else PASS_TOKENS
    reason = "the memory of its architecture is not known"
    return {
        "checkpoint.every_steps": (DEFAULT_PERIOD, reason),
        "inference.num_slots": _slots(config, is_small=is_small),
        "optimizer.micro_batch_tokens": (tokens, reason),
        "optimizer.logits_mb": (LOGITS_MB, reason),
    }


def _slots(config: TrainConfig, *, is_small: bool) -> tuple[int, str]:
    if is_small:
        return DEFAULT_SLOTS, "model made from random weights here"
    rollout = config.rollout
    at_once = max(rollout.tasks_per_step * rollout.group_size, config.evaluation.num_tasks)
    most = min(DEFAULT_SLOTS, rollout.num_parallel, at_once)
    return most, "as many as a step or an evaluation plays at the same time"


def _are_here(config: TrainConfig) -> bool:
    """Whether the sizes of all models can be read; loading them reports what is wrong with one."""
    for policy in config.named_policies.values():
        is_preset = builtin_preset(policy.path) in PRESETS
        if not is_preset and not (Path(policy.path) / "config.json").is_file():
            return False
    return True


def _free_for_each(device: str) -> int:
    """Bytes that one process may have. Ranks of a run must come to one answer, so they share the machine's
    memory, and not what each finds free."""
    if world_size() == 1:
        return free_bytes(device)
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) if device == "cpu" else 1
    return machine_bytes(device) // num_local


def _period(config: TrainConfig, parts: Parts) -> tuple[int, str]:
    num_bytes = parts.gradients + parts.optimizer  # a checkpoint has weights, as many bytes as gradients
    steps = min(MOST_STEPS, max(DEFAULT_PERIOD, config.steps // 4), math.ceil(num_bytes / FAST_CHECKPOINT))
    return max(DEFAULT_PERIOD, steps), f"a checkpoint has {readable(num_bytes)}"


def _of_sampler(
    config: TrainConfig, room: int, reason: str, *, is_small: bool
) -> dict[str, tuple[float | int, str]]:
    num_slots, why = _slots(config, is_small=is_small)
    values: dict[str, tuple[float | int, str]] = {"inference.num_slots": (num_slots, why)}
    if config.inference.engine == LOCAL:
        slots, length = config.inference.num_slots or num_slots, config.inference.max_context
        element = sampler_element(config)
        shapes = [plan_shape(policy.path) for policy in config.named_policies.values()]
        a_token = sum(cache_bytes(shape, 1, GROWTH, element, 0) for shape in shapes if shape) // GROWTH
        everything, one = tokens_at_once(slots, length, 0), tokens_at_once(1, length, 0)
        affordable = cached_tokens(room, a_token)
        cache = max(one, min(everything, affordable))
        values["inference.cache_tokens"] = cache, "room for all" if cache == everything else reason
    return values


def cached_tokens(room: int, a_token: float) -> int:
    """Return the number of tokens whose keys and values, `a_token` bytes each, fit into `room` bytes while
    the cache grows."""
    return round(room / GROWING / a_token) // GROWTH * GROWTH


def _of_passes(
    config: TrainConfig, room: int, reason: str, *, is_small: bool
) -> dict[str, tuple[float | int, str]]:
    most = PASS_TOKENS
    if not is_small and config.model.device == "cpu":
        most = CPU_PASS_TOKENS
    models = learned_models(config)
    if not models:
        return {}
    logits_mb = min(LOGITS_MB, max(LEAST_LOGITS_MB, 2.0 ** math.floor(math.log2(max(1.0, room / 8e6)))))
    a_token = max(bytes_of_token(model) for model in models)
    affordable = (room - 1e6 * logits_mb) / a_token
    tokens = 2 ** math.floor(math.log2(max(LEAST_PASS_TOKENS, min(most, affordable))))
    why = f"{readable(a_token)} a token"
    why += ", as fast as with more" if tokens == most else f"; {reason}"
    return {
        "optimizer.micro_batch_tokens": (tokens, why),
        "optimizer.logits_mb": (logits_mb, "the usual" if logits_mb == LOGITS_MB else reason),
    }


def bytes_of_token(model: PassModel) -> int:
    """Return the bytes that a pass needs for each of its tokens, logits left out.

    Measured with two and with four layers; a model of one or two is measured as it is.
    """
    shape = model.shape
    few, more = (_weight_bytes(model, min(layers, shape.num_layers)) for layers in (2, 4))
    if shape.num_layers > 4:
        more = few + (more - few) * (shape.num_layers - 2) / 2
    return math.ceil((1.0 + FRAGMENTS) * more)


def _weight_bytes(model: PassModel, num_layers: int) -> float:
    """Bytes of a token of a pass through so many layers, with next to no vocabulary."""
    shape = replace(model.shape, num_layers=num_layers, vocab_size=MEASURED_WORDS)
    optimizer = replace(model.optimizer, micro_batch_tokens=0)
    length = min(MEASURED_TOKENS, shape.max_positions)
    rows = like_rows(1, 1, length, length - 1, is_shared=False)
    memory = pass_memory(replace(model, shape=shape, optimizer=optimizer, keeps_gradients=True), rows)
    return memory.beyond_gradients / memory.tokens
