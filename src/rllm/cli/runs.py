"""`rllm runs`: what is on disk of past and present runs, down to a single episode. Reads, and writes nothing.

RUN/config.json, metrics.jsonl, summary.json ──► list, show
RUN/store.sqlite ──► show --phase, show --episode

`compare` and `replay` are in files of their own.
"""

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from rllm.cli.before_after import print_before_after
from rllm.cli.cluster_view import cluster_facts, print_cluster
from rllm.cli.command import Group, example, json_option, print_json
from rllm.cli.compare import command as compare
from rllm.cli.episode_view import episode_view
from rllm.cli.eval_view import show_evaluation
from rllm.cli.replay import command as replay
from rllm.cli.skill_view import print_alarms, print_success
from rllm.cli.supervised_view import machine_rows, show_supervised
from rllm.cli.terminal import (
    FittingTable,
    err,
    facts,
    out,
    print_next,
    print_sentence,
    rate,
    table,
)
from rllm.config.distill import PROMPTS
from rllm.errors import ConfigError, choices_of
from rllm.eval.words import endings_text
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory, is_run, runs_under
from rllm.tracking.alarms import AlarmWatch
from rllm.tracking.console import readable_seconds, sparkline
from rllm.tracking.jsonl import read_metrics
from rllm.view.run_facts import RunFacts, RunStage, facts_of, report_labels
from rllm.view.token_texts import token_texts

DEFAULT_ROOT = Path("runs")
MOST_EPISODES_LISTED = 50
_STATE_STYLES = {RunStage.RUNNING: "cyan", RunStage.FINISHED: "green", RunStage.STOPPED: "yellow"}


@click.group("runs", cls=Group)
def command() -> None:
    """List, show, compare and replay runs, down to single episodes."""


@command.command("list", epilog=example("rllm runs list", "rllm runs list experiments --json"))
@click.argument("root", type=click.Path(path_type=Path), default=DEFAULT_ROOT)
@json_option
def list_runs(root: Path, as_json: bool) -> None:
    """List the runs in ROOT (runs/ by default), newest first."""
    if not root.is_dir() and root != DEFAULT_ROOT:
        raise ConfigError(f"There is no directory {root}; name one that holds runs.")
    runs, unreadable = [], []
    for run in [RunDirectory.read(root)] if is_run(root) else runs_under(root):
        try:
            runs.append(facts_of(run))
        except ConfigError as error:  # one damaged run must not hide the others
            unreadable.append({"run": str(run.path), "error": str(error)})
    if as_json:
        print_json({"runs": [each.to_dict() for each in runs], "unreadable": unreadable})
        return
    console = out()
    if runs:
        console.print(_list_table(runs))
        print_next(console, [(["rllm", "runs", "show", runs[0].run], "look at the newest")])
    elif not unreadable:
        print_sentence(console, f"There are no runs in `{root}`.")
        print_next(console, [(["rllm", "train", "frozenlake"], "make one")])
    for each in unreadable:
        print_sentence(err(), each["error"], style="red")


@command.command(
    "show",
    epilog=example(
        "rllm runs show runs/frozenlake-seed0                              the run at a glance",
        "rllm runs show runs/frozenlake-seed0 --phase train --step 40      the episodes of one step",
        "rllm runs show runs/frozenlake-seed0 --episode 1025               one episode, turn by turn",
    ),
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--episode", "row_id", type=int, help="Print this episode; the run's overview says which ids there are."
)
@click.option(
    "--before-after", is_flag=True, help="Print one held-out task as it was played before and after training."
)
@click.option("--phase", help="List the episodes of a phase, such as train or after.")
@click.option("--step", type=int, help="Only those of one step of the phase.")
@json_option
def show(
    run: Path, row_id: int | None, before_after: bool, phase: str | None, step: int | None, as_json: bool
) -> None:
    """Show a run: its settings and result, the episodes of a phase, or one episode turn by turn."""
    directory = RunDirectory.read(run)
    if row_id is not None and (phase is not None or step is not None):
        raise click.UsageError("--episode names one episode; leave --phase and --step out.")
    if before_after and (row_id is not None or phase is not None or step is not None or as_json):
        raise click.UsageError("--before-after chooses the episodes itself; leave the other options out.")
    if before_after:
        print_before_after(directory)
    elif row_id is not None:
        _show_episode(directory, row_id, as_json)
    elif phase is not None or step is not None:
        _show_phase(directory, phase or TRAIN_PHASE, step, as_json)
    elif (run_facts := facts_of(directory)).kind == "eval":
        _show_evaluation(directory, run_facts, as_json)
    elif run_facts.kind != "train":
        show_supervised(directory, run_facts, _state(run_facts), as_json)
    else:
        _show_run(directory, as_json)


command.add_command(compare)
command.add_command(replay)


def _list_table(runs: list[RunFacts]) -> Any:
    run_table = table(
        *("run", "environment", "seed", "step", "before", "after", "state"),
        right=("seed", "step"),
        spare=("state", "environment", "step", "seed"),
    )
    for each in runs:
        run_table.add_row(
            each.name,
            each.environment or f"rllm {each.kind}",
            str(each.seed),
            f"{each.steps}/{each.total_steps}",
            rate(each.report("before", "success")),
            rate(each.report("after", "success")),
            _state(each),
        )
    return run_table


def _state(each: RunFacts) -> Text:
    text = Text(str(each.state), style=_STATE_STYLES[each.state])
    if each.pid is not None:
        text.append(f" (process {each.pid})", style="dim")
    if each.state is not RunStage.FINISHED and each.phase:
        text.append(f", {each.phase.replace('_', ' ')} step {each.phase_steps}", style="dim")
    return text


def _show_run(directory: RunDirectory, as_json: bool) -> None:
    run_facts, config, summary = facts_of(directory), directory.config(), directory.summary()
    lines = [line for line in read_metrics(directory.metrics_path) if line["phase"] == TRAIN_PHASE]
    success = [line["success"] for line in lines if "success" in line]
    phases, cluster = _phases(directory), cluster_facts(lines)
    if as_json:
        details = {"success": success, "phases": phases, "machines": directory.machines()}
        details |= {"summary": summary, "config": config, "chosen": directory.choices()}
        details |= {"alarms": [alarm.to_dict() for alarm in AlarmWatch(config, lines).history]}
        print_json({**run_facts.to_dict(), **details, **({"cluster": cluster.to_dict()} if cluster else {})})
        return
    console = out()
    try:
        highlights = _highlights(run_facts, config, summary, directory.choices())
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"config.json or summary.json of {directory.path} is not what a run wrote "
            f"({type(error).__name__}: {error}); restore it, or name another directory."
        ) from error
    console.print(Text.assemble((str(directory.path), "bold"), "  ", _state(run_facts)), soft_wrap=True)
    console.print(facts([*highlights, *machine_rows(directory)]))
    labels, has_rewards = report_labels(config), config["task"]["environment"] != PROMPTS
    if has_rewards:
        print_success(console, run_facts.reports, summary or {}, labels)
    if any("reverse_kl" in report for report in run_facts.reports.values()):
        console.print("\nDistance from the teacher, with 95 % intervals", style="bold")
        console.print(_distances(run_facts, labels))
    if success and has_rewards:
        console.print(
            Text.assemble(
                "While training, sampled  ",
                (sparkline(success, 60), "green"),
                f"  {success[0]:.0%} to {success[-1]:.0%}",
            )
        )
    print_alarms(console, AlarmWatch(config, lines).history)
    if cluster is not None:
        print_cluster(console, cluster)
    _print_phases(console, phases)
    following = _following(directory, phases)
    if following:
        print_next(console, following)


def _distances(run_facts: RunFacts, labels: dict[str, str]) -> FittingTable:
    """Table of a student's distances from its teacher, as far as the run has got."""
    distance_table = table("", "reverse KL, nats per token")
    for name, label in labels.items():
        report = run_facts.reports.get(name, {})
        if "reverse_kl" in report:
            spread = 1.96 * report["reverse_kl_error"]
            distance_table.add_row(label, f"{report['reverse_kl']:.4f} ± {spread:.4f}")
    return distance_table


def _show_evaluation(directory: RunDirectory, run_facts: RunFacts, as_json: bool) -> None:
    phases = _phases(directory)
    if as_json:
        details = {"phases": phases, "summary": directory.summary(), "config": directory.config()}
        print_json({**run_facts.to_dict(), **details})
        return
    show_evaluation(directory, _state(run_facts))
    console = out()
    _print_phases(console, phases)
    if following := _following(directory, phases):
        print_next(console, following)


def _highlights(
    run_facts: RunFacts,
    config: dict[str, Any],
    summary: dict[str, Any] | None,
    choices: dict[str, dict[str, Any]],
) -> list[tuple[str, str | Text]]:
    task, rollout, algorithm = config["task"], config["rollout"], config["algorithm"]
    arguments = ", ".join(f"{name} {value}" for name, value in task["environment_args"].items())
    rows: list[tuple[str, str | Text]] = [
        ("environment", f"{task['environment']} ({arguments})" if arguments else task["environment"]),
        ("agent", task["agent"]),
        ("model", f"{config['model']['path']} on {config['model']['device']}"),
        (
            "training",
            f"{config['warm_start']['steps']} warm-start steps, then {run_facts.steps} of "
            f"{run_facts.total_steps} steps of {rollout['tasks_per_step']} tasks × "
            f"{rollout['group_size']} attempts",
        ),
        ("algorithm", f"{algorithm['estimator']}, learning rate {config['optimizer']['learning_rate']:g}"),
        ("seed", str(run_facts.seed)),
    ]
    rows += [
        (f"chosen: {key}", f"{choice['value']:g}, {choice['reason']}") for key, choice in choices.items()
    ]
    if summary is not None:
        rows.append(("work", readable_seconds(summary["wall_s"])))
    return rows


def _phases(directory: RunDirectory) -> list[dict[str, Any]]:
    """Each phase with its episodes by outcome and its range of ids; none while nothing was saved."""
    if not directory.store_path.is_file():
        return []
    phases: list[dict[str, Any]] = []
    with EpisodeStore.open(directory.store_path, read_only=True) as store:
        for phase in store.phases():
            ids, outcomes = store.row_ids(phase), store.counts_by_outcome(phase)
            endings = store.counts_by_ending(phase)
            if ids:
                phases.append(
                    {
                        "phase": phase,
                        "episodes": len(ids),
                        "outcomes": outcomes,
                        "endings": endings,
                        "first_id": min(ids),
                        "last_id": max(ids),
                    }
                )
    return phases


def _print_phases(console: Console, phases: list[dict[str, Any]]) -> None:
    if not phases:
        console.print("\nNo episodes are saved yet.", style="dim")
        return
    outcomes = list(dict.fromkeys(name for each in phases for name in each["outcomes"]))
    console.print("\nEpisodes", style="bold")
    phase_table = table(
        "phase", "episodes", *outcomes, "ids", "ended", right=("episodes", *outcomes), spare=("ids",)
    )
    for each in phases:
        counts = (str(each["outcomes"].get(name, 0)) for name in outcomes)
        phase_table.add_row(
            each["phase"],
            str(each["episodes"]),
            *counts,
            f"{each['first_id']}–{each['last_id']}",
            endings_text(each["endings"]),
        )
    console.print(phase_table)


def _following(directory: RunDirectory, phases: list[dict[str, Any]]) -> list[tuple[list[str], str]]:
    if not phases:
        return []
    words = ["rllm", "runs", "show", str(directory.path)]
    last = [each for each in phases if not each["phase"].endswith(".greedy")][-1]
    return [
        ([*words, "--episode", str(last["first_id"])], "one episode, turn by turn"),
        ([*words, "--phase", last["phase"]], "a list of episodes"),
    ]


def _show_phase(directory: RunDirectory, phase: str, step: int | None, as_json: bool) -> None:
    with EpisodeStore.open(directory.store_path, read_only=True) as store:
        phases = store.phases()
        if phase not in phases:
            raise ConfigError(
                f"{directory.path} has no phase `{phase}`; {choices_of(phase, phases)}."
                if phases
                else f"{directory.path} has saved no episodes yet; wait for its first step."
            )
        ids = store.row_ids(phase, step)
        if not ids:
            raise ConfigError(f"{directory.path} has no episodes of step {step} in phase `{phase}`.")
        episodes_shown = [
            {
                "id": row_id,
                "task_id": episode.task_id,
                "attempt": episode.rollout_idx,
                "outcome": episode.outcome,
                "success": episode.is_correct,
                "reward": episode.reward,
                "turns": sum(len(each.steps) for each in episode.trajectories),
                "termination_reason": episode.termination_reason,
            }
            for row_id, episode in zip(
                ids, store.episodes(phase, step, None if as_json else MOST_EPISODES_LISTED), strict=False
            )
        ]
    if as_json:
        print_json({"run": str(directory.path), "phase": phase, "step": step, "episodes": episodes_shown})
        return
    episode_table = table(
        "id",
        "task",
        "attempt",
        "reward",
        "turns",
        "outcome",
        "ended",
        right=("id", "attempt", "reward", "turns"),
        spare=("reward", "attempt", "outcome", "turns", "ended"),
    )
    for each in episodes_shown:
        episode_table.add_row(
            str(each["id"]),
            str(each["task_id"]),
            str(each["attempt"]),
            Text(f"{each['reward']:g}", style="green" if each["success"] else ""),
            str(each["turns"]),
            str(each["outcome"]),
            str(each["termination_reason"]),
        )
    console = out()
    console.print(episode_table)
    if len(ids) > len(episodes_shown):
        console.print(
            f"{len(episodes_shown)} of {len(ids)}; --json lists them all, --step those of one step.",
            style="dim",
        )
    words = ["rllm", "runs", "show", str(directory.path), "--episode", str(ids[0])]
    print_next(console, [(words, "one episode, turn by turn")])


def _show_episode(directory: RunDirectory, row_id: int, as_json: bool) -> None:
    with EpisodeStore.open(directory.store_path, read_only=True) as store:
        episode = store.episode(row_id)
        phase, step = _place_of(store, row_id, directory.config().get("steps", 0))
    token_text, remark = token_texts(directory)
    if as_json:
        data = episode.to_dict()
        for trajectory in data["trajectories"]:
            for each in trajectory["steps"]:
                each["tokens"] = [token_text(token) for token in each["response_ids"]]
        print_json({"run": str(directory.path), "id": row_id, "phase": phase, "step": step, "episode": data})
        return
    where = f"Episode {row_id} of {directory.path}, phase {phase}" + (
        "" if step is None else f", step {step}"
    )
    out().print(episode_view(episode, token_text, where))
    if remark:
        print_sentence(err(), remark, style="yellow")


def _place_of(store: EpisodeStore, row_id: int, num_steps: int) -> tuple[str, int | None]:
    """(phase, step) of an episode; the step only where a phase has more than one."""
    phase = next(name for name in store.phases() if row_id in store.row_ids(name))
    if phase != TRAIN_PHASE:
        return phase, None
    return phase, next((step for step in range(num_steps) if row_id in store.row_ids(phase, step)), None)
