"""The files of a run that several ranks work on: who of them writes what, and who waits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.config.schema import CheckpointConfig
from rllm.distributed import ALONE
from rllm.trainer.record import RunRecord


class Place:
    """A rank, and everything that a record hands to others, by name."""

    def __init__(self, *, is_writer: bool, has_whole: bool) -> None:
        self.is_writer, self.has_whole = is_writer, has_whole
        self.shard_size = 1 if has_whole else 2
        self.path, self.machines, self.checkpoints_path = Path("run"), Path("machines"), Path("checkpoints")
        self.calls: list[str] = []
        self.saved_with: list[tuple[Any, ...]] = []

    def wait(self) -> None:
        self.calls.append("wait")

    def save(self, *arguments: Any) -> None:
        self.calls.append("checkpoint")

    def save_models(self, *arguments: Any) -> None:
        self.calls.append("models")
        self.saved_with.append(arguments)

    def save_episodes(self, *arguments: Any) -> None:
        self.calls.append("episodes")

    def save_token_numbers(self, phase: str, step: int, numbers: list[Any]) -> None:
        self.calls.append("numbers")
        self.saved_with.append((phase, step, numbers))


def _calls(is_writer: bool, has_whole: bool, act: Any) -> tuple[list[str], Place]:
    place: Any = Place(is_writer=is_writer, has_whole=has_whole)
    record = RunRecord(place, place, CheckpointConfig(), ALONE)
    record._ranks = record.checkpoints = place
    act(record, place)
    return place.calls, place


@pytest.mark.parametrize(
    ("is_writer", "has_whole", "checkpoint", "at_stop", "models", "others"),
    [
        (True, True, ["checkpoint"], ["checkpoint"], ["models"], True),
        (False, True, [], [], [], False),
        (True, False, ["checkpoint"], [], ["models"], True),  # each rank writes its part
        (False, False, ["checkpoint"], [], ["models"], False),
    ],
)
def test_one_rank_writes_what_it_has_whole_and_each_its_part_of_what_it_has_not(
    is_writer: bool,
    has_whole: bool,
    checkpoint: list[str],
    at_stop: list[str],
    models: list[str],
    others: bool,
) -> None:
    def calls(act: Any) -> list[str]:
        return _calls(is_writer, has_whole, act)[0]

    assert calls(lambda record, place: record.save_checkpoint(None, {})) == [*checkpoint, "wait"]
    assert calls(lambda record, place: record.save_now(None, {})) == at_stop, (
        "nobody waits for a rank that ends"
    )
    assert calls(lambda record, place: record.save_models(place)) == [*models, "wait"]
    assert calls(lambda record, place: record.save_episodes("train", 0, [])) == ["episodes"] * others
    assert calls(lambda record, place: record.save_token_numbers("train", 0, [])) == ["numbers"] * others
    written: list[Path] = []
    assert calls(lambda record, place: record.write(written.append)) == ["wait"]
    assert written == [Path("run")] * others


def test_ranks_write_a_sharded_model_together_and_one_writes_a_whole_one_alone() -> None:
    for has_whole in (True, False):
        _, place = _calls(True, has_whole, lambda record, place: record.save_models(place))
        assert place.saved_with == [(Path("run"),) if has_whole else (Path("run"), place)]


def test_numbers_of_tokens_are_kept_as_little_endian_floats() -> None:
    numbers = [("task", 3, np.array([1.5, -2.0], dtype=np.float32))]
    _, place = _calls(True, True, lambda record, place: record.save_token_numbers("train", 7, numbers))
    ((phase, step, ((task, attempt, data),)),) = place.saved_with
    assert (phase, step, task, attempt) == ("train", 7, "task", 3)
    assert np.frombuffer(data, dtype="<f4").tolist() == [1.5, -2.0]
