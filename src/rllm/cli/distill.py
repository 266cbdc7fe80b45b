"""`rllm distill`: tasks and a teacher in, a run directory with a student like its teacher out.

words ──► distill_config ──► build_run ──► train, seen through LiveView ──► reverse KL before and after
"""

from pathlib import Path
from typing import Any

import click
from rich.text import Text

from rllm.build.configs import distill_config
from rllm.build.models import local_model_path
from rllm.build.training import build_run
from rllm.cli.command import elapsed_s, example, options_of, print_json, recipe_option
from rllm.cli.plan import (
    Plan,
    announce_run,
    conflict_with_run,
    interruption,
    print_plan,
    unused_directory,
)
from rllm.cli.published_flags import LEARNING_KEYS, WITH_RULES, alias_options, refused_options
from rllm.cli.supervised import SupervisedOptions
from rllm.cli.terminal import out, phase_list, print_next, print_sentence, rate_with_interval, table, took
from rllm.config.distill import PROMPTS
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.store.run_directory import RunDirectory
from rllm.tracking.console import LiveView
from rllm.trainer.extras import require_training_packages
from rllm.trainer.result import TrainResult


@click.command(
    "distill",
    epilog=example(
        "rllm distill frozenlake --teacher runs/frozenlake-seed0    into runs/distill-frozenlake-seed0",
        "rllm distill prompts.jsonl --teacher Qwen3-4B --model Qwen3-0.6B",
        "rllm distill prompts.jsonl --teacher http://127.0.0.1:8000/v1 --model Qwen3-0.6B",
        "rllm distill frozenlake --teacher RUN --set warm_start.steps=50    first the teacher shows how",
    ),
)
@click.argument("tasks", metavar="BENCHMARK|PROMPTS.jsonl")
@click.option(
    "--teacher",
    default="",
    metavar="DIR|NAME|URL",
    help="A run, a model directory, a name, or a server that returns prompt log-probabilities, such as vLLM.",
)
@click.option("--val-dataset", default="", metavar="FILE", help="Held-out prompts.  [default: the prompts]")
@recipe_option
@alias_options("assignments", LEARNING_KEYS)
@refused_options(WITH_RULES)
@options_of(SupervisedOptions)
def command(tasks: str, teacher: str, val_dataset: str, recipe: str, options: SupervisedOptions) -> None:
    """Make a student like its teacher, on the student's own answers.

    The student answers; the teacher says, token by token, how likely it finds the answer; what it finds more
    likely than the student becomes more likely. That brings down the reverse divergence KL(student, teacher).
    The two must have one vocabulary. A line of PROMPTS.jsonl is {"messages": [...]} or {"prompt": "..."}.

    The same command again resumes a run that was interrupted, and shows the result of one that is finished.
    """
    assignments = options.all_assignments(task__val_dataset=val_dataset)
    place = teacher if not teacher or "://" in teacher else str(local_model_path(teacher))
    config = distill_config(tasks, place, options.config_file, tuple(assignments), recipe=recipe)
    label = Path(tasks).stem
    directory = options.output or Path("runs") / f"distill-{label}-seed{config.seed}"
    if options.fresh:
        directory = unused_directory(directory)
    if options.dry_run:
        run = build_run(config, directory)  # refuses what a run would refuse
        run.require_names()
        plan = Plan(
            title=f"rllm distill {label}",
            directory=directory,
            config=config_dict(run.config),
            defaults=config_dict(TrainConfig()),
            derived=run.config.derived(),
            choices=run.choices,
            conflict=conflict_with_run(directory, run.require_same_config),
            memory=run.memory_plan(1, 1),
            estimate=run.estimate(1),
        )
        print_plan(plan, as_json=options.as_json, force=options.force, tasks=tasks)
        return
    require_training_packages(config.optimizer, config.lora)
    was_finished = announce_run(directory)
    try:
        with LiveView(config.steps, title=f"rllm distill {label}", elapsed_s=elapsed_s()) as view:
            run = build_run(config, directory)
            run.force = options.force
            run.tracker = None if was_finished else view
            result = run.train()
    except KeyboardInterrupt as interrupt:
        words = ["rllm", "distill", tasks, "--teacher", teacher, *options.words(), "--output", str(directory)]
        words += ["--val-dataset", val_dataset] if val_dataset else []
        words += ["--recipe", recipe] if recipe else []
        raise interruption(directory, words) from interrupt
    if options.as_json:
        print_json({**result.summary, "run": str(directory)})
    else:
        _print_result(tasks, config, result)


def _print_result(tasks: str, config: TrainConfig, result: TrainResult) -> None:
    summary, directory = result.summary, RunDirectory.read(result.directory)
    has_rewards = config.task.environment != PROMPTS
    num_tasks = summary["after"]["sampled_report"]["attempted"]
    console = out()
    console.print(f"\nDistance from the teacher on {num_tasks} {summary['tasks']['title']}", style="bold")
    report_table = table(
        "", "reverse KL, nats per token", *(["sampled success", "greedy"] if has_rewards else [])
    )
    names = {"before": "before", "after": "after"}
    if config.warm_start.steps:
        names = {"untrained": "before", "before": "after the teacher's play", "after": "after"}
    for name, label in names.items():
        if name in summary:
            report_table.add_row(label, *_cells(summary[name], has_rewards))
    console.print(report_table)
    print_sentence(console, took(summary["wall_s"], phase_list(summary["phase_s"])))
    console.print(f"\nRun      {directory.path}", soft_wrap=True)
    console.print(f"Model    {directory.model_path}", soft_wrap=True)
    if directory.curve_path.is_file():
        console.print(f"Picture  {directory.curve_path}", soft_wrap=True)
    run, model = str(directory.path), str(directory.model_path)
    following = [(["rllm", "serve", "model", model], "talk to it")]
    if has_rewards:
        following.insert(0, (["rllm", "eval", tasks, "--model", run], "measure it on its own"))
    print_next(console, following)


def _cells(report: dict[str, Any], has_rewards: bool) -> list[str | Text]:
    cells: list[str | Text] = [f"{report['reverse_kl']:.4f} ± {1.96 * report['reverse_kl_error']:.4f}"]
    if has_rewards:
        cells += [rate_with_interval(report[way], report[f"{way}_interval"]) for way in ("success", "greedy")]
    return cells
