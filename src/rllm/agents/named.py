"""Agents by name, as configurations say it. Their files are imported when they are asked for."""

import difflib
import importlib

from rllm.agents.base import BaseAgent
from rllm.errors import ConfigError

AGENTS = {
    "code": "rllm.agents.code:CompetitionCodingAgent",
    "conversation": "rllm.agents.conversation:ConversationAgent",
    "frozenlake": "rllm.agents.frozenlake:FrozenLakeAgent",
    "game": "rllm.agents.game:GameAgent",
    "math": "rllm.agents.math:MathAgent",
    "swe": "rllm.agents.swe_agent:SWEAgent",
    "tool": "rllm.agents.tool:ToolAgent",
    "web": "rllm.agents.web:WebAgent",
}
"""Name -> where its class is."""
_PUBLISHED = {
    "math_agent": "math",
    "code_agent": "code",
    "tool_agent": "tool",
    "frozenlakeagent": "frozenlake",
    "sweagent": "swe",
    "react": "conversation",
    "miniwobagent": "web",
    "webarenaagent": "web",
}
"""Published name -> ours."""


def agent_named(name: str) -> type[BaseAgent]:
    """Raises ConfigError with the nearest name for one that is not there."""
    name = _PUBLISHED.get(name.lower().replace("-", "_"), name)
    if name not in AGENTS:
        nearest = difflib.get_close_matches(name, AGENTS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(AGENTS)}."
        raise ConfigError(f"There is no agent `{name}`; {hint}")
    module, _, attribute = AGENTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
