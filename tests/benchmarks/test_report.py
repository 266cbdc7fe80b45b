"""Tables of documents are those of the files in benchmarks/results."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
UPDATE = {
    "gradients": 1e6,
    "optimizer": 2e6,
    "activations": 3e6,
    "predicted": 6e6,
    "measured": 5e6,
    "error": 0.2,
}


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("report")
    sys.path.remove(str(BENCHMARKS))


def test_every_document_has_what_the_files_say(report: ModuleType) -> None:
    stale = [
        page.name for page in report.documents() if report.rewritten(page.read_text()) != page.read_text()
    ]
    assert stale == [], "run `make bench-report`"
    marks = {mark for page in report.documents() for _, mark, _, _ in report.MARK.findall(page.read_text())}
    assert marks == report.TABLES.keys()


def test_machines_have_a_table_each_that_names_them(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = importlib.import_module("bench_results")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for processor, figures in (("Large 9", {"5m": UPDATE}), ("Small 1", {"5m": UPDATE, "20m": UPDATE})):
        monkeypatch.setattr(results, "processor_name", lambda device, name=processor: name)
        for name, row in figures.items():
            results.keep("memory", {name: row})
    assert len(list(tmp_path.glob("memory-*.json"))) == 2
    text = "before\n<!-- bench:begin memory -->\nold\n<!-- bench:end -->\nafter\n"
    drawn = report.rewritten(text, tmp_path)
    assert drawn.startswith("before\n")
    assert drawn.endswith("after\n")
    assert "old" not in drawn
    large, small = drawn.split("Large 9, ")
    assert large.count("| 5m | 1 | 2 | 3 | 6 | 5 | +20.0% |") == 1
    assert small.count("+20.0%") == 2
    assert "Small 1, " in small
    assert report.rewritten(drawn, tmp_path) == drawn


def test_what_nobody_measured_says_so_and_an_unknown_mark_is_an_error(
    report: ModuleType, tmp_path: Path
) -> None:
    text = "<!-- bench:begin logits -->\n<!-- bench:end -->"
    assert report.NOT_MEASURED in report.rewritten(text, tmp_path)
    (tmp_path / "logits-other.json").write_text(json.dumps({"script": "another"}))
    assert report.NOT_MEASURED in report.rewritten(text, tmp_path)
    with pytest.raises(KeyError):
        report.rewritten("<!-- bench:begin speed -->\n<!-- bench:end -->", tmp_path)
