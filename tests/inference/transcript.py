"""Questions to a vLLM server and the fake one, and the parts of their replies that a fleet looks at.

`record` asks; `transcript.json` has what vLLM 0.32 said. Both servers are held to it: the fake one by
`test_transcript.py`, the real one by tests/vllm. The model is the first of `models`, and answers are its
likeliest tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model

FILE = Path(__file__).with_name("transcript.json")
MAX_CONTEXT = 128
CLOSE = 5e-4
"""Nats between two float32 engines."""
PROMPT = [5, 6, 7, 8, 9]
ALIKE = {
    "model": "policy",
    "prompt": PROMPT,
    "max_tokens": 6,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
    "stop_token_ids": [],
    "logprobs": 1,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": True,
}


def make_models(directory: Path) -> list[Path]:
    """Two models of one architecture whose heads vLLM has kernels for, with output layers of their own."""
    for seed in range(2):
        create_model(directory / f"tied-{seed}", "small", seed)
        save_model(load_model(directory / f"tied-{seed}"), directory / f"{seed}", with_output_layer=True)
    return [directory / "0", directory / "1"]


async def record(url: str, models: list[Path]) -> dict[str, Any]:
    """Name -> what the server at `url` said."""
    root = url.removesuffix("/v1")
    said: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session:

        async def ask(
            name: str, path: str, body: Any, read: Callable[[Any], Any] = lambda reply: None
        ) -> Any:
            call = session.get(root + path) if body is None else session.post(root + path, json=body)
            async with call as response:
                text = await response.text()
                if body is not None and body.get("stream"):
                    reply = _collected(text)
                else:
                    reply = json.loads(text or "{}")
                said[name] = {
                    "status": response.status,
                    "says": read(reply) if response.status == 200 else None,
                }
                return reply

        async def complete(name: str, **changes: Any) -> dict[str, Any]:
            return await ask(name, "/v1/completions", {**ALIKE, **changes}, _choice)

        await ask("models", "/v1/models", None, lambda reply: _of(reply["data"][0], "id", "max_model_len"))
        await ask("version", "/version", None, lambda reply: [*reply])
        await ask("health", "/health", None)
        text = "The answer is 1234.5"
        tokenize = {"model": "policy", "prompt": text, "add_special_tokens": False}
        await ask("tokenize", "/tokenize", tokenize, lambda reply: reply["tokens"])
        whole = _choice(await complete("whole"))
        await complete("streamed", stream=True, stream_options={"include_usage": True})
        await complete("alternatives", logprobs=3)
        await complete("streamed alternatives", logprobs=3, stream=True)
        stop = whole["text"][2:4]
        await complete("stop text", stop=[stop], skip_special_tokens=False)
        await complete("streamed stop text", stop=[stop], skip_special_tokens=False, stream=True)
        await complete("stop id", stop_token_ids=[whole["token_ids"][2]])
        await complete("one token", max_tokens=1)
        await complete("to the end of the context", prompt=PROMPT * 25, max_tokens=3)
        await complete("too long", prompt=PROMPT * 26)
        await complete("another model", model="nobody")
        await complete("scores", prompt_logprobs=0, max_tokens=1)
        await ask("pause", "/pause?mode=wait", {})
        where = {"weights_path": str(models[1])}
        await ask("reload", "/collective_rpc", {"method": "reload_weights", "kwargs": where})
        await ask("reset", "/reset_prefix_cache", {}, lambda reply: reply["success"])
        await ask("new version", "/update_weight_version", {"new_version": "7"})
        await ask("resume", "/resume", {})
        await complete("by new weights")
        await ask("keep", "/pause?mode=keep&clear_cache=false", {})
        await ask("resume again", "/resume", {})
        await ask("unknown path", "/no_such_path", {})
        where = {"weights_path": str(models[0])}
        await ask("reload the first", "/collective_rpc", {"method": "reload_weights", "kwargs": where})
        await ask("reset again", "/reset_prefix_cache", {}, lambda reply: reply["success"])
        await complete("by the first weights")
    return said


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two transcripts are not the same, numbers with a point up to CLOSE."""
    if isinstance(one, dict) and isinstance(other, dict):
        if [*one] != [*other]:
            return [f"{where}: {[*one]} and {[*other]}"]
        return [line for key in one for line in differences(one[key], other[key], f"{where}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [
            line for place, (mine, theirs) in pairs for line in differences(mine, theirs, f"{where}/{place}")
        ]
    is_close = isinstance(one, float) and isinstance(other, float) and abs(one - other) < CLOSE
    return [] if one == other or is_close else [f"{where}: {one!r} and {other!r}"]


def _of(reply: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: reply[name] for name in names}


def _collected(text: str) -> dict[str, Any]:
    """The chunks of a stream as one reply."""
    whole: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": {}}
    for line in text.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
            whole["text"] += choice["text"]
            whole["token_ids"] += choice["token_ids"] or []
            for name, values in (choice.get("logprobs") or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values or [])
            if choice.get("prompt_token_ids") is not None:
                assert "prompt_token_ids" not in whole, "once in a stream"
                whole["prompt_token_ids"] = choice["prompt_token_ids"]
            whole |= {name: choice.get(name) for name in ("finish_reason", "stop_reason")}
    assert text.rstrip().endswith("data: [DONE]")
    return {"choices": [whole]}


def _choice(reply: dict[str, Any]) -> dict[str, Any]:
    """The parts of a choice that a client reads."""
    (choice,) = reply["choices"]
    said = {name: choice[name] for name in ("text", "token_ids", "finish_reason", "stop_reason")}
    said["prompt_token_ids"] = choice.get("prompt_token_ids")
    logprobs = choice["logprobs"]
    said["token_logprobs"] = [float(each) for each in logprobs["token_logprobs"]]
    said["tops"] = [
        {name: float(value) for name, value in sorted(top.items(), key=lambda pair: -pair[1])}
        for top in logprobs["top_logprobs"]
    ]
    if choice.get("prompt_logprobs"):
        said["prompt_logprobs"] = [
            None if each is None else float(each[str(token)]["logprob"])
            for each, token in zip(choice["prompt_logprobs"], choice["prompt_token_ids"], strict=True)
        ]
    return said
