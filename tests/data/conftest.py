"""Five chat templates over letters: the families that models come in, small enough to be read."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rllm.errors import ConfigError
from rllm.models.builtin_templates import CHAT_TEMPLATE
from rllm.rendering.chat import ChatRenderer
from rllm.trainer.chat_rows import ChatEncoder
from rllm.types.messages import Message

HERMES_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\\n' }}{% endif %}"
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
CHATML = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + HERMES_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>"
    "{% for m in messages %}<|header|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/header|>\n\n"
    "{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
QWEN_THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content | trim %}"
    "{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] | trim %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "<think>\n{{ thought | trim }}\n</think>\n\n{{ said }}"
    "{% else %}{{ said }}{% endif %}" + HERMES_CALLS + "<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {% if loop.first and rules is defined %}{{ rules }}\n\n{% endif %}"
    "{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its end token, and its begin token where it has one."""

    template: str
    end: str
    begin: str = ""


FAMILIES = {
    "chatml": Family(CHATML, "<|im_end|>"),
    "llama3": Family(LLAMA3, "<|eot_id|>", "<|begin_of_text|>"),
    "qwen_thinking": Family(QWEN_THINKING, "<|im_end|>"),
    "mistral": Family(MISTRAL, "</s>", "<s>"),
    "builtin": Family(CHAT_TEMPLATE, "<|end|>"),
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot_id|>", "<|begin_of_text|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
)
MARKUP = ("[TOOL_CALLS]",)


class LetterTokenizer:
    """A token is a special text or one letter."""

    images = None

    def __init__(self, template: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template)
        self._texts = [*SPECIAL, *MARKUP]
        self.max_token_chars = max(map(len, self._texts))
        self._pieces = re.compile("|".join([*map(re.escape, self._texts), "."]), re.DOTALL)

    def encode(self, text: str) -> list[int]:
        return [
            self._texts.index(piece) if piece in self._texts else 1000 + ord(piece)
            for piece in self._pieces.findall(text)
        ]

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id] if token_id < 1000 else chr(token_id - 1000)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(text for text in map(self.token_text, ids) if text not in SPECIAL)

    def text(self, ids: Sequence[int]) -> str:
        """With special tokens."""
        return "".join(map(self.token_text, ids))

    def apply_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=tools
            )
        except TemplateError as error:
            raise ConfigError(f"The template refuses the conversation: {error}") from error


def _refuse(reason: str) -> None:
    raise TemplateError(reason)


@pytest.fixture(scope="session")
def encoder() -> Callable[..., ChatEncoder]:
    """What encodes for a family by name, or for a template of the test's own."""

    def make(family: str = "chatml", *, template: str = "") -> ChatEncoder:
        chosen = FAMILIES[family]
        tokenizer = LetterTokenizer(template or chosen.template)
        (end,) = tokenizer.encode(chosen.end)
        begin = tokenizer.encode(chosen.begin)[0] if chosen.begin else None
        return ChatEncoder(ChatRenderer(tokenizer), (end,), end, begin)

    return make
