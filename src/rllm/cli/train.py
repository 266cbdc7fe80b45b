"""`rllm train`: benchmark or program and settings in, a run directory with a better model out.

words ──► Wanted.config ──► build_trainer ──► train, seen through LiveView ──► before and after
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import click

from rllm.build.actors import actor_named
from rllm.build.configs import ProgramNames, program_config, training_config
from rllm.build.judges import JUDGING
from rllm.build.models import initial_model_path
from rllm.build.presentation import lacks_rules
from rllm.build.rows import BENCHMARK
from rllm.build.sampling import assignments_of
from rllm.build.training import build_trainer
from rllm.cli.command import elapsed_s, example, json_option, print_json
from rllm.cli.plan import (
    announce_run,
    conflict_with_run,
    interruption,
    print_plan,
    require_place,
    unused_directory,
    warn_of_missing_rules,
)
from rllm.cli.programs import is_program
from rllm.cli.published_flags import (
    TRAIN_KEYS,
    TRAIN_REFUSED,
    accepted_switches,
    alias_options,
    refused_options,
    sampling_file_option,
)
from rllm.cli.skill_view import print_success
from rllm.cli.terminal import err, out, phase_list, print_next, print_sentence, took
from rllm.config.loader import config_dict
from rllm.config.schema import TrainConfig
from rllm.distributed import rank_from_environment, world_size
from rllm.distributed.launch import launch, launched_words, require_processes
from rllm.errors import ConfigError, choices_of
from rllm.eval.catalogue import benchmark_named
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory, is_run
from rllm.tracking.console import LiveView
from rllm.trainer.agent_trainer import AgentTrainer, TrainResult
from rllm.trainer.extras import require_training_packages
from rllm.view.run_facts import REPORTS, report_labels
from rllm.worker.step_host import open_workers

KEY_OF_FLAG = {
    "split": "evaluation.split",
    "max_examples": "task.num_train_tasks",
    "attempts": "rollout.group_size",
    "concurrency": "rollout.num_parallel",
    "threads": "threads",
}
KEY_OF_SAMPLING = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_tokens": "rollout.max_tokens_per_turn",
}


@click.command(
    "train",
    epilog=example(
        "rllm train frozenlake                                  into runs/frozenlake-seed0",
        "rllm train frozenlake --seed 1 --output lake --json    for a script",
        "rllm train frozenlake --set steps=50 --set rollout.group_size=16 --dry-run",
        "rllm train gsm8k --model DIR --agent my_agent.py:MyAgent --evaluator my_agent.py:score",
        "rllm train frozenlake --nproc 2                        two processes share episodes and updates",
        "rllm train my_flow.py:solve --evaluator my_flow.py:score --dataset my.jsonl     your own program",
    ),
)
@click.argument("benchmark", metavar="BENCHMARK|PROGRAM")
@click.option(
    "--model",
    default="",
    metavar="DIR",
    help="What to start from: a run, for its trained model, a model directory, or builtin:tiny.",
)
@click.option("--base-url", default="", metavar="URL", hidden=True)
@click.option(
    "--agent",
    default="",
    metavar="NAME",
    help="Who acts, as of `rllm eval`: a built-in agent, or file.py:Class, :function or :Workflow.",
)
@click.option(
    "--evaluator",
    default="",
    metavar="NAME",
    help="What judges: a built-in grader, or my_flow.py:score.  [default: the benchmark's own]",
)
@click.option(
    "--judge-model", default="", metavar="NAME", help="The model that an LLM judge asks, as for `rllm eval`."
)
@click.option("--judge-base-url", default="", metavar="URL", help="The server of --judge-model.")
@click.option(
    "--dataset",
    "--train-dataset",
    "dataset",
    default="",
    metavar="FILE|NAME",
    help="A program's training tasks: a file (JSONL, CSV, Parquet), a registered data set, or several with "
    "their weights: a.jsonl=3,b=1.",
)
@click.option(
    "--val-dataset",
    default="",
    metavar="FILE|NAME",
    help="Its held-out tasks.  [default: the data set's test split, or the training tasks]",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Run directory; a run that is there goes on.  [default: runs/NAME-seedN]",
)
@click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="TOML file on top of the benchmark's."
)
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key, such as optimizer.learning_rate=3e-4; may be repeated and wins over the file.",
)
@click.option(
    "--with-rules",
    is_flag=True,
    help="Show tasks as `rllm eval` shows them to a model from elsewhere: with rules, and room to think.",
)
@click.option("--split", help="Which held-out tasks are measured on: `--set evaluation.split=…`.")
@click.option(
    "--max-examples",
    "--num-tasks",
    "max_examples",
    type=int,
    help="Training tasks at most: `--set task.num_train_tasks=…`.",
)
@click.option("--attempts", type=int, help="Tries at each task that are compared: `rollout.group_size`.")
@click.option("--concurrency", type=int, help="Episodes at the same time: `rollout.num_parallel`.")
@click.option("--threads", type=int, help="Threads of torch: `--set threads=…`.")
@click.option(
    "--sampling", multiple=True, metavar="K=V", help="temperature, top_p, top_k or max_tokens: `rollout.…`."
)
@click.option(
    "--nproc",
    type=int,
    default=1,
    metavar="N",
    help="Processes on this machine that share the episodes and the updates; torchrun does it on several.",
)
@click.option("--seed", type=int, help="Seed of every random draw of the run.  [default: 0]")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and do nothing.")
@click.option("--resume", is_flag=True, help="Go on with a run that is there; refuse to begin another.")
@click.option("--fresh", is_flag=True, help="Start a new run beside one that is there, which stays as it is.")
@json_option
@sampling_file_option
@alias_options("assignments", TRAIN_KEYS)
@refused_options(TRAIN_REFUSED)
@accepted_switches("--no-ui")
def command(
    benchmark: str,
    model: str,
    base_url: str,
    agent: str,
    evaluator: str,
    judge_model: str,
    judge_base_url: str,
    dataset: str,
    val_dataset: str,
    output: Path | None,
    config_file: Path | None,
    assignments: tuple[str, ...],
    with_rules: bool,
    seed: int | None,
    dry_run: bool,
    resume: bool,
    fresh: bool,
    as_json: bool,
    sampling: tuple[str, ...],
    nproc: int,
    **flags: str | int | None,
) -> None:
    """Train an agent on a benchmark, or go on with a run that was stopped.

    The run directory holds everything: configuration, episodes, metrics, checkpoints, the model, a picture.
    The same command again resumes a run that was interrupted, and shows the result of one that is finished.

    A PROGRAM is a function made with @rllm.rollout, or any other that takes (task, config), or a Workflow:
    the name of an installed one, package.module:name, or file.py:name. It needs --dataset, and but for a
    workflow --evaluator. With --agent PROGRAM it works on a benchmark's tasks.
    """
    require_processes(nproc)
    model = initial_model_path(model, base_url)
    options = Wanted(
        name=benchmark,
        dataset=dataset,
        val_dataset=val_dataset,
        model=model,
        agent=agent,
        evaluator=evaluator,
        judge_model=judge_model,
        judge_base_url=judge_base_url,
        config_file=config_file,
        assignments=(*_as_assignments(flags, sampling), *assignments),
        with_rules=with_rules,
        seed=seed,
    )
    config = options.config()
    warns = (nproc == 1 or dry_run) and not rank_from_environment()  # of several processes, rank 0 alone
    if warns and options.settings_are_missing:
        print_sentence(
            err(),
            f"`{benchmark}` is for measuring: it has no training settings of its own, because none are known "
            "with which the built-in model learns it. The defaults are used where --config and --set say "
            "nothing; name `steps`, `warm_start.steps` and `optimizer.learning_rate`.",
            style="dim",
        )
    if warns and options.program is None and not with_rules and lacks_rules(config, benchmark):
        warn_of_missing_rules(benchmark, "The model", config)
    directory = output or Path("runs") / f"{options.directory_name}-seed{config.seed}"
    if resume and fresh:
        raise ConfigError("--resume goes on and --fresh begins anew; give one of them.")
    if resume and not is_run(directory):
        raise ConfigError(f"There is no run in {directory} to go on with; leave --resume out to begin one.")
    if fresh and world_size() > 1:
        raise ConfigError("--fresh would be another directory on each rank; name one with --output.")
    if fresh:
        directory = unused_directory(directory)
    if not rank_from_environment():  # it makes and removes the directory, so ranks would remove each other's
        require_place(directory)
    num_ranks = max(nproc, world_size())
    if num_ranks > 1 or dry_run:
        _trainer(config, directory).require_ranks_can(num_ranks)
    if dry_run:
        trainer = _trainer(config, directory)  # refuses what a run would refuse
        trainer.require_names()
        print_plan(
            f"rllm train {options.label}",
            directory,
            config=config_dict(config),
            defaults=config_dict(TrainConfig()),
            derived=config.derived(),
            conflict=conflict_with_run(directory, trainer.require_same_config),
            as_json=as_json,
            memory=trainer.memory_plan(nproc, nproc),
            benchmark=options.label,
        )
        return
    require_training_packages()
    if nproc > 1:
        words, restarts = options.rank_words(directory, as_json=as_json), config.distributed.restarts
        sys.exit(launch(words, nproc, directory, restarts=restarts))
    if rank_from_environment():  # rank 0 shows what all of them do
        _trainer(config, directory).train()
        return
    was_finished = announce_run(directory)
    try:
        with LiveView(config.steps, title=f"rllm train {options.label}", elapsed_s=elapsed_s()) as view:
            result = _trainer(config, directory, None if was_finished else view).train()
    except KeyboardInterrupt as interrupt:
        words = [*options.words(directory), *launched_words()]
        raise interruption(directory, words) from interrupt
    if as_json:
        print_json({**result.summary, "run": str(directory)})
    else:
        _print_result(options, config, result)


def _trainer(config: TrainConfig, directory: Path, tracker: LiveView | None = None) -> AgentTrainer:
    return build_trainer(config, directory, tracker, open_workers=open_workers)


def _as_assignments(flags: Mapping[str, str | int | None], sampling: tuple[str, ...]) -> list[str]:
    """The flags that `rllm eval` has too, as keys of the configuration."""
    assignments = [f"{KEY_OF_FLAG[name]}={value}" for name, value in flags.items() if value is not None]
    for name, value in assignments_of(sampling).items():
        if name not in KEY_OF_SAMPLING:
            raise ConfigError(
                f"`--sampling {name}` means nothing while training; {choices_of(name, KEY_OF_SAMPLING)}."
            )
        assignments.append(f"{KEY_OF_SAMPLING[name]}={value}")
    return assignments


@dataclass(kw_only=True, slots=True, frozen=True)
class Wanted:
    """The options as the user typed them."""

    name: str
    dataset: str
    val_dataset: str
    model: str
    agent: str
    evaluator: str
    judge_model: str
    judge_base_url: str
    config_file: Path | None
    assignments: tuple[str, ...]
    with_rules: bool
    seed: int | None

    @property
    def program(self) -> ProgramNames | None:
        """The program that is trained instead of an agent in a world: named itself, or as the benchmark's
        --agent."""
        if is_program(self.name, self.dataset, self.val_dataset):
            if self.agent:
                raise ConfigError(f"`{self.name}` is what acts; leave --agent {self.agent} out.")
            return ProgramNames(
                program=self.name,
                evaluator=self.evaluator,
                dataset=self.dataset,
                val_dataset=self.val_dataset,
            )
        benchmark_named(self.name)  # a misspelt name is told before anything is said of the agent
        if not self.agent or actor_named(self.agent).agent is not None:
            return None
        return ProgramNames(program=self.agent, evaluator=self.evaluator, dataset=f"{BENCHMARK}{self.name}")

    @property
    def label(self) -> str:
        return self.name if self.program is None else self.program.label

    @property
    def directory_name(self) -> str:
        name = self.name if self.program is None else self.program.directory_name
        return re.sub(r"[^\w.=+-]+", "-", name) if "://" in name else name

    @property
    def settings_are_missing(self) -> bool:
        """Whether a world without training settings is trained on, and nobody says for how many steps."""
        if self.program is not None or self.config_file is not None:
            return False
        spec = benchmark_named(self.name)
        names_steps = any(each.startswith("steps=") for each in self.assignments)
        return not (spec.asks_questions or "steps" in spec.train or names_steps)

    def config(self) -> TrainConfig:
        program = self.program
        if program is not None:
            if self.judge_model:
                raise ConfigError(
                    f"--judge-model {self.judge_model} would be ignored: what judges a program asks its "
                    "model itself. Write --evaluator my_flow.py:score, which may use rllm.rewards."
                )
            if self.with_rules:
                raise ConfigError(
                    f"`{program.program}` says itself what its model is shown; leave --with-rules out."
                )
            return program_config(program, self.model, self.config_file, self.assignments, self.seed)
        judging = {name: getattr(self, name) for name in JUDGING}
        values = {"model.path": self.model}
        values |= {f"task.environment_args.{name}": value for name, value in judging.items()}
        assignments = (f"{key}={value}" for key, value in values.items() if value)
        assignments = (*assignments, *self.assignments)
        return training_config(
            self.name,
            self.config_file,
            assignments,
            self.seed,
            agent=self.agent,
            with_rules=self.with_rules,
        )

    def words(self, directory: Path) -> list[str]:
        """The command that goes on with the run."""
        words = ["rllm", "train", self.name, *self.flags("val_dataset", "model", "judge_base_url")]
        words += ["--output", str(directory)]
        if self.config_file is not None:
            words += ["--config", str(self.config_file)]
        for assignment in self.assignments:
            words += ["--set", assignment]
        words += ["--with-rules"] if self.with_rules else []
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        return words

    def rank_words(self, directory: Path, *, as_json: bool) -> list[str]:
        """The same without `rllm`, for each of several ranks."""
        return [*self.words(directory)[1:], *(["--json"] if as_json else [])]

    def flags(self, *more: str) -> list[str]:
        """The typed flags that `rllm eval` has too, and those of `more`."""
        words: list[str] = []
        for name in ("agent", "evaluator", "judge_model", "dataset", *more):
            if value := getattr(self, name):
                words += [f"--{name.replace('_', '-')}", value]
        return words

    def eval_words(self, run: Path) -> list[str]:
        """The command that measures the result: on the held-out tasks, where a program has some."""
        flags = replace(self, dataset=self.val_dataset or self.dataset).flags("judge_base_url")
        return ["rllm", "eval", self.name, *flags, "--model", str(run)]


def _print_result(options: Wanted, config: TrainConfig, result: TrainResult) -> None:
    summary, directory = result.summary, RunDirectory.read(result.directory)
    labels = report_labels(config_dict(config))
    console = out()
    print_success(console, summary, summary, {name: labels[name] for name in REPORTS})
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
