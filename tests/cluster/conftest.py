"""Clusters of two nodes on this machine. `make test-ray` runs this in an environment of its own; elsewhere
nothing is collected."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("ray") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0", RAY_worker_niceness="0"
    )


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """Two nodes with a core each, beside the head."""
    from two_nodes import Nodes

    made = Nodes()
    made.add()
    made.add()
    yield made
    made.cluster.shutdown()


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of the letter game, without a cluster."""
    import letter_world

    run = tmp_path_factory.mktemp("whole") / "run"
    letter_world.make_trainer(run).train()
    return run
