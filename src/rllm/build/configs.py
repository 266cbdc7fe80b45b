"""Names and files in, configurations out: what a command says becomes a TrainConfig.

benchmark or program ──► its own defaults ──► --config FILE ──► --set KEY=VALUE ──► TrainConfig
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rllm.build.actors import program_named
from rllm.build.distillation import DISTILL_DEFAULTS, PROMPT_DEFAULTS, over
from rllm.build.models import is_from_here
from rllm.build.program_player import PROGRAM_DEFAULTS
from rllm.build.rows import BENCHMARK, held_out_name, mixture_of
from rllm.build.workflow_player import WORKFLOW_DEFAULTS
from rllm.config.loader import config_dict, load_config
from rllm.config.schema import TrainConfig
from rllm.data.questions import render
from rllm.environments.harness.spec import PREFIX
from rllm.errors import ConfigError
from rllm.eval.catalogue import SWE, TASK_DIRECTORY, UNTUNED_TRAINING, Benchmark, benchmark_named
from rllm.eval.tasks import benchmark_world, world_name
from rllm.integrations.task_programs import is_task_program

SCRATCH, PRETRAINED = "scratch", "pretrained"
"""Recipes of a benchmark: for models that rLLM made from random weights, and for all others."""
PRETRAINED_TRAINING: dict[str, Any] = {
    "rollout": {"tasks_per_step": 8},
    "evaluation": {"num_tasks": 128, "every_num_tasks": 32},
}
"""Where the recipe of a pretrained model differs from the defaults of `TrainConfig`: one of its episodes is
hundreds of times the work of one of a tiny model."""
KEPT_IN_ROLLOUT = ("max_turns", "num_parallel", "step_timeout_s", "episode_timeout_s")
"""Settings of `train.rollout` that follow from a benchmark's world and not from its model."""
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
    recipe: str = "",
) -> TrainConfig:
    """The benchmark's own configuration, then the file, then `seed`, then the assignments; with another
    `agent` than its own, which gets none of its arguments.

    `recipe`: `scratch`, for models that rLLM made from random weights, or `pretrained`, for all others; where
    empty, the models of the configuration decide.
    """
    spec = benchmark_named(benchmark)
    assignments = (*(() if seed is None else (f"seed={seed}",)), *assignments)
    if recipe != PRETRAINED:
        config = _scratch_config(spec, agent, path, assignments)
        if recipe or _are_from_here(config):
            return config
    return _with_rules(spec, agent, path, assignments, _pretrained_table(spec))


def _are_from_here(config: TrainConfig) -> bool:
    """Whether rLLM made all models of a run from random weights."""
    return all(is_from_here(policy.path) for policy in config.named_policies.values())


def _scratch_config(
    spec: Benchmark, agent: str, path: Path | None, assignments: tuple[str, ...]
) -> TrainConfig:
    own = spec.train
    if agent not in ("", spec.agent) and "task" in own:
        own = {**own, "task": {key: value for key, value in own["task"].items() if key != "agent_args"}}
    return load_config(path, assignments, base=over(_task_table(spec, agent), own))


def evaluation_config(benchmark: str, agent: str = "") -> TrainConfig:
    """For a model that was not trained on the benchmark."""
    spec = benchmark_named(benchmark)
    own = {section: table for section, table in spec.train.items() if section != "task"}
    if spec.environment not in (TASK_DIRECTORY, SWE):  # any other world ends its episodes itself
        own = over(own, {"rollout": {"max_turns": MAX_EVAL_TURNS}})
    room = {
        "rollout": {"max_tokens_per_turn": MAX_EVAL_TOKENS},
        "inference": {"max_context": MAX_EVAL_CONTEXT},
    }
    if spec.environment == SWE:  # which says itself how much a repository takes
        room = {}
    return _with_rules(spec, agent, None, (), over(own, room))


def _pretrained_table(spec: Benchmark) -> dict[str, Any]:
    """The configuration of a pretrained model's run: no imitation, no settings that were tuned on random
    weights, turns as the world needs them; then `pretrained` of the benchmark."""
    rollout = spec.train.get("rollout", {})
    from_world = {name: rollout[name] for name in KEPT_IN_ROLLOUT if name in rollout}
    if spec.train in UNTUNED_TRAINING:
        from_world = rollout
    table = over(PRETRAINED_TRAINING, {"rollout": from_world, "warm_start": {"steps": 0, "noise": 0.0}})
    if "lockstep" in (inference := spec.train.get("inference", {})):
        table = over(table, {"inference": {"lockstep": inference["lockstep"]}})
    return over(table, spec.pretrained)


def _with_rules(
    spec: Benchmark, agent: str, path: Path | None, assignments: tuple[str, ...], own: Mapping[str, Any]
) -> TrainConfig:
    """Nothing of `train.task`, and the instructions for the benchmark's own agent."""
    config = load_config(path, assignments, base=over(_task_table(spec, agent), own))
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
    recipe: str = "",
) -> TrainConfig:
    """The tasks of a benchmark, or the prompts of a JSONL file; then the file, then the assignments.

    What a benchmark says of experts, estimators and losses is for other runs. `recipe`: as of
    `training_config`.
    """
    defaults = over(DISTILL_DEFAULTS, {"distill": {"teacher": teacher}})
    if name.endswith(".jsonl"):
        if recipe:
            raise ConfigError(f"{name} has prompts that say all there is; leave --recipe {recipe} out.")
        return load_config(
            path, assignments, base=over(over(PROMPT_DEFAULTS, {"task": {"dataset": name}}), defaults)
        )
    if recipe != PRETRAINED:
        config = _distill_config(name, SCRATCH, path, assignments, defaults)
        if recipe or _are_from_here(config):
            return config
    return _distill_config(name, PRETRAINED, path, assignments, defaults)


def _distill_config(
    name: str, recipe: str, path: Path | None, assignments: tuple[str, ...], defaults: Mapping[str, Any]
) -> TrainConfig:
    own = config_dict(training_config(name, recipe=recipe))
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
