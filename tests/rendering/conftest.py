import re
from collections.abc import Callable, Sequence

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rllm.errors import ConfigError
from rllm.types.messages import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<bos>{% for m in messages %}<head>{{ m.role }}</head>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<head>assistant</head>\n\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
MISTRAL = (
    "<bos>{% if messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n\n{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
ROAMING_SYSTEM = (
    "<bos>{% if messages[0].role == 'system' %}"
    "{% set rules = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {% if loop.last and rules is defined %}{{ rules }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role != 'assistant' %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL = ("<|im_end|>", "<|im_start|>", "<bos>", "<head>", "</head>", "[INST]", "[/INST]")
PIECES = ("ab", "ba", "aba", "Up", "Down", "<think>", "</think>")


class ToyTokenizer:
    """Encodes by the longest piece, and is no bijection: `a`+`b`, `ab` and their twins all decode to `ab`.

    Ids: special tokens, pieces, characters; then a twin of each, which decodes alike and is never encoded to.
    """

    def __init__(self, template: str) -> None:
        environment = ImmutableSandboxedEnvironment()
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(template)
        self._texts = [*SPECIAL, *PIECES, *(chr(code) for code in range(32, 127)), "\n", "\u2063"]
        self._id_of = {text: index for index, text in enumerate(self._texts)}
        longest_first = sorted(self._texts, key=len, reverse=True)
        self._piece = re.compile("|".join(map(re.escape, longest_first)))
        self.num_ids = 2 * len(self._texts)
        self.end_id = 0

    def encode(self, text: str) -> list[int]:
        return [self._id_of[piece] for piece in self._piece.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        texts = (self._texts[token % len(self._texts)] for token in ids)
        return "".join(text for text in texts if text not in SPECIAL)

    def apply_template(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise ConfigError(f"The template refuses the conversation: {error}") from error


def _refuse(reason: str) -> None:
    raise TemplateError(reason)


@pytest.fixture(scope="session")
def toy() -> Callable[[str], ToyTokenizer]:
    """A toy tokenizer with a template of its own, or one that is named as in `templates`."""

    def make(template: str = "chatml") -> ToyTokenizer:
        return ToyTokenizer(TEMPLATES.get(template, template))

    return make


TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "roaming_system": ROAMING_SYSTEM,
    "thinking": THINKING,
}
