import asyncio
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rllm.inference.local import forward
from rllm.inference.local.client import LocalClient
from rllm.models.directory import LoadedModel
from rllm.types.messages import FinishReason, LogprobMeaning, ModelOutput, SamplingParams

Serve = Callable[..., LocalClient]
Models = dict[str, LoadedModel]
LogprobsOf = Callable[..., Tensor]

NAMES = ["builtin", "qwen3", "gpt2", "gpt_neox"]


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(
        3, 512, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)
    ).tolist()


@pytest.mark.parametrize("name", NAMES)
async def test_greedy_answers_are_those_of_transformers_token_by_token(
    name: str, models: Models, directories: dict[str, Path], serve: Serve
) -> None:
    client = serve(models[name])
    reference = AutoModelForCausalLM.from_pretrained(directories[name])
    prompts = [_prompt(length) for length in (1, 2, 15, 16, 17, 33, 60)]
    outputs = await asyncio.gather(
        *(client.generate_ids(prompt, SamplingParams(temperature=0.0, max_tokens=24)) for prompt in prompts)
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=list(models[name].end_token_ids),
        )[0, len(prompt) :]
        assert output.completion_ids == expected.tolist()
    assert len({tuple(output.completion_ids) for output in outputs}) > 1


@pytest.mark.parametrize("name", NAMES)
async def test_messages_are_asked_with_the_chat_template_of_the_model(
    name: str, models: Models, directories: dict[str, Path], serve: Serve
) -> None:
    client = serve(models[name])
    messages = [{"role": "user", "content": "SFFH"}]
    output = await client.get_model_response(messages, SamplingParams(temperature=0.0, max_tokens=5))
    tokenizer = AutoTokenizer.from_pretrained(directories[name])
    asked = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert output.prompt_ids == tokenizer.encode(asked, add_special_tokens=False)
    direct = await client.generate_ids(output.prompt_ids, SamplingParams(temperature=0.0, max_tokens=5))
    assert output.completion_ids == direct.completion_ids


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.3])
async def test_log_probabilities_are_those_of_one_plain_forward_pass(
    name: str, temperature: float, models: Models, serve: Serve, logprobs_of: LogprobsOf
) -> None:
    client = serve(models[name])
    outputs = await asyncio.gather(
        *(
            client.generate_ids(
                _prompt(length), SamplingParams(temperature=temperature, max_tokens=20, seed=length)
            )
            for length in (3, 16, 40, 41, 70)
        )
    )
    for output in outputs:
        ids = output.prompt_ids + output.completion_ids
        expected = logprobs_of(models[name], ids, temperature or 1.0)[len(output.prompt_ids) - 1 :]
        assert output.logprobs == pytest.approx(_picked(expected, output), abs=1e-5)
        assert output.temperature == temperature
        assert output.logprob_meaning is (
            LogprobMeaning.RAW if temperature in (0.0, 1.0) else LogprobMeaning.TEMPERATURE
        )


def _picked(logprobs_R_V: Tensor, output: ModelOutput) -> list[float]:
    return logprobs_R_V.gather(1, torch.tensor(output.completion_ids).unsqueeze(1)).squeeze(1).tolist()


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [
        (5, 1.0, 1.0),
        (0, 0.5, 1.0),
        (8, 0.7, 0.6),
        (0, 0.9, 1.3),
        (1, 1.0, 1.0),
        (0, 1e-6, 1.0),
        (1000, 1.0, 1.0),
    ],
)
async def test_truncated_sampling_keeps_to_its_tokens_renormalises_and_says_so(
    top_k: int, top_p: float, temperature: float, endless: LoadedModel, serve: Serve, logprobs_of: LogprobsOf
) -> None:
    client = serve(endless)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=12, seed=4)
    plain = SamplingParams(temperature=0.8, max_tokens=12, seed=4)  # a neighbour that is not truncated
    output, _ = await asyncio.gather(
        client.generate_ids(_prompt(20), sampling), client.generate_ids(_prompt(21), plain)
    )
    assert output.logprob_meaning is LogprobMeaning.TRUNCATED
    logprobs_R_V = logprobs_of(endless, output.prompt_ids + output.completion_ids, temperature)[19:]
    for logprobs_V, token, logprob in zip(logprobs_R_V, output.completion_ids, output.logprobs, strict=True):
        kept = _kept(logprobs_V.exp().tolist(), top_k, top_p)
        assert token in kept
        assert logprob == pytest.approx(math.log(kept[token] / sum(kept.values())), abs=1e-5)


def _kept(probabilities: list[float], top_k: int, top_p: float) -> dict[int, float]:
    """Best tokens first: at most `top_k`, and no more than it takes to reach `top_p` of those."""
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[: top_k or None]
    total = sum(probabilities[token] for token in order)
    kept: dict[int, float] = {}
    for token in order:
        if sum(kept.values()) >= top_p * total:
            break
        kept[token] = probabilities[token]
    return kept


async def test_sampled_tokens_come_as_often_as_the_softmax_says(
    endless: LoadedModel, serve: Serve, logprobs_of: LogprobsOf
) -> None:
    client = serve(endless, num_slots=512)
    prompt, temperature, num_draws = _prompt(6), 0.7, 4096
    outputs = await asyncio.gather(
        *(
            client.generate_ids(prompt, SamplingParams(temperature=temperature, max_tokens=1, seed=seed))
            for seed in range(num_draws)
        )
    )
    expected_V = logprobs_of(endless, [*prompt, 0], temperature)[-1].exp() * num_draws
    seen_V = torch.bincount(
        torch.tensor([output.completion_ids[0] for output in outputs]), minlength=len(expected_V)
    )
    common_V = expected_V >= 5.0
    cells = [
        *zip(seen_V[common_V].tolist(), expected_V[common_V].tolist(), strict=True),
        (int(seen_V[~common_V].sum()), float(expected_V[~common_V].sum())),
    ]
    chi_square = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    assert freedom > 20
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5


async def test_each_position_of_an_answer_is_a_draw_of_its_own(endless: LoadedModel, serve: Serve) -> None:
    """With flat logits the tokens are the draws themselves: uniform everywhere, and not the same twice."""
    flat = _flattened(endless)
    client = serve(flat, num_slots=64)
    outputs = await asyncio.gather(
        *(client.generate_ids([3, 4], SamplingParams(max_tokens=16, seed=seed)) for seed in range(256))
    )
    tokens = torch.tensor([output.completion_ids for output in outputs])
    vocabulary = torch.arange(endless.config["vocab_size"])
    expected = torch.bincount(vocabulary // 32) * tokens.numel() / len(vocabulary)
    cells = torch.bincount(tokens.flatten() // 32, minlength=len(expected)).double()
    freedom = len(expected) - 1
    assert ((cells - expected) ** 2 / expected).sum() < freedom + 4 * (2 * freedom) ** 0.5
    assert (tokens[:, 1:] == tokens[:, :-1]).double().mean() < 0.01
    assert (tokens[1:] == tokens[:-1]).double().mean() < 0.01


class _Flat(torch.nn.Module):
    """Every token is as likely as any other."""

    by_row = ""
    image_grids = None
    sees_images_whole = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def hidden(self, *given: Any) -> Tensor:
        return self.model.hidden(*given)

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        return self.model.logits(hidden_N_D) * 0.0


def _flattened(loaded: LoadedModel) -> LoadedModel:
    return dataclasses.replace(loaded, model=_Flat(loaded.model))


async def test_one_seed_is_one_answer_and_another_seed_another(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)

    async def answer(seed: int) -> list[int]:
        output = await client.generate_ids(_prompt(10), SamplingParams(max_tokens=12, seed=seed))
        return output.completion_ids

    assert await answer(5) == await answer(5)
    assert len({tuple(await answer(seed)) for seed in (0, 1, 2, 2**62, 2**63)}) == 5


async def test_scores_are_the_log_probabilities_of_a_plain_forward_pass_with_and_without_cache(
    tiny: LoadedModel, serve: Serve, logprobs_of: LogprobsOf
) -> None:
    client = serve(tiny)
    ids = _prompt(50)
    for start, temperature in ((1, 1.0), (20, 0.6), (49, 1.3), (1, 0.6), (40, 1.0)):
        expected = (
            logprobs_of(tiny, ids, temperature).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        )
        scores = await client.score(ids, start, temperature)
        assert scores == pytest.approx(expected[start - 1 :].tolist(), abs=1e-5)


@pytest.mark.parametrize("start", [0, -1, 51])
async def test_a_score_that_begins_outside_of_the_row_is_refused(
    start: int, tiny: LoadedModel, serve: Serve
) -> None:
    with pytest.raises(ValueError, match="start"):
        await serve(tiny).score(_prompt(50), start)


async def test_an_answer_ends_with_the_end_token_which_is_part_of_the_ids_and_not_of_the_text(
    tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    (end,) = tiny.end_token_ids
    outputs = await asyncio.gather(
        *(client.generate_ids(_prompt(8), SamplingParams(max_tokens=180, seed=seed)) for seed in range(24))
    )
    ended = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert ended, "no answer of 180 tokens drew the end token"
    for output in ended:
        assert output.completion_ids.index(end) == len(output.completion_ids) - 1
        assert output.text == tiny.tokenizer.decode(output.completion_ids[:-1])


async def test_a_stop_token_ends_the_answer_and_is_its_last_token(endless: LoadedModel, serve: Serve) -> None:
    client = serve(endless)
    free = await client.generate_ids(_prompt(9), SamplingParams(max_tokens=20, seed=1))
    stop = free.completion_ids[7]
    first = free.completion_ids.index(stop)
    output = await client.generate_ids(
        _prompt(9), SamplingParams(max_tokens=20, seed=1, stop_token_ids=(stop,))
    )
    assert output.completion_ids == free.completion_ids[: first + 1]
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_an_answer_is_no_longer_than_it_may_be(
    max_tokens: int, endless: LoadedModel, serve: Serve
) -> None:
    output = await serve(endless).generate_ids(_prompt(9), SamplingParams(max_tokens=max_tokens))
    assert len(output.completion_ids) == len(output.logprobs) == len(output.policy_versions) == max_tokens
    assert output.finish_reason is FinishReason.LENGTH
    assert output.usage == {"prompt_tokens": 9, "completion_tokens": max_tokens, "cached_tokens": 0}
    assert output.text == endless.tokenizer.decode(output.completion_ids)


async def test_a_scored_text_of_any_length_has_few_logits_at_a_time(
    endless: LoadedModel, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same scores, and never more logits than the bytes that are set aside for them."""
    client, ids = serve(endless, max_context=256), _prompt(200)
    whole = await client.score(ids, 3, 0.7)
    num_tokens: list[int] = []
    logits = endless.model.logits
    monkeypatch.setattr(
        endless.model,
        "logits",
        lambda states: (num_tokens.append(len(states)), logits(states))[1],
        raising=False,
    )
    monkeypatch.setattr(forward, "MAX_SCORED_LOGITS", 17 * client.vocab_size - 1)
    chunked = await serve(endless, max_context=256).score(ids, 3, 0.7)
    assert max(num_tokens) == 16
    assert sum(num_tokens) == len(ids) - 3
    assert chunked == pytest.approx(whole, abs=1e-5)
