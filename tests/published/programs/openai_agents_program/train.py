"""Train the agent; prepare_data.py registers its rows."""

import hydra
from openai_agents_eval import openai_agents_evaluator
from openai_agents_flow import openai_agents_flow

from rllm.data.dataset import DatasetRegistry
from rllm.experimental.unified_trainer import AgentTrainer


@hydra.main(config_path="pkg://rllm.experimental.config", config_name="unified", version_base=None)
def main(config):
    train_dataset = DatasetRegistry.load_dataset("products", "train")
    test_dataset = DatasetRegistry.load_dataset("products", "test")
    trainer = AgentTrainer(
        config=config,
        agent_flow=openai_agents_flow,
        evaluator=openai_agents_evaluator,
        train_dataset=train_dataset,
        val_dataset=test_dataset,
        backend=config.rllm.get("backend", "tinker"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
