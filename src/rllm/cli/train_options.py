"""The options of `rllm train`, declared once ──► a run's configuration, and the command that resumes it."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import click

from rllm.build.actors import actor_named
from rllm.build.configs import ProgramNames, is_program, program_config, training_config
from rllm.build.judges import JUDGING
from rllm.build.models import initial_model_path
from rllm.build.rows import BENCHMARK
from rllm.build.sampling import assignments_of
from rllm.cli.command import WordChoice, argument, json_option, option, recipe_option, shared
from rllm.config.schema import DTYPES, TrainConfig
from rllm.errors import ConfigError, choices_of
from rllm.eval.catalogue import benchmark_named
from rllm.types.chat_forms import THINKING, TOOL_FORMS

KEY_OF_FLAG = {
    "split": "evaluation.split",
    "max_examples": "task.num_train_tasks",
    "attempts": "rollout.group_size",
    "concurrency": "rollout.num_parallel",
    "threads": "threads",
    "dtype": "inference.dtype",
    "tool_form": "model.tool_form",
    "chat_template": "model.chat_template",
    "thinking": "model.thinking",
    "max_thinking_tokens": "model.max_thinking_tokens",
}
KEY_OF_SAMPLING = {
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_tokens": "rollout.max_tokens_per_turn",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainOptions:
    """The options as the user typed them."""

    benchmark: str = argument(metavar="BENCHMARK|PROGRAM")
    model: str = option(
        "--model",
        default="",
        metavar="DIR|NAME",
        help="What to start from: a run, for its trained model, a model directory, a name of `rllm model "
        "pull`, one of the hub, or builtin:tiny.",
    )
    base_url: str = option("--base-url", default="", metavar="URL", hidden=True)
    agent: str = option(
        "--agent",
        default="",
        metavar="NAME",
        help="Who acts, as of `rllm eval`: a built-in agent, or file.py:Class, :function or :Workflow.",
    )
    evaluator: str = option(
        "--evaluator",
        default="",
        metavar="NAME",
        help="What judges: a built-in grader, or my_flow.py:score.  [default: the benchmark's own]",
    )
    judge_model: str = option(
        "--judge-model",
        default="",
        metavar="NAME",
        help="The model that an LLM judge asks, as for `rllm eval`.",
    )
    judge_base_url: str = option(
        "--judge-base-url", default="", metavar="URL", help="The server of --judge-model."
    )
    dataset: str = option(
        "--dataset",
        "--train-dataset",
        default="",
        metavar="FILE|NAME",
        help="A program's training tasks: a file (JSONL, CSV, Parquet), a registered data set, or several "
        "with their weights: a.jsonl=3,b=1.",
    )
    val_dataset: str = option(
        "--val-dataset",
        default="",
        metavar="FILE|NAME",
        help="Its held-out tasks.  [default: the data set's test split, or the training tasks]",
    )
    output: Path | None = option(
        "--output",
        type=click.Path(path_type=Path),
        help="Run directory; a run that is there goes on.  [default: runs/NAME-seedN]",
    )
    config_file: Path | None = option(
        "--config", type=click.Path(path_type=Path), help="TOML file on top of the benchmark's."
    )
    assignments: tuple[str, ...] = option(
        "--set",
        multiple=True,
        metavar="KEY=VALUE",
        help="Set one key, such as optimizer.learning_rate=3e-4; may be repeated and wins over the file.",
    )
    recipe: str = shared(recipe_option)
    split: str | None = option(
        "--split", help="Which held-out tasks are measured on: `--set evaluation.split=…`."
    )
    max_examples: int | None = option(
        "--max-examples",
        "--num-tasks",
        type=int,
        help="Training tasks at most: `--set task.num_train_tasks=…`.",
    )
    attempts: int | None = option(
        "--attempts", type=int, help="Tries at each task that are compared: `rollout.group_size`."
    )
    concurrency: int | None = option(
        "--concurrency", type=int, help="Episodes at the same time: `rollout.num_parallel`."
    )
    threads: int | None = option("--threads", type=int, help="Threads of torch: `--set threads=…`.")
    dtype: str | None = option(
        "--dtype",
        type=WordChoice(DTYPES),
        help="Data type of the sampler, beside a trainer that keeps its own: `inference.dtype`.",
    )
    tool_form: str | None = option(
        "--tool-form",
        type=WordChoice(TOOL_FORMS),
        help="How tools are offered: native, by the chat template, or as text: `model.tool_form`.  [default: "
        "text where the template has no tools]",
    )
    chat_template: str | None = option(
        "--chat-template",
        metavar="plain|chatml|FILE",
        help="Chat template of a base model, which has none: `model.chat_template`.",
    )
    thinking: str | None = option(
        "--thinking",
        type=WordChoice(THINKING),
        help="Whether a model that can think first does: `model.thinking`.",
    )
    max_thinking_tokens: int | None = option(
        "--max-thinking-tokens",
        type=click.IntRange(min=0),
        metavar="N",
        help="Close a thought after so many tokens: `model.max_thinking_tokens`.",
    )
    sampling: tuple[str, ...] = option(
        "--sampling",
        multiple=True,
        metavar="K=V",
        help="temperature, top_p, top_k or max_tokens: `rollout.…`.",
    )
    stop_on_alarm: bool = option(
        "--stop-on-alarm",
        is_flag=True,
        help="Save and end the run, with exit code 1, when it raises a critical alarm: `stop_on_alarm`.",
    )
    nproc: int = option(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="Processes that share the episodes and the updates: of this machine, or placed on a cluster "
        "(`distributed.placement`). torchrun does it as well.",
    )
    seed: int | None = option("--seed", type=int, help="Seed of every random draw of the run.  [default: 0]")
    seeds: int | None = option(
        "--seeds",
        type=int,
        metavar="N",
        help="Train N seeds one after the other, from --seed on, and report their mean with an interval. The "
        "same command continues with what is missing.",
    )
    dry_run: bool = option(
        "--dry-run",
        is_flag=True,
        help="Print the resolved configuration and its memory; refuse what does not fit.",
    )
    preview: bool = option(
        "--preview",
        is_flag=True,
        help="Play 8 attempts at 8 tasks, learn from them once, show answers and figures, and keep nothing.",
    )
    force: bool = option("--force", is_flag=True, help="Start also where too little memory is free.")
    resume: bool = option(
        "--resume", is_flag=True, help="Go on with a run that is there; refuse to begin another."
    )
    fresh: bool = option(
        "--fresh", is_flag=True, help="Start a new run beside one that is there, which stays as it is."
    )
    as_json: bool = shared(json_option)

    @property
    def all_assignments(self) -> tuple[str, ...]:
        """The options that are keys of the configuration, then --set, which wins."""
        values = {key: getattr(self, name) for name, key in KEY_OF_FLAG.items()}
        assignments = [f"{key}={value}" for key, value in values.items() if value is not None]
        assignments += ["stop_on_alarm=true"] if self.stop_on_alarm else []
        for name, value in assignments_of(self.sampling).items():
            if name not in KEY_OF_SAMPLING:
                raise ConfigError(
                    f"`--sampling {name}` means nothing while training; {choices_of(name, KEY_OF_SAMPLING)}."
                )
            assignments.append(f"{KEY_OF_SAMPLING[name]}={value}")
        return (*assignments, *self.assignments)

    @property
    def program(self) -> ProgramNames | None:
        """The program that is trained instead of an agent in a world: named itself, or as the benchmark's
        --agent."""
        if is_program(self.benchmark, self.dataset, self.val_dataset):
            if self.agent:
                raise ConfigError(f"`{self.benchmark}` is what acts; leave --agent {self.agent} out.")
            return ProgramNames(
                program=self.benchmark,
                evaluator=self.evaluator,
                dataset=self.dataset,
                val_dataset=self.val_dataset,
            )
        benchmark_named(self.benchmark)  # a misspelt name is told before anything is said of the agent
        if not self.agent or actor_named(self.agent).agent is not None:
            return None
        return ProgramNames(
            program=self.agent, evaluator=self.evaluator, dataset=f"{BENCHMARK}{self.benchmark}"
        )

    @property
    def label(self) -> str:
        return self.benchmark if self.program is None else self.program.label

    @property
    def directory_name(self) -> str:
        name = self.benchmark if self.program is None else self.program.directory_name
        return re.sub(r"[^\w.=+-]+", "-", name) if "://" in name else name

    def directory(self, seed: int) -> Path:
        """The directory of a run with this seed."""
        if self.seeds is not None:
            return self.seeds_directory / f"seed{seed}"
        return self.output or Path("runs") / f"{self.directory_name}-seed{seed}"

    @property
    def seeds_directory(self) -> Path:
        """The directory that holds the runs of --seeds and their report."""
        return self.output or Path("runs") / f"{self.directory_name}-seeds"

    @property
    def settings_are_missing(self) -> bool:
        """Whether a world without training settings is trained on, and nobody says for how many steps."""
        if self.program is not None or self.config_file is not None:
            return False
        spec = benchmark_named(self.benchmark)
        names_steps = any(each.startswith("steps=") for each in self.all_assignments)
        return not (spec.asks_questions or "steps" in spec.train or names_steps)

    def config(self) -> TrainConfig:
        """Raises ConfigError for what cannot be honoured, such as a model on a server."""
        model_path = initial_model_path(self.model, self.base_url)
        program = self.program
        if program is not None:
            if self.judge_model:
                raise ConfigError(
                    f"--judge-model {self.judge_model} would be ignored: what judges a program asks its "
                    "model itself. Write --evaluator my_flow.py:score, which may use rllm.rewards."
                )
            if self.recipe:
                raise ConfigError(
                    f"--recipe {self.recipe} is for benchmarks; leave it out for `{program.program}`."
                )
            return program_config(program, model_path, self.config_file, self.all_assignments, self.seed)
        judging = {name: getattr(self, name) for name in JUDGING}
        values = {"model.path": model_path}
        values |= {f"task.environment_args.{name}": value for name, value in judging.items()}
        assignments = (f"{key}={value}" for key, value in values.items() if value)
        assignments = (*assignments, *self.all_assignments)
        return training_config(
            self.benchmark,
            self.config_file,
            assignments,
            self.seed,
            agent=self.agent,
            recipe=self.recipe,
        )

    def words(self, directory: Path) -> list[str]:
        """The command that goes on with the run."""
        words = ["rllm", "train", self.benchmark, *self.flags("val_dataset", "model", "judge_base_url")]
        words += ["--output", str(directory)]
        if self.config_file is not None:
            words += ["--config", str(self.config_file)]
        for assignment in self.all_assignments:
            words += ["--set", assignment]
        words += ["--recipe", self.recipe] if self.recipe else []
        words += ["--force"] if self.force else []
        if self.seed is not None:
            words += ["--seed", str(self.seed)]
        return words

    def rank_words(self, directory: Path) -> list[str]:
        """The same without `rllm`, for each of several ranks."""
        return [*self.words(directory)[1:], *(["--json"] if self.as_json else [])]

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
        return ["rllm", "eval", self.benchmark, *flags, "--model", str(run)]
