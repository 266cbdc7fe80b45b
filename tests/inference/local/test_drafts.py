"""Tokens guessed ahead: the answers are those of an engine that guesses nothing."""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rllm.inference.client import TokenPiece
from rllm.inference.local.client import LocalClient
from rllm.inference.local.drafts import NGRAM, lookup_drafts
from rllm.inference.local.engine import EngineCounts
from rllm.models.directory import LoadedModel
from rllm.types import SamplingParams
from rllm.types.images import PATCH_IDS_FROM
from rllm.types.messages import ModelOutput

MAX_CONTEXT = 256


async def talk(
    model: LoadedModel, turns: Sequence[tuple[list[int], SamplingParams]], *, num_drafts: int, **options: Any
) -> tuple[list[ModelOutput], list[str], EngineCounts]:
    """One conversation, its streamed text, and what the engine counted."""
    client = LocalClient(model, max_context=MAX_CONTEXT, num_drafts=num_drafts, **options)
    outputs: list[ModelOutput] = []
    texts: list[str] = []
    try:
        async with asyncio.timeout(60), client.session(("talk", 0)) as session:
            ids: list[int] = []
            for new_ids, sampling in turns:
                ids = [*ids, *new_ids]
                if len(ids) >= MAX_CONTEXT:
                    break
                pieces: list[TokenPiece] = []
                output = await session.respond_to_ids(ids, sampling, pieces.append)
                outputs.append(output)
                texts.append("".join(piece.text for piece in pieces))
                ids += output.completion_ids
        return outputs, texts, client.engine.counts
    finally:
        await client.close()


def require_same(mine: ModelOutput, other: ModelOutput) -> None:
    assert mine.completion_ids == other.completion_ids
    assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert mine.finish_reason == other.finish_reason
    assert mine.policy_versions == other.policy_versions


def test_the_shortest_context_in_which_anything_can_repeat() -> None:
    assert lookup_drafts([7] * NGRAM, 2) == []
    assert lookup_drafts([7] * (NGRAM + 1), 0) == []
    assert lookup_drafts([7] * (NGRAM + 1), 1) == [7]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    num_new=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    num_sampled=st.integers(1, 70),
    num_drafts=st.sampled_from([1, 2, 5, 40]),
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    words=st.sampled_from([2, 40]),
    little_room=st.booleans(),
    lockstep=st.booleans(),
)
def test_the_answers_are_those_without_guesses(
    endless: LoadedModel,
    seed: int,
    num_new: list[int],
    num_sampled: int,
    num_drafts: int,
    temperature: float,
    words: int,
    little_room: bool,
    lockstep: bool,
) -> None:
    draws = Random(seed)
    sampling = SamplingParams(max_tokens=num_sampled, seed=seed, temperature=temperature, top_logprobs=2)
    turns = [([draws.randrange(3, 3 + words) for _ in range(count)], sampling) for count in num_new]
    options = {"cache_tokens": MAX_CONTEXT if little_room else 0, "lockstep": lockstep}
    expected, texts, _ = asyncio.run(talk(endless, turns, num_drafts=0))
    outputs, own_texts, counts = asyncio.run(talk(endless, turns, num_drafts=num_drafts, **options))
    assert own_texts == texts
    for mine, other in zip(outputs, expected, strict=True):
        require_same(mine, other)
    assert counts.sampled_tokens == sum(len(each.completion_ids) for each in outputs)
    assert counts.accepted_drafts <= counts.drafted_tokens


async def test_an_answer_that_repeats_itself_takes_fewer_steps(endless: LoadedModel) -> None:
    """Without chance a small model falls into a circle."""
    turns = [([5, 6, 7], SamplingParams(max_tokens=200, temperature=0.0))]
    (expected,), _, plain = await talk(endless, turns, num_drafts=0)
    (output,), _, counts = await talk(endless, turns, num_drafts=8)
    require_same(output, expected)
    assert counts.sampled_tokens == plain.sampled_tokens == 200
    assert counts.accepted_drafts > 100
    assert counts.steps == 200 - counts.accepted_drafts


@pytest.mark.parametrize("sampling", [{"stop": ("a",)}, {"grammar": "start: /(ab ){3,40}/"}])
async def test_texts_that_stop_and_grammars_are_followed(
    endless: LoadedModel, sampling: dict[str, Any]
) -> None:
    turns = [([9, 8, 7] * 6, SamplingParams(max_tokens=80, temperature=0.5, seed=3, **sampling))] * 2
    expected, texts, _ = await talk(endless, turns, num_drafts=0)
    outputs, own_texts, _ = await talk(endless, turns, num_drafts=6)
    assert own_texts == texts
    for mine, other in zip(outputs, expected, strict=True):
        require_same(mine, other)


def test_what_followed_the_latest_time_is_guessed() -> None:
    last = [1, 2, 3]
    assert len(last) == NGRAM
    assert lookup_drafts([*last, 4, 5, *last, 6, 7, 8, *last], 2) == [6, 7]
    assert lookup_drafts([*last, 6, *last], 6) == [6, *last, 6, 1]
    assert lookup_drafts([1, 1, 1, 1], 4) == [1, 1, 1, 1]
    assert lookup_drafts([0, *last, PATCH_IDS_FROM, 4, *last], 2) == []
    for nothing in ([], last, [2, 3, 9, *last]):
        assert lookup_drafts(nothing, 4) == []
    assert lookup_drafts([*last, *last], 0) == []
