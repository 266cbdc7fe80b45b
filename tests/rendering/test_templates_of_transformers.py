from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rllm.errors import ConfigError
from rllm.models.chat_template import render_template

TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "<One> & 'step' é\n",
        "parameters": {"type": "object", "properties": {"to": {"type": "string", "enum": ["Up", "↑"]}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "move", "arguments": {"to": "↑", "n": 1}}}
TALKS: dict[str, list[dict[str, Any]]] = {
    "a question": [{"role": "user", "content": " hello \n"}],
    "two turns": [
        {"role": "system", "content": "Be brief.\n\n"},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nUp"},
        {"role": "user", "content": "\ud83d on"},
    ],
    "a call": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "move", "content": '{"done": true}'},
    ],
}
EXTRAS = {
    "loop controls": "{% for m in messages %}{{ m }}{% if loop.first %}{% break %}{% endif %}{% endfor %}",
    "what the model says": "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "a namespace": "{% set n = namespace(a=1, b=[2]) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ dict(x=n.b) }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ messages | tojson(ensure_ascii=true) }}",
    "layout": "a\n  {% if true %}\n  b\n  {% endif %}\n{{ bos_token }}",
    "a refusal": "{{ raise_exception('never') }}",
    "an underscore": "{% set n = namespace(a=1) %}{% set n._b = 2 %}{{ n._b }}",
    "a change": "{% set _ = messages.append(1) %}{{ messages }}",
    "nothing of ours": "{{ self.__init__ }}{{ cycler.__globals__ }}{{ x.y }}",
}


def test_a_template_prints_what_transformers_prints(templates: dict[str, str]) -> None:
    different: list[tuple[str, str, bool]] = []
    num_compared = 0
    for name, template in {**templates, **EXTRAS}.items():
        for talk, messages in TALKS.items():
            for asks in (True, False):
                for tools in (None, [TOOL]):
                    variables: dict[str, Any] = {
                        "tools": tools,
                        "documents": None,
                        "add_generation_prompt": asks,
                        "bos_token": "<s>",
                        "eos_token": "</s>",
                    }
                    theirs = _theirs(template, messages, variables)
                    if _ours(template, messages, variables) != theirs:
                        different.append((name, talk, asks))
                    num_compared += theirs is not None
    assert not different
    assert num_compared > 100


def _ours(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    try:
        return render_template(template, {**variables, "messages": messages})
    except ConfigError:
        return None


def _theirs(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, **variables)
    except Exception:  # noqa: BLE001  (whatever the template does)
        return None
    return rendered[0]


def test_thoughts_and_nulls_reach_a_template_as_transformers_gives_them(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    from rllm.models.builtin import create_model
    from rllm.models.tokenizer import HuggingFaceTokenizer

    create_model(tmp_path / "model", "tiny")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"chat_template": "', '"chat_template": "{{ messages }}'))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    ours = HuggingFaceTokenizer(tmp_path / "model")
    for thought in ("reasoning_content", "thinking", "reasoning", "thoughts"):
        messages = [{"role": "assistant", "content": None, thought: "well", "tool_calls": None}]
        assert ours.apply_template(messages, add_generation_prompt=False) == theirs.apply_chat_template(
            messages, tokenize=False
        )


def test_a_refused_conversation_says_why() -> None:
    with pytest.raises(ConfigError, match=r": never\."):
        render_template(EXTRAS["a refusal"], {"messages": []})
