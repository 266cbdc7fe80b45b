"""`--select`: the attempts of a finished evaluation ──► one of each task's, and what handing those in comes
to.

Choices are kept with the evaluation: the same command chooses, or asks a model, only where something changed.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rllm.build.asked import Asked
from rllm.build.evaluation_engines import answering, program_client
from rllm.environments.swe.selection import (
    Ask,
    PatchAttempt,
    Selection,
    candidate_of,
    choose,
    require_selector,
)
from rllm.errors import ConfigError
from rllm.eval.catalogue import SWE, Benchmark
from rllm.eval.evaluation import Evaluation
from rllm.eval.plan import hash_of
from rllm.eval.report import by_task
from rllm.eval.results import newest_episodes, row_of
from rllm.eval.selection import selection_report
from rllm.inference.rollout_engine import RolloutEngine
from rllm.types.messages import Message, SamplingParams

_CHOICES = "choices"
_MAX_TOKENS = 1024
"""Maximum tokens of the answer of a model that chooses."""


def require_selectable(request: Asked, spec: Benchmark | None) -> None:
    """Raises ConfigError for a selector that is none, or that has nothing to choose from."""
    if not request.select:
        return
    require_selector(request.select, request.attempts)
    if spec is None or spec.environment != SWE:
        name = spec.name if spec is not None else request.name
        raise ConfigError(
            f"`--select` chooses among patches, and `{name}` makes none; its votes are told by --k "
            "(majority@k). Leave it out."
        )
    if request.judge is not None and request.select != "model":
        raise ConfigError(
            f"`--select {request.select}` asks no model, so --judge-model {request.judge.title} would be "
            "ignored; leave it out."
        )


async def select(request: Asked, evaluation: Evaluation, way: str) -> dict[str, Any]:
    """The report of the selection among the attempts of one way."""
    candidates: dict[str, list[PatchAttempt]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for episode in newest_episodes(evaluation.store, way):
        candidates.setdefault(episode.task_id, []).append(candidate_of(episode))
        rows[episode.task_id] = dict(row_of(episode.task))
    chooser = request.judge or request.place
    name = f"{request.select}/{chooser.title if request.select == 'model' else ''}"
    kept: dict[str, Any] = evaluation.store.value(_CHOICES, {})
    choices: dict[str, Selection] = {}
    async with _asking(request) as ask:
        for task, each in candidates.items():
            key = f"{name}/{task}/{hash_of([(one.attempt, one.patch) for one in each])}"
            if key not in kept:
                choice = await choose(
                    request.select,
                    rows[task]["entry"],
                    each,
                    backend=rows[task].get("backend", "bubblewrap"),
                    ask=ask,
                )
                kept[key] = [choice.attempt, choice.reason, choice.is_settled]
                evaluation.store.set_value(_CHOICES, kept)
            attempt, reason, is_settled = kept[key]
            choices[task] = Selection(attempt=attempt, reason=reason, is_settled=is_settled)
    results = list(by_task(evaluation.results[way].values()).values())
    return selection_report(request.select, results, choices)


@asynccontextmanager
async def _asking(request: Asked) -> AsyncIterator[Ask | None]:
    """The model that chooses: the judge's where one is named, else the one that was evaluated."""
    if request.select != "model":
        yield None
        return
    place = request.judge or request.place
    if place.is_server:
        client = (await answering(place)).client(connect_timeout_s=10.0)
    else:
        client = program_client(
            place, threads=request.threads, dtype=request.dtype, trust_remote_code=request.trust_remote_code
        )

    async def ask(messages: list[Message], key: tuple[str | int, ...]) -> str:
        engine = RolloutEngine(
            client,
            key=(request.seed, *key),
            sampling=SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS),
        )
        try:
            return (await engine.get_model_response(messages)).text
        finally:
            await engine.close()

    try:
        yield ask
    finally:
        await client.close()
