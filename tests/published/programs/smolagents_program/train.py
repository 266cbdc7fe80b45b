"""Train the agent; prepare_data.py registers its rows."""

import hydra
from smolagents_eval import smolagents_evaluator
from smolagents_flow import smolagents_flow

from rllm.data.dataset import DatasetRegistry
from rllm.trainer import AgentTrainer


@hydra.main(config_path="config", config_name="smolagents", version_base=None)
def main(config):
    train_dataset = DatasetRegistry.load_dataset("products", "train")
    test_dataset = DatasetRegistry.load_dataset("products", "test")
    trainer = AgentTrainer(
        config=config,
        agent_flow=smolagents_flow,
        evaluator=smolagents_evaluator,
        train_dataset=train_dataset,
        val_dataset=test_dataset,
        backend=config.rllm.get("backend", "tinker"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
