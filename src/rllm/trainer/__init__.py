"""Training: the loop in `rllm.trainer.loop`, and one class a way to learn.

`AgentTrainer` and `AgentDistillTrainer` are importable from here as well; they stand in
`rllm.published.trainers`.
"""

from rllm.trainer.dpo import AgentDPOTrainer
from rllm.trainer.result import TrainResult
from rllm.trainer.sft import AgentSFTTrainer

__all__ = ["AgentDPOTrainer", "AgentSFTTrainer", "TrainResult"]
