"""Calls answered by other servers: which of them, how often, and what is known of what they give.

Names are looked up in their files when they are first used: the HTTP client is loaded by who needs one.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.gateway.upstream.policy import UpstreamPolicy as UpstreamPolicy

_HOME_OF = {"UpstreamPolicy": "rllm.gateway.upstream.policy"}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.gateway.upstream` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
