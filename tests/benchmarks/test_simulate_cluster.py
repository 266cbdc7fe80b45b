"""docs/scale.md has what the simulation says, of runs and of machines that nobody had."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from cluster_events import Service
from simulate_cluster import (
    ASSUMPTIONS,
    MARK,
    PAGE,
    RESULTS,
    SHAPES,
    SOURCES,
    comparison,
    counts_of,
    fitted,
    non_negative,
    page_text,
)


def test_the_page_compares_with_the_runs_that_were_measured() -> None:
    marked = MARK.search(PAGE.read_text())
    assert marked is not None
    found = comparison(json.loads(RESULTS.read_text())["runs"])
    compared = page_text(found, []).partition("**Extrapolated**")[0]
    assert compared in marked[0]
    rows = [
        line for line in marked[0].splitlines() if line.startswith(("| 8 | e", "| 64 | e", "| 1,024 | e"))
    ]
    assert len(rows) == 6
    assert all("extrapolated" in row for row in rows)
    assert all(each in marked[0] for each in ASSUMPTIONS)
    assert all(each.where.startswith("https://") and each.where in marked[0] for each in SOURCES)


def test_the_fit_finds_the_seconds_that_made_the_runs() -> None:
    truth = Service(
        decode_fixed_s=2e-3,
        decode_row_s=3e-5,
        decode_context_s=1e-7,
        prefill_token_s=2e-5,
        turn_s=5e-4,
        update_token_s=4e-5,
        update_fixed_s=0.02,
    )
    seconds_of = {
        "sampler": (truth.decode_fixed_s, truth.decode_row_s, truth.decode_context_s, truth.prefill_token_s),
        "learner": (truth.update_token_s, truth.update_fixed_s),
        "other": (truth.turn_s, 0.0),
    }
    runs = [
        {
            "work": {field.name: getattr(work, field.name) for field in fields(work)},
            "seconds": {
                thread: float(np.dot(counts, seconds_of[thread]))
                for thread, counts in counts_of(work).items()
            },
        }
        for work in SHAPES
    ]
    found = fitted(runs)
    for field in fields(truth):
        expected = getattr(truth, field.name)
        assert getattr(found, field.name) == pytest.approx(expected, rel=1e-4, abs=1e-9), field.name


def test_a_fit_takes_nothing_below_zero() -> None:
    matrix = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert non_negative(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([0.0, 2.0])
