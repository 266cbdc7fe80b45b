"""What becomes of an answer of verl's servers; needs no verl, whose `TokenOutput` has these fields."""

from types import SimpleNamespace
from typing import Any

import pytest

from rllm.errors import InferenceError
from rllm.integrations.verl.client import VerlClient
from rllm.models.builtin import create_model
from rllm.models.directory import describe_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.types.messages import FinishReason, SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    create_model(directory, "tiny")
    return describe_model(directory, model=None).tokenizer


class Servers:
    """Gives one answer, whatever it is asked."""

    def __init__(self, ids: list[int], stop_reason: str) -> None:
        self.answer = SimpleNamespace(
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            stop_reason=stop_reason,
            extra_fields={"global_steps": 3},
        )

    async def generate(self, request_id: str, **options: Any) -> SimpleNamespace:
        return self.answer


async def finish_reason_of(
    tokenizer: HuggingFaceTokenizer, ids: list[int], stop_reason: str
) -> FinishReason | None:
    assert tokenizer.end_token_id is not None
    client = VerlClient(
        Servers(ids, stop_reason),
        ChatRenderer(tokenizer),
        {},
        max_context=64,
        end_token_ids=(tokenizer.end_token_id,),
    )
    return (await client.generate_ids([5, 6], SamplingParams(max_tokens=3))).finish_reason


async def test_an_answer_that_ends_with_its_last_token_was_not_cut(tokenizer: HuggingFaceTokenizer) -> None:
    end = tokenizer.end_token_id
    assert end is not None
    assert await finish_reason_of(tokenizer, [7, 8, end], "completed") is FinishReason.STOP
    assert await finish_reason_of(tokenizer, [7, 8, 9], "completed") is FinishReason.LENGTH
    assert await finish_reason_of(tokenizer, [7, end], "completed") is FinishReason.STOP


@pytest.mark.parametrize("ids", [[7, 8], []])
async def test_an_answer_that_was_broken_off_is_never_trained_on(
    tokenizer: HuggingFaceTokenizer, ids: list[int]
) -> None:
    with pytest.raises(InferenceError, match=rf"{len(ids)} tokens \(aborted\)"):
        await finish_reason_of(tokenizer, ids, "aborted")
