"""Each form of calls through the whole engine: a model without any sense calls a tool when it must."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from rllm.gateway.local import LocalPolicy
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.rendering.tools import MARKUP
from rllm.types.messages import FinishReason
from rllm.types.wire import CallRequest, Dialect, Piece, ToolChoice, ToolMode

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from fake_upstream import Session

HIDDEN = ("<|im_end|>", "<|im_start|>", "<bos>", "<head>", "</head>")
TEMPLATES = {
    "qwen_coder": "qwen-coder",
    "glm_tools": "glm",
    "mistral_args_tools": "mistral-args",
    "deepseek_tools": "deepseek-v3.1",
    "dsml_tools": "deepseek-v3.2",
    "harmony_tools": "harmony",
    "llama_tools": "llama",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "enum": [1, 2]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def model_that_writes(directory: Path, template: str, ends: list[str]) -> None:
    """The built-in model with a chat template of another family, whose markup is tokens of its own."""
    create_model(directory, "tiny", 0)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(each, special=True, normalized=False) for each in HIDDEN])
    markup = sorted(MARKUP - {"<think>", "</think>"})  # a model without any sense would think for long
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in markup])
    tokenizer.save(str(directory / "tokenizer.json"))
    weights = load_file(directory / "model.safetensors")
    (name,) = (name for name in weights if "embed_tokens" in name)
    rows = weights[name]
    shape = (tokenizer.get_vocab_size() - len(rows), rows.shape[1])
    extra = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * rows.std()
    weights[name] = torch.cat([rows, extra])
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    for file, changes in {
        "config.json": {
            "vocab_size": tokenizer.get_vocab_size(),
            "eos_token_id": [tokenizer.token_to_id(end) for end in ends],
        },
        "tokenizer_config.json": {"chat_template": template, "eos_token": ends[0]},
    }.items():
        path = directory / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
async def test_a_call_that_must_be_made_is_sampled_read_and_streamed(
    toy: Callable[[str], Any], tmp_path: Path, template: str, name: str
) -> None:
    ends = ["<|return|>", "<|call|>"] if name == "harmony" else ["<|im_end|>"]
    model_that_writes(tmp_path / "model", toy(template).template_text, ends)
    client = LocalClient(load_model(tmp_path / "model"), num_slots=4, max_context=1024)
    policy = LocalPolicy(client, "tiny")
    assert client.renderer.tool_format is not None
    assert client.renderer.tool_format.name == name
    request = CallRequest(
        dialect=Dialect.CHAT,
        body={},
        messages=[{"role": "user", "content": "go"}],
        tools=[WEATHER],
        tool_choice=ToolChoice(mode=ToolMode.REQUIRED),
        parallel_tool_calls=False,
        max_tokens=80,
    )
    pieces: list[Piece] = []

    async def emit(piece: Piece) -> None:
        pieces.append(piece)

    try:
        for seed in range(9):
            pieces.clear()
            (choice,) = (await policy.answer(request, Session(seed=seed), emit)).choices
            if choice.finish_reason is FinishReason.LENGTH:
                continue  # thoughts that found no end
            assert choice.finish_reason is FinishReason.TOOL_CALLS
            (call,) = choice.tool_calls
            assert call.name == "weather"
            arguments = json.loads(call.arguments)
            assert arguments["city"] in ("Oslo", "Rome")
            assert arguments["days"] in (1, 2)
            assert not choice.unparsed_markup
            told = "".join(each.tool_call.arguments for each in pieces if each.tool_call is not None)
            assert told == call.arguments
            break
        else:
            pytest.fail("no seed led to a call")
    finally:
        await client.close()
