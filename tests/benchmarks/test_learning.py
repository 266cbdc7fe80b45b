"""`make learn`: its figures beside ones worked out by hand, its runs, the pages that are drawn from it."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rllm.eval.results import Result
from rllm.eval.task_facts import TaskFacts
from rllm.types.episode import EpisodeId, Outcome

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SEEDS = [50, 51, 52]


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The files of `make learn`, which import each other by name."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("learning_blocks", "learning_figures", "learning_floors", "learning_tables", "learning")
    yield {name: importlib.import_module(name) for name in names}
    sys.path.remove(str(BENCHMARKS))


def entry(**changes: Any) -> dict[str, Any]:
    """What learning.json says of a task that reaches every floor."""
    figure = {"value": 95.0, "interval": [91.0, 98.0]}
    run = dict.fromkeys(("trained", "trained_greedy", "score"), figure)
    run |= {name: {"value": 20.0, "interval": [15.0, 25.0]} for name in ("start", "start_greedy")}
    run |= {
        "skill": {"value": 40.0, "interval": [35.0, 45.0]},
        "wall_s": 100.0,
        "curve": [[10, 0.5, 0.4, 0.6, 0.5]],
    }
    made = {
        "category": "games",
        "settings": {"steps": 40},
        "date": "2026-11-22",
        "rllm": "0.1.0",
        "commit": "abc",
        "tried": 3,
        "parameters": 200_000,
        "tasks": 256,
        "distinct": 250,
        "effective": 248.0,
        "score": figure,
        "skill": run["skill"],
        "baselines": {"random": 0.25, "optimum": 1.0},
        "best_baseline": "random",
        "best_baseline_score": 0.0,
        "runs": [{"seed": seed, **run} for seed in SEEDS],
    }
    return {**made, **changes}


def results(**tasks: dict[str, Any]) -> dict[str, Any]:
    return {"seeds": SEEDS, "split": "test", "tasks": tasks}


def with_floors(scripts: dict[str, ModuleType], task: dict[str, Any]) -> dict[str, Any]:
    return {**task, "floors": scripts["learning_floors"].floors_of(task, SEEDS)}


# ---- figures ---------------------------------------------------------------------------------------------


def result(task: str, reward: float) -> Result:
    return Result(
        episode=EpisodeId(task_id=task, attempt=0),
        outcome=Outcome.SCORED,
        reward=reward,
        is_correct=reward == 1.0,
    )


def played(scripts: dict[str, ModuleType], *seeds: list[float], greedy: float = 0.25) -> Any:
    """Tasks a, b, c ... of which random solves a quarter and always adding half; what each seed was paid."""
    names = [chr(ord("a") + place) for place in range(len(seeds[0]))]
    baselines = {"random": 0.25, "always add": 0.5, "optimum": 1.0}
    return scripts["learning_figures"].Played(
        before=[result(name, 0.0) for name in names],
        greedy=[
            result(name, float(place < greedy * len(names)))
            for _ in seeds
            for place, name in enumerate(names)
        ],
        after=[result(name, paid) for seed in seeds for name, paid in zip(names, seed, strict=True)],
        facts=TaskFacts(
            instances={name: name for name in names},
            baselines={policy: dict.fromkeys(names, mean) for policy, mean in baselines.items()},
        ),
    )


def test_seeds_together_have_the_score_and_skill_worked_out_by_hand(scripts: dict[str, ModuleType]) -> None:
    figures, both = scripts["learning_figures"], played(scripts, [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 1.0])
    assert figures.score_together(both)["value"] == pytest.approx(100 * (0.75 - 0.25) / (1 - 0.25), abs=0.01)
    assert figures.skill_together(both)["value"] == pytest.approx(25.0)  # over always adding, not over random
    sharpened = played(scripts, [1.0, 1.0, 1.0, 0.0], greedy=0.75)
    assert figures.skill_together(sharpened)["value"] == 0.0


def test_seeds_that_meet_the_same_tasks_are_no_more_tasks(scripts: dict[str, ModuleType]) -> None:
    figures, paid = scripts["learning_figures"], [1.0, 0.0] * 12
    once, thrice = (figures.score_together(played(scripts, *[paid] * seeds)) for seeds in (1, 3))
    assert once == thrice


def test_parameters_are_those_of_all_models(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    for name in ("solver", "judge"):
        (tmp_path / "models" / name).mkdir(parents=True)
        save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, tmp_path / "models" / name / "model.safetensors")
    assert scripts["learning_figures"].parameters_of(tmp_path) == 34


# ---- floors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "floor"),
    [
        ({"score": {"value": 90.0, "interval": [84.9, 95.0]}}, "score_low"),
        ({"score": None}, "score"),
        ({"skill": {"value": 20.0, "interval": [-0.1, 40.0]}}, "skill_low"),
        ({"best_baseline_score": 70.1}, "baseline"),
        ({"distinct": 199}, "distinct"),
        ({"parameters": 5_000_001}, "parameters"),
    ],
)
def test_each_floor_is_missed_by_what_is_below_it(
    scripts: dict[str, ModuleType], changes: dict[str, Any], floor: str
) -> None:
    assert scripts["learning_floors"].missed(with_floors(scripts, entry())) == []
    found = with_floors(scripts, entry(**changes))
    assert next(name for name, each in found["floors"].items() if not each["met"]) == floor
    assert scripts["learning_floors"].missed(found)


@pytest.mark.parametrize(
    ("name", "value"), [("score", 89.9), ("start", 35.1), ("skill", 19.9), ("wall_s", 601.0)]
)
def test_one_seed_is_enough_to_miss_a_floor(scripts: dict[str, ModuleType], name: str, value: float) -> None:
    task = entry()
    figure = value if name == "wall_s" else {"value": value, "interval": [0.0, 100.0]}
    task["runs"][1] = {**task["runs"][1], name: figure}
    assert not with_floors(scripts, task)["floors"][name]["met"]
    busy = {**task["runs"][0], "wall_s": 3_000.0, "cpu_s": 210.0}
    assert with_floors(scripts, entry(runs=[busy] * 3))["floors"]["wall_s"]["value"] == 210.0
    failed = entry(runs=[*entry()["runs"][:2], {"seed": 52, "failed": "no memory"}])
    assert scripts["learning_floors"].missed(with_floors(scripts, failed)) == ["2 of 3 runs finished"]


def test_the_table_as_a_whole_wants_twelve_tasks_of_six_kinds(scripts: dict[str, ModuleType]) -> None:
    together, good = scripts["learning_floors"].missed_together, with_floors(scripts, entry())
    twelve = {str(number): {**good, "category": str(number % 6)} for number in range(12)}
    assert together(twelve) == []
    assert len(together({name: twelve[name] for name in list(twelve)[:5]})) == 2
    slow = [{**run, "wall_s": 241.0} for run in good["runs"]]
    assert len(together({name: {**each, "runs": slow} for name, each in twelve.items()})) == 1
    many = {f"{name} {number}": each for name, each in twelve.items() for number in range(4)}
    assert together(many) == ["all runs take 4.0 h, not <= 3"]


# ---- pages -----------------------------------------------------------------------------------------------


def test_every_marked_place_holds_what_learning_json_says(scripts: dict[str, ModuleType]) -> None:
    tables = scripts["learning_tables"]
    pages = tables.shipped_pages()
    old = [str(page) for page in tables.documents() if pages.rewritten(page) != page.read_text()]
    assert old == [], "run `python benchmarks/learning_tables.py`"
    for name in pages.pictures():
        assert pages.digest.encode() in (tables.PICTURES / f"{name}.png").read_bytes()


def test_a_page_says_what_is_measured_stale_or_missing(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    tables, page = scripts["learning_tables"], tmp_path / "page.md"
    kinds = ("table lake", "table", "line lake", "line sums", "missed", "curve lake", "curve sums")
    page.write_text(
        "\n".join(f"<!-- learning:begin {each} -->\n3.14\n<!-- learning:end -->" for each in kinds)
    )
    task = with_floors(scripts, entry())
    text = tables.Pages(results(lake=task), {"lake": {"steps": 40}}).rewritten(page)
    assert "3.14" not in text
    for line in (
        "| 51 | 20.0 (15 to 25) | 20.0 (15 to 25) | 95.0 (91 to 98) | 95.0 (91 to 98) | 95.0 (91 to 98) ",
        "| lake | 20 | 20 | random (0) | 95 | 95.0 (91 to 98) | 40.0 (35 to 45) | 250 of 256 | 100 | reaches",
        "from 20 % sampled and 20 % greedy to 95 %",
        "seeds 50, 51 and 52, run once. Measured 2026-11-22 with rllm 0.1.0 (abc); 3 settings",
        "- all together: 1 of at least 12 tasks reach every floor",
        "docs/learning/lake.png)",
    ):
        assert line in text
    assert text.count(tables.NOT_MEASURED) == 2
    assert "tale" not in text
    page.write_text(text)
    assert tables.Pages(results(lake=task), {"lake": {"steps": 40}}).rewritten(page) == text
    assert tables.Pages(results(lake=task), {"lake": {"steps": 41}}).rewritten(page).count("**Stale**") == 2


def test_a_second_measurement_is_told_with_the_scores_of_the_first(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    tables, page = scripts["learning_tables"], tmp_path / "page.md"
    page.write_text("<!-- learning:begin table -->\n<!-- learning:end -->")
    again = entry(earlier=[{"commit": "b22ac63", "scores": [87.45, 78.98, 30.04]}])
    measured = results(sums=with_floors(scripts, again), lake=with_floors(scripts, entry()))
    text = tables.Pages(measured, {"sums": {"steps": 40}, "lake": {"steps": 40}}).rewritten(page)
    assert "`sums` was measured again after it was retuned: with an earlier configuration (b22ac63) " in text
    assert "its scores were 87.5, 79.0 and 30.0." in text
    assert text.count("retuned") == 1


def test_earlier_measurements_of_a_block_have_a_score_a_seed(scripts: dict[str, ModuleType]) -> None:
    earlier = {
        name: each.earlier for name, each in scripts["learning_blocks"].blocks().items() if each.earlier
    }
    assert set(earlier) >= {"countdown", "solver-judge"}
    assert all(len(each["scores"]) == len(SEEDS) for measured in earlier.values() for each in measured)


def test_figures_are_stale_when_a_setting_changes_and_not_when_a_key_comes_at_its_default(
    scripts: dict[str, ModuleType],
) -> None:
    has_changed = scripts["learning_blocks"].has_changed
    shipped = scripts["learning_blocks"].shipped_settings("countdown")
    earlier = {key: value for key, value in shipped.items() if key != "filters.dynamic"}
    assert not has_changed(shipped, shipped)
    assert not has_changed(json.loads(json.dumps(earlier)), shipped)
    assert has_changed(earlier, {**shipped, "filters.dynamic": True})
    assert has_changed(shipped, {**shipped, "steps": shipped["steps"] + 1})
    assert has_changed({**shipped, "key.of.yore": 1}, shipped)


def test_a_picture_has_a_panel_for_each_task_and_the_digest_of_its_figures(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    pages = scripts["learning_tables"].Pages(results(lake=entry(), sums=entry()), {})
    pages.draw(["lake", "sums"], tmp_path / "all.png")
    assert pages.digest.encode() in (tmp_path / "all.png").read_bytes()


# ---- runs ------------------------------------------------------------------------------------------------


def _campaign(scripts: dict[str, ModuleType], tmp_path: Path, program: str, **changes: Any) -> Any:
    (tmp_path / "program.py").write_text(program)
    command = (str(tmp_path / "program.py"), "{output}", "{seed}")
    block = scripts["learning_blocks"].Block(
        name="own", category="own", command=command, files=(str(tmp_path / "program.py"),)
    )
    given = {"seeds": [100, 101], "root": tmp_path / "root", "split": "validation", "limit_s": 600.0}
    return scripts["learning"].Campaign(blocks=[block], source="v1", **{**given, **changes})


COUNTING = """
import pathlib, sys
place = pathlib.Path(sys.argv[1]); place.mkdir(exist_ok=True)
with (place / "starts").open("a") as file:
    file.write(sys.argv[2] + "\\n")
"""


def test_a_finished_run_is_not_repeated_and_another_version_or_configuration_is_another_run(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    campaign = _campaign(scripts, tmp_path, COUNTING)
    assert campaign.run_all()
    assert campaign.run_all()
    starts = sorted(path.read_text() for path in tmp_path.rglob("starts"))
    assert starts == ["100\n", "101\n"]
    campaign.source = "v2"
    assert campaign.run_all()
    assert _campaign(scripts, tmp_path, COUNTING + "# changed\n").run_all()
    assert len(list(tmp_path.rglob("starts"))) == 6


def test_a_run_that_has_no_time_left_is_stopped_and_goes_on_in_its_place(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    go_on = tmp_path / "go_on"
    slow = f"{COUNTING}import time\nwhile not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.01)\n"
    campaign = _campaign(scripts, tmp_path, slow, seeds=[1], limit_s=0.5)
    assert not campaign.run_all()
    campaign.limit_s = 600.0
    go_on.touch()
    (spent,) = tmp_path.rglob("spent_cpu_s.json")
    assert json.loads(spent.read_text()) > 0.0
    spent.write_text("100.0")
    assert campaign.run_all()
    (starts,) = tmp_path.rglob("starts")
    assert set(starts.read_text().splitlines()) == {"1"}
    (about,) = tmp_path.rglob("about.json")
    assert json.loads(about.read_text())["cpu_s"] >= 100.0, "the part that was stopped counts"


def test_a_run_that_fails_is_kept_with_its_last_words(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    program = "if __name__ == '__main__':\n    raise SystemExit('the lake is dry')\n"
    campaign = _campaign(scripts, tmp_path, program, seeds=[100])
    assert campaign.run_all()
    found = campaign.entry(campaign.blocks[0])
    assert found["runs"] == [{"seed": 100, "failed": "the lake is dry"}]
    assert scripts["learning_floors"].missed(found) == ["0 of 1 runs finished"]


@pytest.mark.slow
def test_a_real_block_is_trained_measured_and_told_what_it_misses(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    options = [
        "--task",
        "countdown",
        "--seeds",
        "100",
        "--split",
        "validation",
        "--root",
        str(tmp_path),
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "learning.py"), *options], capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr[-2_000:]
    found = json.loads(done.stdout)["tasks"]["countdown"]
    assert found["runs"][0]["curve"]
    assert found["parameters"] > 100_000
    assert found["runs"][0]["peak_mib"] > 100.0
