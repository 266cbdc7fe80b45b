"""The floating-point operations that an update reports are those that torch counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rllm.algorithms.losses import ImitationLoss, PolicyLoss
from rllm.algorithms.surrogates import WholeVocabulary
from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.models.batching import WeightedRow, micro_batches
from rllm.models.directory import LoadedModel
from rllm.models.lora import with_adapter
from rllm.trainer.backends.critic import CriticBackend
from rllm.trainer.backends.torch_distilling import DistillingBackend
from rllm.types.sample import TrainingSample

Make = Callable[..., Any]
ANSWER = "s" * 24


@pytest.fixture
def apart(sample: Make) -> list[TrainingSample]:
    """Rows of one length that share nothing."""
    return [sample("p" * 8 + ANSWER, seed=seed, task=f"t{seed}") for seed in range(6)]


@pytest.fixture
def together(group: Make) -> list[TrainingSample]:
    """Attempts at two tasks, behind long prompts."""
    return [*group("a", 64, [ANSWER] * 4), *group("b", 64, [ANSWER] * 4, seed=1)]


def counted(backend: Any, rows: Sequence[TrainingSample], loss: Any = None) -> tuple[int, int]:
    """Operations that a first update reports, and those that torch counts. The kernel for attention is the
    one whose products torch sees one by one."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        backend.update(rows, loss or ImitationLoss(), 1e-4)
    return backend.work.flops, counter.get_total_flops()


def test_all_weights_of_rows_apart(decoder: Make, backend: Make, apart: list[TrainingSample]) -> None:
    mine, torch_s = counted(backend(decoder(2)), apart)
    assert mine == pytest.approx(torch_s, rel=1e-3)


def test_a_shared_prompt_counts_once(decoder: Make, backend: Make, together: list[TrainingSample]) -> None:
    mine, torch_s = counted(backend(decoder(2)), together)
    alone, torch_alone = counted(backend(decoder(2), share_prefixes=False), together)
    assert mine == pytest.approx(torch_s, rel=0.02)
    assert alone == pytest.approx(torch_alone, rel=0.02)
    assert mine < 0.6 * alone


@pytest.mark.parametrize(
    "targets",
    [[], ["q_proj", "v_proj"], ["o_proj"], ["down_proj"], ["gate_proj", "up_proj"], ["k_proj", "down_proj"]],
    ids=str,
)
def test_beside_an_adapter_weights_have_no_gradient(
    tiny: LoadedModel, backend: Make, apart: list[TrainingSample], targets: list[str]
) -> None:
    adapted = with_adapter(tiny, LoraConfig(rank=4, targets=targets), seed=0)
    mine, torch_s = counted(backend(adapted.model), apart)
    assert mine == pytest.approx(torch_s, rel=1e-3)


def test_what_is_computed_again_counts_once(
    decoder: Make, backend: Make, together: list[TrainingSample]
) -> None:
    plain, _ = counted(backend(decoder(2)), together)
    config = OptimizerConfig(gradient_checkpointing=True, logits_mb=0.02)
    again, torch_s = counted(backend(decoder(2), config=config), together)
    assert again == plain
    assert torch_s > 1.1 * plain


def test_rows_without_a_gradient_count_nothing(
    decoder: Make, backend: Make, apart: list[TrainingSample]
) -> None:
    tied = [replace(each, advantages_T=0.0 * each.advantages_T) for each in apart[:3]]
    mine, torch_s = counted(backend(decoder(2)), [*tied, *apart[3:]], PolicyLoss())
    half, _ = counted(backend(decoder(2)), apart[3:], PolicyLoss())
    assert mine == half == pytest.approx(torch_s, rel=1e-3)


def test_a_critic_computes_no_logits(decoder: Make, apart: list[TrainingSample]) -> None:
    class OfValues(ImitationLoss):
        def terms(self, tokens: Any) -> torch.Tensor:
            return tokens.new_values_M

    critic = CriticBackend(decoder(2), config=OptimizerConfig())
    mine, torch_s = counted(critic, apart, OfValues())
    assert mine == pytest.approx(torch_s, rel=0.01)


def test_a_teacher_s_pass_counts(decoder: Make, apart: list[TrainingSample]) -> None:
    teacher = decoder(4, seed=1)
    student = DistillingBackend(decoder(2), teacher=teacher, publish=lambda version: None)
    mine, torch_s = counted(
        student, apart, PolicyLoss(surrogate=WholeVocabulary(divergence="forward_kl", beta=0.5))
    )
    of_output_layer = 6 * len(ANSWER) * 2 * 16 * teacher.vocab_size
    # Both output layers are computed once more, and torch does not count what is added up in place.
    assert torch_s + of_output_layer == pytest.approx(mine + 2 * of_output_layer, rel=1e-3)


def test_a_teacher_that_a_loss_does_not_ask_computes_nothing(
    decoder: Make, apart: list[TrainingSample]
) -> None:
    student = DistillingBackend(decoder(2), teacher=decoder(4, seed=1), publish=lambda version: None)
    mine, torch_s = counted(student, apart, ImitationLoss())
    assert mine == pytest.approx(torch_s, rel=1e-3)


def test_pairs_are_those_of_paths_without_padding(together: list[TrainingSample]) -> None:
    rows = [
        WeightedRow(index=index, sample=each, weights_T=each.trainable_T.astype(float))
        for index, each in enumerate(together)
    ]
    (batch,) = micro_batches(rows, 4096, torch.device("cpu"))
    first, others = 64 + 23, 23
    assert batch.attention.num_pairs == 2 * (first * first + 3 * others * (64 + 23))
    assert len(batch.tokens_N) == 2 * (first + 3 * others)
