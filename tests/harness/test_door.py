"""The door to the model is shared fairly: what one sandbox does to it costs no other one, and no log."""

import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.environments.harness import door
from rllm.environments.harness.door import Door

PATH = "/sessions/a"
POST = f"POST {PATH}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n".encode()
GET = f"GET {PATH}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode()


class FakeSandbox:
    """Its network is this machine's."""

    def __init__(self) -> None:
        self.is_stopped = threading.Event()

    def listen(self, port: int, *, datagrams: bool = False) -> socket.socket:
        if not datagrams:
            listening = socket.create_server(("127.0.0.1", 0), backlog=1000)
            self.address = listening.getsockname()
            return listening
        names = socket.socket(type=socket.SOCK_DGRAM)
        names.bind(("127.0.0.1", 0))
        self.names_address = names.getsockname()
        return names

    def stop(self) -> None:
        self.is_stopped.set()


@pytest.fixture
def inside() -> Any:
    return FakeSandbox()


@pytest.fixture
def gateway() -> Iterator[tuple[str, list[int]]]:
    """The address of a server that answers each request when it is whole, and the requests that are open
    there, whenever their number changes."""
    counts: list[int] = []
    lock, num_open = threading.Lock(), 0

    def serve(line: socket.socket) -> None:
        nonlocal num_open
        with lock:
            num_open += 1
            counts.append(num_open)
        with line:
            head = b""
            while not head.endswith(b"\r\n\r\n") and (block := line.recv(65536)):
                head += block
            time.sleep(0.05)
            line.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nwords")
        with lock:
            num_open -= 1

    def accept() -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(line,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=1000) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}{PATH}/v1", counts
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def answer_to(inside: FakeSandbox, request: bytes) -> bytes:
    with socket.create_connection(inside.address, timeout=20) as line:
        line.sendall(request)
        answer = b""
        while block := line.recv(65536):
            answer += block
    return answer


def test_a_hostile_sandbox_costs_honest_ones_nothing(tmp_path: Path) -> None:
    program = Path(__file__).parent / "hostile_neighbour.py"
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ends = {name: (outcome, reward) for name, outcome, reward, _ in map(json.loads, done.stdout.splitlines())}
    honest = {end for name, end in ends.items() if "honest" in name}
    assert honest == {("scored", 1.0)}, done.stdout
    assert len(ends) == 4
    assert len(done.stderr.splitlines()) < 10, done.stderr[:2000]


def test_a_sandbox_has_its_share_of_connections_and_the_others_wait(
    inside: Any,
    gateway: tuple[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(door, "MOST_CONNECTIONS", 5)
    base_url, counts = gateway
    answers: list[bytes] = []
    with Door(inside, base_url), caplog.at_level(logging.WARNING):
        threads = [threading.Thread(target=lambda: answers.append(answer_to(inside, GET))) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answer[-5:] for answer in answers] == [b"words"] * 40
    assert max(counts) <= 5
    assert [record.message for record in caplog.records] == [
        "The sandbox of session a has as many connections open as is its share; more of them wait."
    ]


def test_doors_share_the_descriptors_of_the_process(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "raised_file_limit", lambda: 240)
    assert door._open_doors.share() == 40
    with Door(inside, "http://127.0.0.1:9/sessions/a/v1"), Door(FakeSandbox(), "http://127.0.0.1:9/s/b/v1"):  # type: ignore[arg-type]
        assert door._open_doors.share() == 20
    assert door._open_doors.share() == 40


def test_a_connection_that_asks_nothing_is_closed(
    inside: Any, gateway: tuple[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HEAD_S", 0.2)
    with Door(inside, gateway[0]):
        for beginning in (b"", b"GET", POST):
            start_s = time.monotonic()
            assert answer_to(inside, beginning) == b""
            assert time.monotonic() - start_s < 5


def test_a_connection_ends_with_its_answer(inside: Any, gateway: tuple[str, list[int]]) -> None:
    with Door(inside, gateway[0]):
        assert answer_to(inside, GET).endswith(b"words"), "although this side is still open"


def test_time_stands_still_for_a_request_only_when_it_is_whole(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        base_url = f"http://127.0.0.1:{silent.getsockname()[1]}{PATH}/v1"
        with (
            Door(inside, base_url, work_s=1.0) as opened,
            socket.create_connection(inside.address) as part,
        ):
            part.sendall(POST + b"Content-Length: 9\r\n\r\nhalf")
            assert inside.is_stopped.wait(10)
            assert opened.is_out_of_time
        inside.is_stopped.clear()
        with Door(inside, base_url, work_s=1.0), socket.create_connection(inside.address) as whole:
            whole.sendall(POST + b"Content-Length: 4\r\n\r\nbody")
            assert not inside.is_stopped.wait(2), "the model may take its time"


@pytest.mark.parametrize("call", ["open_connection", "sock_accept"])
def test_a_machine_without_descriptors_is_waited_for_and_then_at_fault(
    inside: Any,
    gateway: tuple[str, list[int]],
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(door, "RETRY_S", 0.02)
    place: Any = door.asyncio if call == "open_connection" else door.asyncio.SelectorEventLoop
    real, left = getattr(place, call), [5]

    async def fail_first(*arguments: Any, **options: Any) -> Any:
        if left[0] > 0 and "sock" not in options:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return await real(*arguments, **options)

    monkeypatch.setattr(place, call, fail_first)
    with caplog.at_level(logging.WARNING), Door(inside, gateway[0]) as opened:
        assert answer_to(inside, GET).endswith(b"words")
    assert opened.failure is None
    assert len(caplog.records) == 1, "one line for one cause"
    left[0] = 10**9
    monkeypatch.setattr(door, "PATIENCE_S", 0.2)
    with Door(inside, gateway[0]) as opened, socket.create_connection(inside.address) as line:
        line.sendall(GET)
        assert inside.is_stopped.wait(10)
        assert isinstance(opened.failure, OSError)


def test_a_flood_of_names_is_answered_in_part_and_told_once(
    inside: Any, caplog: pytest.LogCaptureFixture
) -> None:
    query = b"\1\2\1\0\0\1\0\0\0\0\0\0\7example\3com\0\0\1\0\1"
    with (
        caplog.at_level(logging.WARNING),
        Door(inside, "http://127.0.0.1:9/sessions/a/v1"),
        socket.socket(type=socket.SOCK_DGRAM) as asking,
    ):
        asking.settimeout(1)
        num_answers = 0
        for _ in range(500):
            asking.sendto(query, inside.names_address)
        try:
            while asking.recv(512):
                num_answers += 1
        except TimeoutError:
            pass
    assert 1 <= num_answers <= 2 * door.PER_S
    assert [record.message for record in caplog.records] == [
        f"The sandbox of session a asks for more than {door.PER_S} names a second; the rest get no answer."
    ]
