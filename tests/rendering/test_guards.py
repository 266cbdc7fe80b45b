"""Text from outside never becomes a control token, in the template of any family."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.models.builtin import create_model
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.rendering.guards import GUARD, encode_guarded, guard, guard_pattern
from rllm.rendering.tools import MARKUP

TEXTS = ("<|im_end|>", "<|im_start|>", "<s>", "</tool_response>", "<unused1>", "<unused12>", "end|><s")


@given(st.lists(st.sampled_from([*TEXTS, "<", "|", "a", "im_end", GUARD]), max_size=12).map("".join))
def test_no_part_has_a_control_text_and_no_character_is_lost(text: str) -> None:
    pieces: list[str] = []

    def encode(part: str) -> list[int]:
        pieces.append(part)
        return [0]

    encode_guarded(encode, guard(text, guard_pattern(TEXTS)))
    assert "".join(pieces) == text.replace(GUARD, "")
    assert not any(control in piece for control in TEXTS for piece in pieces)


def test_thousands_of_control_texts_are_looked_for_at_once() -> None:
    texts = [f"<unused{number}>" for number in range(6_000)]
    pattern = guard_pattern(texts)
    assert guard("a <unused5999> b", pattern) == f"a <{GUARD}unused5999> b"
    assert guard({"k<unused1>": ["<unused10>"]}, pattern) == {f"k<{GUARD}unused1>": [f"<{GUARD}unused10>"]}
    assert re.fullmatch(pattern, "<unused6000>") is None


FORMATS = (
    *("builtin", "qwen", "qwen_thinking", "qwen_coder", "llama_tools", "mistral_tools", "mistral_args_tools"),
    *("glm_tools", "deepseek_tools", "deepseek_fenced_tools", "dsml_tools", "harmony_tools"),
)
"""Templates, one of each tool format at least."""
CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}


def conversation(role: str, text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools, in which one of them says the text."""
    texts = dict.fromkeys(("system", "user", "tool", "description"), "x") | {role: text}
    messages = [
        {"role": "system", "content": texts["system"]},
        {"role": "user", "content": texts["user"]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "name": "look", "content": texts["tool"]},
    ]
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    function = {"name": "look", "description": texts["description"], "parameters": parameters}
    return messages, [{"type": "function", "function": function}]


@pytest.mark.parametrize("role", ["user", "tool", "system", "description"])
@pytest.mark.parametrize("template", FORMATS)
def test_a_text_that_spells_every_control_token_adds_none(
    toy: Callable[..., Any], template: str, role: str
) -> None:
    tokenizer = toy(template)
    controls = frozenset({"<|im_end|>", "<|im_start|>", "[INST]", "[/INST]", *MARKUP})
    tokenizer.control_texts = controls
    renderer = ChatRenderer(tokenizer)
    spelt = sorted(controls - MARKUP if role == "system" else controls)
    ids = {token_id for text in spelt for token_id in tokenizer.encode(text)}

    def control_ids(text: str) -> list[int]:
        return [token_id for token_id in renderer.render(*conversation(role, text)) if token_id in ids]

    assert control_ids(" ".join(spelt)) == control_ids("x")
    shown = renderer.text_that_asks(*conversation(role, " ".join(spelt)))
    assert GUARD not in shown


def test_a_tokenizer_of_a_model_knows_its_control_texts(tmp_path: Path) -> None:
    create_model(tmp_path / "model", "tiny")
    tokenizer = HuggingFaceTokenizer(tmp_path / "model")
    renderer = ChatRenderer(tokenizer)
    plain = renderer.render([{"role": "user", "content": "x"}])
    controls = {token_id for text in tokenizer.control_texts for token_id in tokenizer.encode(text)}
    hostile = renderer.render([{"role": "user", "content": "".join(sorted(tokenizer.control_texts))}])
    assert [token for token in hostile if token in controls] == [
        token for token in plain if token in controls
    ]
