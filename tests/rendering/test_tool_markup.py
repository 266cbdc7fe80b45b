"""Tool formats through a real tokenizer, whose markup is tokens: special ones, added ones, or plain text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rllm.models.builtin import create_tokenizer
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.tools import MARKUP, required_tool_format, shown_markup

HIDDEN = ("<|im_end|>", "<|im_start|>", "<bos>", "<head>", "</head>")
TEMPLATES = {
    "qwen": "hermes",
    "qwen_coder": "qwen-coder",
    "glm_tools": "glm",
    "mistral_tools": "mistral",
    "mistral_args_tools": "mistral-args",
    "deepseek_tools": "deepseek-v3.1",
    "deepseek_fenced_tools": "deepseek",
    "dsml_tools": "deepseek-v3.2",
    "harmony_tools": "harmony",
    "llama_tools": "llama",
}


def saved(
    directory: Path, template: str, special: Sequence[str], added: Sequence[str]
) -> HuggingFaceTokenizer:
    tokenizer = create_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in special])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in added])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = template
    wrapped.save_pretrained(directory)
    return HuggingFaceTokenizer(directory)


@pytest.mark.parametrize("spelling", ["special", "added", "text"])
@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_calls_are_found_however_the_vocabulary_has_the_markup(
    toy: Callable[[str], Any], tmp_path: Path, template: str, name: str, spelling: str
) -> None:
    markup = sorted(MARKUP if name == "harmony" else shown_markup(MARKUP - {"<|channel|>"}))
    if spelling == "text" and name == "harmony":
        pytest.skip("`<|end|>` is a special token of this vocabulary in any case")
    special = [*HIDDEN, *(markup if spelling == "special" else ())]
    tokenizer = saved(tmp_path, toy(template).template_text, special, markup if spelling == "added" else ())
    found = required_tool_format(tokenizer)
    assert found.name == name
    ids = found.token_ids  # pyright: ignore[reportAttributeAccessIssue]
    assert all(tokenizer.decode([token]) == tag for tag, token in ids.items() if tag in markup)


def test_an_end_token_is_markup_only_where_there_are_channels() -> None:
    assert shown_markup({"<tool_call>", "<|end|>", "<bos>"}) == {"<tool_call>"}
    assert shown_markup({"<|channel|>", "<|end|>", "<bos>"}) == {"<|channel|>", "<|end|>"}
