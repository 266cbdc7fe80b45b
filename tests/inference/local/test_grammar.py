import asyncio
import dataclasses
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rllm.errors import InferenceError, MissingExtraError
from rllm.inference.client import TokenPiece
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import END_OF_TURN
from rllm.models.directory import LoadedModel
from rllm.types.messages import FinishReason, LogprobMeaning, ModelOutput, SamplingParams
from rllm.types.sample import NOT_SAMPLED

Serve = Callable[..., LocalClient]
Until = Callable[..., Any]

PROMPT = [70, 71, 72]


def _json(schema: dict[str, Any]) -> str:
    return "start: %json " + json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})


def _random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "boolean", "null", "string", "enum"] + ["object", "array"] * (depth < 2)
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "string":
        low = rng.randrange(3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(5)}
    if kind == "enum":
        return {"enum": rng.sample(["up", "down", 3, None, True, "é"], rng.randrange(1, 4))}
    if kind == "array":
        low = rng.randrange(2)
        return {
            "type": "array",
            "items": _random_schema(rng, depth + 1),
            "minItems": low,
            "maxItems": low + 2,
        }
    if kind != "object":
        return {"type": kind}
    names = rng.sample(["a", "key", "two words", "日"], rng.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: _random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _follows(value: Any, schema: dict[str, Any]) -> bool:
    """What JSON Schema says about these few keywords, written down a second time."""
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    match schema["type"]:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(_follows(each, schema["items"]) for each in value)
            )
        case _:
            known = schema["properties"]
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(known)
                and all(_follows(each, known[name]) for name, each in value.items())
            )


async def test_random_weights_at_temperature_1_write_json_that_follows_any_schema(
    tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny, num_slots=32, max_context=256)
    rng = random.Random(5)
    schemas = [_random_schema(rng) for _ in range(60)]
    outputs = await asyncio.gather(
        *(
            client.generate_ids(PROMPT, SamplingParams(max_tokens=250, seed=seed, grammar=_json(schema)))
            for seed, schema in enumerate(schemas)
        )
    )
    whole = [
        (json.loads(output.text), schema)
        for output, schema in zip(outputs, schemas, strict=True)
        if output.finish_reason is FinishReason.STOP
    ]
    assert len(whole) >= 55
    for value, schema in whole:
        assert _follows(value, schema), (value, schema)


@pytest.mark.parametrize("pattern", ["[a-c]{2,4}", "(yes|no)( [0-9]){1,3}", "é+日?", r"\{[^}]{0,9}\}", "x"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
async def test_answers_follow_a_regular_expression(
    pattern: str, temperature: float, tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny, num_slots=8)
    for seed in range(4):
        sampling = SamplingParams(
            max_tokens=100, seed=seed, temperature=temperature, grammar=f"start: /{pattern}/"
        )
        output = await client.generate_ids(PROMPT, sampling)
        if output.finish_reason is FinishReason.STOP:
            assert re.fullmatch(pattern, output.text), output.text
            assert output.completion_ids[-1] in tiny.end_token_ids


@pytest.mark.parametrize(
    ("temperature", "meaning"), [(1.0, LogprobMeaning.RAW), (0.6, LogprobMeaning.TEMPERATURE)]
)
async def test_log_probabilities_stay_those_of_the_model_without_the_grammar(
    temperature: float,
    meaning: LogprobMeaning,
    tiny: LoadedModel,
    serve: Serve,
    logprobs_of: Callable[..., Any],
) -> None:
    output = await serve(tiny).generate_ids(
        PROMPT,
        SamplingParams(
            max_tokens=60, temperature=temperature, top_logprobs=3, grammar="start: /[0-9a-f]{20}/"
        ),
    )
    ids = output.prompt_ids + output.completion_ids
    expected = logprobs_of(tiny, ids, temperature)[len(PROMPT) - 1 :]
    chosen = [row[token].item() for row, token in zip(expected, output.completion_ids, strict=True)]
    assert output.logprob_meaning is meaning
    assert output.logprobs == pytest.approx(chosen, abs=1e-4)
    for row, top in zip(expected, output.top_logprobs, strict=True):
        assert [token for token, _ in top] == row.topk(3).indices.tolist()


async def test_a_forced_token_without_any_chance_in_the_model_has_a_finite_log_probability(
    own: LoadedModel, serve: Serve
) -> None:
    with torch.no_grad():
        for parameter in own.model.parameters():
            parameter *= 40
    output = await serve(own).generate_ids(PROMPT, SamplingParams(max_tokens=20, grammar='start: "zq7"'))
    assert min(output.logprobs) < -110, "its probability is 0 in float32"
    assert all(value > float("-inf") for value in output.logprobs)


async def test_a_token_that_the_grammar_left_no_choice_about_was_not_sampled(
    tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    client.publish(7)
    output = await client.generate_ids(
        PROMPT, SamplingParams(max_tokens=20, grammar='start: "4" /[0-9]/ "2" /[0-9]/?')
    )
    digits = [int(output.text[place].isdigit()) for place in range(len(output.text))]
    assert sum(digits) == len(output.completion_ids) - 1, "digits never merge"
    last_two = (
        [7, NOT_SAMPLED] if len(digits) == 4 else [7]
    )  # after a fourth digit nothing but the end is left
    assert output.policy_versions == [NOT_SAMPLED, 7, NOT_SAMPLED, *last_two]
    assert output.weight_version == 7


async def test_forced_tokens_stay_so_when_weights_are_published_on_the_way(
    tiny: LoadedModel, serve: Serve, until: Until
) -> None:
    client = serve(tiny)
    task = asyncio.create_task(
        client.generate_ids(PROMPT, SamplingParams(max_tokens=180, grammar='start: ("4" /[0-9]/){80}'))
    )
    await until(lambda: client.engine.counts.sampled_tokens > 20)
    client.publish(1)
    output = await task
    assert output.policy_versions[:160:2] == [NOT_SAMPLED] * 80
    sampled = output.policy_versions[1:160:2]
    assert (sampled[0], sampled[-1]) == (0, 1)
    assert sampled == sorted(sampled)


async def test_an_end_token_may_come_exactly_where_the_grammar_accepts(
    tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    lengths: set[int] = set()
    for seed in range(40):
        sampling = SamplingParams(max_tokens=100, seed=seed, grammar="start: /[0-9]{2,4}/")
        output = await client.generate_ids(PROMPT, sampling)
        lengths.add(len(output.text))
        assert output.completion_ids[-1] in tiny.end_token_ids
        assert not set(output.completion_ids[:-1]) & set(range(6)), "no special token is text"
    assert lengths <= {2, 3, 4}
    assert len(lengths) > 1


async def test_a_grammar_may_name_special_tokens_and_the_end_token_itself(
    tiny: LoadedModel, serve: Serve
) -> None:
    grammar = f"start: <|tool|> /[0-9]/ <{END_OF_TURN[1:-1]}>"
    output = await serve(tiny).generate_ids(PROMPT, SamplingParams(max_tokens=9, grammar=grammar))
    assert output.finish_reason is FinishReason.STOP
    assert output.completion_ids[0] == tiny.tokenizer.encode("<|tool|>")[0]
    assert re.fullmatch("[0-9]", output.text)


async def test_without_an_end_token_the_answer_is_over_when_nothing_can_follow(
    endless: LoadedModel, serve: Serve
) -> None:
    output = await serve(endless).generate_ids(
        PROMPT, SamplingParams(max_tokens=50, grammar="start: /[0-9]{3}/")
    )
    assert re.fullmatch("[0-9]{3}", output.text)
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("grammar", ['start: ("7" | "8") start', "start: /[0-9]*/ x\nx: /[0-9]/ x"])
async def test_a_grammar_that_never_ends_is_cut_off_by_the_limit(
    grammar: str, tiny: LoadedModel, serve: Serve
) -> None:
    output = await serve(tiny).generate_ids(PROMPT, SamplingParams(max_tokens=30, grammar=grammar))
    assert output.finish_reason is FinishReason.LENGTH
    assert len(output.completion_ids) == 30


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("start: x", 'unknown name: "x"'),
        ("start: /[a-c/", "lexer error|regex"),
        ('start: %json {"type": "nope"}', "nope"),
        ('start: %json {"type": "object", "properties": {"a": false}, "required": ["a"]}', "nsatisfiable"),
        ("{}", "grammars"),
        ("start: <|nope|>", "nope"),
    ],
)
async def test_a_grammar_that_does_not_compile_is_refused_by_name_before_anything_is_queued(
    grammar: str, named: str, tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    with pytest.raises(ValueError, match=rf"(?s)`grammar` does not compile: .*({named})"):
        await client.generate_ids(PROMPT, SamplingParams(grammar=grammar))
    assert client.engine.counts.accepted == 0
    assert len((await client.generate_ids(PROMPT, SamplingParams(max_tokens=1))).completion_ids) == 1


@pytest.mark.parametrize("grammar", ['start: "7" start', 'start: "a" | b\nb: "7" b'])
async def test_a_grammar_that_forces_one_text_for_ever_is_an_error_of_that_answer(
    grammar: str, tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    asked = [
        client.generate_ids(PROMPT, SamplingParams(grammar=grammar, seed=seed, temperature=5.0))
        for seed in range(8)
    ]
    for result in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(result, ModelOutput):
            assert result.text == "a"
        else:
            assert isinstance(result, ValueError | InferenceError)
            assert "for ever" in str(result)


async def test_a_dead_end_in_one_grammar_fails_that_answer_and_no_other(
    tiny: LoadedModel, serve: Serve
) -> None:
    endless = dataclasses.replace(tiny, end_token_ids=(tiny.end_token_ids[0],))
    client = serve(endless, num_slots=8)
    dead = f'start: "4" /[0-9]/ <{END_OF_TURN[1:-1]}> "2"'  # the engine ends an answer at its end token
    good = SamplingParams(max_tokens=30, grammar="start: /[0-9]{12}/")
    free = SamplingParams(max_tokens=30, seed=3)
    results = await asyncio.gather(
        client.generate_ids(PROMPT, free),
        client.generate_ids(PROMPT, SamplingParams(grammar=dead)),
        client.generate_ids(PROMPT, good),
        return_exceptions=True,
    )
    assert isinstance(results[1], InferenceError)
    assert "no token" in str(results[1])
    assert isinstance(results[0], ModelOutput)
    assert isinstance(results[2], ModelOutput)
    assert re.fullmatch("[0-9]{12}", results[2].text)
    assert (client.engine.counts.failed, client.engine.counts.finished) == (1, 2)
    client.publish(0)
    assert (await client.generate_ids(PROMPT, free)).completion_ids == results[0].completion_ids


async def test_neighbours_of_a_grammar_are_answered_as_if_they_were_alone(
    endless: LoadedModel, serve: Serve
) -> None:
    client = serve(endless, num_slots=16)
    plain = [SamplingParams(max_tokens=25, seed=seed, top_k=seed % 2 * 4) for seed in range(6)]
    ruled = [SamplingParams(max_tokens=25, seed=seed, grammar="start: /[a-z ]*/") for seed in range(6)]
    outputs = await asyncio.gather(*(client.generate_ids(PROMPT, each) for each in [*plain, *ruled]))
    for output, sampling in zip(outputs, [*plain, *ruled], strict=True):
        client.publish(0)
        alone = await client.generate_ids(PROMPT, sampling)
        assert alone.completion_ids == output.completion_ids
        assert alone.logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert alone.policy_versions == output.policy_versions
    assert all(re.fullmatch("[a-z ]*", output.text) for output in outputs[6:])


async def test_a_grammar_goes_with_streaming_stop_texts_and_truncation(
    tiny: LoadedModel, serve: Serve
) -> None:
    client = serve(tiny)
    for seed in range(6):
        sampling = SamplingParams(
            max_tokens=150, seed=seed, top_k=3, top_p=0.9, stop=("42",), grammar="start: /[1-4]{60}/"
        )
        pieces: list[TokenPiece] = []
        output = await client.generate_ids(PROMPT, sampling, on_piece=pieces.append)
        assert re.fullmatch("[1-4]*", output.text)
        assert "42" not in output.text
        assert (output.stop_sequence == "42") == (len(output.text) < 60)
        assert "".join(piece.text for piece in pieces) == output.text
        assert all(-1e9 < value <= 0.0 for value in output.logprobs)


async def test_a_conversation_may_use_a_grammar_too(tiny: LoadedModel, serve: Serve) -> None:
    async with serve(tiny).session(("task", 0)) as session:
        output = await session.respond(
            [{"role": "user", "content": "Up or Down?"}],
            SamplingParams(max_tokens=5, grammar='start: "Up" | "Down"'),
        )
    assert output.text in ("Up", "Down")


async def test_a_model_whose_weights_have_more_rows_than_its_tokenizer_has_tokens_follows_grammars(
    tiny: LoadedModel, serve: Serve
) -> None:
    known = tiny.config["vocab_size"]
    config = {**tiny.config, "vocab_size": known + _Wider.MORE}
    wide = dataclasses.replace(tiny, model=_Wider(tiny.model), config=config)
    output = await serve(wide).generate_ids(PROMPT, SamplingParams(max_tokens=60, grammar="start: /.{5,40}/"))
    assert max(output.completion_ids) < known


class _Wider(torch.nn.Module):
    """Logits for tokens that the tokenizer does not have."""

    MORE = 88

    by_row = ""
    image_grids = None
    sees_images_whole = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def hidden(self, *given: Any) -> torch.Tensor:
        return self.model.hidden(*given)

    def logits(self, hidden_N_D: torch.Tensor) -> torch.Tensor:
        logits_N_V = self.model.logits(hidden_N_D)
        return torch.cat((logits_N_V, logits_N_V[:, : self.MORE] + 9.0), dim=1)


async def test_without_llguidance_the_error_says_what_to_install(
    tiny: LoadedModel, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rllm\[gateway\]'"):
        await serve(tiny).generate_ids(PROMPT, SamplingParams(grammar='start: "a"'))


async def test_a_model_directory_without_tokenizer_json_is_named(
    tiny: LoadedModel, serve: Serve, tmp_path: Path
) -> None:
    client = serve(dataclasses.replace(tiny, directory=tmp_path))
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        await client.generate_ids(PROMPT, SamplingParams(grammar='start: "a"'))


async def test_a_stop_token_may_come_where_the_grammar_accepts_and_not_before(
    endless: LoadedModel, serve: Serve
) -> None:
    stop = endless.tokenizer.encode("<|tool|>")[0]
    client = serve(endless)
    for seed in range(5):
        sampling = SamplingParams(
            max_tokens=60, seed=seed, stop_token_ids=(stop,), grammar="start: /[0-9]{3}/"
        )
        output = await client.generate_ids(PROMPT, sampling)
        assert re.fullmatch("[0-9]{3}", output.text)
        assert output.completion_ids[3:] == [stop]
        assert output.policy_versions == [0, 0, 0, NOT_SAMPLED]
