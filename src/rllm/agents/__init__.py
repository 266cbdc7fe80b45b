"""Agents: what one is, how to check one, and the ones that ship.

Names are looked up in their files when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.agents.base import BaseAgent as BaseAgent
    from rllm.agents.checks import check_agent as check_agent
    from rllm.agents.code import CompetitionCodingAgent as CompetitionCodingAgent
    from rllm.agents.flow import AgentFlow as AgentFlow
    from rllm.agents.flow import rollout as rollout
    from rllm.agents.frozenlake import FrozenLakeAgent as FrozenLakeAgent
    from rllm.agents.math import MathAgent as MathAgent
    from rllm.agents.swe_agent import SWEAgent as SWEAgent
    from rllm.agents.tool import MCPToolAgent as MCPToolAgent
    from rllm.agents.tool import ToolAgent as ToolAgent
    from rllm.agents.web import WebAgent as WebAgent

_HOME_OF = {
    "AgentFlow": "rllm.agents.flow",
    "BaseAgent": "rllm.agents.base",
    "CompetitionCodingAgent": "rllm.agents.code",
    "FrozenLakeAgent": "rllm.agents.frozenlake",
    "MCPToolAgent": "rllm.agents.tool",
    "MathAgent": "rllm.agents.math",
    "SWEAgent": "rllm.agents.swe_agent",
    "ToolAgent": "rllm.agents.tool",
    "WebAgent": "rllm.agents.web",
    "check_agent": "rllm.agents.checks",
    "rollout": "rllm.agents.flow",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.agents` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
