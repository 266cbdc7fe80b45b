"""An agent and an environment of the package, trained in the style of 2025."""

from rllm.agents.frozenlake_agent import FrozenLakeAgent
from rllm.environments.frozenlake.frozenlake import FrozenLakeEnv
from rllm.trainer.agent_trainer import AgentTrainer


def main(config):
    tasks = [{"task_id": f"lake-{seed}", "seed": seed, "size": 4, "p": 0.8} for seed in range(8)]
    trainer = AgentTrainer(
        agent_class=FrozenLakeAgent,
        env_class=FrozenLakeEnv,
        agent_args={"max_steps": 8, "use_accumulate_history": False, "system_prompt": "Reach G."},
        env_args={"max_steps": 8},
        config=config,
        train_dataset=tasks,
        val_dataset=tasks[:2],
        backend="tinker",
    )
    return trainer.train()


if __name__ == "__main__":
    import hydra

    hydra.main(config_path="config", config_name="lake", version_base=None)(main)()
