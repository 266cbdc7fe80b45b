"""The packages that training needs beyond the core, required before any work."""

import importlib.util

from rllm.config.lora import LoraConfig
from rllm.config.optimizer import OptimizerConfig
from rllm.errors import MissingExtraError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "jinja2", "peft", "matplotlib")


def require_training_packages(optimizer: OptimizerConfig, lora: LoraConfig) -> None:
    """Raises MissingExtraError for the first package that a run would miss, some of them at its very end."""
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "train")
    if optimizer.name == "adamw8bit" or lora.base_dtype == "nf4":
        from rllm.models.bitsandbytes import require_bitsandbytes  # torch is there

        require_bitsandbytes()
