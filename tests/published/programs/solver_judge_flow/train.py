"""Both roles are one model, and each has an estimator of its own."""

import hydra
from evaluator import solver_judge_evaluator
from omegaconf import DictConfig
from solver_judge_flow import solver_judge_flow

from rllm.trainer import AgentTrainer
from rllm.trainer.algorithms.config import rLLMAdvantageEstimator


def rows(numbers):
    return [
        {"question": f"Make {2 * n + 1} of {n} and {n + 1}.", "nums": [n, n + 1], "target": 2 * n + 1}
        for n in numbers
    ]


@hydra.main(config_path="config", config_name="solver_judge", version_base=None)
def main(config: DictConfig):
    trainer = AgentTrainer(
        agent_flow=solver_judge_flow,
        evaluator=solver_judge_evaluator,
        config=config,
        train_dataset=rows(range(2, 10)),
        val_dataset=rows(range(10, 12)),
        backend=config.rllm.get("backend", "tinker"),
        traj_group_adv_estimator_map={
            "solver": rLLMAdvantageEstimator.GRPO,
            "judge": rLLMAdvantageEstimator.REINFORCE,
        },
    )
    trainer.train()


if __name__ == "__main__":
    main()
