"""A rank as an actor holds it: what it prints, its exit code and its signals reach whoever placed it. Needs
no Ray."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from rllm.errors import ClusterError
from rllm.integrations.ray.rank_host import RankHost, RankOutput

SLOW_S = 900.0


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the rank runs instead of `rllm`, once a test has written it."""
    path = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def started(program: Path, script: str) -> RankHost:
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    host = RankHost("rank-1")
    host.start(["train", "frozenlake"], {"RANK": "1"}, str(program.parent))
    return host


def until_the_end(host: RankHost) -> RankOutput:
    """All that it prints, and its exit code."""
    stdout, stderr = b"", b""
    deadline_s = time.monotonic() + SLOW_S
    while time.monotonic() < deadline_s:
        printed = host.look()
        stdout, stderr = stdout + printed.stdout, stderr + printed.stderr
        if printed.code is not None:
            return RankOutput(stdout=stdout, stderr=stderr, code=printed.code)
    raise AssertionError(f"it has not ended: {stdout!r} {stderr!r}")


def test_what_a_rank_prints_and_how_it_ends_is_told(program: Path) -> None:
    host = started(program, 'echo "$@ as $RANK in $PWD"; echo no >&2; exit 3')
    said = f"-m rllm train frozenlake as 1 in {program.parent}\n".encode()
    assert until_the_end(host) == RankOutput(stdout=said, stderr=b"no\n", code=3)


def test_nothing_of_a_long_output_is_lost_or_told_twice(program: Path) -> None:
    numbers = "".join(f"{number}\n" for number in range(1, 200_001)).encode()
    assert until_the_end(started(program, "seq 200000")).stdout == numbers


def test_a_signal_reaches_a_rank_that_works(program: Path) -> None:
    host = started(program, "trap 'echo saved; exit 130' TERM; echo ready; while :; do sleep 0.1; done")
    printed = b""
    while b"ready" not in printed:
        printed += host.look().stdout
    host.send_signal(signal.SIGTERM)
    assert until_the_end(host) == RankOutput(stdout=b"saved\n", stderr=b"", code=130)


def test_a_rank_that_is_killed_has_the_signal_as_its_code(program: Path) -> None:
    assert until_the_end(started(program, "kill -9 $$")).code == -signal.SIGKILL


def test_what_a_rank_leaves_running_does_not_keep_its_end_from_being_told(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllm.integrations.ray.rank_host.LAST_WORDS_S", 0.1)
    host = started(program, "sleep 1000 & echo $!")
    printed = until_the_end(host)
    psutil.Process(int(printed.stdout)).kill()
    assert printed.code == 0


def test_files_that_a_node_does_not_have_are_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert RankHost("rank-0").unreadable([str(tmp_path), missing, os.sep]) == [missing]


def test_a_host_without_a_rank_says_so() -> None:
    with pytest.raises(ClusterError, match=r"rank-2.*no rank"):
        RankHost("rank-2").look()
