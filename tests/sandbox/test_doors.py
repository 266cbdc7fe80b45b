"""Sockets in the sandbox's own network that its owner answers, and directories of this machine in it."""

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rllm.errors import ConfigError, SandboxError
from rllm.sandbox import Limits, Root, Status, open_sandbox

LIMITS = Limits(wall_s=20, cpu_s=20, memory_mb=256, disk_mb=32, processes=32)
NO_SUCH_NAME = b"\x81\x83"
"""The flags of a name server's answer."""
CALL = """
import socket
with socket.create_connection(("127.0.0.1", 61001), timeout=5) as line:
    line.sendall(b"hello")
    print(line.recv(99).decode())
try:
    socket.getaddrinfo("example.com.", 80, socket.AF_INET)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(params=["bubblewrap", "unshare"])
def backend(request: pytest.FixtureRequest, need: Callable[[str], str]) -> str:
    return need(request.param)


def test_a_program_reaches_who_listens_for_it_and_reads_what_is_shown(backend: str, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    shown.chmod(0o755)
    (shown / "tool.txt").write_text("of this machine\n")
    root = Root(mounts=((str(shown), "/opt/tools"),))
    with open_sandbox(backend, limits=LIMITS, root=root) as box:
        with box.listen(61001) as door, box.listen(53, datagrams=True) as names:
            with pytest.raises(SandboxError, match="port 61001"):
                box.listen(61001)

            queries: list[bytes] = []

            def answer() -> None:
                line, _ = door.accept()
                with line:
                    line.sendall(line.recv(99).upper())
                query, asker = names.recvfrom(512)
                queries.append(query)
                names.sendto(query[:2] + NO_SUCH_NAME + query[4:], asker)

            answering = threading.Thread(target=answer)
            answering.start()
            done = box.exec(["python3", "-c", CALL])
            answering.join()
            assert (done.status, done.stdout) == (Status.OK, "HELLO\ngaierror\n"), done.stderr
            assert b"\x07example\x03com\x00" in queries[0]
        done = box.exec("cat /opt/tools/tool.txt; echo x > /opt/tools/tool.txt")
        assert (done.stdout, "Read-only" in done.stderr) == ("of this machine\n", True)
    assert (shown / "tool.txt").read_text() == "of this machine\n"
    with socket.socket() as outside:
        assert outside.connect_ex(("127.0.0.1", 61001)) != 0


def test_what_cannot_be_shown_or_listened_at_is_refused(need: Callable[[str], str], tmp_path: Path) -> None:
    for mounts, tree in ((("nowhere", "/opt/x"),), ""), (((str(tmp_path), "/opt/x"),), str(tmp_path)):
        with pytest.raises(ConfigError, match="`mounts`"):
            Root(mounts=mounts, tree=tree)
    with pytest.raises(ConfigError, match="no absolute path"):
        Root(mounts=((str(tmp_path), "/opt/../etc"),))
    with (
        open_sandbox(need("subprocess"), limits=LIMITS) as box,
        pytest.raises(ConfigError, match="no network"),
    ):
        box.listen(61001)
