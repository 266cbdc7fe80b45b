"""Training of agents in environments: who plays the episodes.

AgentExecutionEngine ──► agent ⇄ environment ──► LocalClient (the weights that are trained)
"""

import inspect
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rllm.agents.base import BaseAgent
from rllm.config.schema import TrainConfig
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv, call_reset, unpack_reset
from rllm.errors import ConfigError
from rllm.inference.client import TokenClient
from rllm.rendering.chat import ChatRenderer


@dataclass(kw_only=True, slots=True, frozen=True)
class AgentPlayer:
    """An agent and the environment that it acts in, with what each attempt makes them with."""

    agent_class: type[BaseAgent]
    env_class: type[BaseEnv]
    agent_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    env_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """They win over what a task says."""
    kind: ClassVar[Literal["agent"]] = "agent"

    def make_agent(self) -> BaseAgent:
        return self.agent_class(**self.agent_args)

    def engine(self, config: TrainConfig, client: TokenClient) -> AgentExecutionEngine:
        """An engine for training."""
        rollout = config.rollout
        return AgentExecutionEngine(
            self.agent_class,
            self.env_class,
            self.agent_args,
            self.env_args,
            rollout_engine=client,
            n_parallel_agents=rollout.num_parallel,
            max_steps=rollout.max_turns,
            episode_timeout_s=rollout.episode_timeout_s,
            trajectory_timeout=rollout.wall_timeout_s or None,
            model_timeout_s=config.inference.model_timeout_s,
            step_timeout_s=rollout.step_timeout_s,
            retry_limit=rollout.retry_limit,
            max_failed_fraction=rollout.max_failed_fraction,
            max_workers=rollout.env_workers,
            max_prompt_length=0,  # `inference.max_context` is the limit
            max_response_length=0,
            requires_ids=True,
            stored=True,
            gamma=config.algorithm.gamma,
            seed=config.seed,
        )

    @asynccontextmanager
    async def open_engine(
        self, config: TrainConfig, clients: Mapping[str, Any], directory: Path
    ) -> AsyncIterator[AgentExecutionEngine]:
        """See `rllm.trainer.cluster.EpisodePlayer`."""
        (client,) = clients.values()
        yield self.engine(config, client)

    async def require_prompt_fits(
        self, config: TrainConfig, task: Mapping[str, Any], renderer: ChatRenderer
    ) -> None:
        """Raises ConfigError when the context cannot even hold the first prompt of a task and its answer."""
        env = self.env_class.from_dict({**task, **self.env_args})
        try:
            result = call_reset(env, 0)
            opening = await result if inspect.isawaitable(result) else result
            observation, info = unpack_reset(env, opening)
        finally:
            close_result: Any = env.close()
            if inspect.isawaitable(close_result):
                await close_result
        agent = self.make_agent()
        agent.update_from_env(observation, 0.0, False, info)
        prompt = renderer.render(agent.chat_completions, agent.tool_schemas)
        num_needed = len(prompt) + config.rollout.max_tokens_per_turn
        if num_needed > config.inference.max_context:
            raise ConfigError(
                f"`inference.max_context` is {config.inference.max_context}, but the first prompt and its "
                f"answer take {num_needed} tokens; set it to {num_needed} times the expected turns, or "
                "shorten the prompt."
            )
