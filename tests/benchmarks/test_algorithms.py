"""The study of algorithms: what it compares can be run, and what it says follows from intervals."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rllm.algorithms.estimators import ESTIMATORS
from rllm.build.configs import training_config
from rllm.config.algorithm import LOSSES
from rllm.config.loader import config_dict

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCHMARKS))
    yield {name: importlib.import_module(name) for name in ("algorithm_variants", "algorithm_tables")}
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("label", ["single-turn", "multi-turn"])
def test_every_variant_is_a_configuration_and_changes_one_thing(
    scripts: dict[str, ModuleType], label: str
) -> None:
    module = scripts["algorithm_variants"]
    study, found = module.STUDIES[label], {}
    for name, variant in module.variants_of(label).items():
        assignments = (*module.common(study.steps), *variant.assignments)
        found[name] = config_dict(training_config(study.task, None, assignments, 200))
    assert len({str(each) for each in found.values()}) == len(found)
    algorithms = [each["algorithm"] for each in found.values()]
    assert {each["estimator"] for each in algorithms} == set(ESTIMATORS) - {"teacher"}
    assert {each["loss"] for each in algorithms} == set(LOSSES)


def test_a_difference_whose_interval_covers_nought_is_none(scripts: dict[str, ModuleType]) -> None:
    tables, default = scripts["algorithm_tables"], scripts["algorithm_variants"].DEFAULT
    low, high = tables.interval_of([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))

    def runs(*sampled: float) -> dict[str, dict[str, object]]:
        return {
            str(seed): {
                "sampled": each,
                "greedy": each,
                "seconds": 10.0,
                "curve": [each],
                "baselines": {"always": 0.5},
            }
            for seed, each in enumerate(sampled)
        }

    study = {
        "imitation": runs(0.2, 0.2, 0.2),
        default: runs(0.7, 0.8, 0.6),
        "RLOO": runs(0.81, 0.9, 0.7),
        "ReMax": runs(0.9, 0.5, 0.7),
        "GSPO": runs(0.5, 0.61, 0.4),
        "AdamW": runs(0.7, 0.7, 0.7),
        tables.TRL: runs(0.71, 0.71, 0.71),
    }
    report = {
        "date": "today",
        "commit": "c",
        "studies": {"single-turn": {"task": "sums", "steps": 3, "runs": study}},
    }
    text = tables.text_of(report)
    for line in (
        "The imitator has 20 % sampled, 20 % greedy; `always` has 50 %.",
        "| RLOO | 3 | 80.3 | 80.3 | +10.3 (+8.9 to +11.8) | better | 10 |",
        "| ReMax | 3 | 70.0 | 70.0 | +0.0 (-65.7 to +65.7) | no difference seen | 10 |",
        "| worse | 10 |",
        "ours is -1.0 (-1.0 to -1.0) points beside it (a lower end of -5 is asked for: met)",
    ):
        assert line in text
    assert "not measured" in tables.text_of({"studies": {}})
