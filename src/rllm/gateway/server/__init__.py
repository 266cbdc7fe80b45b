"""The gateway over HTTP: requests of programs in, answers out, each of them in the ledger before it leaves.

Names are looked up in their files when they are first used: the HTTP server is loaded by who runs one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.gateway.server.gateway import Gateway as Gateway
    from rllm.gateway.server.gateway import GatewaySession as GatewaySession
    from rllm.gateway.server.listening import listening_socket as listening_socket

_HOME_OF = {
    "Gateway": "rllm.gateway.server.gateway",
    "GatewaySession": "rllm.gateway.server.gateway",
    "listening_socket": "rllm.gateway.server.listening",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.gateway.server` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
