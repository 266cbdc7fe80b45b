"""Model clients: the shipped fake, the built-in torch engine, vLLM by ids, any OpenAI-compatible server."""

import importlib

_HOMES = {
    "ModelClient": "rllm.inference.client",
    "ModelSession": "rllm.inference.client",
    "ScriptedAnswer": "rllm.inference.scripted",
    "ScriptedClient": "rllm.inference.scripted",
    "LocalClient": "rllm.inference.local.client",
    "OpenAIClient": "rllm.inference.openai",
    "VLLMClient": "rllm.inference.vllm",
    "RolloutEngine": "rllm.inference.rollout_engine",
    "RoleSettings": "rllm.inference.rollout_engine",
    "make_client": "rllm.inference.engines",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
