"""Thinking models: thoughts on or off, and thoughts that are closed for the model at a limit."""

import json
from pathlib import Path
from typing import Any

import pytest

from rllm.build.models import resolve_form
from rllm.config.loader import load_config
from rllm.errors import ConfigError
from rllm.gateway.local import LocalPolicy
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.store.run_directory import RunDirectory
from rllm.types.chat_forms import OWN_FORM, ChatForm
from rllm.types.episode import CUT_THOUGHT, Step
from rllm.types.messages import Message, SamplingParams
from rllm.types.sample import NOT_SAMPLED
from rllm.types.wire import CallRequest, Dialect

TURNS = "{% for message in messages %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endfor %}"
SWITCHED = (
    TURNS + "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""As Qwen3 has it."""
OPENED = TURNS + "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
"""As DeepSeek R1 has it: the prompt opens the thought."""
ASK: list[Message] = [{"role": "user", "content": "Up or Down?"}]


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories whose vocabulary has the tokens around thoughts, by their chat template."""
    root = tmp_path_factory.mktemp("thinkers")
    create_model(root / "tiny", "tiny", 0)
    paths: dict[str, Path] = {"plain": root / "tiny"}
    for name, template in (("switched", SWITCHED), ("opened", OPENED)):
        paths[name] = root / name
        paths[name].mkdir()
        for path in (root / "tiny").iterdir():
            content = path.read_bytes().replace(b"<|tool|>", b"<think>").replace(b"<|system|>", b"</think>")
            (paths[name] / path.name).write_bytes(content)
        settings = json.loads((paths[name] / "tokenizer_config.json").read_text())
        settings["chat_template"] = template
        (paths[name] / "tokenizer_config.json").write_text(json.dumps(settings))
    return paths


def test_thoughts_are_turned_on_and_off_by_the_templates_own_switch(thinkers: dict[str, Path]) -> None:
    prompts = {
        thinking: ChatRenderer(
            HuggingFaceTokenizer(thinkers["switched"], form=ChatForm(thinking=thinking))
        ).text_that_asks(ASK)
        for thinking in ("auto", "on", "off")
    }
    assert prompts["auto"] == prompts["on"] == "<|user|>Up or Down?<|end|><|assistant|>"
    assert prompts["off"] == prompts["on"] + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", ["opened", "plain"])
def test_a_template_without_a_switch_is_told(thinkers: dict[str, Path], name: str) -> None:
    with pytest.raises(ConfigError, match="enable_thinking, thinking"):
        HuggingFaceTokenizer(thinkers[name], form=ChatForm(thinking="off"))


def test_a_limit_needs_tokens_around_thoughts(thinkers: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"</think>.*leave it out"):
        HuggingFaceTokenizer(thinkers["plain"], form=ChatForm(max_thinking_tokens=5))


async def test_a_thought_is_closed_at_its_limit_by_tokens_that_nobody_sampled(
    thinkers: dict[str, Path],
) -> None:
    model = load_model(thinkers["opened"], form=ChatForm(max_thinking_tokens=6))
    tokenizer, closing = model.tokenizer, model.tokenizer.encode("\n</think>\n\n")
    client = LocalClient(model, num_slots=4, max_context=128)
    output = await client.get_model_response(ASK, SamplingParams(max_tokens=30, seed=2))
    cut = slice(6, 6 + len(closing))
    assert output.completion_ids[cut] == closing
    assert output.policy_versions[cut] == [NOT_SAMPLED] * len(closing)
    assert NOT_SAMPLED not in output.policy_versions[:6]
    assert NOT_SAMPLED not in output.policy_versions[cut.stop :]
    assert output.has_cut_thought
    assert Step.from_model_output(output, ASK).info[CUT_THOUGHT] is True
    # Up to the limit the draws are those of a model that may think as long as it likes.
    free = LocalClient(load_model(thinkers["opened"]), num_slots=4, max_context=128)
    same = await free.get_model_response(ASK, SamplingParams(max_tokens=30, seed=2))
    assert same.completion_ids[:6] == output.completion_ids[:6]
    assert same.has_cut_thought == tokenizer.ends_in_thought([*same.prompt_ids, *same.completion_ids])
    await client.close()
    await free.close()


async def test_an_answer_without_a_thought_has_no_limit(thinkers: dict[str, Path]) -> None:
    form = ChatForm(thinking="off", max_thinking_tokens=3)
    limited = LocalClient(load_model(thinkers["switched"], form=form), num_slots=4, max_context=128)
    free = LocalClient(
        load_model(thinkers["switched"], form=ChatForm(thinking="off")), num_slots=4, max_context=128
    )
    outputs = [
        await client.get_model_response(ASK, SamplingParams(max_tokens=20, seed=5))
        for client in (limited, free)
    ]
    assert outputs[0].completion_ids == outputs[1].completion_ids
    assert not outputs[0].has_cut_thought
    await limited.close()
    await free.close()


async def test_a_grammar_is_followed_behind_a_thought_that_was_closed(thinkers: dict[str, Path]) -> None:
    model = load_model(thinkers["opened"], form=ChatForm(max_thinking_tokens=4))
    client = LocalClient(model, num_slots=4, max_context=160)
    grammar = client.renderer.plain_format.schema_grammar({"type": "integer"})
    sampling = SamplingParams(max_tokens=60, seed=4, grammar=grammar)
    output = await client.get_model_response(ASK, sampling)
    answer = client.renderer.plain_format.parse(output.text)
    assert output.has_cut_thought
    assert int(answer.content) == int(answer.content.strip())
    await client.close()


async def test_programs_are_told_of_a_cut_thought(thinkers: dict[str, Path]) -> None:
    model = load_model(thinkers["opened"], form=ChatForm(max_thinking_tokens=4))
    client = LocalClient(model, num_slots=4, max_context=128)
    request = CallRequest(dialect=Dialect.CHAT, body={}, messages=ASK, max_tokens=20, seed=1)
    answer = await LocalPolicy(client, "thinker").answer(request, _Session())
    assert answer.choices[0].has_cut_thought
    assert len(model.tokenizer.encode(answer.choices[0].reasoning)) <= 8
    await client.close()


def test_a_run_is_asked_in_the_form_that_it_was_trained_with(tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run") as run:
        run.write_config(
            {"model": {"thinking": "off", "max_thinking_tokens": 5, "chat_template": "gone.jinja"}}
        )
    trained = ChatForm(thinking="off", max_thinking_tokens=5)
    assert resolve_form(tmp_path / "run", OWN_FORM) == trained
    assert resolve_form(tmp_path / "run", ChatForm(thinking="on")) == ChatForm(thinking="on")
    assert resolve_form(tmp_path, OWN_FORM) == OWN_FORM


def test_servers_close_no_thought() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_thinking_tokens"):
        load_config(
            {
                "model": {"max_thinking_tokens": 5},
                "inference": {"engine": "vllm", "lockstep": False, "servers": ["http://127.0.0.1:9/v1"]},
            }
        )


class _Session:
    """A session that has not asked before."""

    def __init__(self) -> None:
        self.id, self.seed = "s", 0
        self.sampling: dict[str, Any] = {}
        self.state: dict[str, Any] = {}

    def history(self) -> list[Any]:
        return []
