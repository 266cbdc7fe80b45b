"""A run directory that another machine wrote, or an attacker, is refused in a sentence and costs nothing."""

import json
import os
import resource
import sqlite3
import zlib
from pathlib import Path

import pytest

from rllm.errors import CheckpointError, ConfigError
from rllm.files.atomic import MANIFEST, verify_manifest
from rllm.store.episodes import EpisodeStore
from rllm.store.payload import MAX_PAYLOAD_CHARS, unpack_payload
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "config.json").write_text('{"steps": 1}')
    return RunDirectory.read(tmp_path)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/random"])
def test_a_summary_that_is_a_device_is_refused(run: RunDirectory, target: str) -> None:
    (run.path / "summary.json").symlink_to(target)
    with pytest.raises(ConfigError, match="no regular file"):
        run.summary()


def test_a_pipe_is_refused_and_not_waited_for(run: RunDirectory) -> None:
    os.mkfifo(run.path / "summary.json")
    with pytest.raises(ConfigError, match="no regular file"):
        run.summary()


def test_a_summary_that_fills_the_memory_is_refused(run: RunDirectory) -> None:
    with (run.path / "summary.json").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(ConfigError, match=r"8,589,934,592.*67,108,864"):
        run.summary()


def test_json_that_is_nested_too_deeply_is_refused(run: RunDirectory) -> None:
    deep = "[" * 200_000
    (run.path / "summary.json").write_text(deep)
    with pytest.raises(ConfigError, match="nested too deeply"):
        run.summary()
    (run.path / "metrics.jsonl").write_text(f"{deep}\n")
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        read_metrics(run.path / "metrics.jsonl")
    (run.path / MANIFEST).write_text(deep)
    with pytest.raises(CheckpointError):
        verify_manifest(run.path)


def test_an_episode_that_unpacks_to_more_than_is_ever_kept_is_refused() -> None:
    packing = zlib.compressobj(9)
    piece = b"0" * (1 << 20)
    packed = (
        b"".join(packing.compress(piece) for _ in range((MAX_PAYLOAD_CHARS >> 20) + 64)) + packing.flush()
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=f"{MAX_PAYLOAD_CHARS:,}"):
        unpack_payload(packed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * MAX_PAYLOAD_CHARS / 1024
    with pytest.raises(zlib.error):
        unpack_payload(zlib.compress(json.dumps({"reward": 1.0}).encode())[:-6])


def test_a_view_in_the_place_of_a_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    EpisodeStore.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE episodes RENAME TO others")
        connection.execute("CREATE VIEW episodes AS SELECT * FROM others")
    connection.close()
    with pytest.raises(ConfigError, match="has a view `episodes`"):
        EpisodeStore.open(path, read_only=True)
