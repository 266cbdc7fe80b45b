"""Names and files in, configurations out: what a command says becomes a TrainConfig.

benchmark or program ──► its own defaults ──► --config FILE ──► --set KEY=VALUE ──► TrainConfig
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllm.build.actors import program_named
from rllm.build.distillation import DISTILL_DEFAULTS, PROMPT_DEFAULTS, over
from rllm.build.program_player import PROGRAM_DEFAULTS
from rllm.build.rows import BENCHMARK, held_out_name, mixture_of
from rllm.build.workflow_player import WORKFLOW_DEFAULTS
from rllm.config.loader import config_dict, load_config
from rllm.config.schema import TrainConfig
from rllm.data.questions import render
from rllm.environments.harness.spec import PREFIX
from rllm.errors import ConfigError
from rllm.eval.catalogue import SWE, TASK_DIRECTORY, Benchmark, benchmark_named
from rllm.eval.tasks import benchmark_world, world_name
from rllm.integrations.task_programs import is_task_program

MAX_EVAL_TOKENS = 1024
"""Most tokens of an answer to a question, or of a turn of a model that was not trained on its world, unless
`--sampling` says otherwise."""
MAX_EVAL_TURNS = 200
"""The number of turns of such a model, where its world allows more: no context holds conversations much
longer."""
MAX_EVAL_CONTEXT = 4096
"""Tokens of a conversation with such a model, where it is here."""


def training_config(
    benchmark: str,
    path: Path | None = None,
    assignments: tuple[str, ...] = (),
    seed: int | None = None,
    *,
    agent: str = "",
    with_rules: bool = False,
) -> TrainConfig:
    """The benchmark's own configuration, then the file, then `seed`, then the assignments; with another
    `agent` than its own, which gets none of its arguments. `with_rules` shows tasks as an evaluation shows
    them to a model that was not trained on them."""
    spec = benchmark_named(benchmark)
    own = spec.train
    if with_rules and spec.asks_questions:
        raise ConfigError(
            f"`{spec.name}` asks the same of every model, so --with-rules changes nothing; leave it out."
        )
    extra = () if seed is None else (f"seed={seed}",)
    if with_rules:
        return _config_with_rules(spec, agent, path, (*extra, *assignments))
    if agent not in ("", spec.agent) and "task" in own:
        own = {**own, "task": {key: value for key, value in own["task"].items() if key != "agent_args"}}
    return load_config(path, (*extra, *assignments), base=over(_task_table(spec, agent), own))


def evaluation_config(benchmark: str, agent: str = "") -> TrainConfig:
    """For a model that was not trained on the benchmark."""
    return _config_with_rules(benchmark_named(benchmark), agent, None, ())


def _config_with_rules(
    spec: Benchmark, agent: str, path: Path | None, assignments: tuple[str, ...]
) -> TrainConfig:
    """Nothing of `train.task`, the instructions for the benchmark's own agent, and room to think."""
    own = {section: table for section, table in spec.train.items() if section != "task"}
    if spec.environment not in (TASK_DIRECTORY, SWE):  # any other world ends its episodes itself
        own = over(own, {"rollout": {"max_turns": MAX_EVAL_TURNS}})
    room = {
        "rollout": {"max_tokens_per_turn": MAX_EVAL_TOKENS},
        "inference": {"max_context": MAX_EVAL_CONTEXT},
    }
    if spec.environment == SWE:  # which says itself how much a repository takes
        room = {}
    config = load_config(path, assignments, base=over(_task_table(spec, agent), over(own, room)))
    prompts = (table.get("system_prompt", "") for table in (config.task.agent_args, spec.agent_args))
    if spec.instructions and agent in ("", spec.agent) and len(set(prompts)) == 1:  # else somebody wrote one
        instructions = render(spec.instructions, config.task.environment_args).strip()
        config.task.agent_args = {**config.task.agent_args, "system_prompt": instructions}
    return config


def _task_table(spec: Benchmark, agent: str) -> dict[str, Any]:
    """The section `task` of a configuration, as far as training and evaluation share it."""
    return {
        "task": {
            "environment": world_name(spec),
            "agent": agent or spec.agent,
            "agent_args": spec.agent_args if agent in ("", spec.agent) else {},
            "environment_args": spec.task,
            "train_args": spec.train_task,
        }
    }


def distill_config(
    name: str,
    teacher: str = "",
    path: Path | None = None,
    assignments: tuple[str, ...] = (),
    *,
    with_rules: bool = False,
) -> TrainConfig:
    """The tasks of a benchmark, or the prompts of a JSONL file; then the file, then the assignments.

    What a benchmark says of experts, estimators and losses is for other runs. `with_rules`: as of
    `training_config`.
    """
    defaults = over(DISTILL_DEFAULTS, {"distill": {"teacher": teacher}})
    if name.endswith(".jsonl"):
        if with_rules:
            raise ConfigError(f"{name} has prompts that say all there is; leave --with-rules out.")
        return load_config(
            path, assignments, base=over(over(PROMPT_DEFAULTS, {"task": {"dataset": name}}), defaults)
        )
    own = config_dict(training_config(name, with_rules=with_rules))
    for section in ("algorithm", "warm_start"):
        del own[section]
    return load_config(path, assignments, base=over(own, defaults))


HARNESS_DEFAULTS: dict[str, Any] = {
    **PROGRAM_DEFAULTS,
    "inference": {"lockstep": False, "max_context": 32_768},
    "rollout": {"max_tokens_per_turn": 0, "step_timeout_s": 900.0, "episode_timeout_s": 3600.0},
    "algorithm": {"updates_per_step": 1},
}
"""Where a run of a harness differs: its prompts are long, hidden tests run within a step's time, and episodes
of minutes make steps of few tasks, down to one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ProgramNames:
    """A program or workflow, what judges it and its tasks, as a command names them."""

    program: str
    """An entry point, `package.module:name` or `file.py:name`."""
    evaluator: str
    """Empty where each task of a benchmark names its grader, or a workflow pays itself."""
    dataset: str
    """A file of rows, a registered data set, or `benchmark:NAME`."""
    val_dataset: str = ""

    @property
    def label(self) -> str:
        """For titles: the last part of the program's name."""
        return self.program.rpartition(":")[2]

    @property
    def brings_tasks(self) -> bool:
        """Whether tasks and judge come with it, as of `verifiers:NAME`."""
        return is_task_program(self.program)

    @property
    def training_tasks(self) -> str:
        """The data set, or the program that brings its own."""
        return self.program if self.brings_tasks else self.dataset

    @property
    def directory_name(self) -> str:
        """`langgraph-agent-solve` of `examples/langgraph/agent.py:solve`: functions of one name in several
        files do not meet in one directory."""
        place, _, name = self.program.rpartition(":")
        if self.brings_tasks:
            return re.sub(r"[^\w.=+-]+", "-", self.program)
        if self.program.startswith(PREFIX):
            return f"harness-{Path(name).name.removesuffix('.toml')}"
        if not place.endswith(".py"):
            return f"{place}-{name}" if place else name
        file = Path(place)
        return "-".join(part for part in (file.parent.name, file.stem, name) if part)

    def require_all(self, *, pays_itself: bool = False) -> None:
        """Raises ConfigError for what is missing, or would be ignored."""
        if self.brings_tasks:
            for name in ("evaluator", "dataset", "val_dataset"):
                if value := getattr(self, name):
                    raise ConfigError(
                        f"`{self.program}` brings its tasks and its judge, so --{name.replace('_', '-')} "
                        f"{value} would be ignored; leave it out."
                    )
            return
        has_judge = pays_itself or self._is_asked()
        for option, value in (("--evaluator", has_judge or self.evaluator), ("--dataset", self.dataset)):
            if not value:
                example = "my_flow.py:score" if option == "--evaluator" else "my.jsonl"
                raise ConfigError(
                    f"The program `{self.program}` needs {option}, such as {option} {example}; "
                    "a benchmark brings its own."
                )

    def _is_asked(self) -> bool:
        """Whether each task says who judges it: those of a benchmark of questions do, and of a world that
        pays programs too."""
        if sets := mixture_of(self.dataset):
            return all(replace(self, dataset=each)._is_asked() for each in sets)
        if not self.dataset.startswith(BENCHMARK):
            return False
        spec = benchmark_named(self.dataset.removeprefix(BENCHMARK))
        if not (spec.asks_questions or self.evaluator or benchmark_world(spec).evaluator):
            raise ConfigError(
                f"`{spec.name}` pays for what is done in its world, but {self.label} does not play it: say "
                "who judges with --evaluator."
            )
        return True


def program_config(
    names: ProgramNames,
    model: str = "",
    path: Path | None = None,
    assignments: tuple[str, ...] = (),
    seed: int | None = None,
) -> TrainConfig:
    """Defaults of programs or workflows, then the file, then `seed` and `model`, then the assignments.

    A data set that holds tasks out is measured on those.
    """
    actor = program_named(names.program)
    names.require_all(pays_itself=actor.workflow is not None)
    settings: dict[str, Any] = {
        "task": {
            "environment": names.label,
            "agent": names.label,
            "program": names.program,
            "evaluator": names.evaluator,
            "dataset": names.training_tasks,
            "val_dataset": names.val_dataset or held_out_name(names.training_tasks),
        }
    }
    extra = [] if seed is None else [f"seed={seed}"]
    extra += [f"model.path={model}"] if model else []
    defaults = PROGRAM_DEFAULTS if actor.workflow is None else WORKFLOW_DEFAULTS
    if names.program.startswith(PREFIX):
        defaults = HARNESS_DEFAULTS
    return load_config(path, (*extra, *assignments), base={**defaults, **settings})


def is_program(name: str, *options: str) -> bool:
    """Whether the words of `rllm train` and `rllm eval` mean a program: a place to find it, or an option that
    programs alone have; otherwise it is a benchmark, as the address of an environment is."""
    is_place = ":" in name and "://" not in name
    return is_place or name.endswith(".py") or any(options)
