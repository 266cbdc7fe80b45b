"""Muon in two precisions: what each is, and that a run keeps the one that it began with."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.models.directory import load_model, parameters_sha256
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.backends import torch_muon
from rllm.trainer.backends.torch_muon import Muon, faster_dtype, orthogonal_factor
from rllm.trainer.replay import replay

MUON: dict[str, Any] = {"optimizer": {"name": "muon"}}
SHAPES = [(24, 8), (8, 24), (16, 16)]


def _matrices(seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def _parameters(run: Path) -> str:
    return parameters_sha256(load_model(run / "model").model.state_dict_hf())


def test_in_bfloat16_it_is_the_one_of_torch_bit_for_bit() -> None:
    ours = [torch.nn.Parameter(each) for each in _matrices()]
    theirs = [torch.nn.Parameter(each) for each in _matrices()]
    mine = Muon(ours, weight_decay=0.1, dtype=torch.bfloat16)
    peer = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for some in (ours, theirs):
            for weight, gradient in zip(some, _matrices(step + 1), strict=True):
                weight.grad = gradient
        mine.step(0.02)
        peer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert mine.state[one].keys() == peer.state[other].keys()
        assert torch.equal(mine.state[one]["momentum_buffer"], peer.state[other]["momentum_buffer"])


def test_either_precision_sets_singular_values_to_about_one() -> None:
    for matrix in _matrices():
        whole = orthogonal_factor(matrix, torch.float32)
        rounded = orthogonal_factor(matrix, torch.bfloat16).float()
        for each in (whole, rounded):
            assert 0.5 < torch.linalg.svdvals(each).median() < 1.3
        assert torch.linalg.vector_norm(whole - rounded) < 0.05 * torch.linalg.vector_norm(whole)
        # Singular vectors stay: the product with the transpose of the input is symmetric.
        assert torch.allclose(whole @ matrix.T, (whole @ matrix.T).T, atol=1e-4)


def test_the_machine_gives_one_answer_and_an_accelerator_has_bfloat16() -> None:
    assert faster_dtype("cpu") in ("float32", "bfloat16")
    assert faster_dtype("cpu") == faster_dtype("cpu")
    assert faster_dtype("cuda") == "bfloat16"


@pytest.mark.parametrize(
    ("bfloat16_s", "faster", "num_trials"),
    [
        (0.5, "bfloat16", 5),
        (1.0, "float32", 5),
        (2.5, "float32", 5),
        (5.0, "float32", 1),
        (30.0, "float32", 1),
    ],
)
def test_the_faster_data_type_is_measured_and_one_that_is_far_slower_is_tried_once(
    monkeypatch: pytest.MonkeyPatch, bfloat16_s: float, faster: str, num_trials: int
) -> None:
    clock, dtypes = [100.0], list[torch.dtype]()

    def orthogonalized(matrix: torch.Tensor, dtype: torch.dtype) -> None:
        dtypes.append(dtype)
        clock[0] += bfloat16_s if dtype is torch.bfloat16 else 1.0

    monkeypatch.setattr(torch_muon, "orthogonal_factor", orthogonalized)
    monkeypatch.setattr(torch_muon, "time", SimpleNamespace(process_time=lambda: clock[0]))
    assert faster_dtype.__wrapped__("cpu") == faster
    assert dtypes == [torch.float32, torch.bfloat16] * num_trials


class _StopsAt:
    """A tracker that ends the process's run at a step, as a power cut would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def begin(self, phase: str) -> None: ...

    def advance(self, done: int, total: int) -> None: ...

    def log(self, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
        if (phase, step) == ("train", self._step):
            raise ConnectionError("the power is off")

    def close(self) -> None: ...


@pytest.mark.parametrize("began_with", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_the_precision_that_it_began_with(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, began_with: str
) -> None:
    other = "bfloat16" if began_with == "float32" else "float32"
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    monkeypatch.setattr(torch_muon, "faster_dtype", lambda device: began_with)
    letters.make_trainer(whole, MUON).train()
    with pytest.raises(ConnectionError):
        letters.make_trainer(stopped, MUON, tracker=_StopsAt(2)).train()
    assert RunDirectory.read(stopped).config()["optimizer"]["muon_dtype"] == began_with
    monkeypatch.setattr(torch_muon, "faster_dtype", lambda device: other)
    letters.make_trainer(stopped, MUON).train()
    assert _parameters(stopped) == _parameters(whole)
    assert [each.get("loss") for each in read_metrics(stopped / "metrics.jsonl")] == [
        each.get("loss") for each in read_metrics(whole / "metrics.jsonl")
    ]
    assert replay(letters.make_trainer(whole, MUON).run).is_identical
    with pytest.raises(ConfigError, match="muon_dtype"):
        letters.make_trainer(whole, {"optimizer": {"name": "muon", "muon_dtype": other}}).train()


def test_the_precision_matters_to_a_run(
    letters: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = set[str]()
    for dtype in ("float32", "bfloat16"):
        pinned = {"optimizer": {"name": "muon", "muon_dtype": dtype}}
        monkeypatch.setattr(
            torch_muon, "faster_dtype", lambda device: pytest.fail("nothing is to be measured")
        )
        letters.make_trainer(tmp_path / dtype, pinned).train()
        hashes.add(_parameters(tmp_path / dtype))
    assert len(hashes) == 2


def test_a_precision_without_muon_is_refused() -> None:
    with pytest.raises(ConfigError, match="muon_dtype"):
        load_config({"optimizer": {"muon_dtype": "float32"}})
