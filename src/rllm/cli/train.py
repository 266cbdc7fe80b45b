"""`rllm train`: benchmark or program and settings in, a run directory with a better model out.

words ──► TrainOptions.config ──► build_run ──► train, seen through LiveView ──► before and after
"""

import sys
from pathlib import Path

import click

from rllm.build.training import build_run
from rllm.cli.command import elapsed_s, example, options_of, print_json
from rllm.cli.plan import (
    Plan,
    announce_run,
    conflict_with_run,
    interruption,
    print_plan,
    require_place,
    unused_directory,
)
from rllm.cli.published_flags import (
    TRAIN_KEYS,
    TRAIN_REFUSED,
    accepted_switches,
    alias_options,
    refused_options,
    sampling_file_option,
)
from rllm.cli.seeds import settle_seeds, train_seeds
from rllm.cli.skill_view import print_alarms, print_success
from rllm.cli.terminal import err, out, phase_list, print_next, print_sentence, took
from rllm.cli.train_options import TrainOptions
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.distributed import rank_from_environment, world_size
from rllm.distributed.launch import launch, launched_words, require_processes
from rllm.errors import ConfigError
from rllm.store.episodes import TRAIN_PHASE, EpisodeStore
from rllm.store.run_directory import RunDirectory, is_run
from rllm.tracking.alarms import AlarmWatch
from rllm.tracking.console import LiveView
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.cluster import rank_places
from rllm.trainer.extras import require_training_packages
from rllm.trainer.result import TrainResult
from rllm.trainer.run import TrainingRun
from rllm.view.run_facts import report_labels
from rllm.worker.step_host import open_workers


@click.command(
    "train",
    epilog=example(
        "rllm train frozenlake                                  into runs/frozenlake-seed0",
        "rllm train frozenlake --seed 1 --output lake --json    for a script",
        "rllm train frozenlake --set steps=50 --set rollout.group_size=16 --dry-run",
        "rllm train gsm8k --model DIR --agent my_agent.py:MyAgent --evaluator my_agent.py:score",
        "rllm train frozenlake --seeds 3                        seeds 0 to 2, their mean with an interval",
        "rllm train frozenlake --nproc 2                        two processes share episodes and updates",
        "rllm train my_flow.py:solve --evaluator my_flow.py:score --dataset my.jsonl     your own program",
    ),
)
@options_of(
    TrainOptions,
    sampling_file_option,
    alias_options("assignments", TRAIN_KEYS),
    refused_options(TRAIN_REFUSED),
    accepted_switches("--no-ui"),
)
def command(options: TrainOptions) -> None:
    """Train an agent on a benchmark, or go on with a run that was stopped.

    The run directory holds everything: configuration, episodes, metrics, checkpoints, the model, a picture.
    The same command again resumes a run that was interrupted, and shows the result of one that is finished.

    A PROGRAM is a function made with @rllm.rollout, or any other that takes (task, config), or a Workflow:
    the name of an installed one, package.module:name, or file.py:name. It needs --dataset, and but for a
    workflow --evaluator. With --agent PROGRAM it works on a benchmark's tasks.
    """
    require_processes(options.nproc)
    config = options.config()
    if options.seeds is not None:
        options = settle_seeds(options, config)
        if not options.dry_run:
            train_seeds(options, config)
            return
    # Of several processes, rank 0 alone.
    warns = (options.nproc == 1 or options.dry_run) and not rank_from_environment()
    if warns and options.settings_are_missing:
        print_sentence(
            err(),
            f"`{options.benchmark}` is for measuring: it has no training settings of its own, because none "
            "are known with which the built-in model learns it. The defaults are used where --config and "
            "--set say nothing; name `steps`, `warm_start.steps` and `optimizer.learning_rate`.",
            style="dim",
        )
    directory = options.directory(config.seed)
    if options.resume and options.fresh:
        raise ConfigError("--resume goes on and --fresh begins anew; give one of them.")
    if options.resume and not is_run(directory):
        raise ConfigError(f"There is no run in {directory} to go on with; leave --resume out to begin one.")
    if options.preview and options.dry_run:
        raise ConfigError("--preview plays a step and --dry-run plays nothing; give one of them.")
    if options.fresh and world_size() > 1:
        raise ConfigError("--fresh would be another directory on each rank; name one with --output.")
    if options.fresh:
        directory = unused_directory(directory)
    if not rank_from_environment():  # it makes and removes the directory, so ranks would remove each other's
        require_place(directory)
    num_ranks = max(options.nproc, world_size())
    if num_ranks > 1 or options.dry_run:
        _run(config, directory).require_ranks_can(num_ranks)
    if options.dry_run:
        run = _run(config, directory)  # refuses what a run would refuse
        run.require_names()
        plan = Plan(
            title=f"rllm train {options.label}",
            directory=directory,
            config=config_dict(run.config),
            defaults=config_dict(TrainConfig()),
            derived=run.config.derived(),
            choices=run.choices,
            conflict=conflict_with_run(directory, run.require_same_config),
            memory=run.memory_plan(options.nproc, options.nproc),
            estimate=run.estimate(num_ranks),
            processes=run.process_plan(num_ranks, is_of_torchrun=num_ranks > options.nproc),
            num_runs=options.seeds or 1,
        )
        print_plan(plan, as_json=options.as_json, force=options.force, benchmark=options.label)
        return
    require_training_packages(config.optimizer, config.lora)
    if options.preview:
        _preview(options, config, directory, num_ranks)
        return
    if options.nproc > 1:
        words, restarts = options.rank_words(directory), config.distributed.restarts
        with rank_places(config, options.nproc, directory) as start:
            sys.exit(launch(words, options.nproc, directory, restarts=restarts, start=start))
    if rank_from_environment():  # rank 0 shows what all of them do
        _run(config, directory, force=options.force).train()
        return
    was_finished = announce_run(directory)
    try:
        with LiveView(config.steps, title=f"rllm train {options.label}", elapsed_s=elapsed_s()) as view:
            run = _run(config, directory, force=options.force)
            run.tracker = None if was_finished else view
            result = run.train()
    except KeyboardInterrupt as interrupt:
        words = [*options.words(directory), *launched_words()]
        raise interruption(directory, words) from interrupt
    if options.as_json:
        print_json({**result.summary, "run": str(directory)})
    else:
        _print_result(options, config, result)


def _preview(options: TrainOptions, config: TrainConfig, directory: Path, num_ranks: int) -> None:
    """Show the first step of the run."""
    if num_ranks > 1:
        raise ConfigError(f"--preview plays on one process, and this run has {num_ranks}; leave one out.")
    from rllm.cli.preview import print_preview
    from rllm.trainer.preview import preview

    with LiveView(1, title=f"rllm train {options.label} --preview", elapsed_s=elapsed_s()) as view:
        run = _run(config, directory, force=options.force)
        run.tracker = view
        memory = run.memory_plan(1, 1)
        first_step = preview(run)
    print_preview(first_step, memory, options.words(directory), as_json=options.as_json)


def _run(config: TrainConfig, directory: Path, *, force: bool = False) -> TrainingRun:
    run = build_run(config, directory, open_workers=open_workers)
    run.force = force
    return run


def _print_result(options: TrainOptions, config: TrainConfig, result: TrainResult) -> None:
    summary, directory = result.summary, RunDirectory.read(result.directory)
    labels = report_labels(directory.config())
    console = out()
    print_success(console, summary, summary, labels)
    lines = (line for line in read_metrics(directory.metrics_path) if line["phase"] == TRAIN_PHASE)
    print_alarms(console, AlarmWatch(directory.config(), lines).history)
    num_failures = sum(summary["after"][f"{way}_report"]["failed"] for way in ("sampled", "greedy"))
    if num_failures:
        console.print(f"{num_failures} of the last episodes failed and count as no success.", style="red")
    print_sentence(console, took(summary["wall_s"], phase_list(summary["phase_s"])))
    console.print(f"\nRun      {directory.path}", soft_wrap=True)
    console.print(f"Model    {directory.model_path}", soft_wrap=True)
    if directory.curve_path.is_file():
        console.print(f"Picture  {directory.curve_path}", soft_wrap=True)
    run = str(directory.path)
    print_next(
        console,
        [
            (options.eval_words(directory.path), "measure it on its own"),
            (["rllm", "runs", "show", run, "--episode", str(_episode_to_show(directory))], "watch it play"),
        ],
    )


def _episode_to_show(directory: RunDirectory) -> int:
    """The first episode of the trained model."""
    with EpisodeStore.open(directory.store_path, read_only=True) as store:
        return store.row_ids("after")[0]
