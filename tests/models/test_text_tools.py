"""Tools for models whose chat template has none: described in the system message, called in text."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rllm.cli.main import rllm as front_door
from rllm.errors import ConfigError
from rllm.models.builtin import create_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.rendering.text_tools import describe_tools
from rllm.rendering.writing import AnswerWriter
from rllm.store.episodes import EpisodeStore
from rllm.types.chat_forms import ChatForm
from rllm.types.messages import Message

WITH_SYSTEM = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|system|>You are helpful.<|end|>{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As SmolLM2-135M-Instruct has it: a system message by default, no tools."""
ALTERNATING = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Gemma 2 has it: no system message, and user and assistant in turn."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["word", "limit"],
            },
        },
    }
]
ASK: Message = {"role": "user", "content": "What is a fjord?"}
CALL: Message = {
    "role": "assistant",
    "content": "I look it up.",
    "tool_calls": [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"word": "fjord", "limit": 1}'},
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_0", "name": "look_up", "content": "A long inlet."}
CALL_TEXT = '<tool_call>\n{"name": "look_up", "arguments": {"word": "fjord", "limit": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, whose chat template has tools."""
    directory = tmp_path_factory.mktemp("native") / "tiny"
    create_model(directory, "tiny", 0)
    return directory


def _with_template(native: Path, directory: Path, template: str) -> Path:
    directory.mkdir()
    for path in native.iterdir():
        if path.suffix != ".jinja":
            (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((native / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return directory


@pytest.fixture(params=[WITH_SYSTEM, ALTERNATING], ids=["with system", "alternating"])
def directory(request: pytest.FixtureRequest, native: Path, tmp_path: Path) -> Path:
    """A model whose chat template has no tools."""
    return _with_template(native, tmp_path / "model", request.param)


def test_a_template_without_tools_offers_them_as_text_and_reads_calls_back(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = HuggingFaceTokenizer(directory)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.tool_form == "text"
    assert "has no tools" in caplog.text
    renderer = ChatRenderer(tokenizer)
    tool_format = renderer.tool_format
    assert tool_format is not None
    answer = tool_format.parse(f"I look it up.\n{CALL_TEXT}", TOOLS)
    assert (answer.content.strip(), [call.name for call in answer.calls]) == ("I look it up.", ["look_up"])
    assert json.loads(answer.calls[0].arguments) == {"word": "fjord", "limit": 1}
    prompt = renderer.text_that_asks([ASK], TOOLS)
    assert describe_tools(TOOLS) in prompt
    assert f"\nlook_up(word: string, limit: integer) {TOOLS[0]['function']['description']}\n" in prompt
    assert '{"name": "look_up", "arguments": {"word": "...", "limit": 1}}' in prompt
    assert "You are helpful." not in prompt
    text = renderer.text([ASK, CALL, RESULT], TOOLS)
    assert f"<|assistant|>{CALL['content']}\n{CALL_TEXT}" in text
    assert "<|user|><tool_response>\nA long inlet.\n</tool_response>" in text


def test_a_conversation_with_tools_is_one_row(directory: Path) -> None:
    renderer = ChatRenderer(HuggingFaceTokenizer(directory))
    assert renderer.appends([RESULT], TOOLS)
    assert renderer.appends([RESULT, RESULT, ASK], TOOLS)
    conversation = Conversation(renderer=renderer)
    first = list(conversation.prompt([ASK], TOOLS))
    call_ids = renderer.tokenizer.encode(f"I look it up.\n{CALL_TEXT}")
    conversation.record(call_ids, CALL)
    second = list(conversation.prompt([ASK, CALL, RESULT], TOOLS))
    assert conversation.num_segments == 1
    assert second[: len(first) + len(call_ids)] == first + call_ids
    assert second == renderer.render([ASK, CALL, RESULT], TOOLS)


def test_tools_stand_behind_what_the_agent_says_of_itself(native: Path, tmp_path: Path) -> None:
    renderer = ChatRenderer(HuggingFaceTokenizer(_with_template(native, tmp_path / "model", WITH_SYSTEM)))
    prompt = renderer.text_that_asks([{"role": "system", "content": "Be brief."}, ASK], TOOLS)
    assert prompt.startswith(f"<|system|>Be brief.\n\n{describe_tools(TOOLS)}")
    assert renderer.text_that_asks([ASK]) == (
        "<|system|>You are helpful.<|end|><|user|>What is a fjord?<|end|><|assistant|>"
    )


def test_without_system_messages_the_tools_stand_before_the_question(native: Path, tmp_path: Path) -> None:
    renderer = ChatRenderer(HuggingFaceTokenizer(_with_template(native, tmp_path / "model", ALTERNATING)))
    prompt = renderer.text_that_asks([ASK], TOOLS)
    assert prompt == f"<|user|>{describe_tools(TOOLS)}\n\nWhat is a fjord?<|end|><|assistant|>"


def test_native_is_refused_where_the_template_has_no_tools(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"print the tools.*`text`"):
        HuggingFaceTokenizer(directory, form=ChatForm(tool_form="native"))


def test_a_template_with_tools_keeps_its_own_form_unless_text_is_chosen(native: Path) -> None:
    assert HuggingFaceTokenizer(native).tool_form == "native"
    own, text = (
        ChatRenderer(HuggingFaceTokenizer(native, form=ChatForm(tool_form=form))).text_that_asks([ASK], TOOLS)
        for form in ("native", "text")
    )
    assert describe_tools(TOOLS) not in own
    assert describe_tools(TOOLS) in text


def test_a_demonstrated_call_is_written_as_the_model_is_to_write_it(directory: Path) -> None:
    renderer = ChatRenderer(tokenizer := HuggingFaceTokenizer(directory))
    end_id = tokenizer.encode("<|end|>")[0]
    ids = AnswerWriter(renderer, (end_id,), end_id).ids([ASK], CALL, TOOLS)
    assert (tokenizer.decode(ids[:-1]), ids[-1]) == (f"{CALL['content']}\n{CALL_TEXT}", end_id)


def test_a_tool_agent_is_trained_from_a_model_whose_template_has_no_tools(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    _with_template(native, tmp_path / "model", WITH_SYSTEM)
    settings = (
        *("steps=1", "warm_start.steps=1", "warm_start.episodes_per_step=2", "threads=1"),
        *(
            "rollout.tasks_per_step=2",
            "rollout.group_size=2",
            "rollout.max_turns=2",
            "rollout.num_parallel=4",
        ),
        *("inference.max_context=1024", "inference.num_slots=4", "rollout.max_tokens_per_turn=96"),
        *("evaluation.num_tasks=2", "evaluation.every_steps=0"),
    )
    words = ["train", "calculator", "--model", "model", "--recipe", "scratch", "--output", "run"]
    for each in settings:
        words += ["--set", each]
    ended = CliRunner().invoke(front_door, words, prog_name="rllm", catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        episode = next(iter(store.episodes("train", 0)))
    prompt = HuggingFaceTokenizer(tmp_path / "model").decode(episode.trajectories[0].steps[0].prompt_ids)
    assert "add(a: integer|number|string, b: integer|number|string)" in prompt
    assert "<tool_call>" in prompt


def test_parameters_are_told_by_their_types() -> None:
    function = {
        "name": "find",
        "description": "Find rows.",
        "parameters": {
            "properties": {
                "table": {"type": "string", "enum": ["users", "orders"]},
                "ids": {"type": "array", "items": {"type": "integer"}, "description": "Their numbers."},
                "where": {"type": "object", "properties": {"x": {"type": "number"}}},
            },
            "required": ["table"],
        },
    }
    first, second, *_ = describe_tools([{"type": "function", "function": function}]).splitlines()[1:]
    where = '{"type": "object", "properties": {"x": {"type": "number"}}}'
    assert first == f'find(table: "users"|"orders", ids?: list of integer, where?: {where}) Find rows.'
    assert second == "  ids: Their numbers."
