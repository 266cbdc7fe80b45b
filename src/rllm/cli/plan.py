"""The output of `--dry-run`, and the place of a new run under `--fresh`: the same for every command that
trains."""

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text
from rich.tree import Tree

from rllm.cli.command import print_json
from rllm.cli.terminal import err, out, print_sentence
from rllm.errors import ConfigError
from rllm.store.run_directory import RunDirectory, is_run
from rllm.tracking.console import readable_seconds
from rllm.trainer.defaults import KeyChoice, choices_dict
from rllm.trainer.memory import readable

if TYPE_CHECKING:
    from rllm.trainer.estimates import RunEstimate
    from rllm.trainer.memory_plan import MemoryPlan
    from rllm.trainer.process_plan import ProcessPlan


def unused_directory(directory: Path) -> Path:
    """`directory`, or with the first number behind it that is free."""
    candidates = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([directory], candidates) if not path.exists())


def require_place(directory: Path) -> None:
    """Raises ConfigError, before any work, for a directory that cannot be made. Nothing is left behind."""
    try:
        missing = [each for each in (directory, *directory.parents) if not each.exists()]
        if not missing:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for each in missing:
            each.rmdir()
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}: {error.filename}); choose another --output."
        ) from error


def announce_run(directory: Path) -> bool:
    """Say what becomes of the run that is already in `directory`, if any. Whether it is finished."""
    if not is_run(directory):
        return False
    run = RunDirectory.read(directory)
    is_finished = run.summary() is not None
    remark = "is finished; --fresh starts another run" if is_finished else "was stopped; it goes on"
    if (pid := run.writer_pid) is not None:
        remark = f"is being written by process {pid}"
    elif (pid := run.lost_writer_pid) is not None and not is_finished:
        remark = (
            f"was left in the middle by process {pid}, which was killed, crashed, or ran code that ends its "
            "process, such as `os._exit`; it goes on from its last checkpoint"
        )
    print_sentence(err(), f"{directory} {remark}.", style="dim")
    return is_finished


def interruption(directory: Path, words: Sequence[str]) -> click.Abort:
    """The end of a run that somebody stopped, with the command that goes on with it."""
    has_checkpoint = is_run(directory) and any(RunDirectory.read(directory).checkpoints_path.glob("step-*"))
    how = "Go on from the last checkpoint" if has_checkpoint else "There is no checkpoint yet. Begin again"
    return click.Abort(f"Interrupted. {how} with: {shlex.join(words)}")


def conflict_with_run(directory: Path, require_same_config: Callable[[RunDirectory], None]) -> str:
    """The reason that the run already in `directory` cannot go on with this configuration; empty where it
    can.
    """
    if not is_run(directory):
        return ""
    try:
        require_same_config(RunDirectory.read(directory))
    except ConfigError as error:
        return str(error)
    return ""


@dataclass(kw_only=True, slots=True, frozen=True)
class Plan:
    """A run that could be started: its configuration and what follows from it."""

    title: str
    directory: Path
    config: dict[str, Any]
    defaults: dict[str, Any]
    derived: dict[str, Any]
    conflict: str
    """The reason that the run already in `directory` could not go on with it; empty where it could. A plan is
    printed all the same: to see what another setting would mean is what it is for."""
    choices: Sequence[KeyChoice] = ()
    """Keys that were chosen for the model; none of a run that is there already."""
    memory: "MemoryPlan | None" = None
    """Memory of each process; None where it is not known."""
    estimate: "RunEstimate | None" = None
    """Its time and disk; None where these are not known."""
    processes: "Sequence[ProcessPlan]" = ()
    """All that the run will be or start; empty where it is this process alone."""
    num_runs: int = 1
    """Number of such runs, one after the other; they differ in their seeds."""


def print_plan(plan: Plan, *, as_json: bool, force: bool, **facts: str) -> None:
    """Print the resolved configuration and what follows from it. `facts` lead the JSON.

    Raises ConfigError, unless `force`, for a run that needs more memory than is free.
    """
    _print(plan, as_json=as_json, **facts)
    if plan.memory is not None:
        plan.memory.require_fits(force=force)


def _print(plan: Plan, *, as_json: bool, **facts: str) -> None:
    memory = plan.memory
    if as_json:
        run = {"run": str(plan.directory), "conflict": plan.conflict or None}
        values: dict[str, Any] = {"config": plan.config, "derived": plan.derived}
        if plan.processes:
            values["processes"] = [each.facts() for each in plan.processes]
        values["chosen"] = choices_dict(plan.choices)
        values["memory"] = None if memory is None else memory.facts()
        values["estimate"] = None if plan.estimate is None else plan.estimate.facts()
        if plan.num_runs > 1:
            values["seeds"] = plan.num_runs
            values["estimate_of_seeds"] = plan.estimate and plan.estimate.of_runs(plan.num_runs)
        print_json({**facts, **run, **values})
        return
    tree = Tree(Text.assemble((plan.title, "bold"), f" into {plan.directory}"), guide_style="dim")
    _add_branches(tree, plan.config, plan.defaults)
    branch = tree.add(Text("derived", style="bold"))
    for name, value in plan.derived.items():
        branch.add(Text(f"{name} = {value:,}" if isinstance(value, int | float) else f"{name} = {value}"))
    if plan.choices:
        branch = tree.add(Text("chosen for this model", style="bold"))
        for choice in plan.choices:
            branch.add(Text(f"{choice.key} = {choice.value:g}: {choice.reason}"))
    if plan.processes:
        branch = tree.add(Text("processes", style="bold"))
        for each in plan.processes:
            branch.add(Text(str(each)))
    if memory is not None:
        _add_memory(tree, memory)
    if plan.estimate is not None:
        _add_estimate(tree, plan.estimate, plan.num_runs)
    console = out()
    console.print(tree)
    console.print("Bold values differ from the defaults. Nothing was written.", style="dim")
    if plan.conflict:
        print_sentence(console, Text(f"It needs a directory of its own: {plan.conflict}", style="yellow"))


def _add_memory(tree: Tree, memory: "MemoryPlan") -> None:
    """The parts, the most at one time, and what it was computed for."""
    each = " of each process" if memory.num_ranks > 1 else ""
    branch = tree.add(Text(f"memory{each}, with conversations as long as they may be", style="bold"))
    parts = {name: value for name, value in memory.parts.as_dict().items() if value}
    beyond = {"activations": memory.activations, "fragments": memory.fragments}
    for name, value in {**parts, **beyond}.items():
        branch.add(Text(f"{name} = {readable(value)}"))
    num_trained = memory.pass_trained_tokens
    branch.add(Text(f"largest pass = {memory.pass_tokens:,} tokens, {num_trained:,} of them trained"))
    for moment, value in memory.moments.items():
        branch.add(Text(f"most at one time, {moment} = {readable(value)}"))
    branch.add(Text(f"free = {readable(memory.free)}"))
    if memory.on_cpu:
        branch.add(Text(f"on the CPU, of all processes of a machine = {readable(memory.on_cpu)}"))
    if memory.sampler:
        branch.add(Text(f"each rollout worker, or model server = {readable(memory.sampler)}"))


def _add_estimate(tree: Tree, estimate: "RunEstimate", num_runs: int) -> None:
    branch = tree.add(Text("time and disk at most, of tokens alone", style="bold"))
    if estimate.sampled_tokens_per_s:
        branch.add(Text(f"samples = {estimate.sampled_tokens_per_s:,.0f} tokens a second"))
    branch.add(Text(f"learns from = {estimate.learned_tokens_per_s:,.0f} tokens a second"))
    branch.add(Text(f"each step = {readable_seconds(estimate.step_s)}"))
    branch.add(Text(f"run = {readable_seconds(estimate.run_s)}"))
    branch.add(Text(f"disk = {readable(estimate.disk_bytes)}"))
    if num_runs > 1:
        seeds = estimate.of_runs(num_runs)
        branch.add(
            Text(
                f"all {num_runs} seeds, one after the other = {readable_seconds(seeds['run_s'])}, disk "
                f"{readable(int(seeds['disk_bytes']))}"
            )
        )


def _add_branches(tree: Tree, values: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Plain keys first, then sections; bold where a value is not the default."""
    for key, value in sorted(values.items(), key=lambda item: isinstance(item[1], dict)):
        default = defaults.get(key)
        if isinstance(value, dict) and value:
            _add_branches(tree.add(Text(key)), value, default if isinstance(default, dict) else {})
        else:
            tree.add(Text.assemble(f"{key} = ", (str(value), "" if value == default else "bold green")))
