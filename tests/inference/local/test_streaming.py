import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rllm.errors import InferenceError
from rllm.inference.client import TokenClient, TokenPiece
from rllm.inference.local.client import LocalClient, _Mailbox, _Reader
from rllm.models.directory import LoadedModel
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]


def _prompt(seed: int, length: int = 6) -> list[int]:
    return torch.randint(6, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


async def _streamed(
    client: TokenClient, prompt: list[int], sampling: SamplingParams
) -> tuple[ModelOutput, list[TokenPiece]]:
    pieces: list[TokenPiece] = []
    return await client.generate_ids(prompt, sampling, on_piece=pieces.append), pieces


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_a_stream_adds_up_to_the_answer_and_is_the_answer_that_comes_without_streaming(
    temperature: float, tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    for seed in range(5):
        sampling = SamplingParams(max_tokens=60, seed=seed, temperature=temperature, top_logprobs=2)
        output, pieces = await _streamed(client, _prompt(seed), sampling)
        client.publish(0)  # what was computed for the first is not used again
        plain = await client.generate_ids(_prompt(seed), sampling)
        assert output.completion_ids == plain.completion_ids
        assert output.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        assert (output.text, output.finish_reason) == (plain.text, plain.finish_reason)
        assert "".join(piece.text for piece in pieces) == output.text
        assert [token for piece in pieces for token in piece.token_ids] == output.completion_ids
        assert [value for piece in pieces for value in piece.logprobs] == output.logprobs
        assert [each for piece in pieces for each in piece.top_logprobs] == output.top_logprobs


async def test_pieces_arrive_while_the_answer_is_being_written(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)
    loop, in_flight = asyncio.get_running_loop(), 0

    def hear(piece: TokenPiece) -> None:
        nonlocal in_flight
        assert asyncio.get_running_loop() is loop
        in_flight += client.engine.num_in_flight

    await client.generate_ids(_prompt(1), SamplingParams(max_tokens=180), on_piece=hear)
    assert in_flight > 10


async def test_a_listener_is_told_at_once_and_all_that_came_meanwhile_as_one() -> None:
    mailbox = _Mailbox(asyncio.get_running_loop())
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pieces: list[TokenPiece] = []
    reader = _Reader(answer, pieces.append)
    for texts in ("a", "bc", "d"):
        for text in texts:
            top = [[(ord(text), -1.0)]]
            mailbox.put(
                reader, TokenPiece(text=text, token_ids=[ord(text)], logprobs=[-1.0], top_logprobs=top)
            )
            mailbox.wake()
        await asyncio.sleep(0)
    mailbox.wake()
    await asyncio.sleep(0)
    assert [piece.text for piece in pieces] == ["a", "bc", "d"]
    assert [len(piece.token_ids) for piece in pieces] == [1, 2, 1]
    assert [len(piece.logprobs) for piece in pieces] == [1, 2, 1]
    assert [len(piece.top_logprobs) for piece in pieces] == [1, 2, 1]


async def test_no_piece_ends_within_a_character_and_no_special_token_is_text(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    tokenizer = endless.tokenizer
    for seed in range(8):
        output, pieces = await _streamed(client, _prompt(seed), SamplingParams(max_tokens=120, seed=seed))
        assert any(client.is_special(token) for token in range(6))
        assert "<|" not in output.text
        told: list[int] = []
        for piece in pieces[:-1]:
            assert piece.text
            told += piece.token_ids
        assert "".join(piece.text for piece in pieces[:-1]) == tokenizer.decode(told).rstrip("\ufffd")


async def test_256_streams_at_once_are_each_whole_and_their_own(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless, num_slots=64, max_context=64)
    answers = await asyncio.gather(
        *(_streamed(client, _prompt(seed), SamplingParams(max_tokens=12, seed=seed)) for seed in range(256))
    )
    for output, pieces in answers:
        assert "".join(piece.text for piece in pieces) == output.text
        assert [token for piece in pieces for token in piece.token_ids] == output.completion_ids
    for seed in range(0, 256, 37):
        client.publish(0)
        alone = await client.generate_ids(_prompt(seed), SamplingParams(max_tokens=12, seed=seed))
        assert answers[seed][0].completion_ids == alone.completion_ids
    assert client.engine.num_in_flight == 0


async def test_a_stream_whose_listener_goes_away_stops_and_frees_its_row(
    endless: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(endless, num_slots=1)
    heard: list[TokenPiece] = []
    task = asyncio.create_task(
        client.generate_ids(_prompt(1), SamplingParams(max_tokens=180), on_piece=heard.append)
    )
    await until(lambda: len(heard) >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    count = len(heard)
    output = await client.generate_ids(_prompt(2), SamplingParams(max_tokens=3))
    assert len(output.completion_ids) == 3, "the only row is free again"
    assert len(heard) == count, "nobody is told of an answer that is no longer wanted"
    assert (client.engine.counts.cancelled, client.engine.num_in_flight) == (1, 0)


async def test_a_listener_that_raises_ends_its_own_call_and_no_other(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)

    def broken(piece: TokenPiece) -> None:
        raise KeyError("mine")

    sampling = SamplingParams(max_tokens=100)
    bad, good = await asyncio.gather(
        client.generate_ids(_prompt(1), sampling, on_piece=broken),
        client.generate_ids(_prompt(2), sampling),
        return_exceptions=True,
    )
    assert isinstance(bad, KeyError)
    assert isinstance(good, ModelOutput)
    assert len(good.completion_ids) == 100


async def test_text_that_cannot_be_decoded_fails_its_own_answer(
    endless: LoadedModel, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve(endless)

    def unable(token: int) -> bool:
        raise OverflowError("no such token")

    good = asyncio.create_task(client.generate_ids(_prompt(2), SamplingParams(max_tokens=100)))
    monkeypatch.setattr(client, "is_special", unable)
    with pytest.raises(InferenceError, match="no such token"):
        await _streamed(client, _prompt(1), SamplingParams(max_tokens=100))
    assert len((await good).completion_ids) == 100
    assert (client.engine.counts.failed, client.engine.counts.finished) == (1, 1)


async def test_an_answer_ends_where_a_stop_text_begins_and_its_tokens_are_all_that_were_sampled(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless)
    spanning = 0
    for seed in range(10):
        whole = await client.generate_ids(_prompt(seed), SamplingParams(max_tokens=80, seed=seed))
        for start in (3, 17, 40):
            stop = whole.text[start : start + 5].strip("\ufffd")
            if "\ufffd" in stop or not stop:
                continue
            at = whole.text.find(stop)
            sampling = SamplingParams(max_tokens=80, seed=seed, stop=("never there", stop))
            client.publish(0)
            output, pieces = await _streamed(client, _prompt(seed), sampling)
            assert (output.text, output.stop_sequence) == (whole.text[:at], stop)
            assert output.finish_reason is FinishReason.STOP
            count = len(output.completion_ids)
            assert output.completion_ids == whole.completion_ids[:count]
            assert stop in endless.tokenizer.decode(output.completion_ids)
            assert stop not in endless.tokenizer.decode(output.completion_ids[:-1]), "it ended at once"
            assert len(output.logprobs) == len(output.policy_versions) == count
            assert "".join(piece.text for piece in pieces) == output.text, "nothing of the stop text leaked"
            assert [token for piece in pieces for token in piece.token_ids] == output.completion_ids
            client.publish(0)
            plain = await client.generate_ids(_prompt(seed), sampling)
            assert (plain.text, plain.completion_ids) == (output.text, output.completion_ids)
            spanning += len(endless.tokenizer.encode(stop)) > 1
    assert spanning > 5


async def test_a_stop_text_that_does_not_come_changes_nothing(tiny: LoadedModel, serve: Serve) -> None:
    client = serve(tiny)
    for seed in range(6):
        plain = await client.generate_ids(_prompt(seed), SamplingParams(max_tokens=40, seed=seed))
        client.publish(0)
        sampling = SamplingParams(max_tokens=40, seed=seed, stop=(plain.text[-1:] + "\0",))
        output, pieces = await _streamed(client, _prompt(seed), sampling)
        assert (output.text, output.completion_ids) == (plain.text, plain.completion_ids)
        assert "".join(piece.text for piece in pieces) == plain.text, "what was held back comes at the end"
        assert (output.finish_reason, output.stop_sequence) == (plain.finish_reason, None)


@pytest.mark.parametrize("stop", [("",), "abc", ("a", "")])
def test_a_stop_text_without_text_is_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match="`stop` is"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=10, top_logprobs=5),
        SamplingParams(max_tokens=10, top_logprobs=5, temperature=0.6),
        SamplingParams(max_tokens=10, top_logprobs=5, temperature=0.0),
        SamplingParams(max_tokens=10, top_logprobs=5, top_k=3),
        SamplingParams(max_tokens=10, top_logprobs=5, temperature=1.3, top_p=0.5),
    ],
)
async def test_the_best_tokens_are_reported_with_what_their_log_probabilities_mean(
    sampling: SamplingParams, endless: LoadedModel, serve: Serve, logprobs_of: Callable[..., Any]
) -> None:
    client = serve(endless)
    output, plain = await asyncio.gather(
        client.generate_ids(_prompt(4), sampling),
        client.generate_ids(_prompt(5), SamplingParams(max_tokens=10)),
    )
    assert plain.top_logprobs == []
    ids = output.prompt_ids + output.completion_ids
    temperature = sampling.temperature or 1.0
    expected = logprobs_of(endless, ids, temperature)[len(output.prompt_ids) - 1 :]
    assert len(output.top_logprobs) == len(output.completion_ids)
    for place, top in enumerate(output.top_logprobs):
        best = expected[place].topk(5)
        assert [token for token, _ in top] == best.indices.tolist()[: len(top)]
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        if sampling.logprob_meaning == "truncated":
            assert output.completion_ids[place] in dict(top) or len(top) == 5
            renormalised = best.values - best.values[: len(top)].logsumexp(0)
            if len(top) < 5:
                assert values == pytest.approx(renormalised[: len(top)].tolist(), abs=1e-4)
        else:
            assert len(top) == 5
            assert values == pytest.approx(best.values.tolist(), abs=1e-4)
        sampled = dict(top).get(output.completion_ids[place])
        assert sampled is None or sampled == pytest.approx(output.logprobs[place], abs=1e-5)


def test_a_negative_count_of_alternatives_is_refused() -> None:
    with pytest.raises(ValueError, match="`top_logprobs` is -1"):
        SamplingParams(top_logprobs=-1)
