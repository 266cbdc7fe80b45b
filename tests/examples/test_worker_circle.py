"""The circle of a worker: it serves, learns from that, and a better model takes over while it serves."""

import asyncio
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from rllm.contracts import read_contract

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "worker_circle"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield import_module("circle")
    finally:
        sys.path.remove(str(EXAMPLE))


def test_messages_are_drawn_once_so_that_nobody_is_asked_what_was_learned(example: ModuleType) -> None:
    drawn = example.messages(3)
    assert len({text for text, _ in drawn}) == len(drawn)
    assert len(drawn) >= example.NUM_LEARNED + example.NUM_COMPARED + example.NUM_AFTER
    assert read_contract(EXAMPLE / "route.worker.md").output_schema.properties["team"]["enum"] == list(
        example.WORDS
    )


@pytest.mark.slow
def test_success_in_service_goes_up(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    result = asyncio.run(example.circle(tmp_path / "circle"))
    assert result["before"] < 0.45
    assert result["promoted"]
    assert result["interval"][0] > 0.3
    assert result["after"] > 0.85
    contract = read_contract(tmp_path / "circle" / "route.worker.md")
    assert contract.binding.model == "better"
    assert json.loads((tmp_path / "circle" / "better" / "summary.json").read_text())
