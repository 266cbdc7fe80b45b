import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.types.messages import Message

Toy = Callable[..., Any]

USER_TEXT = st.text(alphabet="abUp \n<|im_end>x", max_size=12)
ANSWER_TEXT = st.text(alphabet="abUpx ", max_size=10).map(str.strip)  # what trimming templates would print


@given(turns=st.lists(st.tuples(USER_TEXT, ANSWER_TEXT), min_size=1, max_size=5), with_system=st.booleans())
@pytest.mark.parametrize("template", ["chatml", "llama", "gemma", "mistral"])
def test_appending_gives_what_rendering_the_whole_conversation_would(
    toy: Toy, template: str, turns: list[tuple[str, str]], with_system: bool
) -> None:
    tokenizer = toy(template)
    renderer = ChatRenderer(tokenizer)
    conversation = Conversation(renderer=renderer)
    messages: list[Message] = []
    if with_system and template != "gemma":
        messages.append({"role": "system", "content": "rules"})
    for said, answer in turns:
        messages = [*messages, {"role": "user", "content": said}]
        assert conversation.prompt(messages) == renderer.render(messages)
        conversation.record([*tokenizer.encode(answer), tokenizer.end_id], answer)
        messages = [*messages, {"role": "assistant", "content": answer}]
    assert renderer.incremental
    assert conversation.num_segments == 1


@pytest.mark.parametrize(
    ("template", "incremental"),
    [
        ("chatml", True),
        ("llama", True),
        ("gemma", True),
        ("mistral", True),
        ("roaming_system", False),
        ("thinking", False),
        ("{% for m in messages[-2:] %}{{ m.content }}<|im_end|>{% endfor %}", False),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", False),
        ("{% for m in messages %} {{ m.content }}<|im_end|>{% endfor %}", False),
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}", False),
    ],
)
def test_it_is_found_out_whether_a_template_only_appends(toy: Toy, template: str, incremental: bool) -> None:
    assert ChatRenderer(toy(template)).incremental is incremental


def test_messages_with_more_than_role_and_content_reach_the_template(toy: Toy) -> None:
    tokenizer = toy(
        "{% for m in messages %}<|im_start|>{{ m.name or m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = ChatRenderer(tokenizer)
    tool: Message = {"role": "tool", "name": "clock", "content": "noon"}
    assert renderer.continuation([tokenizer.end_id], [tool]) == tokenizer.encode(
        "\n<|im_start|>clock\nnoon<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_system_messages_serves_conversations_without_them(toy: Toy) -> None:
    renderer = ChatRenderer(toy("gemma"))
    with pytest.raises(ConfigError, match="System role not supported"):
        renderer.render([{"role": "system", "content": "rules"}, {"role": "user", "content": "go"}])


def test_a_template_that_refuses_the_plainest_conversation_is_refused_at_once(toy: Toy) -> None:
    with pytest.raises(ConfigError, match="never"):
        ChatRenderer(toy("{{ raise_exception('never') }}"))


def test_a_template_that_drops_answers_cannot_go_on_and_says_so(toy: Toy) -> None:
    drops_answers = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}"
    renderer = ChatRenderer(toy(drops_answers))
    assert not renderer.incremental
    with pytest.raises(ConfigError, match=r"`content` .*assistant"):
        renderer.continuation([0], [{"role": "user", "content": "go"}])


def test_a_template_that_shows_answers_alone_begins_with_one_and_goes_on(toy: Toy) -> None:
    tokenizer = toy("{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}")
    tail = ChatRenderer(tokenizer).continuation([], [{"role": "user", "content": "go"}])
    assert tail == [tokenizer.end_id]


def test_what_users_say_cannot_move_the_place_where_an_answer_ends(toy: Toy) -> None:
    tokenizer = toy("chatml")
    renderer = ChatRenderer(tokenizer)
    marked = "\u2063answer\u2063"
    assert renderer.continuation(
        [tokenizer.end_id], [{"role": "user", "content": marked}]
    ) == tokenizer.encode(f"\n<|im_start|>user\n{marked}<|im_end|>\n<|im_start|>assistant\n")


# ---- tools -----------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": name, "description": "ab"}} for name in ("move", "look")]
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_of_some_length",
            "type": "function",
            "function": {"name": "move", "arguments": '{"b": [1], "a": "x"}'},
        }
    ],
}
RESULT: Message = {"role": "tool", "tool_call_id": "call_of_some_length", "name": "move", "content": "done"}
USER: Message = {"role": "user", "content": "go"}


def test_tools_calls_and_results_reach_the_template_and_arguments_are_objects_there(toy: Toy) -> None:
    tokenizer = toy("qwen")
    text = tokenizer.decode(ChatRenderer(tokenizer).render([USER, CALL, RESULT], TOOLS))
    assert json.dumps(TOOLS[1]) in text
    assert '<tool_call>\n{"name": "move", "arguments": {"b": [1], "a": "x"}}\n</tool_call>' in text
    assert "<tool_response>\ndone\n</tool_response>" in text
    assert "None" not in text
    assert CALL["tool_calls"][0]["function"]["arguments"] == '{"b": [1], "a": "x"}', "theirs is not touched"


def test_ids_of_nine_letters_and_digits_reach_a_template_that_wants_them_as_they_are(toy: Toy) -> None:
    tokenizer = toy("mistral_tools")

    def text_with(call_id: str) -> str:
        call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": call_id}]}
        result: Message = {**RESULT, "tool_call_id": call_id}
        return tokenizer.decode(ChatRenderer(tokenizer).render([USER, call, result], TOOLS))

    assert text_with("abcdef789").count("abcdef789") == 2
    for other in ("abcdef78", "abcdef-89", "call_of_some_length"):
        assert other not in text_with(other)
    assert text_with("abcdef-89") != text_with("abcdef-88")


def test_ids_of_any_length_reach_a_template_that_takes_them_as_they_are(toy: Toy) -> None:
    tokenizer = toy(
        toy("qwen").template_text.replace("<tool_response>", "<tool_response>{{ m.tool_call_id }}")
    )
    text = tokenizer.decode(ChatRenderer(tokenizer).render([USER, CALL, RESULT], TOOLS))
    assert "<tool_response>call_of_some_length\ndone" in text


def test_a_template_that_writes_texts_of_arguments_gets_them_as_they_were_said(toy: Toy) -> None:
    tokenizer = toy("deepseek_fenced_tools")
    function = {"name": "move", "arguments": {"to": "Tromsø"}}
    call = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": function}]}
    text = tokenizer.decode(ChatRenderer(tokenizer).render([USER, call, RESULT], TOOLS))
    assert '{"to": "Troms' in text
    assert "\\u" not in text  # the toy has no such letter, and leaves it out where it comes as one


@pytest.mark.parametrize("arguments", ["{bad", "[1]", "5"])
def test_arguments_that_are_no_object_reach_the_template_as_they_are(toy: Toy, arguments: str) -> None:
    tokenizer = toy("qwen")
    call = {"id": "c", "type": "function", "function": {"name": "move", "arguments": arguments}}
    said: Message = {"role": "assistant", "tool_calls": [call]}
    text = tokenizer.decode(ChatRenderer(tokenizer).render([USER, said, RESULT], TOOLS))
    assert f'"arguments": {arguments}}}' in text


@pytest.mark.parametrize(
    "template",
    [
        "qwen",
        "qwen_coder",
        "glm_tools",
        "mistral_tools",
        "deepseek_fenced_tools",
        "dsml_tools",
        "harmony_tools",
    ],
)
def test_a_call_without_arguments_renders_alike_however_a_client_says_so(toy: Toy, template: str) -> None:
    renderer = ChatRenderer(toy(template))

    def render_with(arguments: dict[str, Any]) -> list[int]:
        call = {"id": "abcdef789", "type": "function", "function": {"name": "move", **arguments}}
        result: Message = {**RESULT, "tool_call_id": "abcdef789"}
        return renderer.render([USER, {"role": "assistant", "tool_calls": [call]}, result], TOOLS)

    ids = render_with({"arguments": "{}"})
    for other in ("null", " null\n", "", None, {}):
        assert render_with({"arguments": other}) == ids, other
    assert render_with({}) == ids


def test_an_answer_without_calls_renders_alike_however_a_client_says_so(toy: Toy) -> None:
    """Clients send the fields of their classes, and templates look whether there is one."""
    renderer = ChatRenderer(
        toy(
            "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
            "{{ raise_exception('One call at a time') }}{% endif %}a call{% else %}{{ m.content }}{% endif %}"
            "<|im_end|>{% endfor %}"
        )
    )
    ask = {"role": "user", "content": "?"}
    for content in ("go", [{"type": "text", "text": "go"}]):
        answer = {"role": "assistant", "content": content}
        plain = renderer.render([ask, answer, ask])
        for no_calls in (None, []):
            assert renderer.render([ask, {**answer, "tool_calls": no_calls}, ask]) == plain


def test_content_in_parts_or_absent_renders_as_text_does(toy: Toy) -> None:
    renderer = ChatRenderer(toy("qwen"))
    parts: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}],
    }
    for content in ({"content": ""}, {"content": None}, {}, {"content": []}):
        said: Message = {"role": "assistant", "tool_calls": CALL["tool_calls"], **content}
        assert renderer.render([parts, said], TOOLS) == renderer.render([USER, CALL], TOOLS)


@pytest.mark.parametrize("template", ["builtin", "qwen", "llama_tools", "mistral_tools"])
def test_appending_a_tool_result_gives_what_rendering_the_whole_conversation_would(
    toy: Toy, template: str
) -> None:
    tokenizer = toy(template)
    renderer = ChatRenderer(tokenizer)
    prompt = renderer.render([USER], TOOLS)
    whole = renderer.render([USER, CALL, RESULT], TOOLS)
    tail = renderer.continuation([], [RESULT], TOOLS)
    assert renderer.appends([RESULT], TOOLS)
    assert whole[: len(prompt)] == prompt
    assert whole[-len(tail) :] == tail
    answer = whole[len(prompt) : -len(tail)]
    assert renderer.tool_format is not None
    assert [call.name for call in renderer.tool_format.parse(tokenizer.decode(answer)).calls] == ["move"]


@pytest.mark.parametrize(
    ("template", "after_a_result", "after_a_user"),
    [
        ("builtin", True, True),
        ("qwen", True, True),
        ("qwen_coder", True, True),
        ("llama_tools", True, True),
        ("mistral_tools", True, False),  # its tools stand before the last user message
        ("qwen_thinking", True, False),  # its thoughts go when a user speaks again
        ("qwen_opened", True, False),
        ("thinking", False, False),
    ],
)
def test_it_is_found_out_after_whom_a_template_only_appends(
    toy: Toy, template: str, after_a_result: bool, after_a_user: bool
) -> None:
    renderer = ChatRenderer(toy(template))
    assert renderer.appends([RESULT], TOOLS) is after_a_result
    assert renderer.appends([RESULT, RESULT, RESULT], TOOLS) is after_a_result
    assert renderer.appends([USER], TOOLS) is after_a_user
    assert renderer.appends([RESULT, USER], TOOLS) is after_a_user


def test_a_template_that_drops_results_when_a_user_speaks_again_only_appends_after_results(toy: Toy) -> None:
    dropping = toy("qwen").template_text.replace(
        "{% for m in messages %}{% if m.role == 'tool' %}",
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'tool' and loop.index0 < ns.last %}"
        "{% elif m.role == 'tool' %}",
    )
    assert dropping != toy("qwen").template_text
    renderer = ChatRenderer(toy(dropping))
    assert renderer.incremental, "as long as there are no tools"
    assert renderer.appends([RESULT], TOOLS)
    assert not renderer.appends([USER], TOOLS)


def test_a_template_that_ends_calls_otherwise_than_answers_does_not_only_append(toy: Toy) -> None:
    other_end = toy("qwen").template_text.replace(
        "{% endfor %}<|im_end|>\n{% endif %}",
        "{% endfor %}{{ '<head>' if m.tool_calls else '<|im_end|>' }}\n{% endif %}",
    )
    renderer = ChatRenderer(toy(other_end))
    assert not renderer.appends([RESULT], TOOLS)
    assert renderer.appends([USER], TOOLS) is True


def test_a_tail_that_lists_the_tools_lists_the_right_ones(toy: Toy) -> None:
    tokenizer = toy(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "<|im_start|>assistant\n{% endif %}"
    )
    assert "move look" in tokenizer.decode(ChatRenderer(tokenizer).continuation([], [USER], TOOLS))


def test_the_same_messages_with_other_tools_are_another_prompt(toy: Toy) -> None:
    renderer = ChatRenderer(toy("qwen"))
    prompts = [renderer.render([USER], tools) for tools in ((), TOOLS, TOOLS[:1], ())]
    assert prompts[0] == prompts[3]
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_what_is_remembered_of_long_texts_is_bounded(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.rendering.chat.MAX_LONG", 50_000)
    tokenizer = toy("qwen")
    renderer = ChatRenderer(tokenizer)
    for number in range(40):
        long: Message = {"role": "user", "content": f"{number} " + "ab" * 2_000}
        for _ in range(2):
            said = tokenizer.encode(tokenizer.apply_template([long], add_generation_prompt=True))
            assert renderer.render([long]) == said
        known = renderer._long._entries.values()
        assert renderer._long.num_characters == sum(size for size, _ in known) <= 50_000
    assert 1 < len(renderer._long) < 40
    with monkeypatch.context() as patch:  # the latest are those that are remembered
        patch.setattr(type(tokenizer), "encode", lambda self, text: pytest.fail(f"{len(text)} characters"))
        assert renderer.render([long]) == said
    assert len(renderer.render([{"role": "user", "content": "ab" * 50_000}])) > 50_000
    assert renderer._long.num_characters <= 50_000
    assert renderer._plain.cache_info().currsize == 0


def test_long_messages_are_remembered_apart_from_where_they_stand(toy: Toy) -> None:
    tokenizer = toy("qwen")
    renderer = ChatRenderer(tokenizer)
    long: Message = {"role": "user", "content": "ab" * 2_000}
    for _ in range(2):
        whole = renderer.render([long])
        assert whole == tokenizer.encode(tokenizer.apply_template([long], add_generation_prompt=True))
        assert renderer.continuation([tokenizer.end_id], [long]) == tokenizer.encode("\n") + whole


def test_ids_of_calls_fit_the_template_when_tools_are_no_longer_offered(toy: Toy) -> None:
    tokenizer = toy("mistral_tools")
    text = tokenizer.decode(ChatRenderer(tokenizer).render([USER, CALL, RESULT]))
    ids = re.findall(r'"(?:call_)?id": "([a-z0-9]{9})"', text)
    assert len(ids) == 2
    assert len(set(ids)) == 1
