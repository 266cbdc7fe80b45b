import copy
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.config.optimizer import OptimizerConfig
from rllm.distributed import ALONE, RankGroup
from rllm.models.builtin import create_model
from rllm.models.decoder import Decoder, DecoderShape
from rllm.models.directory import LoadedModel, load_model
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.sample import NOT_SAMPLED, TrainingSample

VOCABULARY = 40


@pytest.fixture(scope="session")
def letters() -> ModuleType:
    """The tiny world of letter_game.py, the same that the killed processes play."""
    return _beside("letter_game")


@pytest.fixture(scope="session")
def finished(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of `letters`, to be read only."""
    run = tmp_path_factory.mktemp("runs") / "run"
    letters.make_trainer(run).train()
    return run


@pytest.fixture(scope="session")
def chats() -> ModuleType:
    """The run of sft_game.py, the same that the killed processes train."""
    return _beside("sft_game")


@pytest.fixture(scope="session")
def preferences() -> ModuleType:
    """The run of dpo_game.py, the same that the killed processes train."""
    return _beside("dpo_game")


def _beside(name: str) -> ModuleType:
    """A game of this directory, imported as killing.py imports it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        return import_module(name)


@pytest.fixture(scope="session")
def ask() -> Iterator[Callable[..., dict[str, Any]]]:
    """Let a process train a run of a game, perhaps to its death; returns how it ended. What may be asked:
    killing.py."""
    with _nursery() as ask:
        yield ask


@pytest.fixture(scope="session")
def ask_elsewhere() -> Callable[..., AbstractContextManager[Callable[..., dict[str, Any]]]]:
    """The same of a process with another environment, or in another working directory."""
    return _nursery


@contextmanager
def _nursery(cwd: Path | None = None, **environment: str) -> Iterator[Callable[..., dict[str, Any]]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "killing.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **environment},
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    assert stdout.readline() == "ready\n"

    def request(run: Path, *, game: str = "letters", **fate: Any) -> dict[str, Any]:
        stdin.write(json.dumps({"run": str(run), "game": game, **fate}) + "\n")
        stdin.flush()
        ended = json.loads(stdout.readline())
        assert not ended.get("code"), "the run failed; its traceback is on stderr"
        assert "error" not in ended or "errno" in fate, ended["message"]
        return ended

    try:
        yield request
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def decoder() -> Callable[..., Decoder]:
    """A decoder under 10k parameters, random; `num_kv_heads` below 4 shares keys between heads."""

    def make(num_kv_heads: int = 4, seed: int = 0, **changes: Any) -> Decoder:
        shape = DecoderShape(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": num_kv_heads,
                "head_dim": 6,
                "norm_eps": 1e-6,
                "rope_theta": 10_000.0,
                "max_positions": 128,
                "tied": True,
                "qkv_bias": False,
                "out_bias": False,
                "qk_norm": False,
                **changes,
            }
        )
        model = Decoder(shape)
        model.initialize(torch.Generator().manual_seed(seed))
        return model

    return make


@pytest.fixture
def backend() -> Callable[..., TorchBackend]:
    """A learner on a model; keywords are keys of `[optimizer]`, or arguments of the backend."""
    keys = {each.name for each in fields(OptimizerConfig)}

    def make(model: Any, **changes: Any) -> TorchBackend:
        config = OptimizerConfig(**{key: value for key, value in changes.items() if key in keys})
        others = {key: value for key, value in changes.items() if key not in keys}
        return TorchBackend(model, **{"publish": lambda version: None, "config": config, **others})

    return make


@pytest.fixture
def sample() -> Callable[..., TrainingSample]:
    """A row of random tokens: `pattern` has a letter for each, `s` where it was sampled."""

    def make(
        pattern: str,
        *,
        seed: int = 0,
        task: str = "t",
        attempt: int = 0,
        advantage: float = 1.0,
        prefix: Sequence[int] = (),
        temperature: float = 1.0,
    ) -> TrainingSample:
        rng = np.random.default_rng(seed)
        size = len(pattern)
        token_ids = rng.integers(VOCABULARY, size=size)
        token_ids[: len(prefix)] = prefix
        sampled_T = np.array([letter == "s" for letter in pattern])
        return TrainingSample(
            token_ids_T=token_ids,
            policy_versions_T=np.where(sampled_T, 0, NOT_SAMPLED),
            logprobs_T=np.where(sampled_T, rng.normal(-3.7, 0.1, size), 0.0).astype(np.float32),
            advantages_T=np.where(sampled_T, advantage, 0.0).astype(np.float32),
            group_key=(task, "agent"),
            order_key=(task, attempt, 0, 0),
            temperature=temperature,
        )

    return make


@pytest.fixture
def group(sample: Callable[..., TrainingSample]) -> Callable[..., list[TrainingSample]]:
    """Attempts at one task: a common prompt of `num_prompt` tokens, one pattern for what follows in each."""

    def make(task: str, num_prompt: int, patterns: Sequence[str], seed: int = 0) -> list[TrainingSample]:
        rng = np.random.default_rng((seed, num_prompt))
        prompt = rng.integers(VOCABULARY, size=num_prompt)
        return [
            sample(
                "p" * num_prompt + pattern,
                seed=1000 * seed + attempt,
                task=task,
                attempt=attempt,
                prefix=prompt.tolist(),
                advantage=float(rng.choice([-1.0, -0.3, 0.4, 1.7])),
            )
            for attempt, pattern in enumerate(patterns)
        ]

    return make


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over one row, written out."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


@pytest.fixture
def plain_logprobs() -> Callable[[Any, TrainingSample], Tensor]:
    """[T] log-probability of every token but the first, from one forward pass over the row alone."""

    def logprobs(model: Any, sample: TrainingSample) -> Tensor:
        tokens = torch.from_numpy(sample.token_ids_T)
        hidden = model.hidden(tokens, torch.arange(len(tokens)), _attend)
        temperature = float(
            np.float32(sample.temperature)
        )  # the precision that sampler and trainer have it in
        scaled = (model.logits(hidden) / temperature).log_softmax(-1)
        own = scaled[:-1].gather(1, tokens[1:].unsqueeze(1)).squeeze(1)
        return torch.cat((own.new_zeros(1), own))

    return logprobs


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in tiny model, to be read only."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    create_model(directory, "tiny", seed=0)
    return directory


@pytest.fixture
def tiny(tiny_directory: Path) -> LoadedModel:
    """A fresh copy of it in memory."""
    return load_model(tiny_directory)


@pytest.fixture
def batch(
    group: Callable[..., list[TrainingSample]], sample: Callable[..., TrainingSample]
) -> list[TrainingSample]:
    """Shared prompts of several lengths, ragged rows, rows of one token, lonely rows, no shared prefix."""
    return [
        *group("long", 23, ["ss", "soos", "s", "sssosooo", "ossss"], seed=1),
        *group("short", 2, ["sos", "s", "oos"], seed=2),
        *group("one token", 1, ["s", "sss"], seed=3),
        sample("ppppsoss", task="alone", seed=4),
        sample("ps", task="least", seed=5, advantage=-2.0),
        *(sample("ppsos", task="nothing shared", attempt=index, seed=60 + index) for index in range(3)),
        sample("pppp", task="nothing sampled", seed=7),
        sample("pppss", task="hot", seed=8, temperature=1.3),
        sample("pppss", task="cold", seed=9, temperature=0.6, advantage=-1.0),
    ]


class _ThreadRanks(RankGroup):
    """Ranks that are threads of one process, so that a test sees what each of them computes."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier, tensor_size: int) -> None:
        self.rank, self.size, self.tensor_size = rank, len(slots), tensor_size
        self._slots, self._barrier = slots, barrier

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self.wait()
        values = copy.deepcopy(self._slots)  # as what another process sends is
        self.wait()
        return values

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        return self.gather(tensor)

    def sum_in_place(self, tensors: Sequence[Tensor]) -> None:
        of_ranks = self.gather(list(tensors))
        for place, each in enumerate(tensors):
            each.copy_(sum(theirs[place] for theirs in of_ranks))

    def wait(self) -> None:
        self._barrier.wait(30.0)

    def with_same_part(self) -> RankGroup:
        return self if self.tensor_size == 1 else ALONE


@pytest.fixture
def on_two_ranks() -> Callable[..., list[Any]]:
    """What `work` gives on each of two ranks."""

    def run(work: Callable[[RankGroup], Any], tensor_size: int = 1) -> list[Any]:
        slots, barrier = [None, None], threading.Barrier(2)
        with ThreadPoolExecutor(2) as pool:
            return list(
                pool.map(lambda rank: work(_ThreadRanks(rank, slots, barrier, tensor_size)), range(2))
            )

    return run
