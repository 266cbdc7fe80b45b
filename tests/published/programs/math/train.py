"""Train it: python train.py rllm/backend=tinker model.name=... training.group_size=4"""

from math_eval import math_evaluator
from math_flow import math_flow

from rllm.data.dataset import DatasetRegistry
from rllm.experimental.unified_trainer import AgentTrainer


def main(config):
    train_dataset = DatasetRegistry.load_dataset("sums", "train")
    val_dataset = DatasetRegistry.load_dataset("sums", "test")
    if train_dataset is None or val_dataset is None:
        raise RuntimeError("The data set is not here; run prepare_data.py.")
    trainer = AgentTrainer(
        backend=config["rllm"].get("backend", "tinker"),
        agent_flow=math_flow,
        evaluator=math_evaluator,
        config=config,
        train_dataset=train_dataset,
        val_dataset=val_dataset,
    )
    return trainer.train()


if __name__ == "__main__":
    import hydra

    hydra.main(config_path="pkg://rllm.trainer.config", config_name="unified", version_base=None)(main)()
