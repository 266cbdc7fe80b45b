"""`rllm dpo`: better and worse answers, or a stored run, in; a run directory with a better model out."""

from pathlib import Path

import click

from rllm.cli.command import WordChoice, example, options_of
from rllm.cli.published_flags import LEARNING_KEYS, alias_options
from rllm.cli.supervised import SupervisedOptions, rows_file, run_supervised
from rllm.config.preference import SETTINGS, DpoConfig
from rllm.tracking.base import Tracker
from rllm.trainer.dpo import AgentDPOTrainer


@click.command(
    "dpo",
    epilog=example(
        "rllm dpo pairs.jsonl --model Qwen3-0.6B               into runs/dpo-pairs-seed0",
        "rllm dpo --run runs/frozenlake-seed0                  what succeeded there, against what failed",
        "rllm dpo pairs.jsonl --loss simpo --set preference.target_margin=1.4 --dry-run",
    ),
)
@click.argument("dataset", required=False, default="", metavar="[DATA.jsonl|NAME]")
@click.option(
    "--run", default="", metavar="RUN", help="A run directory whose attempts at one task are compared."
)
@click.option(
    "--val-dataset", default="", metavar="FILE", help="What is held out.  [default: a tenth of the examples]"
)
@click.option("--loss", type=WordChoice(list(SETTINGS)), help="What is minimised.  [default: dpo]")
@alias_options("assignments", LEARNING_KEYS)
@options_of(SupervisedOptions)
def command(dataset: str, run: str, val_dataset: str, loss: str | None, options: SupervisedOptions) -> None:
    """Train a model to prefer better answers to worse ones, by DPO or a variant.

    A line of DATA.jsonl is {"prompt": ..., "chosen": ..., "rejected": ...}, for kto {"prompt": ...,
    "completion": ..., "label": true}; each is text, or chat messages, with "tools" where there are calls. Of
    a stored run, attempts at one task that succeeded are compared with those that failed. Rows that cannot
    be learned from are refused by their line before anything begins.

    NAME is a data set that is kept here; its split train is taken.

    The same command again resumes a run that was interrupted, and shows the result of one that is finished.
    """
    held_out = {"data__val_dataset": val_dataset, "data__heldout_fraction": "0"} if val_dataset else {}
    assignments = options.all_assignments(
        data__dataset=rows_file(dataset), data__run=run, preference__loss=loss or "", **held_out
    )
    config = options.load(DpoConfig, assignments)

    def make(directory: Path, tracker: Tracker | None) -> AgentDPOTrainer:
        return AgentDPOTrainer(config, output=directory, tracker=tracker)

    words = [*([dataset] if dataset else []), *(["--run", run] if run else [])]
    words += ["--val-dataset", val_dataset] if val_dataset else []
    words += ["--loss", loss] if loss else []
    run_supervised(options, make, Path(dataset or config.data.dataset or config.data.run).stem, words)
