"""One agent, one environment, one turn.

task ──► environment ──► agent ──► model ──► action ──► environment ──► reward
"""

from collections.abc import Mapping
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.environments.base import BaseEnv
from rllm.workflows.multi_turn_workflow import MultiTurnWorkflow


class SingleTurnWorkflow(MultiTurnWorkflow):
    """A `MultiTurnWorkflow` that ends after one answer, whether the environment is done or not."""

    def __init__(
        self,
        rollout_engine: Any,
        agent_cls: type[BaseAgent],
        env_cls: type[BaseEnv],
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(rollout_engine, agent_cls, env_cls, agent_args, env_args, max_steps=1, **kwargs)
