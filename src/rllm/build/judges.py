"""`--evaluator` and `--judge-model` ──► who judges an evaluation.

a grader's name, file.py:score, an entry point   ──► Evaluator
a judge's model: a name of `rllm model list`, PROVIDER:MODEL, or a server's name with its base URL
"""

import asyncio
import atexit
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm.build.providers import ModelPlace, Protocol, resolve_model
from rllm.build.sources import source_hash, version
from rllm.data.registry import DatasetRegistry
from rllm.errors import ConfigError
from rllm.eval.catalogue import ENVIRONMENT, Benchmark, benchmark_named, benchmark_names
from rllm.eval.judging import task_evaluator
from rllm.eval.plan import hash_of
from rllm.rewards.evaluator import ENTRY_POINTS, Evaluator, as_evaluator, load_evaluator
from rllm.rewards.graders import GRADERS, grader_named, option_names
from rllm.types.names import object_named


@dataclass(kw_only=True, slots=True, frozen=True)
class ChosenJudge:
    """A judge and what the stamp says of it."""

    name: str
    evaluator: Evaluator | None
    """None where each task names its own grader, or the world pays."""
    hash: str


def judge_named(
    name: str, place: ModelPlace | None, arguments: Mapping[str, Any] | None = None
) -> ChosenJudge:
    """The judge of that name; of a grader with `arguments`, asking the model at `place`.

    Raises ConfigError for a model where the judge asks none, and none where it asks one.
    """
    options = dict(arguments or {})
    settings_hash = hash_of({"grader": name, "arguments": options, "rllm": version()})
    if name not in GRADERS:
        if place is not None:
            raise ConfigError(
                f"--judge-model is for graders that ask a model; `{name}` is a judge of its own."
            )
        evaluator = load_evaluator(name)
        return ChosenJudge(name=name, evaluator=evaluator, hash=source_hash(evaluator.function))
    if place is not None:
        options = options | _asking(name, place)
    grader = grader_named(name, **options)
    atexit.register(grader.close)
    return ChosenJudge(name=name, evaluator=as_evaluator(grader), hash=settings_hash)


def judge_of_benchmark(spec: Benchmark, name: str, place: ModelPlace | None) -> ChosenJudge:
    """The judge of a benchmark's answers: `name`, else its own, which asks the model at `place`."""
    own = name in ("", spec.evaluator)
    if own and spec.evaluator == ENVIRONMENT:
        if place is not None:
            raise ConfigError(f"`{spec.name}` pays for what is done in its world and asks no --judge-model.")
        return ChosenJudge(name=ENVIRONMENT, evaluator=None, hash="")
    arguments = spec.evaluator_args if own else {}
    grader_name = name or spec.evaluator
    if place is None and _asks_a_model(grader_name) and not arguments.get("base_url"):
        raise ConfigError(
            f"`{spec.name}` is judged by a model; say which: --judge-model NAME of `rllm model list`, "
            "PROVIDER:MODEL, or a server's name for it with --judge-base-url."
        )
    if own and place is None:
        settings_hash = hash_of({"grader": grader_name, "arguments": arguments, "rllm": version()})
        return ChosenJudge(name=grader_name, evaluator=None, hash=settings_hash)
    return judge_named(grader_name, place, arguments)


JUDGING = ("evaluator", "judge_model", "judge_base_url")
"""Entries of `task.environment_args` that say who judges answers while training."""


def split_judging(arguments: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """(who judges, what the tasks are made with) of `task.environment_args`."""
    judging = {name: str(value) for name, value in arguments.items() if name in JUDGING}
    return judging, {name: value for name, value in arguments.items() if name not in JUDGING}


def judge_while_training(benchmark: str, judging: Mapping[str, str]) -> Evaluator | None:
    """The evaluator that pays for answers instead of the tasks' own graders; None where those do, or a world.

    Raises ConfigError for a judge that would be ignored, and for questions that want a judge's model.
    """
    is_known = benchmark in benchmark_names() or DatasetRegistry.dataset_exists(benchmark)
    if is_known and (spec := benchmark_named(benchmark)).asks_questions:
        place = judge_place(judging.get("judge_model", ""), judging.get("judge_base_url", ""))
        return judge_of_benchmark(spec, judging.get("evaluator", ""), place).evaluator
    for name, value in judging.items():
        raise ConfigError(
            f"`{benchmark}` pays for what is done in its world, so --{name.replace('_', '-')} {value} would "
            "be ignored; leave it out."
        )
    return None


def judge_place(name: str, base_url: str) -> ModelPlace | None:
    """The meaning of `--judge-model` and `--judge-base-url`."""
    if base_url and not name:
        raise ConfigError(f"Say with --judge-model by which name {base_url} knows the judge.")
    return resolve_model(name, base_url=base_url) if name else None


def judge_of_stored(config: Mapping[str, Any], name: str, place: ModelPlace | None) -> ChosenJudge:
    """The judge that rescores a stored evaluation: `name`, else the graders that its tasks name."""
    if name:
        return judge_named(name, place)
    if place is not None:
        return judge_named(str(config.get("evaluator", "")), place)
    settings_hash = hash_of({"grader": config.get("evaluator"), "rllm": version()})
    return ChosenJudge(name="the tasks' graders", evaluator=task_evaluator(), hash=settings_hash)


def output_judge_named(name: str) -> Any:
    """A judge of a worker's outputs, which sees no episode."""
    return object_named(name, group=ENTRY_POINTS, what="evaluator")


def require_grader(name: str) -> None:
    """Raises ConfigError with the nearest name for a grader that there is not."""
    if name not in GRADERS:
        grader_named(name)


def _asking(grader: str, place: ModelPlace) -> dict[str, Any]:
    """Options of a grader that make it ask the model there."""
    if not _asks_a_model(grader):
        raise ConfigError(f"The grader `{grader}` asks no model; leave --judge-model out.")
    if not place.is_server:
        raise ConfigError(
            f"A judge's model must be on a server, and {place.path} is here; serve it with `rllm serve`, and "
            "give --judge-base-url."
        )
    if place.protocol is Protocol.OPENAI:
        return {"base_url": place.base_url, "model": place.name, "api_key": place.api_key}
    client = place.client(connect_timeout_s=10.0)
    atexit.register(lambda: asyncio.run(client.close()))
    return {"client": client, "model": place.name}


def _asks_a_model(grader: str) -> bool:
    if grader not in GRADERS:
        return False
    module, _, attribute = GRADERS[grader].partition(":")
    return "client" in option_names(getattr(importlib.import_module(module), attribute))
