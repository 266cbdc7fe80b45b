"""Real vLLM servers, started as a run starts them. The Python that has vLLM is named by RLLM_VLLM_PYTHON."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("RLLM_VLLM_PYTHON", "")
    if not python:
        pytest.skip("RLLM_VLLM_PYTHON names no Python with vLLM: `make test-vllm` makes one")
    return python
