import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rllm.errors import ConfigError
from rllm.models.builtin_templates import CHAT_TEMPLATE
from rllm.rendering.tools import MARKUP
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

QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role != 'system' or not loop.first %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}\n{% endif %}"
    '<tool_call>\n{"name": {{ call.function.name | tojson }}, "arguments": {{ ARGUMENTS }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace(
    "ARGUMENTS",
    "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
)
QWEN_THINKING = QWEN_TOOLS.replace(
    "<|im_start|>{{ m.role }}\n{{ m.content }}",
    "<|im_start|>{{ m.role }}\n{{ m.content if m.role != 'assistant' or loop.index0 > ns.last"
    " else m.content.split('</think>')[-1].lstrip('\n') }}",
).replace(
    "{% for m in messages %}",
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}",
)
QWEN_OPENED = QWEN_THINKING.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
).replace(
    "<|im_start|>{{ m.role }}\n",
    "<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and '</think>' in m.content %}<think>\n"
    "{% endif %}",
)
QWEN_CODER = (
    QWEN_TOOLS.partition("<tool_call>")[0] + "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% if call.function.arguments is mapping %}"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}{% endif %}"
    "</function>\n</tool_call>" + QWEN_TOOLS.partition("</tool_call>")[2]
)
LLAMA_TOOLS = (
    "<bos>{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
    "{% set messages = messages[1:] %}{% else %}{% set rules = '' %}{% endif %}"
    "<head>system</head>\n\n{{ rules }}"
    "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}<|im_end|>"
    "{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('single calls') }}{% endif %}"
    "<head>assistant</head>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>'
    "{% else %}<head>{{ 'ipython' if m.role == 'tool' else m.role }}</head>\n\n"
    "{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<head>assistant</head>\n\n{% endif %}"
)
MISTRAL_TOOLS = (
    "<bos>{% if messages[0].role == 'system' %}{% set rules = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST] {% if loop.first and rules is defined %}{{ rules }}\n\n{% endif %}"
    "{{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] ["
    "{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids of 9') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}'
    "{% endfor %}]<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}"
)
GLM_TOOLS = (
    "<bos>{% if tools %}<head>system</head>\n# Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<head>observation</head>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'assistant' %}<head>assistant</head>\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}"
    "{% else %}<head>{{ m.role }}</head>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<head>assistant</head>\n{% endif %}"
)
GLM_TIGHT_TOOLS = (
    GLM_TOOLS.replace("\n<tool_call>{{ call.function.name }}\n", "<tool_call>{{ call.function.name }}")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("</arg_value>\n", "</arg_value>")
)
MISTRAL_ARGS_TOOLS = (
    "<bos>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or m.role == 'system' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>"
    "{% endif %}{% endfor %}"
)
DEEPSEEK_TOOLS = (
    "<bos>{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'assistant' %}<head>assistant</head>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>{{ ARGUMENTS }}<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}<|im_end|>"
    "{% else %}<head>{{ m.role }}</head>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<head>assistant</head>{% endif %}"
)
DEEPSEEK_FENCED_TOOLS = DEEPSEEK_TOOLS.replace(
    "{{ call.function.name }}<｜tool▁sep｜>{{ ARGUMENTS }}",
    "{{ call.type }}<｜tool▁sep｜>{{ call.function.name }}\n```json\n{{ ARGUMENTS }}\n```",
).replace("<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>{% if not loop.last %}\n{% endif %}")
# some templates add arguments up as text and break when they are an object
DEEPSEEK_FENCED_TOOLS = DEEPSEEK_FENCED_TOOLS.replace("{{ ARGUMENTS }}", "{{ '' + call.function.arguments }}")
DEEPSEEK_TOOLS = DEEPSEEK_TOOLS.replace("ARGUMENTS", "call.function.arguments | tojson")
DSML_TOOLS = (
    "<bos>{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<function_results>\n<result>{{ m.content }}</result>\n</function_results>"
    "{% elif m.role == 'assistant' %}<head>assistant</head>{{ m.content }}"
    "{% if m.tool_calls %}\n\n<｜DSML｜function_calls>\n{% for call in m.tool_calls %}"
    '<｜DSML｜invoke name="{{ call.function.name }}">\n'
    "{% for key, value in call.function.arguments.items() %}"
    """<｜DSML｜parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">"""
    "{{ value if value is string else value | tojson }}</｜DSML｜parameter>\n{% endfor %}"
    "</｜DSML｜invoke>\n{% endfor %}</｜DSML｜function_calls>{% endif %}<|im_end|>"
    "{% else %}<head>{{ m.role }}</head>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<head>assistant</head>{% endif %}"
)
HARMONY_TOOLS = (
    "<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>"
    "{% if tools %}<|start|>developer<|message|># Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% elif m.tool_calls %}<|start|>assistant<|channel|>commentary to=functions."
    "{{ m.tool_calls[0].function.name }} <|constrain|>json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HARMONY_ROLE_TOOLS = HARMONY_TOOLS.replace(
    "<|start|>assistant<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }} "
    "<|constrain|>json",
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json",
)

SPECIAL = ("<|im_end|>", "<|im_start|>", "<bos>", "<head>", "</head>", "[INST]", "[/INST]")
PIECES = (
    "ab",
    "ba",
    "aba",
    "Up",
    "Down",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    *sorted(MARKUP - {"<think>", "</think>", "<tool_call>", "</tool_call>"}),
)


class ToyTokenizer:
    """Encodes by the longest piece, and is no bijection: `a`+`b`, `ab` and their twins all decode to `ab`.

    Ids: special tokens, pieces, characters; then a twin of each, which decodes alike and is never encoded to.
    """

    images = None

    def __init__(self, template: str) -> None:
        environment = ImmutableSandboxedEnvironment()
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = _tojson
        self.template_text = template
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
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"The template refuses the conversation: {error}") from error


def _refuse(reason: str) -> None:
    raise TemplateError(reason)


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.fixture(scope="session")
def toy() -> Callable[[str], ToyTokenizer]:
    """A toy tokenizer with a template of its own, or one that is named as in `templates`."""

    def make(template: str = "chatml") -> ToyTokenizer:
        return ToyTokenizer(TEMPLATES.get(template, template))

    return make


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    """Name -> a chat template in the manner of a published one."""
    return TEMPLATES


TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "roaming_system": ROAMING_SYSTEM,
    "thinking": THINKING,
    "builtin": CHAT_TEMPLATE.replace("<|end|>", "<|im_end|>"),
    "qwen": QWEN_TOOLS,
    "qwen_thinking": QWEN_THINKING,
    "qwen_opened": QWEN_OPENED,
    "qwen_coder": QWEN_CODER,
    "llama_tools": LLAMA_TOOLS,
    "mistral_tools": MISTRAL_TOOLS,
    "mistral_args_tools": MISTRAL_ARGS_TOOLS,
    "glm_tools": GLM_TOOLS,
    "glm_tight_tools": GLM_TIGHT_TOOLS,
    "deepseek_tools": DEEPSEEK_TOOLS,
    "deepseek_fenced_tools": DEEPSEEK_FENCED_TOOLS,
    "dsml_tools": DSML_TOOLS,
    "harmony_tools": HARMONY_TOOLS,
    "harmony_role_tools": HARMONY_ROLE_TOOLS,
}
