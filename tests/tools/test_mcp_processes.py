"""MCP servers as processes: each lease its own, dead ones are replaced, and every failure says why."""

import asyncio
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the `mcp` extra is not installed")

from rllm.errors import ConfigError
from rllm.tools.mcp import MCPPool, MCPServer, MCPServerError, MCPTool, mcp_tools

ODD = str(Path(__file__).with_name("mcp_odd_server.py"))


def odd(*args: str, **options: Any) -> MCPServer:
    return MCPServer(name="odd", command=[sys.executable, ODD, *args], **options)


def named(tools: list[MCPTool]) -> dict[str, MCPTool]:
    return {each.name: each for each in tools}


def test_each_lease_of_a_stateful_server_has_a_memory_of_its_own() -> None:
    with MCPPool(odd(warm=1)) as pool:
        pool.prepare()
        with pool.lease() as one, pool.lease() as other:
            assert one.pid != other.pid
            words = [named(mcp_tools(lease))["remember"] for lease in (one, other)]
            words[0](word="one")
            assert words[1](word="other").output == "other"
            assert words[0](word="again").output == "one again"
        with pool.lease() as third:
            assert named(mcp_tools(third))["remember"](word="fresh").output == "fresh"


def test_a_shared_server_is_one_process_for_all_leases() -> None:
    with MCPPool(odd(shared=True)) as pool, pool.lease() as one, pool.lease() as other:
        assert one.pid == other.pid
        assert pool.num_sessions == 1
        one.release()
        assert named(mcp_tools(other))["remember"](word="still here").output == "still here"


def test_a_server_that_dies_fails_that_call_of_that_lease_and_is_restarted() -> None:
    with MCPPool(odd()) as pool, pool.lease() as one, pool.lease() as other:
        tools, others = named(mcp_tools(one)), named(mcp_tools(other))
        others["remember"](word="mine")
        died = one.pid
        with pytest.raises(MCPServerError, match=r"(?s)odd died .*`die`.*status 7.*as I was told"):
            tools["die"]()
        assert tools["remember"](word="reborn").output == "reborn"
        assert one.pid != died
        assert others["remember"](word="kept").output == "mine kept"


def test_a_server_killed_with_nine_while_idle_is_replaced_before_the_next_call() -> None:
    with MCPPool(odd()) as pool, pool.lease() as lease:
        tools = named(mcp_tools(lease))
        assert lease.pid is not None
        killed = lease.pid
        os.kill(killed, signal.SIGKILL)
        while lease._connection.is_alive:  # until the guard's note of it is here
            time.sleep(0.01)
        assert tools["remember"](word="new").output == "new"
        assert lease.pid != killed


def test_a_call_that_hangs_is_an_error_for_the_model_and_the_session_goes_on() -> None:
    with MCPPool(odd(call_timeout_s=1.5)) as pool, pool.lease() as lease:
        tools = named(mcp_tools(lease))
        tools["remember"](word="before")
        assert tools["sleep"](seconds=1.7).error == "No answer within 1.5 s."
        time.sleep(0.3)
        assert tools["remember"](word="after").output == "before after"


def test_a_shared_session_that_hangs_gets_no_new_calls() -> None:
    with MCPPool(odd(shared=True, call_timeout_s=1.5, max_sessions=2)) as pool, pool.lease() as lease:
        tools = named(mcp_tools(lease))
        first = lease.pid
        assert tools["sleep"](seconds=2.5).error
        assert tools["remember"](word="moved").output == "moved"
        assert lease.pid != first


async def test_cancelling_a_call_frees_the_caller_at_once_and_keeps_the_session() -> None:
    with MCPPool(odd()) as pool:
        lease = await pool.async_lease()
        remember, _, sleep = (MCPTool(lease, each) for each in (await lease.async_listed())[:3])
        call = asyncio.create_task(sleep.async_forward(seconds=0.5))
        await asyncio.sleep(0.1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await remember.async_forward(word="awake")).output == "awake"
        await lease.async_release()


def test_the_environment_of_a_server_is_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_SECRET", "hidden")
    monkeypatch.setenv("OWN_KEY", "passed on")
    server = odd(env={"GIVEN": "explicit"}, env_from=("OWN_KEY",))
    assert "explicit" not in repr(server)
    with MCPPool(server) as pool, pool.lease() as lease:
        variable = named(mcp_tools(lease))["variable"]
        assert variable(name="OWN_SECRET").output == "(not set)"
        assert variable(name="OWN_KEY").output == "[key]", (
            "it was passed on, and is hidden in what comes back"
        )
        assert variable(name="GIVEN").output == "explicit"
        assert variable(name="PATH").output == os.environ["PATH"]
    monkeypatch.delenv("OWN_KEY")
    with MCPPool(server) as pool, pytest.raises(ConfigError, match="OWN_KEY"):
        pool.lease()


@pytest.mark.parametrize(
    ("command", "patience_s", "says"),
    [
        (["no-such-program"], 20.0, "could not start: No such file or directory: no-such-program"),
        ([sys.executable, "-c", "print(1 / 0)"], 20.0, r"(?s)ended with status 1.*ZeroDivisionError"),
        (["sleep", "100"], 0.3, r"0\.3 s"),
        (["cat"], 0.3, "MCP server cat"),
    ],
    ids=["absent", "crashing", "silent", "echoing"],
)
def test_a_server_that_does_not_start_says_why(command: list[str], patience_s: float, says: str) -> None:
    with MCPPool(MCPServer(command=command, connect_timeout_s=patience_s)) as pool:
        with pytest.raises(MCPServerError, match=says):
            pool.lease()
        assert pool.num_sessions == 0


def test_a_server_that_floods_stderr_is_heard_without_blocking_it() -> None:
    with MCPPool(odd("chatty")) as pool, pool.lease() as lease:
        tools = named(mcp_tools(lease))
        assert tools["remember"](word="through").output == "through"
        with pytest.raises(MCPServerError, match="line 4999") as raised:
            tools["die"]()
        assert len(str(raised.value)) < 6000


def test_more_leases_than_sessions_wait_and_then_say_so() -> None:
    with MCPPool(odd(max_sessions=1, lease_timeout_s=1.0)) as pool:
        with (
            pool.lease(),
            pytest.raises(MCPServerError, match=r"1 sessions .*`max_sessions`"),
        ):
            pool.lease()
        with pool.lease() as free:
            assert mcp_tools(free)


def test_forty_rollouts_in_threads_keep_their_memories_apart() -> None:
    from mcp.server.mcpserver import MCPServer as SDKServer

    def made() -> SDKServer:
        server, kept = SDKServer("memory", log_level="ERROR"), []

        @server.tool(structured_output=False)
        def remember(word: str) -> str:
            """Keep a word."""
            kept.append(word)
            return " ".join(kept)

        return server

    def rollout(number: int) -> str:
        with pool.lease() as lease:
            (remember,) = mcp_tools(lease)
            return [remember(word=f"{number}.{turn}").output for turn in range(3)][-1]

    with MCPPool(MCPServer(target=made, max_sessions=7)) as pool, ThreadPoolExecutor(10) as threads:
        told = list(threads.map(rollout, range(40)))
        assert pool.num_sessions == 0
    assert told == [f"{number}.0 {number}.1 {number}.2" for number in range(40)]
