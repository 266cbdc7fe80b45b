"""`rllm sft`: conversations, or a stored run, in; a run directory with a model that answers like them out."""

from pathlib import Path

import click

from rllm.cli.command import example, options_of
from rllm.cli.published_flags import SFT_KEYS, SFT_REFUSED, alias_options, refused_options
from rllm.cli.supervised import SupervisedOptions, rows_file, run_supervised
from rllm.config.supervised import SftConfig
from rllm.tracking.base import Tracker
from rllm.trainer.sft import AgentSFTTrainer


@click.command(
    "sft",
    epilog=example(
        "rllm sft chats.jsonl --model Qwen3-0.6B                into runs/sft-chats-seed0",
        "rllm sft --run runs/frozenlake-seed0                   learn from what that run did well",
        "rllm sft chats.jsonl --set epochs=3 --set optimizer.learning_rate=1e-5 --dry-run",
    ),
)
@click.argument("dataset", required=False, default="", metavar="[DATA.jsonl|NAME]")
@click.option(
    "--run", default="", metavar="RUN", help="A run directory whose successful episodes are learned."
)
@click.option(
    "--val-dataset", default="", metavar="FILE", help="What is held out.  [default: a tenth of the examples]"
)
@alias_options("assignments", SFT_KEYS)
@refused_options(SFT_REFUSED)
@options_of(SupervisedOptions)
def command(dataset: str, run: str, val_dataset: str, options: SupervisedOptions) -> None:
    """Fine-tune a model on conversations, or on what a stored run did well.

    A line of DATA.jsonl is {"messages": [...]}, with "tools" where there are calls, or {"prompt": ...,
    "completion": ...}. Every answer of the assistant is learned, end token included; nothing else is. Rows
    that cannot be learned are refused by their line before anything begins.

    NAME is a data set that is kept here; its split train is taken.

    The same command again resumes a run that was interrupted, and shows the result of one that is finished.
    """
    held_out = {"data__val_dataset": val_dataset, "data__heldout_fraction": "0"} if val_dataset else {}
    assignments = options.all_assignments(data__dataset=rows_file(dataset), data__run=run, **held_out)
    config = options.load(SftConfig, assignments)

    def make(directory: Path, tracker: Tracker | None) -> AgentSFTTrainer:
        return AgentSFTTrainer(config, output=directory, tracker=tracker)

    words = [*([dataset] if dataset else []), *(["--run", run] if run else [])]
    words += ["--val-dataset", val_dataset] if val_dataset else []
    run_supervised(options, make, Path(dataset or config.data.dataset or config.data.run).stem, words)
