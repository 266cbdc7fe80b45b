"""Keys that a configuration may leave open, so that a run chooses them for its model.

OPEN_KEYS: key -> the value that stands for "open", which is each key's default
"""

from typing import Any

OPEN_KEYS: dict[str, float | int] = {
    "optimizer.learning_rate": 0.0,
    "optimizer.warmup_steps": -1,
    "warm_start.steps": -1,
    "warm_start.learning_rate": 0.0,
    "rollout.max_tokens_per_turn": -1,
    "inference.max_context": 0,
    "inference.num_slots": 0,
    "inference.cache_tokens": 0,
    "optimizer.micro_batch_tokens": 0,
    "optimizer.logits_mb": 0.0,
    "checkpoint.every_steps": 0,
}
"""`rllm.trainer.defaults` says what each comes to."""
MEMORY_KEYS = (
    "inference.num_slots",
    "inference.cache_tokens",
    "optimizer.micro_batch_tokens",
    "optimizer.logits_mb",
    "checkpoint.every_steps",
)
"""Those that follow from the memory that is free; `rllm.trainer.fitting` chooses them."""


def open_keys(config: object) -> list[str]:
    """Return the keys of OPEN_KEYS that `config` has and leaves open."""
    return [key for key, value in OPEN_KEYS.items() if get_key(config, key) == value]


def get_key(config: object, key: str) -> Any:
    """Return the value of `section.name`; None for a configuration without that section."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section, None), name, None)


def set_key(config: object, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    setattr(getattr(config, section), name, value)
