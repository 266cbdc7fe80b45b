"""Train the agent; prepare_data.py registers its rows."""

import hydra
from langgraph_eval import langgraph_evaluator
from langgraph_flow import langgraph_flow

from rllm.data.dataset import DatasetRegistry
from rllm.trainer.unified_trainer import AgentTrainer


@hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)
def main(config):
    train_dataset = DatasetRegistry.load_dataset("products", "train")
    test_dataset = DatasetRegistry.load_dataset("products", "test")
    trainer = AgentTrainer(
        config=config,
        agent_flow=langgraph_flow,
        evaluator=langgraph_evaluator,
        train_dataset=train_dataset,
        val_dataset=test_dataset,
        backend=config.rllm.get("backend", "tinker"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
