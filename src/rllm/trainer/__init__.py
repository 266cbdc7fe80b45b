"""Training: one class a way to learn, for programs; `rllm.trainer.loop` for readers."""

from rllm.trainer.agent_trainer import AgentTrainer
from rllm.trainer.distill import AgentDistillTrainer
from rllm.trainer.dpo import AgentDPOTrainer
from rllm.trainer.result import TrainResult
from rllm.trainer.sft import AgentSFTTrainer

__all__ = ["AgentDPOTrainer", "AgentDistillTrainer", "AgentSFTTrainer", "AgentTrainer", "TrainResult"]
