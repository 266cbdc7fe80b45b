import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm.models.builtin import TinyModel, create_model

Ranks = Callable[[str, Sequence[Any], int], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def smallest_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few thousand parameters, to be read only."""
    directory = tmp_path_factory.mktemp("models") / "smallest"
    create_model(
        directory, TinyModel(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, vocab_size=400)
    )
    return directory


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Run a program of this directory as so many ranks, as torchrun would, until all have ended; returns how
    each did. What may be asked: nursery.py."""
    nursery = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "nursery.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
    )
    stdin, stdout = nursery.stdin, nursery.stdout
    assert stdin is not None
    assert stdout is not None
    assert stdout.readline() == "ready\n"

    def run(program: str, words: Sequence[Any], num_ranks: int) -> list[dict[str, Any]]:
        request = {"program": program, "words": [str(each) for each in words], "places": places(num_ranks)}
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return json.loads(stdout.readline())

    try:
        yield run
    finally:
        nursery.kill()
        nursery.communicate()


def places(num_ranks: int) -> list[dict[str, str]]:
    """What each rank finds in its environment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = str(listening.getsockname()[1])
    shared = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
