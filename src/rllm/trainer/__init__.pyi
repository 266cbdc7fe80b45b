# What `import rllm.trainer` offers, for editors and type checkers.
from rllm.published.trainers import AgentDistillTrainer as AgentDistillTrainer
from rllm.published.trainers import AgentTrainer as AgentTrainer
from rllm.trainer.dpo import AgentDPOTrainer as AgentDPOTrainer
from rllm.trainer.result import TrainResult as TrainResult
from rllm.trainer.sft import AgentSFTTrainer as AgentSFTTrainer
