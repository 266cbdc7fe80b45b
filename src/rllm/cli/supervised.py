"""The common part of the commands that train on rows: `rllm sft`, `rllm dpo`, `rllm distill`.

SupervisedOptions                the options that all of them have
run_supervised(options, make)    plan, or train with a live view; before and after; what to type next
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rllm.build.models import initial_model_path, settle_model_names
from rllm.cli.command import elapsed_s, json_option, option, print_json, shared
from rllm.cli.plan import Plan, announce_run, conflict_with_run, interruption, print_plan, unused_directory
from rllm.cli.supervised_view import measured_on, reports_table
from rllm.cli.terminal import out, print_next, print_sentence, took
from rllm.config.loader import config_dict, load_as
from rllm.data.registry import DatasetRegistry
from rllm.store.run_directory import RunDirectory
from rllm.tracking.base import Tracker
from rllm.tracking.console import LiveView
from rllm.trainer.result import TrainResult
from rllm.trainer.supervised import AnySupervised, SupervisedTrainer

MakeTrainer = Callable[[Path, Tracker | None], SupervisedTrainer[Any]]
"""(run directory, what shows the progress) -> the trainer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SupervisedOptions:
    """The options that all these commands have, as the user typed them."""

    model: str = option(
        "--model",
        default="",
        metavar="DIR|NAME",
        help="What to start from: a run, for its trained model, a model directory, a name of `rllm model "
        "pull`, one of the hub, or builtin:tiny.",
    )
    output: Path | None = option(
        "--output",
        type=click.Path(path_type=Path),
        help="Run directory; a run that is there goes on.  [default: runs/COMMAND-NAME-seedN]",
    )
    config_file: Path | None = option(
        "--config", type=click.Path(path_type=Path), help="TOML file of settings."
    )
    assignments: tuple[str, ...] = option(
        "--set",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one key, such as optimizer.learning_rate=3e-4; may be repeated and wins over the file.",
    )
    seed: int | None = option("--seed", type=int, help="Seed of every random draw of the run.  [default: 0]")
    dry_run: bool = option("--dry-run", is_flag=True, help="Check everything, print the plan and do nothing.")
    force: bool = option("--force", is_flag=True, help="Start also where too little memory is free.")
    fresh: bool = option(
        "--fresh", is_flag=True, help="Start a new run beside one that is there, which stays as it is."
    )
    as_json: bool = shared(json_option)

    def all_assignments(self, **by_key: str) -> list[str]:
        """`by_key`: keys that were typed as options (`data__run` is data.run), then --set, which wins."""
        options = {"model__path": initial_model_path(self.model), **by_key}
        seed = [] if self.seed is None else [f"seed={self.seed}"]
        from_flags = [f"{key.replace('__', '.')}={value}" for key, value in options.items() if value]
        return [*seed, *from_flags, *self.assignments]

    def load(self, kind: type[AnySupervised], assignments: Sequence[str]) -> AnySupervised:
        """Return the configuration of the file and the assignments, with models by their directories."""
        config = load_as(kind, self.config_file, assignments)
        settle_model_names(config)
        return config

    def words(self) -> list[str]:
        """These options again, without the output."""
        words = ["--model", self.model] if self.model else []
        words += ["--config", str(self.config_file)] if self.config_file is not None else []
        for assignment in self.assignments:
            words += ["--set", assignment]
        words += ["--force"] if self.force else []
        return words + ([] if self.seed is None else ["--seed", str(self.seed)])


def rows_file(name: str) -> str:
    """The file of a data set's split `train` that is kept here under this name; any other name as it is."""
    if not name or Path(name).exists() or not DatasetRegistry.dataset_exists(name, "train"):
        return name
    rows = DatasetRegistry.load_dataset(name, "train")
    assert rows is not None, "it was just there"
    return rows.get_data_path() or name


def run_supervised(options: SupervisedOptions, make: MakeTrainer, label: str, words: Sequence[str]) -> None:
    """Plan or train. `label` names the data, for titles and directories; `words` are the command as typed,
    without the common options."""
    trainer = make(Path("unused"), None)  # refuses what a run would refuse, before anything is written
    kind, seed = trainer.kind, trainer.config.seed
    directory = options.output or Path("runs") / f"{kind}-{label}-seed{seed}"
    if options.fresh:
        directory = unused_directory(directory)
    if options.dry_run:
        from rllm.trainer.estimates import estimate_rows  # brings torch

        quantities, memory = trainer.dry_run()
        plan = Plan(
            title=f"rllm {kind} {label}",
            directory=directory,
            config=config_dict(trainer.config),
            defaults=config_dict(trainer.config_class()),
            choices=trainer.choices,
            derived=quantities,
            conflict=conflict_with_run(directory, trainer.require_same_config),
            memory=memory,
            estimate=estimate_rows(trainer.config, quantities),
        )
        print_plan(plan, as_json=options.as_json, force=options.force, data=label)
        return
    was_finished = announce_run(directory)
    try:
        with LiveView(0, title=f"rllm {kind} {label}", elapsed_s=elapsed_s()) as view:
            trainer = make(directory, None if was_finished else view)
            trainer.force = options.force
            result = trainer.train()
    except KeyboardInterrupt as interrupt:
        again = ["rllm", kind, *words, *options.words(), "--output", str(directory)]
        raise interruption(directory, again) from interrupt
    if options.as_json:
        print_json({**result.summary, "run": str(directory)})
    else:
        _print_result(result)


def _print_result(result: TrainResult) -> None:
    summary, directory = result.summary, RunDirectory.read(result.directory)
    console = out()
    console.print(f"\nBefore and after{measured_on(summary)}", style="bold")
    console.print(reports_table(summary, directory.config()))
    work = f"{summary['steps']:,} updates, {summary['trained_tokens']:,} labelled tokens"
    print_sentence(console, took(summary["wall_s"], work))
    console.print(f"\nRun      {directory.path}", soft_wrap=True)
    console.print(f"Model    {directory.model_path}", soft_wrap=True)
    if directory.curve_path.is_file():
        console.print(f"Picture  {directory.curve_path}", soft_wrap=True)
    model = str(directory.model_path)
    print_next(
        console,
        [
            (["rllm", "serve", "model", model], "talk to it"),
            (["rllm", "runs", "show", str(directory.path)], "look at the run again"),
        ],
    )
