"""Websites as environments, in a real browser that all episodes share.

Names are looked up in their files when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.environments.web.actions import WebAction as WebAction
    from rllm.environments.web.browser import close_browser as close_browser
    from rllm.environments.web.env import WebEnv as WebEnv
    from rllm.environments.web.miniwob import MiniWobEnv as MiniWobEnv
    from rllm.environments.web.network import SiteRequest as SiteRequest
    from rllm.environments.web.network import SiteResponse as SiteResponse
    from rllm.environments.web.observation import PageView as PageView

_HOME_OF = {
    "MiniWobEnv": "rllm.environments.web.miniwob",
    "PageView": "rllm.environments.web.observation",
    "SiteRequest": "rllm.environments.web.network",
    "SiteResponse": "rllm.environments.web.network",
    "WebAction": "rllm.environments.web.actions",
    "WebEnv": "rllm.environments.web.env",
    "close_browser": "rllm.environments.web.browser",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.environments.web` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
