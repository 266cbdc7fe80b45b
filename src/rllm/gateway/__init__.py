"""The tracing gateway: any program that speaks to a model speaks to it, and every call is captured.

`Gateway` brings an HTTP server; such names are looked up when they are first used, so that a program which
only speaks of calls and records does not wait for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rllm.errors import MissingExtraError
from rllm.types.wire import Answer, CallRecord, CallRequest, CallStatus, Choice, Dialect, Piece, Policy

if TYPE_CHECKING:
    from rllm.gateway.ledger import Ledger
    from rllm.gateway.server import Gateway, GatewaySession

__all__ = [
    "Answer",
    "CallRecord",
    "CallRequest",
    "CallStatus",
    "Choice",
    "Dialect",
    "Gateway",
    "GatewaySession",
    "Ledger",
    "Piece",
    "Policy",
]

_HOME_OF = {
    "Gateway": "rllm.gateway.server.gateway",
    "GatewaySession": "rllm.gateway.server.gateway",
    "Ledger": "rllm.gateway.ledger",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.gateway` has no attribute `{name}`")
    try:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rllm"):
            raise
        raise MissingExtraError(error.name or "aiohttp", "gateway") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
