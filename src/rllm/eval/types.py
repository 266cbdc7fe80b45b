"""The module from which published programs import what an evaluator says; its home is `rllm.types`."""

from rllm.types.evaluation import EvalOutput, Signal

__all__ = ["EvalOutput", "Signal"]
