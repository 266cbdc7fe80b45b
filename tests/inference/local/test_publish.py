import asyncio
import copy
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rllm.algorithms.losses import ImitationLoss
from rllm.config.optimizer import OptimizerConfig
from rllm.errors import InferenceError
from rllm.inference.client import TokenPiece
from rllm.inference.local.client import LocalClient, LocalSession
from rllm.models.directory import LoadedModel
from rllm.trainer.backends.torch import TorchBackend
from rllm.types.messages import ModelOutput, SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]
LogprobsOf = Callable[..., Tensor]

PROMPT = list(range(40, 80))


def _update(loaded: LoadedModel, seed: int) -> None:
    """What an optimizer step does: every parameter is written in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def _logprobs(logprobs_of: LogprobsOf, loaded: LoadedModel, output: ModelOutput) -> list[float]:
    ids = output.prompt_ids + output.completion_ids
    rows = logprobs_of(loaded, ids)[len(output.prompt_ids) - 1 :]
    return rows.gather(1, torch.tensor(output.completion_ids).unsqueeze(1)).squeeze(1).tolist()


async def test_every_token_carries_the_version_that_was_published_last(
    own: LoadedModel, serve: Serve
) -> None:
    client = serve(own)
    versions = []
    for version in (0, 3, 4):
        client.publish(version)
        output = await client.generate_ids(PROMPT, SamplingParams(max_tokens=3))
        versions.append(output.policy_versions)
        assert output.weight_version == client.policy_version == version
    assert versions == [[0] * 3, [3] * 3, [4] * 3]


async def test_a_publish_waits_for_no_more_than_the_step_that_is_running(
    own: LoadedModel, serve: Serve, until: Until
) -> None:
    """A busy engine takes its own lock again at once: whoever waits for it waited for dozens of steps."""
    client = serve(own)
    waits = []
    for version in range(1, 8):
        answer = asyncio.create_task(client.generate_ids(PROMPT, SamplingParams(max_tokens=150)))
        before = client.engine.counts.sampled_tokens
        await until(lambda before=before: client.engine.counts.sampled_tokens > before + 3)
        at_call = client.engine.counts.sampled_tokens - before
        client.publish(version)
        versions = (await answer).policy_versions
        waits.append(versions.count(version - 1) - at_call)
    assert statistics.median(waits) <= 3, waits


async def test_after_a_publish_nothing_is_computed_from_the_old_weights(
    own: LoadedModel, serve: Serve, logprobs_of: LogprobsOf
) -> None:
    client = serve(own)
    async with client.session(("task", 0)) as session:
        before = await session.respond_to_ids(PROMPT, SamplingParams(max_tokens=4))
        old_score = await client.score(PROMPT, 1)
        _update(own, 1)
        client.publish(1)
        score = await client.score(PROMPT, 1)
        more = [*PROMPT, *before.completion_ids, 9, 10]
        later = await session.respond_to_ids(more, SamplingParams(max_tokens=4))
    fresh = logprobs_of(own, PROMPT).gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1).tolist()
    assert score == pytest.approx(fresh, abs=1e-5)
    assert max(abs(new - old) for new, old in zip(score, old_score, strict=True)) > 1e-2
    assert later.usage["cached_tokens"] == 0
    assert later.logprobs == pytest.approx(_logprobs(logprobs_of, own, later), abs=1e-5)


def _imitated() -> TrainingSample:
    return TrainingSample(
        token_ids_T=np.array([1, 2]),
        policy_versions_T=np.array([NOT_SAMPLED, 0]),
        logprobs_T=np.zeros(2, dtype=np.float32),
        advantages_T=np.ones(2, dtype=np.float32),
        group_key=("t", "agent"),
        order_key=("t", 0, 0, 0),
    )


@pytest.mark.parametrize(
    "way", ["in place", "optimizer", "load", "adamw of the trainer", "muon of the trainer"]
)
async def test_weights_that_change_without_a_publish_are_noticed(
    way: str, own: LoadedModel, serve: Serve
) -> None:
    client = serve(own)
    await client.generate_ids(PROMPT, SamplingParams(max_tokens=2))
    if way == "in place":
        _update(own, 1)
    elif way == "optimizer":
        optimizer = torch.optim.AdamW(own.model.parameters(), lr=1e-3)
        for parameter in own.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    elif way.endswith("of the trainer"):
        config = OptimizerConfig(name=way.split()[0])
        trainer = TorchBackend(own.model, publish=lambda version: None, config=config)
        trainer.update([_imitated()], ImitationLoss(), 1e-2)
    else:
        own.model.load_hf({name: 2 * tensor for name, tensor in own.model.state_dict_hf().items()})
    with pytest.raises(InferenceError, match="without `publish`"):
        await client.generate_ids(PROMPT, SamplingParams(max_tokens=2))
    client.publish(1)
    assert (await client.generate_ids(PROMPT, SamplingParams(max_tokens=2))).policy_versions == [1, 1]


async def _held_midway(client: LocalClient, until: Until, num_sampled: int) -> LocalSession:
    """Hold an engine in lockstep between two steps, by a session that does not ask, until that is closed."""
    await until(lambda: client.engine.counts.sampled_tokens >= num_sampled)
    silent = client.session(("silent", 0))
    client.publish(client.policy_version)  # returns when no step is running any more
    return silent


async def test_an_answer_across_a_publish_carries_both_versions_and_the_log_probabilities_of_each(
    own: LoadedModel, serve: Serve, until: Until, logprobs_of: LogprobsOf
) -> None:
    client = serve(own, lockstep=True)
    sessions = [client.session(("task", number)) for number in range(3)]
    requests = [
        asyncio.create_task(
            session.respond_to_ids(PROMPT[: 20 + 5 * number], SamplingParams(max_tokens=60, seed=number))
        )
        for number, session in enumerate(sessions)
    ]
    silent = await _held_midway(client, until, 9)
    old = copy.deepcopy(own)
    _update(own, 5)
    client.publish(1)
    silent.close()
    for request, session in zip(requests, sessions, strict=True):
        output = await request
        session.close()
        under = [_logprobs(logprobs_of, loaded, output) for loaded in (old, own)]
        assert set(output.policy_versions) == {0, 1}
        assert output.policy_versions == sorted(output.policy_versions)
        assert output.weight_version == 0
        expected = [under[version][place] for place, version in enumerate(output.policy_versions)]
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
        assert max(abs(old - new) for old, new in zip(*under, strict=True)) > 1e-2


async def test_a_request_that_is_cancelled_across_a_publish_leaves_no_old_keys_behind(
    own: LoadedModel, serve: Serve, until: Until, logprobs_of: LogprobsOf
) -> None:
    client = serve(own, lockstep=True, num_slots=1)
    session = client.session(("task", 0))
    request = asyncio.create_task(session.respond_to_ids(PROMPT, SamplingParams(max_tokens=100)))
    silent = await _held_midway(client, until, 3)
    _update(own, 5)
    client.publish(1)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await until(lambda: client.engine.counts.cancelled == 1)
    silent.close()
    again = await session.respond_to_ids(PROMPT, SamplingParams(max_tokens=8, seed=9))
    session.close()
    assert again.policy_versions == [1] * 8
    assert again.logprobs == pytest.approx(_logprobs(logprobs_of, own, again), abs=1e-5)


async def test_a_publish_does_not_wait_for_the_answers_in_flight(own: LoadedModel, serve: Serve) -> None:
    client = serve(own, max_context=256)

    def publish_at_once(piece: TokenPiece) -> None:
        if client.policy_version == 0:
            client.publish(1)

    output = await client.generate_ids([5, 6], SamplingParams(max_tokens=250), on_piece=publish_at_once)
    assert set(output.policy_versions) == {0, 1}
