"""Going on with a run: is it the same one, and what was recorded beyond its checkpoint?"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllm.config.loader import config_dict, load_config
from rllm.config.optimizer import OptimizerConfig
from rllm.config.schema import ModelConfig, TrainConfig
from rllm.errors import ConfigError
from rllm.files.atomic import write_atomic
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics, truncate_after
from rllm.trainer.checkpoint import RunState, remove_old
from rllm.types.task import Task, row_of

PHASES = ("untrained", "warm_start", "before", "train", "after")
"""In the order of a run."""


def require_record(directory: RunDirectory, *files: Path) -> None:
    """Raises ConfigError for a run that has checkpoints and lacks one of the `files` that were there before
    the first of them: it would train on, with a record that begins in the middle."""
    missing = [path.name for path in files if not path.is_file()]
    if missing and any(directory.checkpoints_path.glob("step-*")):
        raise ConfigError(
            f"{directory.path} has checkpoints but no {' and no '.join(missing)}, so it cannot go on as the "
            "run that it was. Put that back, or begin a new run with another --output."
        )


def require_episodes(store: EpisodeStore, state: RunState) -> None:
    """Raises ConfigError for a store without the episodes of a run that has been to `state`."""
    if state.reports and not store.count():
        raise ConfigError(
            f"{store.path} is empty, but the run has checkpoints: it is not the one that holds its episodes. "
            "Put that back, or begin a new run with another --output."
        )


def require_same_config(directory: RunDirectory, config: TrainConfig) -> None:
    """A run keeps its configuration for life: anything else would make its curve a mixture."""
    old_config = directory.config()
    if not old_config:
        return
    # Read as a configuration, so that one from before a key existed has its default.
    began_with = load_config(old_config)
    keep_muon_dtype(began_with.optimizer, config.optimizer)
    take_words_for_dtype(began_with.model, config.model)
    # Who plays the episodes, where servers are, how processes share the work, where numbers go and whether an
    # alarm stops the run is not what the run is.
    began_with.tracking, began_with.stop_on_alarm = config.tracking, config.stop_on_alarm
    began_with.cluster, began_with.distributed = config.cluster, config.distributed
    for name in ("servers", "replicas", "server_python"):
        setattr(began_with.inference, name, getattr(config.inference, name))
    for name in began_with.policies.keys() & config.policies.keys():
        began_with.policies[name].servers = config.policies[name].servers
    require_same(directory, config_dict(began_with), config_dict(config))


def keep_muon_dtype(old: OptimizerConfig, mine: OptimizerConfig) -> None:
    """Go on in the precision that the run began with: another machine, or another moment on this one, might
    choose another."""
    if mine.name == old.name and mine.muon_dtype == "auto":
        mine.muon_dtype = old.muon_dtype


def take_words_for_dtype(old: ModelConfig, mine: ModelConfig) -> None:
    """`auto` and what it comes to are the same data type."""
    if old.number_type == mine.number_type:
        old.dtype = mine.dtype


def settle_muon_dtype(optimizer: OptimizerConfig, device: str) -> None:
    """Replace `auto` by what is faster on this machine, so that `config.json` has what the run computes
    with."""
    if optimizer.name == "muon" and optimizer.muon_dtype == "auto":
        from rllm.trainer.backends.torch_muon import faster_dtype

        optimizer.muon_dtype = faster_dtype(device.partition(":")[0])


def require_same(directory: RunDirectory, old: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises ConfigError that lists the keys in which the two differ."""
    if differing := sorted(_differences(old, mine)):
        raise ConfigError(
            f"{directory.path} holds a run with another configuration ({'; '.join(differing[:4])}); start a "
            "new one with another output directory, or repeat the old values to go on."
        )


def require_same_tasks(store: EpisodeStore, tasks: Mapping[str, Sequence[Task | Mapping[str, Any]]]) -> None:
    """Raises ConfigError when the tasks, by what they are for, are not those that the run began with."""
    mine = {name: _fingerprint(some) for name, some in tasks.items()}
    if store.value("tasks") is None:
        store.set_value("tasks", mine)
    elif differing := other_tasks(store, tasks):
        raise ConfigError(
            f"{store.path} belongs to a run with other {' and '.join(differing)} tasks; its curve would be a "
            "mixture. Give the tasks that it began with, or another output directory."
        )


def other_tasks(store: EpisodeStore, tasks: Mapping[str, Sequence[Task | Mapping[str, Any]]]) -> list[str]:
    """Names of those `tasks`, by what they are for, that are not those that the run of `store` began with."""
    old_tasks = store.value("tasks") or {}
    return [
        name for name, some in tasks.items() if name in old_tasks and old_tasks[name] != _fingerprint(some)
    ]


def _fingerprint(tasks: Sequence[Task | Mapping[str, Any]]) -> str:
    """Hash of the tasks' number and of up to a thousand of them: a hundred thousand would take seconds."""
    every = max(1, len(tasks) // 1_000)
    digest = hashlib.sha256(str(len(tasks)).encode())
    for task in tasks[::every]:
        row = row_of(task)
        digest.update(json.dumps(row, sort_keys=True, default=_kind).encode())
    return digest.hexdigest()


def _kind(value: object) -> str:
    """The kind of a value; one that JSON does not hold counts by its kind alone."""
    return type(value).__name__


def take_back(directory: RunDirectory, state: RunState) -> None:
    """Remove what was logged beyond the checkpoint that the run goes on from."""
    reports_done = [name for name in ("untrained", "before", "after") if name in state.reports]
    if not directory.metrics_path.exists():
        return
    order = {name: index for index, name in enumerate(PHASES)}
    last = {"warm_start": state.warm_steps - 1, "train": state.steps - 1, **dict.fromkeys(reports_done, 0)}
    checkpoints_reached = [
        line for line in read_metrics(directory.metrics_path) if line["step"] <= last.get(line["phase"], -1)
    ]
    if checkpoints_reached:
        end = max(checkpoints_reached, key=lambda line: (order[line["phase"]], line["step"]))
        truncate_after(directory.metrics_path, PHASES, end["phase"], end["step"])
    else:
        write_atomic(directory.metrics_path, b"")


def go_back_to(directory: RunDirectory, store: EpisodeStore, state: RunState, keep: int) -> None:
    """Take back what was recorded beyond the checkpoint, of which `keep` stay.

    Raises ConfigError for a store without the episodes of the run.
    """
    # Each of these changes nothing the second time, so a process that ends in between does no harm.
    take_back(directory, state)
    remove_old(directory.checkpoints_path, state, keep)
    require_episodes(store, state)
    store.rollback_to(state.steps - 1)


def _differences(old_values: Mapping[str, Any], mine: Mapping[str, Any], prefix: str = "") -> list[str]:
    differences: list[str] = []
    for key in old_values.keys() | mine.keys():
        old, new = old_values.get(key), mine.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            differences += _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            differences.append(f"{prefix}{key}: {old!r} there, {new!r} here")
    return differences
