"""`make learn-pretrained`: a short run of an example, its file, and the tables drawn of such files."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(BENCHMARKS))
    yield {name: importlib.import_module(name) for name in ("learn_pretrained", "pretrained_tables")}
    sys.path.remove(str(BENCHMARKS))


def shorten(example: Any) -> Any:
    example.CONFIG |= {"steps": 1, "evaluation": {"num_tasks": 4}}
    example.CONFIG["rollout"] |= {"tasks_per_step": 2, "group_size": 2}
    return example


def test_a_run_has_one_file_with_its_figures(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = scripts["learn_pretrained"]
    load = script.load_example
    monkeypatch.setattr(script, "load_example", lambda name: shorten(load(name)))
    place = tmp_path / "seed7"
    script.train_one("lights", "builtin:tiny", 7, "validation", place / "run")
    about = {"commit": "abc", "cpu_s": 1.0, "wall_s": 1.0, "peak_mib": 1.0, "date": "2026-11-29"}
    (place / "about.json").write_text(json.dumps(about))
    block = script.blocks("builtin:tiny")["lights"]
    result = script.result_of(block, place, 7, "validation")
    assert result["pass_at_8"] == {"before": 0.0, "after": 0.0}
    assert result["start"]["value"] == result["trained"]["value"] == 0.0
    assert result["steps"] == len(result["success_by_step"]) == 1
    assert 0.0 < result["different_answers"]["after"] <= 1.0
    assert 0.25 <= result["constant"] / 100 <= 1.0, "four tasks, of which one order fits one at least"
    assert set(result["kinds"]) <= {f"{count} colours" for count in range(1, 5)}
    assert str(tmp_path) not in json.dumps(result), "no path of a machine is committed"
    page = scripts["pretrained_tables"].learned_table(BENCHMARKS.parent / "docs" / "learning.md", [result])
    row = next(line for line in page.splitlines() if line.startswith("| [lights]"))
    assert [cell.strip() for cell in row.split("|")][3:5] == ["4", "7"]
    assert "(../examples/pretrained/lights.py)" in row
    assert "partial: 1 of 24 runs" in page


def test_a_run_with_an_adapter_has_a_file_and_a_table_for_itself(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, tables = scripts["learn_pretrained"], scripts["pretrained_tables"]
    load = script.load_example
    monkeypatch.setattr(script, "load_example", lambda name: shorten(load(name)))
    place = tmp_path / "seed7"
    script.train_one("lights", "builtin:tiny", 7, "validation", place / "run", "lora")
    assert list((place / "run").rglob("adapter_model.safetensors"))
    about = {"commit": "abc", "cpu_s": 1.0, "wall_s": 1.0, "peak_mib": 1.0, "date": "2026-11-29"}
    (place / "about.json").write_text(json.dumps(about))
    block = script.blocks("builtin:tiny", "lora")["lights"]
    assert block.result_name == "lights-lora"
    result = script.result_of(block, place, 7, "validation")
    (tmp_path / "lights-lora-seed7.json").write_text(json.dumps(result))
    assert tables.load_runs(tmp_path) == []
    (run,) = tables.load_runs(tmp_path, variants=True)
    row = tables.variant_table(BENCHMARKS.parent / "docs" / "learning.md", [run]).splitlines()[-1]
    assert tables.VARIANTS["lora"] in row
    assert f"| {result['settings']['optimizer.learning_rate']:g} | 7 |" in row


def test_both_sides_of_a_comparison_with_trl_have_one_row(scripts: dict[str, ModuleType]) -> None:
    ours = {"success": 0.9, "success_interval": [0.8, 0.95], "greedy": 1.0, "cpu_s": 100.0}
    theirs = {"success": 0.8, "success_interval": [0.7, 0.9], "greedy": 0.9, "cpu_s": 250.0}
    result = {"task": "sql", "seed": 60, "commit": "abc", "rllm": ours, "trl": theirs}
    row = scripts["pretrained_tables"].trl_table([result]).splitlines()[2]
    assert row == "| sql | 60 | 90 (80 to 95) (100) | 80 (70 to 90) (90) | 100 | 250 | 2.5 |"


def test_a_trial_without_training_has_a_row(scripts: dict[str, ModuleType]) -> None:
    tables = scripts["pretrained_tables"]
    trial = {"task": "sql", "setting": "as it is", "steps": 0, "before": 0.05, "cpu_s": 46}
    cells = [cell.strip() for cell in tables.screen_table([trial]).splitlines()[-1].split("|")]
    assert cells[1:7] == ["sql", "as it is", "0", "5 → -", "-", "46"]


def test_every_example_is_described(scripts: dict[str, ModuleType]) -> None:
    script = scripts["learn_pretrained"]
    assert set(scripts["pretrained_tables"].ABOUT) == set(script.blocks("any")) == set(script.CONSTANTS)


def test_a_run_that_failed_has_no_file_and_is_tried_again(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = scripts["learn_pretrained"]
    words = [
        "--task",
        "lights",
        "--seeds",
        "7",
        "--split",
        "validation",
        "--model",
        str(tmp_path / "nothing"),
    ]
    for _ in range(2):
        assert script.main([*words, "--root", str(tmp_path)]) == 1
        assert "FAILED" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_task_that_was_redesigned_has_fresh_seeds(
    scripts: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, runs = scripts["learn_pretrained"], list[tuple[str, int]]()

    def fail(campaign: Any, block: Any, seed: int, title: str, left_s: float) -> bool:
        runs.append((block.name, seed))
        place = campaign.place(block, seed)
        place.mkdir(parents=True)
        (place / "about.json").write_text(json.dumps({"failed": "not played here"}))
        return True

    monkeypatch.setattr(script.PretrainedCampaign, "run_one", fail)
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    assert script.main(["--task", "constraints", "relay", "--root", str(tmp_path)]) == 1
    pairs = zip((63, 64, 65), (60, 61, 62), strict=True)
    assert runs == [run for fresh, usual in pairs for run in (("constraints", fresh), ("relay", usual))]
