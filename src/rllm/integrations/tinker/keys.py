"""Configurations of published scripts for Tinker and for the unified trainer ──► ours, key by key.

    training.learning_rate=1e-5     one of TRANSLATED: becomes a key of ours
    rllm.gateway.port=9090          one of WITHOUT_EFFECT: nothing at its default, else a warning names it
    training.eps=1e-6               one of FIXED: refused, unless it has the value that is true here
    anything else                   ConfigError

A key that is left out means the published default. Where two published keys say one thing, the one that was
changed counts; two that were changed to different values are refused by both names.
"""

import difflib
import logging
import math
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from rllm.config.loader import load_config, parse_assignment
from rllm.errors import ConfigError
from rllm.integrations.tinker.tables import (
    ASYNC_DEFAULTS,
    CONSTANTS,
    FIXED,
    SILENT,
    TOGETHER,
    TRANSLATED,
    WITHOUT_EFFECT,
    KeySource,
)
from rllm.integrations.verl.composed import as_dict
from rllm.integrations.verl.trees import leaves, nested
from rllm.integrations.verl.values import number, switch, whole

log = logging.getLogger(__name__)

_ONLY_THEIRS = frozenset(("rllm", "training", "rollout_engine", "data", "validation", "trainer", "workflow"))
_VERLS = "actor_rollout_ref"
_MISSING = "???"
"""A value that Hydra leaves to somebody else."""


def is_published(config: Any) -> bool:
    """Whether it is in published keys: a mapping (an OmegaConf config counts), or a list of "a.b=c"."""
    if isinstance(config, Mapping):
        return bool(_ONLY_THEIRS & set(map(str, config))) and _VERLS not in config
    if isinstance(config, list | tuple):
        return any(str(each).lstrip("+").partition(".")[0] in _ONLY_THEIRS for each in config)
    return False


def translate(config: Any, num_tasks: int) -> dict[str, Any]:
    """Our configuration, for `num_tasks` training tasks.

    Raises ConfigError for the first key that has no counterpart, or whose value has none.
    """
    settings = _settings(config)
    _require_known(settings)
    ours = dict(CONSTANTS)
    for name, sources in TRANSLATED.items():
        value = _value(name, sources, settings)
        if value is not None:
            ours[name] = value
    _derive(ours, settings, num_tasks)
    tree = nested(ours)
    load_config(tree)
    return tree


def _require_known(settings: Mapping[str, Any]) -> None:
    """Raises ConfigError for a key of no table, and for one of FIXED with another value."""
    translated_keys = {source.key for sources in TRANSLATED.values() for source in sources}
    keys_without_effect: list[str] = []
    for key, value in settings.items():
        if key in translated_keys or key in TOGETHER or any(fnmatch(key, each) for each in SILENT):
            continue
        if key in FIXED:
            allowed_values, reason = FIXED[key]
            if value not in allowed_values:
                raise ConfigError(
                    f"`{key}` is {value!r}, and only {allowed_values[0]!r} is honoured: {reason}."
                )
        elif (pattern := next((each for each in WITHOUT_EFFECT if fnmatch(key, each)), None)) is not None:
            if value not in WITHOUT_EFFECT[pattern] and value not in (None, _MISSING):
                keys_without_effect.append(key)
        else:
            nearest = difflib.get_close_matches(key, [*translated_keys, *TOGETHER, *FIXED], n=1, cutoff=0.75)
            hint = f"Did you mean `{nearest[0]}`?" if nearest else "Leave it out."
            raise ConfigError(f"`{key}` is {value!r}, which has no counterpart here: {hint}")
    if keys_without_effect:
        log.warning(
            "Without effect here, where one process samples and trains and the run's own files keep the "
            "record: %s.",
            ", ".join(keys_without_effect),
        )


def _value(name: str, sources: tuple[KeySource, ...], settings: Mapping[str, Any]) -> Any:
    """Value of the published keys of one of ours; None where they leave it to us."""
    present = [
        (each, settings[each.key])
        for each in sources
        if each.key in settings and settings[each.key] not in (None, _MISSING)
    ]
    own_values = [(each, value) for each, value in present if value != each.default]
    read = [(each.key, _read(each, value)) for each, value in own_values or present[:1]]
    values = {value for _, value in read}
    if len(values) > 1:
        both = " and ".join(f"`{key}`, {value!r}" for key, value in read)
        raise ConfigError(f"{both} say the same thing, `{name}` here, in two ways; leave one of them out.")
    if read:
        return read[0][1]
    default = sources[0].default
    return None if default is None else _read(sources[0], default)


def _read(source: KeySource, value: Any) -> Any:
    try:
        return source.reader(value)
    except ValueError as error:
        raise ConfigError(f"`{source.key}` is {value!r}, which has no counterpart: {error}.") from error


def _derive(ours: dict[str, Any], settings: Mapping[str, Any], num_tasks: int) -> None:
    """Add the keys that several published ones say together."""
    prompt, response = ours.pop("prompt_length"), ours.pop("response_length")
    ours["rollout.max_tokens_per_turn"] = response
    ours["inference.max_context"] = prompt + response
    _derive_schedule(ours, settings)
    _derive_steps(ours, num_tasks)
    ratio = ours.pop("warmup_ratio")
    # A published -1 leaves it to the ratio.
    ours["optimizer.warmup_steps"] = max(0, ours["optimizer.warmup_steps"])
    if ratio and not ours["optimizer.warmup_steps"]:
        updates = ours["steps"] * ours["algorithm.updates_per_step"]
        ours["optimizer.warmup_steps"] = int(ratio * updates)
    _derive_algorithm(ours, settings)
    for name in ("evaluation.every_steps", "checkpoint.every_steps"):
        ours[name] = max(0, ours[name])
    # Never is not to be had here: it becomes the last step alone.
    ours["checkpoint.every_steps"] = ours["checkpoint.every_steps"] or max(1, ours["steps"])


def _derive_schedule(ours: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Add the schedule of a run that samples while it learns: its batches, and how far sampling is ahead."""
    readers = dict(zip(ASYNC_DEFAULTS, (switch, whole(1), number), strict=True))
    is_async, batch, staleness = (
        _read(KeySource(key, default, readers[key]), settings.get(key, default))
        for key, default in ASYNC_DEFAULTS.items()
    )
    if is_async:
        ours |= {
            "schedule.kind": "async",
            "schedule.max_staleness": math.ceil(staleness),
            "inference.lockstep": False,
            "rollout.tasks_per_step": batch,
        }
        return
    own_keys = [key for key, default in ASYNC_DEFAULTS.items() if settings.get(key, default) != default]
    if own_keys:
        raise ConfigError(
            f"`{own_keys[0]}` is {settings[own_keys[0]]!r} and `rllm.async_training.enable` is not true, so "
            "it says nothing; set that to true, or leave this out."
        )


def _derive_steps(ours: dict[str, Any], num_tasks: int) -> None:
    epochs, batches = ours.pop("epochs"), ours.pop("batches")
    batch = ours["rollout.tasks_per_step"]
    if batches > 0:
        ours["steps"] = batches
        return
    if num_tasks < batch:
        raise ConfigError(
            f"`data.train_batch_size` is {batch} and there are {num_tasks} training tasks, so an epoch has "
            "no step; lower it, or set `rllm.trainer.total_batches`."
        )
    ours["steps"] = epochs * (num_tasks // batch)


def _derive_algorithm(ours: dict[str, Any], settings: Mapping[str, Any]) -> None:
    by_std = ours.pop("by_std")
    if not by_std and ours["algorithm.estimator"] == "grpo":
        ours["algorithm.estimator"] = "dr_grpo"
    loss = ours.setdefault(
        "algorithm.loss", "ppo" if "grpo" in ours["algorithm.estimator"] else "importance_sampling"
    )
    low, high = ours.pop("clip"), ours.pop("clip_high", None)
    if loss in ("ppo", "cispo"):
        ours |= {"algorithm.clip_low": low, "algorithm.clip_high": low if high is None else high}
    level, cap = ours.pop("correction_level", None), ours.pop("correction_cap")
    if level is not None:
        ours |= {
            "algorithm.correction": "truncate",
            "algorithm.correction_level": level,
            "algorithm.correction_high": cap,
        }
    if not ours["algorithm.kl_coef"]:
        del ours["algorithm.kl_coef"]
    steps = settings.get("rllm.agent.max_steps", settings.get("agent.max_steps"))
    if steps not in (None, *_MAX_STEPS_DEFAULTS):
        ours["rollout.max_turns"] = whole(1)(steps)


_MAX_STEPS_DEFAULTS = (1, 20)
"""The defaults of the two keys: a composed configuration has them for runs without an agent, too."""


def _settings(config: Any) -> dict[str, Any]:
    """The settings of a script, by whole key; empty sections are not there."""
    if isinstance(config, Mapping):
        return dict(leaves(as_dict(config, resolve=True)))
    flat: dict[str, Any] = {}
    for each in config:
        flat.update(leaves(parse_assignment(str(each).lstrip("+"))))
    plain = {"null": None, "True": True, "False": False}
    return {key: plain.get(str(value), value) for key, value in flat.items()}
