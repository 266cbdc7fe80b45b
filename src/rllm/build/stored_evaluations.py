"""Stored evaluations: two of them compared, one of them judged again."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllm.build.evaluation_engines import answering
from rllm.build.judges import judge_of_stored
from rllm.build.providers import ModelPlace
from rllm.errors import ConfigError
from rllm.eval.comparison import Comparison, compare
from rllm.eval.evaluation import results_in
from rllm.eval.plan import differing_conditions, require_evaluation
from rllm.eval.report import Prices
from rllm.eval.rescoring import Rescored, rescore
from rllm.store.run_directory import RunDirectory


def compare_evaluations(
    first: Path, second: Path, way: str
) -> tuple[dict[str, Comparison], dict[str, tuple[Any, Any]]]:
    """(way -> comparison, conditions that differ); every way that is in both where `way` is empty."""
    results = results_in(first), results_in(second)
    common_ways = [name for name in results[0] if name in results[1]]
    if way and way not in common_ways:
        raise ConfigError(f"There is no `{way}` in both; both have {', '.join(common_ways) or 'nothing'}.")
    if not common_ways:
        raise ConfigError(
            f"{first} has {', '.join(results[0])} and {second} has {', '.join(results[1])}: none in both."
        )
    ways = [way] if way else common_ways
    comparisons = {name: compare(results[0][name], results[1][name]) for name in ways}
    configs = [RunDirectory.read(path).config() for path in (first, second)]
    return comparisons, differing_conditions(configs[0], configs[1], ways)


def rescore_evaluation(
    source: Path,
    target: Path,
    evaluator: str,
    place: ModelPlace | None,
    *,
    sizes: Callable[[int], tuple[int, ...]],
    prices: Prices,
) -> Rescored:
    """Judge the episodes in `source` again, into `target`. `sizes`: number of attempts -> the k of pass@k."""
    config = RunDirectory.read(source).config()
    require_evaluation(config, source)
    judge = judge_of_stored(config, evaluator, place)
    assert judge.evaluator is not None, "a stored evaluation is judged by somebody"
    if place is not None:
        asyncio.run(answering(place))
    return rescore(
        source,
        target,
        judge.evaluator,
        by=judge.name,
        evaluator_hash=judge.hash,
        ks=sizes(config["attempts"]),
        prices=prices,
    )
