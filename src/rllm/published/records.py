"""Trajectories of an evaluation, as published scripts handle them: count, keep, colour, log."""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rllm.eval.pass_at_k import pass_at_k
from rllm.files.atomic import write_atomic
from rllm.types.episode import Episode, Trajectory

log = logging.getLogger(__name__)


def compute_pass_at_k(results: Sequence[Trajectory]) -> dict[str, float]:
    """`pass@1` and `pass@k` over the trajectories of each task, printed and returned.

    A trajectory is right where its reward is above 0; `k` is the smallest number of attempts at a task.
    """
    attempts: dict[str, list[bool]] = defaultdict(list)
    for trajectory in results:
        attempts[_task_key(trajectory.task)].append((trajectory.reward or 0.0) > 0.0)
    if not attempts:
        return {}
    k = min(len(each) for each in attempts.values())
    scores = {
        f"pass@{size}": sum(pass_at_k(len(each), sum(each), size) for each in attempts.values())
        / len(attempts)
        for size in sorted({1, k})
    }
    click.echo(f"Tasks: {len(attempts)}, attempts: {len(results)}")
    for name, score in scores.items():
        click.echo(f"{name}: {score:.4f}")
    return scores


def save_trajectories(
    results: Sequence[Trajectory],
    save_dir: str | Path = "./trajectories",
    filename: str = "trajectories.jsonl",
) -> str:
    """Write trajectories as JSON lines; a name that ends in .pt gets .jsonl, since no pickles are written."""
    path = Path(save_dir) / Path(filename).with_suffix(".jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(each.to_dict(), default=str, ensure_ascii=False) for each in results]
    write_atomic(path, "".join(f"{line}\n" for line in lines))
    click.echo(f"{len(lines)} trajectories are in {path}")
    return str(path)


def colorful_print(string: str, *args: Any, **kwargs: Any) -> None:
    """Print in click's colours (`fg`, `bold`, …)."""
    click.echo(click.style(string, *args, **kwargs))


class EpisodeLogger:
    """Writes each episode into `LOG_DIR/MODE_step_S_epoch_E/`, one JSON file each."""

    def __init__(self, base_dir: str | Path, subdirectory: str | None = None) -> None:
        self.log_dir = Path(base_dir) / subdirectory if subdirectory else Path(base_dir)

    def log_episode(self, episode: Episode, step: int, mode: str = "train", epoch: int = 0) -> Path:
        """Write one episode; the file it is in."""
        digest = hashlib.sha256(_task_key(episode.task).encode()).hexdigest()[:8]
        name = f"episode_hash{digest}_id{str(episode.id).replace('/', '_')}.json"
        path = self.log_dir / f"{mode}_step_{step}_epoch_{epoch}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(episode.to_dict(), default=str, ensure_ascii=False) + "\n")
        return path

    def log_episodes(
        self, episodes: Sequence[Episode], step: int, mode: str = "train", epoch: int = 0
    ) -> list[Path]:
        return [self.log_episode(episode, step, mode, epoch) for episode in episodes]


def _task_key(task: Any) -> str:
    return json.dumps(task, sort_keys=True, default=str)
