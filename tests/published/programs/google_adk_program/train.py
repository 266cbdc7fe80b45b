"""Train the agent; prepare_data.py registers its rows."""

import hydra
from google_adk_eval import google_adk_evaluator
from google_adk_flow import google_adk_flow

from rllm.data.dataset import DatasetRegistry
from rllm.trainer.unified_trainer import AgentTrainer


@hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)
def main(config):
    train_dataset = DatasetRegistry.load_dataset("products", "train")
    test_dataset = DatasetRegistry.load_dataset("products", "test")
    trainer = AgentTrainer(
        config=config,
        agent_flow=google_adk_flow,
        evaluator=google_adk_evaluator,
        train_dataset=train_dataset,
        val_dataset=test_dataset,
        backend=config.rllm.get("backend", "tinker"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
