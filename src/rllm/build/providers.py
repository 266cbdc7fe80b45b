"""Services with models, and what a name given as `--model` means.

    "runs/lake-seed0", "qwen3/", "builtin:tiny"  ──► here: a run, a directory, a built-in model
    "judge"                                      ──► what `rllm model setup` kept under that name
    "openai:gpt-5-mini"                          ──► that model there, with the key in OPENAI_API_KEY
    "model.gguf"                                 ──► a GGUF file, read as a model directory and kept
    "smollm2-135m-instruct"                      ──► a model of `rllm model pull`, fetched now and kept
    "Qwen/Qwen3-0.6B"                            ──► that model of the hub, fetched now and kept
                        resolve_model ──► ModelPlace ──► client()

Keys come from the environment or the system's keyring, at the moment in which they are needed.
"""

import difflib
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rllm.build.gguf_files import SUFFIX, gguf_directory
from rllm.build.model_pull import find_small_model, pull_model, small_models
from rllm.build.model_settings import ModelEntry, ModelSettings, key_of
from rllm.data.hub import hub_model, is_model_id
from rllm.errors import ConfigError
from rllm.inference.client import ModelClient
from rllm.types.addresses import require_base_url

BUILTIN = "builtin:"


class Protocol(StrEnum):
    OPENAI = "openai"
    """Chat completions, which nearly everybody speaks."""
    ANTHROPIC = "anthropic"
    """Anthropic's own messages."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Provider:
    """Where models are served, and which key it takes."""

    title: str
    base_url: str = ""
    """Empty where everybody has another one."""
    key_variable: str = ""
    """The environment variable that people keep its key in."""
    needs_key: bool = True
    protocol: Protocol = Protocol.OPENAI
    url_example: str = ""
    """For those without `base_url`."""
    keys_at: str = ""
    """Where keys are made."""


PROVIDERS = {
    "openai": Provider(
        title="OpenAI",
        base_url="https://api.openai.com/v1",
        key_variable="OPENAI_API_KEY",
        keys_at="https://platform.openai.com/api-keys",
    ),
    "anthropic": Provider(
        title="Anthropic",
        base_url="https://api.anthropic.com",
        key_variable="ANTHROPIC_API_KEY",
        protocol=Protocol.ANTHROPIC,
        keys_at="https://console.anthropic.com/settings/keys",
    ),
    "azure": Provider(
        title="Azure OpenAI",
        key_variable="AZURE_OPENAI_API_KEY",
        url_example="https://RESOURCE.openai.azure.com/openai/v1",
        keys_at="https://portal.azure.com",
    ),
    "openrouter": Provider(
        title="OpenRouter",
        base_url="https://openrouter.ai/api/v1",
        key_variable="OPENROUTER_API_KEY",
        keys_at="https://openrouter.ai/settings/keys",
    ),
    "together": Provider(
        title="Together",
        base_url="https://api.together.xyz/v1",
        key_variable="TOGETHER_API_KEY",
        keys_at="https://api.together.ai/settings/api-keys",
    ),
    "fireworks": Provider(
        title="Fireworks",
        base_url="https://api.fireworks.ai/inference/v1",
        key_variable="FIREWORKS_API_KEY",
        keys_at="https://app.fireworks.ai/settings/users/api-keys",
    ),
    "deepseek": Provider(
        title="DeepSeek",
        base_url="https://api.deepseek.com/v1",
        key_variable="DEEPSEEK_API_KEY",
        keys_at="https://platform.deepseek.com/api_keys",
    ),
    "vllm": Provider(
        title="vLLM", base_url="http://127.0.0.1:8000/v1", key_variable="VLLM_API_KEY", needs_key=False
    ),
    "ollama": Provider(title="Ollama", base_url="http://127.0.0.1:11434/v1", needs_key=False),
    "server": Provider(
        title="Any OpenAI-compatible server", needs_key=False, url_example="http://127.0.0.1:8000/v1"
    ),
}


def provider_named(name: str) -> Provider:
    """Raises ConfigError with the nearest name for one that is not there."""
    if name not in PROVIDERS:
        nearest = difflib.get_close_matches(name.lower(), PROVIDERS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(PROVIDERS)}."
        raise ConfigError(
            f"There is no provider `{name}`; {hint} Any other is reached as `server` with its base URL."
        )
    return PROVIDERS[name]


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelPlace:
    """The place of a model: files here, or a name on a server."""

    path: str = ""
    """The path of a run or a model directory, or `builtin:NAME`; empty for a model on a server."""
    name: str = ""
    """As the server calls it."""
    base_url: str = ""
    protocol: Protocol = Protocol.OPENAI
    api_key: str | None = field(default=None, repr=False)
    key_from: str = ""
    """Where the key came from, for messages: `OPENAI_API_KEY`, `the keyring`."""

    @property
    def is_server(self) -> bool:
        return bool(self.base_url)

    @property
    def title(self) -> str:
        """For people; the same place has the same one."""
        return f"{self.name} at {self.base_url}" if self.is_server else self.path

    def client(self, *, timeout_s: float = 600.0, connect_timeout_s: float = 30.0) -> ModelClient:
        """The client of a server. Nothing is asked of it yet. For files see `rllm.build`."""
        if not self.is_server:
            raise ConfigError(f"{self.path} is here and not on a server; load it instead.")
        if self.protocol is Protocol.ANTHROPIC:
            from rllm.inference.anthropic import AnthropicClient as Client
        else:
            from rllm.inference.openai import OpenAIClient as Client
        return Client(
            self.base_url, self.name, self.api_key, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s
        )


def resolve_model(
    name: str, *, base_url: str = "", api_key: str | None = None, settings: ModelSettings | None = None
) -> ModelPlace:
    """The model that `--model NAME` means; for no name the default of `settings`, which are those of
    RLLM_HOME unless they are given.

    With `base_url` it is that server's name for a model, and the key is `api_key` or OPENAI_API_KEY. Raises
    ConfigError for a name that means nothing, or two things, and for a key that is not there.
    """
    if base_url:
        base_url = require_base_url("The base URL", base_url)
        key = api_key or os.environ.get("OPENAI_API_KEY")
        return ModelPlace(name=name, base_url=base_url, api_key=key, key_from="OPENAI_API_KEY")
    settings = settings or ModelSettings.load()
    entries, name = settings.entries, name or settings.default
    if not name:
        raise ConfigError(
            "No model is named, and none was set up; give a run, a model directory, builtin:tiny, or "
            "PROVIDER:MODEL."
        )
    is_here = Path(name).exists()
    if name in entries and is_here:
        raise ConfigError(
            f"`{name}` is a directory here and a model of `rllm model list`; write ./{name} for the "
            "directory, or run elsewhere."
        )
    if name in entries:
        return place_of(entries[name])
    if is_here and name.endswith(SUFFIX):
        return ModelPlace(path=str(gguf_directory(Path(name))))
    if name.startswith(BUILTIN) or is_here:
        return ModelPlace(path=name)
    if find_small_model(name) is not None:
        return ModelPlace(path=str(pull_model(name)))
    provider, colon, model = name.partition(":")
    if colon and "/" not in provider:
        return _unkept(provider, model)
    if is_model_id(name):
        return ModelPlace(path=str(_fetched(name, entries)))
    raise ConfigError(_unknown(name, entries))


def _fetched(name: str, entries: dict[str, ModelEntry]) -> Path:
    """The directory of a model on the hub. Raises ConfigError that also says what else a name may be."""
    try:
        return hub_model(name)
    except ConfigError as error:
        raise ConfigError(f"{_unknown(name, entries)} On the hub: {error}") from error


def place_of(entry: ModelEntry) -> ModelPlace:
    """The place of a stored model. Raises ConfigError when its key is not where it was."""
    provider = provider_named(entry.provider)
    key, key_from = key_of(entry)
    return ModelPlace(
        name=entry.model,
        base_url=entry.base_url or provider.base_url,
        protocol=provider.protocol,
        api_key=key,
        key_from=key_from,
    )


def _unkept(name: str, model: str) -> ModelPlace:
    """`openai:gpt-5-mini`, which nobody set up."""
    provider = provider_named(name)
    if not model:
        raise ConfigError(f"`{name}:` names no model; write {name}:MODEL.")
    if not provider.base_url:
        raise ConfigError(
            f"{provider.title} has no address of its own; run rllm model setup --provider {name} once, and "
            "use the name that you give it."
        )
    key = os.environ.get(provider.key_variable) if provider.key_variable else None
    if key is None and provider.needs_key:
        raise ConfigError(
            f"{provider.title} needs a key: set {provider.key_variable} (made at {provider.keys_at}), or "
            f"keep one in the keyring: rllm model setup --provider {name} --model {model} --keyring"
        )
    return ModelPlace(
        name=model,
        base_url=provider.base_url,
        protocol=provider.protocol,
        api_key=key,
        key_from=provider.key_variable,
    )


def _unknown(name: str, entries: dict[str, ModelEntry]) -> str:
    if name in PROVIDERS:
        return f"`{name}` is a provider; say which model: {name}:MODEL, or rllm model setup."
    nearest = difflib.get_close_matches(name, [*entries, *small_models()], n=1)
    hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
    return (
        f"There is no model `{name}`: it is no file here, and not in `rllm model list`.{hint} Give a run, a "
        "model directory, a name of `rllm model pull`, builtin:tiny, PROVIDER:MODEL, or a base URL with the "
        "server's name for it."
    )
