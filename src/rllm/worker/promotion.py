"""Is another model better behind a worker? Both do the same requests, and the interval of pairs decides.

    rows: {"inputs": {…}, "outputs": {…}} ──► the worker with its model, with the candidate ──► right or not
                                                     └── pairs ──► difference, its 95 % interval ──► better?

A run is right where its status is `ok` and every expected output has the expected value.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rllm.contracts.contract import Contract
from rllm.errors import ConfigError
from rllm.eval.statistics import mcnemar, newcombe_interval
from rllm.files.jsonl import read_jsonl_lines
from rllm.worker.host import WorkerHost
from rllm.worker.response import WorkerResponse

Judge = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""(inputs, outputs) -> whether they are right."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ExpectedRun:
    """One row of an evaluation."""

    inputs: dict[str, Any]
    expected: dict[str, Any] | None = None
    """Outputs that must come out as they are here; others may be anything. None leaves it to a judge."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelComparison:
    """The candidate beside the model that serves."""

    requests: int
    current: float
    """Share of right runs."""
    candidate: float
    difference: float
    interval: tuple[float, float]
    """95 %, of pairs (Newcombe 1998)."""
    p_value: float
    """McNemar, exact."""
    is_better: bool
    """The whole interval is above 0."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_requests(path: Path, contract: Contract, *, is_judged: bool) -> list[ExpectedRun]:
    """Rows of JSON. Raises ConfigError with the line of one that no run of this contract gets right."""
    return list(_requests(path, contract, is_judged))


def _requests(path: Path, contract: Contract, is_judged: bool) -> Iterator[ExpectedRun]:
    for number, row in read_jsonl_lines(path):
        if not isinstance(row.get("inputs"), dict):
            raise ConfigError(
                f'{path}:{number} has no `inputs`; write {{"inputs": {{…}}, "outputs": {{…}}}}.'
            )
        request = ExpectedRun(inputs=row["inputs"], expected=row.get("outputs"))
        violation = contract.input_schema.first_violation(_with_own_key(contract, request, number).inputs)
        if violation is not None:
            raise ConfigError(f"{path}:{number} has `inputs` that break their schema at {violation}")
        yield request if is_judged else replace(request, expected=_possible(request, contract, path, number))


def _possible(request: ExpectedRun, contract: Contract, path: Path, number: int) -> dict[str, Any]:
    """The expected outputs without what the runtime fills in, which is another for each run."""
    values = request.expected if isinstance(request.expected, dict) else {}
    expected = {name: value for name, value in values.items() if name not in contract.runtime_properties}
    if not expected:
        raise ConfigError(
            f"{path}:{number} has no `outputs` to compare with; add them, or give an --evaluator."
        )
    schema = contract.output_schema
    for name, value in expected.items():
        if name not in schema.properties:
            if schema.document.get("additionalProperties") is False and not schema.document.get(
                "patternProperties"
            ):
                raise ConfigError(
                    f"{path}:{number} expects `{name:.80}`, and outputs have {', '.join(schema.properties)}."
                )
        elif not schema.accepts(name, value):
            raise ConfigError(
                f"{path}:{number} expects `{name}` to be {value!r:.100}, which the output schema refuses."
            )
    return expected


async def compare_models(
    contract: Contract,
    candidate: str,
    requests: Sequence[ExpectedRun],
    *,
    judge: Judge | None = None,
    max_parallel: int = 64,
    on_answer: Callable[[WorkerResponse], object] = lambda response: None,
) -> ModelComparison:
    """Do all requests with both models; `candidate` takes the place of the contract's `model`. `on_answer`
    hears of each answer, of which there are two for a request."""
    if not requests:
        raise ConfigError("The evaluation has no rows; nothing can be said about the model.")
    other = replace(contract, binding=replace(contract.binding, model=candidate, base_url=""))
    current_right, candidate_right = [
        await _right_runs(each, requests, judge, max_parallel, on_answer) for each in (contract, other)
    ]
    pairs = list(zip(current_right, candidate_right, strict=True))
    both, only_first = pairs.count((True, True)), pairs.count((True, False))
    only_second, neither = pairs.count((False, True)), pairs.count((False, False))
    interval = newcombe_interval(both, only_first, only_second, neither)
    return ModelComparison(
        requests=len(pairs),
        current=sum(current_right) / len(pairs),
        candidate=sum(candidate_right) / len(pairs),
        difference=(only_second - only_first) / len(pairs),
        interval=interval,
        p_value=mcnemar(only_first, only_second),
        is_better=interval[0] > 0.0,
    )


async def _right_runs(
    contract: Contract,
    requests: Sequence[ExpectedRun],
    judge: Judge | None,
    max_parallel: int,
    on_answer: Callable[[WorkerResponse], object],
) -> list[bool]:
    """In the order of the requests. Raises ConfigError where the infrastructure failed: that says nothing."""
    # A store of their own: in an older one the runs `row-1` and so on may have answers already.
    with TemporaryDirectory(prefix="rllm-promote-") as name:
        async with WorkerHost([contract], Path(name), max_parallel=max_parallel) as host:
            own_key_requests = [_with_own_key(contract, each, number) for number, each in enumerate(requests)]
            responses = await host.workers[contract.id].run_all(
                [each.inputs for each in own_key_requests], num_callers=max_parallel, on_answer=on_answer
            )
    return [
        _is_right(request, response, judge, number)
        for number, (request, response) in enumerate(zip(own_key_requests, responses, strict=True), 1)
    ]


def _with_own_key(contract: Contract, request: ExpectedRun, number: int) -> ExpectedRun:
    """Rows may repeat a run's name, or have none: here each row is a run."""
    name = contract.constraints.idempotency_key
    if contract.key_type != "string":
        return request
    return replace(request, inputs={**request.inputs, name: f"row-{number}"})


def _is_right(request: ExpectedRun, response: WorkerResponse, judge: Judge | None, number: int) -> bool:
    value = response.to_dict()
    error = value["error"] or {}
    cause = error.get("cause", error.get("code"))
    if cause in ("model", "program", "overloaded", "cancelled") or value["status"] == "invalid_request":
        raise ConfigError(
            f"The run of row {number} failed, which says nothing about the model: {error['message']}"
        )
    if not response.is_ok:
        return False
    if judge is None:
        return all(
            _is_equal(value["outputs"].get(key), each) for key, each in (request.expected or {}).items()
        )
    try:
        verdict = judge(request.inputs, value["outputs"])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(f"The evaluator failed at row {number}: {text:.500}") from error
    if not isinstance(verdict, bool | int | float) or verdict not in (0, 1):
        raise ConfigError(f"The evaluator returned {verdict!r:.100}; it says True or False.")
    return bool(verdict)


def _is_equal(one: Any, other: Any) -> bool:
    """Numbers within rounding, a bool never a number, all else exactly."""
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (one, other))
    if numbers:
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return type(one) is type(other) and one == other
