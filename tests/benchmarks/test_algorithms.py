"""The study of algorithms: what it compares can be run, and what it says follows from intervals."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.algorithms.estimators import ESTIMATORS
from rllm.build.configs import training_config
from rllm.config.algorithm import LOSSES
from rllm.config.loader import config_dict

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCHMARKS))
    names = ("algorithm_variants", "algorithm_tables", "algorithm_curves", "algorithm_trl")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("label", ["single-turn", "multi-turn"])
def test_every_variant_is_a_configuration_and_changes_one_thing(
    scripts: dict[str, ModuleType], label: str
) -> None:
    module = scripts["algorithm_variants"]
    study, found = module.STUDIES[label], {}
    for name, variant in module.variants_of(label).items():
        assignments = (*study.assignments, *module.common(study.steps), *variant.assignments)
        found[name] = config_dict(training_config(study.task, None, assignments, 200))
    assert len({str(each) for each in found.values()}) == len(found)
    algorithms = [each["algorithm"] for each in found.values()]
    assert {each["estimator"] for each in algorithms} == set(ESTIMATORS) - {"teacher"}
    assert {each["loss"] for each in algorithms} == set(LOSSES)
    budgets = {each["rollout"]["tasks_per_step"] * each["rollout"]["group_size"] for each in found.values()}
    assert len(budgets) == 1, "attempts of a step"


def on_record(module: ModuleType, label: str, runs: dict[str, Any]) -> dict[str, Any]:
    """A study with runs of the configuration that ships."""
    steps = module.STUDIES[label].steps
    changes = {name: list(each.assignments) for name, each in module.variants_of(label).items()}
    changes[module.TRL] = changes.get(module.OURS, [])
    for name, mine in runs.items():
        for run in mine.values():
            run |= {"change": changes.get(name, []), "date": "today", "commit": "c"}
    settings = module.study_settings(label, steps)
    return {"task": module.STUDIES[label].task, "steps": steps, "settings": settings, "runs": runs}


def runs(*sampled: float, cpu_s: float = 10.0) -> dict[str, Any]:
    """One for each seed from 200 on."""
    return {
        str(seed): {
            "sampled": each,
            "greedy": each,
            "cpu_s": cpu_s,
            "curve": [each],
            "baselines": {"always": 0.5},
        }
        for seed, each in enumerate(sampled, start=200)
    }


def test_what_a_difference_says_follows_from_its_interval(scripts: dict[str, ModuleType]) -> None:
    tables, default = scripts["algorithm_tables"], scripts["algorithm_variants"].DEFAULT
    low, high = tables.interval_of([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    study = {
        "imitation": runs(0.2, 0.2, 0.2),
        default: runs(0.7, 0.8, 0.6),
        "RLOO": runs(0.81, 0.9, 0.7),
        "ReMax": runs(0.9, 0.5, 0.7),
        "GSPO": runs(0.5, 0.61, 0.4),
        "KL 0.04": runs(0.6, 0.71, 0.5),
        "clip 0.2": runs(0.7, 0.81, 0.5),
        "AdamW": runs(0.7, 0.7, 0.7),
        tables.TRL: runs(0.71, 0.71, 0.71),
    }
    text = tables.text_of(
        {"studies": {"single-turn": on_record(scripts["algorithm_variants"], "single-turn", study)}}
    )
    for line in (
        "The imitator has 20 % sampled, 20 % greedy; `always` has 50 %.",
        "| RLOO | 3 | 80.3 | 80.3 | +10.3 (+8.9 to +11.8) | better | 10 |",
        "| ReMax | 3 | 70.0 | 70.0 | +0.0 (-65.7 to +65.7) | no difference seen | 10 |",
        "| worse | 10 |",
        "comes to 71.0 (3 seeds): ours with AdamW is -1.0 (-1.0 to -1.0) points beside it, 0 from seed to "
        "seed (a lower end of -5 is asked for: met) and takes 1/1.0 of the CPU seconds.",
        "can be left out (Yu et al. 2025). Reproduced: -9.7 ",
        "clip-higher). Not reproduced, no difference seen: -3.0 ",
        "Not run: PPO (critic); REINFORCE++; Dr. GRPO; ",
        "**multi-turn: frozenlake.** Not run.",
        "Run with fewer seeds than meant: default (GRPO) (3 of 5 seeds); RLOO (3 of 5 seeds); ",
        "Measured today (c).",
    ):
        assert line in text, line
    assert "Stale" not in text
    assert "not measured" in tables.text_of({"studies": {}})


def test_a_study_beside_trl_compares_with_trl_by_samples_and_by_seconds(
    scripts: dict[str, ModuleType],
) -> None:
    tables, variants = scripts["algorithm_tables"], scripts["algorithm_variants"]

    def text(*ours: float) -> str:
        study = {
            "imitation": runs(0.1, 0.1, 0.1),
            variants.OURS: runs(*ours, cpu_s=20.0),
            variants.TRL: runs(0.9, 0.9, 0.9, cpu_s=50.0),
        }
        return tables.text_of({"studies": {"beside-trl": on_record(variants, "beside-trl", study)}})

    near, far = text(0.89, 0.9, 0.91), text(0.7, 0.9, 0.95)
    for line in (
        "| AdamW | 3 | 90.0 | 90.0 | +0.0 (-2.5 to +2.5) | no difference seen | 20 |",
        f"| {variants.TRL} | 3 | 90.0 | 90.0 |  |  | 50 |",
        "ours with AdamW is +0.0 (-2.5 to +2.5) points beside it, 1 from seed to seed (a lower end of -5 is "
        "asked for: met) and takes 1/2.5 of the CPU seconds.",
    ):
        assert line in near, line
    assert "asked for: **missed**" in far
    assert "Stale" not in near


def test_trl_has_our_learning_rate_at_each_update(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    variants = scripts["algorithm_variants"]
    ours = (*variants.common(3), *variants.VARIANTS[variants.OURS].assignments)
    config = training_config("small-programs", None, (*ours, "optimizer.learning_rate=0.4"), 200)
    assert config.algorithm.updates_per_step == 2
    settings = scripts["algorithm_trl"].settings_of(config, ["f: add 2"], tmp_path)
    assert settings["learning_rates"] == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.0, 0.0])


def test_runs_beside_trl_come_last_and_in_pairs(scripts: dict[str, ModuleType]) -> None:
    curves, variants = scripts["algorithm_curves"], scripts["algorithm_variants"]
    label, names = "beside-trl", list(variants.VARIANTS)
    seeds = variants.SEEDS[: variants.STUDIES[label].seeds_beside_trl]
    assert list(curves.jobs([label], names, trl=True)) == [
        (label, name, seed) for seed in seeds for name in (variants.OURS, variants.TRL)
    ]
    assert list(curves.jobs([label], names, trl=False)) == [(label, variants.OURS, seed) for seed in seeds]
    both = list(curves.jobs(["single-turn", label], [variants.DEFAULT, variants.OURS], trl=True))
    assert both[:5] == [("single-turn", variants.DEFAULT, seed) for seed in variants.SEEDS[:5]]
    assert {name for _, name, _ in both[5:]} == {variants.OURS, variants.TRL}
    assert len(both) == 5 + 2 * (variants.STUDIES["single-turn"].seeds_beside_trl + len(seeds))


@pytest.mark.parametrize(
    ("expects", "interval", "said"),
    [
        ("better", (1.0, 9.0), "Reproduced"),
        ("better", (-9.0, -1.0), "Not reproduced, worse"),
        ("no worse", (-4.0, 9.0), "Reproduced"),
        ("no worse", (-9.0, 9.0), "Cannot be told from so few runs"),
        ("no worse", (-9.0, -1.0), "Not reproduced"),
        ("no better", (-9.0, 4.0), "Reproduced"),
        ("no better", (1.0, 9.0), "Not reproduced"),
    ],
)
def test_that_nothing_is_lost_is_shown_by_a_narrow_interval_alone(
    scripts: dict[str, ModuleType], expects: str, interval: tuple[float, float], said: str
) -> None:
    assert scripts["algorithm_tables"].reproduced(expects, interval) == said


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        study=["single-turn", "multi-turn"],
        only=["RLOO", "GSPO"],
        alone=False,
        anew=False,
        hours=1.0,
        threads=1,
        root=tmp_path,
        quick=False,
    )


def test_a_study_goes_on_with_what_is_missing_on_record(
    scripts: dict[str, ModuleType],
    options: argparse.Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves, variants = scripts["algorithm_curves"], scripts["algorithm_variants"]
    figures = {"sampled": 0.5, "greedy": 0.5, "cpu_s": 1.0, "curve": [0.5]}
    imitator = {"sampled": 0.2, "greedy": 0.2, "baselines": {}}
    record: dict[str, Any] = {
        "imitation": {"200": dict(imitator)},
        variants.DEFAULT: {"200": dict(figures)},
        "RLOO": {"200": dict(figures)},
    }
    study = on_record(variants, "single-turn", record)
    monkeypatch.setattr(curves, "RESULTS", tmp_path / "algorithms.json")

    def missing() -> list[tuple[str, str, int]]:
        curves.RESULTS.write_text(json.dumps({"studies": {"single-turn": study}}))
        return curves.Campaign(options).missing()

    left = missing()
    assert left[:3] == [
        ("multi-turn", variants.DEFAULT, 200),
        ("multi-turn", "RLOO", 200),
        ("single-turn", variants.DEFAULT, 201),
    ]
    assert left[-6:] == [(label, "GSPO", seed) for seed in (200, 201, 202) for label in options.study]
    assert len(left) == 2 * (5 + 5 + 3) - 2, "TRL has nothing to be compared with"

    record["RLOO"]["200"]["change"] = ["algorithm.estimator=grpo"]
    assert ("single-turn", "RLOO", 200) in missing(), "it would be another run today"
    assert "Stale**, because the configuration has changed since: RLOO." in scripts[
        "algorithm_tables"
    ].text_of({"studies": {"single-turn": study}})
    study["settings"]["rollout.temperature"] = 0.5
    assert len(missing()) == 2 * (5 + 5 + 3)
    assert "changed since: all of it." in scripts["algorithm_tables"].text_of(
        {"studies": {"single-turn": study}}
    )


def test_runs_are_not_paired_with_those_of_another_imitator(
    scripts: dict[str, ModuleType], options: argparse.Namespace
) -> None:
    campaign = scripts["algorithm_curves"].Campaign(options)
    campaign.studies["multi-turn"]["runs"] = {}
    campaign.note_imitator("multi-turn", 200, {"sampled": 0.2, "greedy": 0.1})
    campaign.note_imitator("multi-turn", 200, {"sampled": 0.2, "greedy": 0.1})
    with pytest.raises(SystemExit, match=r"multi-turn, seed 200, has 21\.0% sampled"):
        campaign.note_imitator("multi-turn", 200, {"sampled": 0.21, "greedy": 0.1})


def test_two_processes_at_one_study_lose_no_run(
    scripts: dict[str, ModuleType],
    options: argparse.Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves, variants = scripts["algorithm_curves"], scripts["algorithm_variants"]
    monkeypatch.setattr(curves, "RESULTS", tmp_path / "algorithms.json")
    both = [curves.Campaign(options) for _ in range(2)]
    for campaign, name in zip(both, ("RLOO", "GSPO"), strict=True):
        figures = {"sampled": 0.5, "greedy": 0.5, "cpu_s": 1.0, "curve": [0.5], "baselines": {}}
        runs = {"imitation": {"200": dict(figures)}, name: {"200": dict(figures)}}
        campaign.studies["single-turn"] = on_record(variants, "single-turn", runs)
        campaign.write()
    found = curves.load_studies(curves.RESULTS)
    assert list(found) == ["single-turn"]
    assert list(found["single-turn"]["runs"]) == ["imitation", "RLOO", "GSPO"]
    options.anew = True
    curves.Campaign(options)
    assert curves.load_studies(curves.RESULTS) == {}
