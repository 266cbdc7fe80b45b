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
    with pytest.raises(ConfigError, match="prints the `content` of every assistant message"):
        renderer.continuation([0], [{"role": "user", "content": "go"}])


def test_what_users_say_cannot_move_the_place_where_an_answer_ends(toy: Toy) -> None:
    tokenizer = toy("chatml")
    renderer = ChatRenderer(tokenizer)
    marked = "\u2063answer\u2063"
    assert renderer.continuation(
        [tokenizer.end_id], [{"role": "user", "content": marked}]
    ) == tokenizer.encode(f"\n<|im_start|>user\n{marked}<|im_end|>\n<|im_start|>assistant\n")
