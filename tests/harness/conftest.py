"""A repository with a bug, and harnesses that are played against a scripted model."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))
from swe_projects import repository, row, usable_backend

from rllm.types.task import Task

Row = Callable[..., Task]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Task]:
    """The tiny project. RLLM_HOME is one for all tests; with HARNESS_HOME what was installed is kept."""
    source, commit = repository(tmp_path_factory.mktemp("source"))
    with pytest.MonkeyPatch.context() as patch:
        home = os.environ.get("HARNESS_HOME") or str(tmp_path_factory.mktemp("home"))
        patch.setenv("RLLM_HOME", home)
        fields: dict[str, Any] = {
            "entry": row(source, base_commit=commit),
            "backend": usable_backend(),
        }
        yield Task(id="calc-1", metadata=fields)
