"""The tool format of a model: found by what its chat template writes, or refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.tools import (
    ParsedAnswer,
    required_tool_format,
    tool_format_of,
)

Toy = Callable[..., Any]

THOUGHT = "<|channel|>analysis<|message|>Oslo, I think.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("builtin", "hermes"),
        ("qwen", "hermes"),
        ("qwen_thinking", "hermes"),
        ("qwen_opened", "hermes"),
        ("qwen_coder", "qwen-coder"),
        ("llama_tools", "llama"),
        ("mistral_tools", "mistral"),
        ("mistral_args_tools", "mistral-args"),
        ("glm_tools", "glm"),
        ("glm_tight_tools", "glm"),
        ("deepseek_tools", "deepseek-v3.1"),
        ("deepseek_fenced_tools", "deepseek"),
        ("dsml_tools", "deepseek-v3.2"),
        ("harmony_tools", "harmony"),
        ("harmony_role_tools", "harmony"),
        ("chatml", None),
        ("llama", None),
        ("gemma", None),
        ("thinking", None),
    ],
)
def test_the_format_is_the_one_that_the_template_writes(toy: Toy, template: str, name: str | None) -> None:
    tool_format = ChatRenderer(toy(template)).tool_format
    assert (tool_format and tool_format.name) == name


@pytest.mark.parametrize(
    "breaks",
    [
        ("tojson }}}\n</tool_call>", "tojson }}\n</tool_call>"),  # a brace less
        ("<tool_call>", "<call>"),
        ("{% if tools %}<|im_start|>system", "{{ messages | length }}{% if tools %}<|im_start|>system"),
        ("{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}", ""),  # calls, but no list of tools
        ("call.function.name | tojson", "'other' | tojson"),
    ],
)
def test_a_template_whose_calls_cannot_be_read_back_has_no_format(toy: Toy, breaks: tuple[str, str]) -> None:
    from_template = toy("qwen").template_text
    assert breaks[0] in from_template
    assert tool_format_of(toy(from_template.replace(*breaks))) is None


def test_markup_that_the_tokenizer_drops_leaves_no_format(toy: Toy) -> None:
    assert tool_format_of(toy(toy("qwen").template_text.replace("<tool_call>", "<head>"))) is None


@pytest.mark.parametrize("template", ["harmony_tools", "harmony_role_tools"])
def test_a_template_that_writes_channels_has_its_plain_answers_read_in_channels(
    toy: Toy, template: str
) -> None:
    plain = ChatRenderer(toy(template)).plain_format
    assert plain.parse(f"{THOUGHT}<|channel|>final<|message|>Up").content == "Up"


def test_a_template_that_takes_one_call_or_arguments_as_text_is_known_for_it(toy: Toy) -> None:
    one_call = {
        template: required_tool_format(toy(template)).one_call for template in ("qwen", "harmony_tools")
    }
    assert one_call == {"qwen": False, "harmony_tools": True}
    other_second = "{{ call.function.name if loop.first else 'other' }}"
    template = toy("deepseek_tools").template_text.replace("{{ call.function.name }}", other_second)
    assert required_tool_format(toy(template)).one_call
    as_text = {
        template: required_tool_format(toy(template)).text_arguments
        for template in ("deepseek_tools", "deepseek_fenced_tools")
    }
    assert as_text == {"deepseek_tools": False, "deepseek_fenced_tools": True}


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (("{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}", ""), "does not print the tools"),
        (("# Tools", "{{ raise_exception('no tools') }}"), "no tools"),
        (("<tool_call>", "<call>"), "'<call>"),
    ],
)
def test_a_run_with_tools_is_refused_with_the_reason_where_the_template_has_no_form_of_calls(
    toy: Toy, breaks: tuple[str, str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"Tools .*{reason}"):
        required_tool_format(toy(toy("qwen").template_text.replace(*breaks)))


def test_a_template_whose_answers_begin_with_the_reasoning_that_its_prompt_opens_has_its_format(
    toy: Toy,
) -> None:
    opened = toy("qwen").template_text.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    in_history = opened.replace(
        "<|im_start|>{{ m.role }}\n",
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n</think>\n{% endif %}",
    )
    for template in (opened, in_history):
        tool_format = tool_format_of(toy(template))
        assert tool_format is not None
        assert tool_format.name == "hermes"


def test_a_prompt_that_opens_the_reasoning_makes_answers_begin_with_it(toy: Toy) -> None:
    renderer = ChatRenderer(toy("qwen_opened"))
    assert renderer.tool_format is not None
    assert renderer.tool_format.parse("idea\n</think>\n\nUp") == ParsedAnswer(content="Up", reasoning="idea")
    assert renderer.plain_format.parse("idea\n</think>\n\nUp") == ParsedAnswer(content="Up", reasoning="idea")


def test_a_template_that_refuses_calls_is_quoted(toy: Toy) -> None:
    refusing = "{% if m.tool_calls %}{{ raise_exception('calls-are-not-for-me') }}{% endif %}"
    template = toy("qwen").template_text
    loop = "{% for m in messages %}"
    assert loop in template
    with pytest.raises(ConfigError, match="calls-are-not-for-me"):
        required_tool_format(toy(template.replace(loop, loop + refusing)))
