"""Model clients: `ScriptedClient` (the shipped fake) and `LocalClient` (the built-in torch engine)."""

import importlib

_HOMES = {
    "ModelClient": "rllm.inference.client",
    "ModelSession": "rllm.inference.client",
    "ScriptedAnswer": "rllm.inference.scripted",
    "ScriptedClient": "rllm.inference.scripted",
    "LocalClient": "rllm.inference.local.client",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
