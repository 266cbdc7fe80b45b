"""What a forward and backward pass holds at the same time, counted in bytes of every tensor that is made."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rllm.algorithms.losses import PolicyLoss
from rllm.trainer.backends.logprobs import (
    Entropy,
    TeacherComparison,
    compared_logprobs,
    selected_logprobs,
    tokens_at_once,
)
from rllm.trainer.backends.torch_measure import measure_rows
from rllm.trainer.backends.torch_optimizer import HALF, MasterWeights
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside and are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage()._cdata not in inputs | self._seen:
                storage = each.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self._seen.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, key, size)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


class Head(torch.nn.Module):
    """An output layer alone."""

    def __init__(
        self, vocabulary: int, width: int, dtype: torch.dtype = torch.float32, *, is_plain: bool = True
    ) -> None:
        super().__init__()
        generator = None if torch.get_default_device().type == "meta" else torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(vocabulary, width, generator=generator, dtype=dtype))
        self.vocab_size = vocabulary
        self.output_weight = self.weight if is_plain else None

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        return hidden_N_D @ self.weight.t()


def _inputs(num: int, vocabulary: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = None if torch.get_default_device().type == "meta" else torch.Generator().manual_seed(1)
    hidden_M_D = torch.randn(num, width, generator=generator, dtype=dtype).requires_grad_()
    targets_M = torch.randint(vocabulary, (num,), generator=generator)
    return hidden_M_D, targets_M, 0.5 + torch.rand(num, generator=generator, dtype=dtype)


@pytest.mark.parametrize("entropy", list(Entropy))
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 30])
@pytest.mark.parametrize("is_plain", [True, False])
def test_chunks_give_log_probabilities_entropies_and_gradients_of_the_whole(
    chunk: int, hot: bool, entropy: Entropy, is_plain: bool
) -> None:
    found: list[list[Tensor]] = []
    for size in (chunk, 31):
        head = Head(13, 5, torch.float64, is_plain=is_plain)
        hidden_M_D, targets_M, temperature_M = _inputs(31, 13, 5, torch.float64)
        logprobs_M, entropy_M = selected_logprobs(
            head, hidden_M_D, targets_M, temperature_M if hot else None, chunk=size, entropy=entropy
        )
        total = (logprobs_M * torch.linspace(-1, 2, 31)).sum()
        outputs = [logprobs_M]
        if entropy_M is not None:
            assert entropy_M.requires_grad == (entropy is Entropy.WITH_GRADIENT)
            total = total + (entropy_M * torch.linspace(3, -1, 31)).sum()
            outputs.append(entropy_M)
        total.backward()
        assert hidden_M_D.grad is not None
        assert head.weight.grad is not None
        assert (entropy_M is not None) == (entropy is not Entropy.NONE)
        found.append([*(each.detach() for each in outputs), hidden_M_D.grad, head.weight.grad])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-12


@pytest.mark.parametrize("entropy", list(Entropy))
def test_memory_grows_with_the_chunk_and_not_with_tokens_times_vocabulary(entropy: Entropy) -> None:
    vocabulary, width, chunk = 4000, 4, 16
    one_chunk = chunk * vocabulary * 4

    def peak(num: int, size: int) -> int:
        head = Head(vocabulary, width)
        hidden_M_D, targets_M, temperature_M = _inputs(num, vocabulary, width, torch.float32)
        with LiveBytes() as bytes_of:
            logprobs_M, entropy_M = selected_logprobs(
                head, hidden_M_D, targets_M, temperature_M, chunk=size, entropy=entropy
            )
            total = logprobs_M.sum() if entropy_M is None else logprobs_M.sum() + entropy_M.sum()
            total.backward()
        return bytes_of.peak

    assert peak(256, 256) > 2 * 256 * vocabulary * 4  # the counter does see logits
    assert peak(256, chunk) < 7 * one_chunk
    assert peak(1024, chunk) < 7 * one_chunk


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("compared", "entropy"),
    [
        ("", Entropy.NONE),
        ("", Entropy.WITH_GRADIENT),
        ("forward_kl", Entropy.NONE),
        ("jsd", Entropy.WITH_GRADIENT),
    ],
)
@pytest.mark.parametrize("num", [4_096, pytest.param(32_768, marks=pytest.mark.slow)])
def test_a_loss_at_152_thousand_words_takes_a_gibibyte_at_most(
    num: int, entropy: Entropy, compared: str, dtype: torch.dtype
) -> None:
    """Beyond states and weights; the gradients of both are counted. On the device `meta`, where tensors have
    sizes and no numbers; benchmarks/logits.py measures the same in memory."""
    vocabulary, width = 151_936, 896  # of Qwen2.5-0.5B
    with torch.device("meta"):
        head, teacher = (Head(vocabulary, width, dtype) for _ in range(2))
        hidden_M_D, targets_M, temperature_M = _inputs(num, vocabulary, width, dtype)
        teacher_M_D, _, _ = _inputs(num, vocabulary, width, dtype)
        if dtype in HALF:
            MasterWeights({"weight": head.weight})
    chunk = tokens_at_once(head, 512.0 / (2 if compared else 1))
    with LiveBytes() as bytes_of:
        if compared:
            comparison = TeacherComparison(
                teacher=teacher, states_M_D=teacher_M_D.detach(), kind=compared, beta=0.5
            )
            columns = compared_logprobs(
                head, hidden_M_D, targets_M, temperature_M, comparison, chunk=chunk, entropy=entropy
            )
        else:
            columns = selected_logprobs(
                head, hidden_M_D, targets_M, temperature_M, chunk=chunk, entropy=entropy
            )
        sum(column.sum() for column in columns if column is not None).backward()
    assert bytes_of.peak <= 2**30


@pytest.mark.parametrize("plan", [{"logits_mb": 0.002}, {"gradient_checkpointing": True}], ids=str)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_an_update_that_saves_memory_is_the_same_update(
    decoder: Make, backend: Make, batch: list[TrainingSample], plan: dict[str, Any], entropy_coef: float
) -> None:
    learned: list[tuple[float, dict[str, Tensor]]] = []
    for changes in ({}, plan):
        model = decoder(2, qk_norm=True).double()
        loss = PolicyLoss(entropy_coef=entropy_coef)
        metrics = backend(model, max_grad_norm=1e12, **changes).update(batch, loss, 0.0)
        learned.append((metrics["loss"], {name: each.grad for name, each in model.named_parameters()}))
    (loss, grads), (other_loss, other_grads) = learned
    assert other_loss == pytest.approx(loss, abs=1e-12)
    assert max(float((grads[name] - other_grads[name]).abs().max()) for name in grads) <= 1e-12


def test_recomputed_layers_are_not_held(decoder: Make, backend: Make, group: Make) -> None:
    rows = group("t", 30, ["s" * 40] * 4)

    def peak(**changes: Any) -> int:
        learner = backend(decoder(num_layers=8, vocab_size=64, hidden_size=32), **changes)
        with LiveBytes() as bytes_of:
            learner.update(rows, PolicyLoss(), 0.0)
        return bytes_of.peak

    assert peak(gradient_checkpointing=True) < 0.5 * peak()


def test_all_that_makes_logits_of_rows_keeps_to_the_megabytes(
    decoder: Make, backend: Make, group: Make
) -> None:
    """An update, scoring and measuring, with a vocabulary that is all there is to memory."""
    rows = group("t", 4, ["s" * 100] * 4)
    vocabulary = 2_000

    def peaks(logits_mb: float) -> list[int]:
        model = decoder(vocab_size=vocabulary)
        learner = backend(model, logits_mb=logits_mb)
        acts = (
            lambda: learner.update(rows, PolicyLoss(), 0.0),
            lambda: learner.score(rows),
            lambda: measure_rows(model, rows, micro_batch_tokens=16_384, logits_mb=logits_mb),
        )
        found: list[int] = []
        for act in acts:
            with LiveBytes() as bytes_of:
                act()
            found.append(bytes_of.peak)
        return found

    for little, much in zip(peaks(0.5), peaks(512.0), strict=True):
        assert much > 400 * vocabulary * 4
        assert little < 0.3 * much
