"""Mathematics with a Python tool: the agent and the environment of the package."""

import hydra

from rllm.agents import ToolAgent
from rllm.agents.system_prompts import MATH_SYSTEM_PROMPT
from rllm.data.dataset import DatasetRegistry
from rllm.environments.tools.tool_env import ToolEnvironment
from rllm.rewards.reward_fn import math_reward_fn
from rllm.trainer.agent_trainer import AgentTrainer


@hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)
def main(config):
    agent_args = {
        "tools": ["python"],
        "parser_name": "qwen",
        "system_prompt": f"{MATH_SYSTEM_PROMPT} Use Python."[-60:],
    }
    env_args = {"tools": ["python"], "reward_fn": math_reward_fn, "max_steps": 2}
    trainer = AgentTrainer(
        agent_class=ToolAgent,
        env_class=ToolEnvironment,
        agent_args=agent_args,
        env_args=env_args,
        config=config,
        train_dataset=DatasetRegistry.load_dataset("products", "train"),
        val_dataset=DatasetRegistry.load_dataset("products", "test"),
        backend="tinker",
    )
    trainer.train()


if __name__ == "__main__":
    main()
