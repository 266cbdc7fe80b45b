"""`backend = "tinker"`: models that a Tinker service trains and samples from; see docs/tinker.md."""

from rllm.integrations.tinker.backend import TINKER as TINKER
