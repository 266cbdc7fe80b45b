"""No MCP server outlives what it was started for: its pool, its owner, a cancelled lease."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="the `mcp` extra is not installed")

from rllm.tools import mcp_loop
from rllm.tools.mcp import MCPPool, MCPServer, mcp_tools
from rllm.tools.mcp_connection import Connection
from rllm.tools.mcp_sessions import MCPLease

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="who descends from whom is read from /proc")

ODD = str(Path(__file__).with_name("mcp_odd_server.py"))
DIES_WITHIN_S = 5.0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], within_s: float = DIES_WITHIN_S) -> bool:
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def own_processes() -> set[int]:
    """Guards and servers below this process."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    found.add(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = own_processes()
    yield
    assert until(lambda: own_processes() <= before), "a process of a test outlived its pool"


def test_closing_ends_a_stubborn_server_and_what_it_spawned() -> None:
    with MCPPool(MCPServer(command=[sys.executable, ODD, "stubborn"])) as pool, pool.lease() as lease:
        spawn = next(each for each in mcp_tools(lease) if each.name == "spawn")
        spawned = int(spawn().output)
        server = lease.pid
        assert server is not None
        assert is_running(spawned)
        assert is_running(server)
    assert until(lambda: not is_running(spawned) and not is_running(server))


OWNER = """
import sys, time
from rllm.tools.mcp import MCPPool, MCPServer, mcp_tools
pool = MCPPool(MCPServer(command=[sys.executable, sys.argv[1], "stubborn"]))
lease = pool.lease()
spawn = next(each for each in mcp_tools(lease) if each.name == "spawn")
print(lease.pid, spawn().output, flush=True)
if sys.argv[2] == "stay":
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["stay", "leave"])
def test_nothing_outlives_an_owner_that_is_killed_or_forgets_to_close(end: str, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    with subprocess.Popen(
        [sys.executable, str(script), ODD, end], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(each) for each in owner.stdout.readline().split()]
        assert len(pids) == 2
        if end == "stay":
            assert all(map(is_running, pids))
            owner.kill()
        owner.wait(timeout=20)
    assert until(lambda: not any(map(is_running, pids)))


def test_a_lease_that_is_cancelled_while_it_tells_the_others_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = MCPPool(MCPServer(command=[sys.executable, ODD]))
    is_open: list[object] = []

    async def open_while_others_are_told(connection: Connection) -> None:
        await pool._changed.acquire()
        is_open.append(connection)

    async def cancel_it() -> int:
        lease = asyncio.ensure_future(pool._lease())
        while not is_open:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        lease.cancel()
        pool._changed.release()
        for each in await asyncio.gather(lease, return_exceptions=True):
            if isinstance(each, MCPLease):
                await each._release()
        return pool.num_sessions

    monkeypatch.setattr(Connection, "open", open_while_others_are_told)
    assert mcp_loop.run(cancel_it()) == 0
    pool.close()


async def test_cancelling_a_lease_that_starts_leaves_no_process() -> None:
    before = own_processes()
    with MCPPool(MCPServer(command=[sys.executable, "-c", "import time; time.sleep(100)"])) as pool:
        starting = asyncio.create_task(pool.async_lease())
        while own_processes() <= before:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await asyncio.to_thread(until, lambda: own_processes() <= before)
        assert pool.num_sessions == 0
