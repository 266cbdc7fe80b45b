"""One held-out task as the model played it before training, and beside it as it did after.

RUN/store.sqlite: phases before, after ──► the first task that only the trained model solves ──► two columns
"""

from typing import Any

from rich.table import Table
from rich.text import Text

from rllm.cli.episode_view import prompt_text
from rllm.cli.terminal import out
from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode


def print_before_after(directory: RunDirectory) -> None:
    """Print both episodes beside each other. Raises ConfigError for a run that has not measured both."""
    before, after = episode_pair(directory)
    table = Table(title=f"Task {after.task_id}, sampled", title_justify="left", expand=True)
    for heading in ("before training", "after training"):
        table.add_column(heading, ratio=1, overflow="fold")
    table.add_row(_conversation(before), _conversation(after))
    out().print(table)


def episode_pair(directory: RunDirectory) -> tuple[Episode, Episode]:
    """Return the episodes of one held-out task before and after training: of the first task that training
    solved, else of the first."""
    with EpisodeStore.open(directory.store_path, read_only=True) as store:
        by_phase = {phase: _first_attempts(store, phase) for phase in ("before", "after")}
    before, after = by_phase["before"], by_phase["after"]
    task_ids = [task_id for task_id in after if task_id in before]
    if not task_ids:
        raise ConfigError(
            f"{directory.path} has not measured its held-out tasks before and after training; let it end."
        )
    learnt = (task for task in task_ids if after[task].is_correct and not before[task].is_correct)
    task_id = next(learnt, task_ids[0])
    return before[task_id], after[task_id]


def _first_attempts(store: EpisodeStore, phase: str) -> dict[str, Episode]:
    episodes = list(store.episodes(phase)) if phase in store.phases() else []
    return {episode.task_id: episode for episode in reversed(episodes)}


def _conversation(episode: Episode) -> Text:
    lines = Text()
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            name = "model" if len(episode.trajectories) == 1 else trajectory.name
            lines.append(f"{prompt_text(step)}\n", style="dim")
            lines.append(f"{name}: ", style="bold").append(f"{step.model_response.strip()}\n\n")
    style = "green" if episode.is_correct else "red"
    ending: Any = "success" if episode.is_correct else "no success"
    return lines.append(f"{ending}, reward {episode.reward:g}", style=style)
