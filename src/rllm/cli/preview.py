"""`rllm train … --preview` on the screen: attempts with their rewards, then figures and one sentence."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rllm.cli.command import print_json
from rllm.cli.episode_view import prompt_text
from rllm.cli.skill_view import print_alarms
from rllm.cli.terminal import out, print_next, print_sentence, rate
from rllm.tracking.alarms import AlarmEvent
from rllm.tracking.console import readable_seconds
from rllm.tracking.screen import Screen
from rllm.trainer.memory import readable
from rllm.trainer.preview import NUM_ATTEMPTS, Preview, answers
from rllm.types.episode import LEARNABLE, Episode

if TYPE_CHECKING:
    from rllm.trainer.memory_plan import MemoryPlan

STYLES = {"good": "bold green", "warning": "bold yellow", "bad": "bold red"}


def print_preview(
    preview: Preview, memory: "MemoryPlan | None", words: Sequence[str], *, as_json: bool
) -> None:
    """Print a preview. `memory`: the plan of the run, None where it is unknown; `words`: the command that
    starts the run."""
    if as_json:
        print_json({**preview.facts(), "memory": None if memory is None else memory.facts()})
        return
    console = out()
    for task_id, attempts in preview.groups().items():
        _print_task(console, task_id, attempts)
    console.print("\nOne step, measured", style="bold")
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(preview, memory):
        figures.add_row(f"  {name}", value)
    console.print(figures)
    print_alarms(console, [AlarmEvent(step=0, alarm=alarm) for alarm in preview.alarms()])
    level, sentence = preview.verdict()
    print_sentence(console, sentence, style=STYLES[level])
    console.print("Nothing was kept.", style="dim")
    print_next(console, [(words, "start the run")])


def _print_task(console: Screen, task_id: str, attempts: Sequence[Episode]) -> None:
    """Print a task, the last message of its prompt, and its different answers, each on one line with its
    reward and how often it was given."""
    num_correct = sum(episode.is_correct for episode in attempts)
    console.print(f"\n{task_id}: {num_correct} of {len(attempts)} attempts succeed", style="bold")
    first_steps = [trajectory.steps[0] for trajectory in attempts[0].trajectories if trajectory.steps]
    for step in first_steps[:1]:
        _print_line(console, Text(f"prompt  {one_line(prompt_text(step))}", style="dim"))
    counts: dict[tuple[str, str], int] = {}
    for episode in attempts:
        text = " → ".join(one_line(answer) or "(empty)" for answer in answers(episode))
        reward = f"{episode.reward:g}" if episode.outcome in LEARNABLE else str(episode.outcome)
        counts[reward, text] = counts.get((reward, text), 0) + 1
    for (reward, text), count in counts.items():
        often = f" × {count}" if count > 1 else ""
        _print_line(console, Text.assemble((f"{reward:>6}  ", "dim"), text or "(no answer)"), often)


def _print_line(console: Screen, line: Text, ending: str = "") -> None:
    """Print `line`, cut where the screen ends, and `ending` behind it."""
    line.truncate(max(20, console.width - len(ending)), overflow="ellipsis")
    console.print(line.append(ending, style="dim"), soft_wrap=True)


def one_line(text: str) -> str:
    """Return `text` with every run of white space as one space."""
    return " ".join(text.split())


def _figures(preview: Preview, memory: "MemoryPlan | None") -> list[tuple[str, str | Text]]:
    costs, metrics = preview.costs(), preview.metrics
    rows: list[tuple[str, str | Text]] = [
        ("pass@1", rate(preview.pass_rate(1))),
        (f"pass@{NUM_ATTEMPTS}", rate(preview.pass_rate(NUM_ATTEMPTS))),
        ("mean reward", f"{metrics['reward_mean']:.3g}"),
        ("tasks with different rewards", f"{preview.num_with_signal} of {len(preview.groups())}"),
        ("turns of an attempt", f"{metrics['turns_mean']:.3g}"),
        ("failed attempts", str(metrics["failed"])),
    ]
    if "answers_cut" in metrics:
        rows.append(("answers cut at the token limit", f"{metrics['answers_cut']:.0%}"))
    if "policy_entropy" in metrics:
        rows.append(("entropy, nats a token", f"{metrics['policy_entropy']:.3g}"))
    if "update_kl" in metrics:
        rows.append(("KL of the update, nats a token", f"{metrics['update_kl']:.2g}"))
    rows += [
        ("tokens of a step", f"{costs['step_tokens']:,.0f}"),
        ("time of a step", f"about {readable_seconds(costs['step_s'])}"),
        (
            f"time of {preview.config.steps} steps and evaluations, answers like these",
            f"about {readable_seconds(costs['run_s'])}",
        ),
        ("memory of this step", readable(preview.peak_bytes)),
    ]
    if memory is not None:
        text = f"{readable(memory.peak)}, {readable(memory.free)} free"
        rows.append(("memory of the run at most", text))
    return rows
