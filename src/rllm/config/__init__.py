"""Configuration: one dataclass per section, one loader."""

from rllm.config.loader import config_dict, load_config
from rllm.config.schema import TrainConfig

__all__ = ["TrainConfig", "config_dict", "load_config"]
