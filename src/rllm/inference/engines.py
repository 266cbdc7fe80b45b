"""A model client by the name of its engine, and the arguments as a user writes them.

    make_client("openai", {"base_url": "http://127.0.0.1:8000/v1", "model": "m"}, tokenizer)  ──► OpenAIClient
    make_client("vllm", {"base_url": …}, tokenizer)                                           ──► VLLMClient
    make_client("local", {"model": "runs/lake/model"})                                        ──► LocalClient

Nothing is asked of a server yet: clients do that with their first call. What cannot be honoured is refused.
"""

import difflib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllm.errors import ConfigError, MissingExtraError, choices_of
from rllm.inference.client import ModelClient
from rllm.rendering.tokens import TextTokenizer

if TYPE_CHECKING:
    from rllm.models.tokenizer import HuggingFaceTokenizer

_SERVER_ARGS = ("base_url", "model", "api_key", "processed_logprobs", "timeout_s", "connect_timeout_s")
_ARGS = {
    "openai": (*_SERVER_ARGS, "return_token_ids", "extra_body", "max_connections"),
    "vllm": (*_SERVER_ARGS, "max_connections", "sends_seeds"),
    "local": (
        "model",
        "device",
        "trust_remote_code",
        "num_slots",
        "max_context",
        "max_prefill_tokens",
        "cache_tokens",
        "num_drafts",
        "lockstep",
    ),
}
_OF_A_RUN = ("verl", "tinker")
OPENAI_URL = "https://api.openai.com/v1"
VLLM_URL = "http://127.0.0.1:8000/v1"


def make_client(
    engine_name: str, args: Mapping[str, Any] | None = None, tokenizer: Any = None
) -> ModelClient:
    """The client of `openai`, `vllm` or `local`.

    `tokenizer`: the model's directory, a tokenizer of transformers, or a `TextTokenizer`. `vllm` needs one,
    `openai` measures prompts with it, `local` has its own. Where `args` do not say, `openai` takes
    `base_url` and `api_key` from OPENAI_BASE_URL and OPENAI_API_KEY. Raises ConfigError.
    """
    if engine_name in _OF_A_RUN:
        raise ConfigError(
            f"`engine_name` is {engine_name!r}, whose servers a training run makes: give "
            f'`AgentTrainer(backend="{engine_name}")`. Here ask a server of your own: `engine_name="vllm"` '
            'with `rollout_engine_args={"base_url": …}`.'
        )
    if engine_name not in _ARGS:
        raise ConfigError(
            f"`engine_name` is {engine_name!r}; {choices_of(engine_name, _ARGS)}. Any other engine is "
            "given as `rollout_engine`."
        )
    arguments = dict(args or {})
    for name in arguments:
        if name not in _ARGS[engine_name]:
            nearest = difflib.get_close_matches(name, _ARGS[engine_name], n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else f"it has {', '.join(_ARGS[engine_name])}."
            raise ConfigError(
                f"`rollout_engine_args` has `{name}`, which `{engine_name}` does not know; {hint}"
            )
    if engine_name == "local":
        return _local(arguments, tokenizer)
    return _openai(arguments, tokenizer) if engine_name == "openai" else _vllm(arguments, tokenizer)


def _openai(args: dict[str, Any], tokenizer: Any) -> ModelClient:
    from rllm.inference.openai import OpenAIClient

    base_url = args.pop("base_url", None) or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
    args["api_key"] = args.get("api_key") or os.environ.get("OPENAI_API_KEY")
    return OpenAIClient(base_url, tokenizer=None if tokenizer is None else text_tokenizer(tokenizer), **args)


def _vllm(args: dict[str, Any], tokenizer: Any) -> ModelClient:
    from rllm.inference.vllm import VLLMClient
    from rllm.models.tokenizer import HuggingFaceTokenizer

    if tokenizer is None:
        raise ConfigError(
            "`tokenizer` is missing: with `vllm`, prompts are made of ids here. Give the directory of the "
            "model that is served."
        )
    read = text_tokenizer(tokenizer)
    if not isinstance(read, HuggingFaceTokenizer):
        raise ConfigError(
            f"`tokenizer` is {tokenizer!r}; with `vllm` it must be one of transformers, or the directory of "
            "the model that is served."
        )
    return VLLMClient(args.pop("base_url", VLLM_URL), read, **args)


def _local(args: dict[str, Any], tokenizer: Any) -> ModelClient:
    try:
        from rllm.inference.local.client import LocalClient
        from rllm.models.directory import load_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    if tokenizer is not None:
        raise ConfigError("`tokenizer` is given, but a `local` model has its own; leave it out.")
    model = args.pop("model", None)
    if not isinstance(model, str | Path):
        raise ConfigError(f"`model` is {model!r}; with `local` it is the directory of a model.")
    local_model = load_model(
        Path(model),
        device=args.pop("device", "cpu"),
        trust_remote_code=args.pop("trust_remote_code", False),
    )
    args.setdefault("max_context", min(local_model.max_positions, 4096))
    return LocalClient(local_model, **args)


def text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """A tokenizer as rendering needs it, of a directory or of an object of transformers."""
    from rllm.models.tokenizer import HuggingFaceTokenizer

    if isinstance(tokenizer, str | Path):
        return HuggingFaceTokenizer(Path(tokenizer))
    if hasattr(tokenizer, "apply_template"):
        return tokenizer
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"`tokenizer` is {tokenizer!r}; it must be a model directory, a tokenizer of transformers, or "
            "have the methods of rllm.rendering.tokens.TextTokenizer."
        )
    return _saved_and_read(tokenizer)


def _saved_and_read(tokenizer: Any) -> "HuggingFaceTokenizer":
    """Read from files like any other, with the same checks and none of its own settings."""
    from rllm.models.tokenizer import HuggingFaceTokenizer

    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return HuggingFaceTokenizer(Path(directory))
