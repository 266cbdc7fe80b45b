"""Training: `AgentTrainer` for programs, `rllm.trainer.loop` for readers."""

from rllm.trainer.agent_trainer import AgentTrainer, TrainResult

__all__ = ["AgentTrainer", "TrainResult"]
