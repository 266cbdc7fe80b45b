"""Training: the loop in `rllm.trainer.loop`, and one class a way to learn.

`AgentTrainer` and `AgentDistillTrainer` are importable from here as well; they stand in
`rllm.published.trainers`.
"""

from rllm.trainer.dpo import AgentDPOTrainer
from rllm.trainer.result import TrainResult
from rllm.trainer.sft import AgentSFTTrainer

# Two of these are in no file of this room: `rllm.published.finder` looks them up when a program asks.
__all__ = [
    "AgentDPOTrainer",
    "AgentDistillTrainer",  # pyright: ignore[reportUnsupportedDunderAll]
    "AgentSFTTrainer",
    "AgentTrainer",  # pyright: ignore[reportUnsupportedDunderAll]
    "TrainResult",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
