"""An answer from elsewhere becomes the tokens that a model with this template would have had to sample."""

from collections.abc import Callable
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.writing import AnswerWriter
from rllm.types.messages import Message

Toy = Callable[..., Any]
ASKED: list[Message] = [{"role": "user", "content": "Up?"}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": "{}"}}
SHORTENS_ANSWERS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role == 'user' else m.content[:8] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(tokenizer: Any, **answer: Any) -> list[int]:
    writer = AnswerWriter(ChatRenderer(tokenizer), (tokenizer.end_id,), tokenizer.end_id)
    return writer.ids(ASKED, {"role": "assistant", **answer})


@pytest.mark.parametrize("template", ["chatml", "llama", "gemma", "mistral", "builtin"])
def test_an_answer_is_its_text_and_one_end_token(toy: Toy, template: str) -> None:
    tokenizer = toy(template)
    *ids, end = written(tokenizer, content="b Up")
    assert tokenizer.decode(ids).strip() == "b Up"
    assert end == tokenizer.end_id
    assert tokenizer.end_id not in ids


def test_an_answer_that_the_template_shortens_is_refused_and_a_short_one_written(toy: Toy) -> None:
    tokenizer = toy(SHORTENS_ANSWERS)
    assert tokenizer.decode(written(tokenizer, content="b Up")) == "b Up"
    with pytest.raises(ConfigError, match="drops or rewrites"):
        written(tokenizer, content="a longer answer")


def test_a_call_is_refused_where_the_template_knows_no_tools(toy: Toy) -> None:
    with pytest.raises(ConfigError, match="calls tools"):
        written(toy("chatml"), content="b", tool_calls=[CALL])


@pytest.mark.parametrize("behind", ["U", "Up"])
def test_an_answer_that_goes_on_behind_its_end_is_refused(toy: Toy, behind: str) -> None:
    with pytest.raises(ConfigError, match="end token"):
        written(toy("chatml"), content=f"b<|im_end|>{behind}")
