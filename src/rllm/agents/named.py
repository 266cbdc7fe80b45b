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

_HARNESSES = {
    **{
        name: name
        for name in ("claude-code", "codex", "mini-swe-agent", "opencode", "openhands", "terminus-2")
    },
    "terminus2": "terminus-2",
}
"""Published name -> the harness that ships."""
_OTHER_COMMANDS = frozenset(("aider", "bash", "kimi-cli", "qwen-code", "swe-agent", "zeroclaw"))


def published_agent_successor(name: str) -> str:
    """The mend for a published name of an agent that is no class of ours; "" for any other name."""
    command = name.removeprefix("harbor:").replace("_", "-").lower()
    if command in _HARNESSES:
        return f"it is a command-line agent: `harness:{_HARNESSES[command]}` (docs/harnesses.md)."
    if command in _OTHER_COMMANDS or name.startswith("harbor:"):
        return "as a command-line agent it needs a TOML file: `harness:FILE.toml` (docs/harnesses.md)."
    if command == "oracle":
        return "`rllm doctor tasks DIRECTORY` tries the reference solutions of tasks."
    if command == "search":
        return "`tool` is the agent; docs/search.md gives it a tool that searches."
    return ""


def agent_named(name: str) -> type[BaseAgent]:
    """Raises ConfigError with the nearest name for one that is not there."""
    name = _PUBLISHED.get(name.lower().replace("-", "_"), name)
    if name not in AGENTS:
        nearest = difflib.get_close_matches(name, AGENTS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(AGENTS)}."
        hint = published_agent_successor(name) or hint
        raise ConfigError(f"There is no agent `{name}`; {hint}")
    module, _, attribute = AGENTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
