"""Engines: tasks in, episodes out."""

from rllm.engine.agent_execution import AgentExecutionEngine

__all__ = ["AgentExecutionEngine"]
