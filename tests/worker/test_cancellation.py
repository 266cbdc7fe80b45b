"""Cancellation reaches who does the work: a call of an MCP client, a plain function, a workflow's workers."""

import asyncio
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mcp
import psutil
import pytest
import worker_files as files
from mcp.client.stdio import StdioServerParameters, stdio_client

from rllm.sandbox import Limits, Sandbox, open_sandbox
from rllm.tools import MultiTool, Tool
from rllm.worker.store import RunStore

SLOW = """
import asyncio, contextlib, time
from pathlib import Path

HERE = Path(__file__).parent

async def wait(task, config):
    (HERE / "began").touch()
    try:
        await asyncio.sleep(60)
    finally:
        (HERE / "ended").touch()
"""


async def until(is_true: Any) -> None:
    async with asyncio.timeout(30):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_a_cancelled_call_of_an_mcp_client_ends_its_run(tmp_path: Path) -> None:
    contract = files.write_worker(tmp_path, program="slow.py:wait", timeout_s=60)
    (tmp_path / "slow.py").write_text(SLOW)
    command = ["-m", "rllm", "worker", "mcp", str(contract), "--directory", str(tmp_path / "runs")]
    parameters = StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
    async with mcp.Client(stdio_client(parameters)) as client:
        call = asyncio.create_task(client.call_tool("measure", {"run_id": "a", "task": "four"}))
        await until((tmp_path / "began").exists)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until((tmp_path / "ended").exists)
        assert (await client.list_tools()).tools, "the server goes on"
    store = RunStore(tmp_path / "runs")
    try:
        (run,) = store.runs()
        (attempt,) = store.attempts(run["run_id"])
    finally:
        store.close()
    assert (attempt["status"], "cancelled" in attempt["error"]) == ("retryable_error", True)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
async def test_a_plain_function_ends_when_its_run_does(tmp_path: Path, reason: str) -> None:
    began, ended = threading.Event(), threading.Event()

    def compute(task: Any, config: Any) -> dict[str, Any]:
        """Catches all errors of its own, which is not what ends it."""
        began.set()
        try:
            while True:
                with suppress(Exception):
                    time.sleep(0.001)
        finally:
            ended.set()

    limit_s = 60 if reason == "cancelled" else 0.2
    async with files.runtime(tmp_path, compute, timeout_s=limit_s) as worker:
        call = asyncio.create_task(worker.run({"run_id": "a", "task": "four"}))
        await asyncio.to_thread(began.wait, 30)
        if reason == "cancelled":
            await worker.cancel("a")
        assert (await call).code == reason
        assert await asyncio.to_thread(ended.wait, 30)


async def test_a_command_in_a_sandbox_ends_with_the_run_whose_plain_function_waits_for_it(
    tmp_path: Path,
) -> None:
    """The function keeps its sandbox open: what ends the command is the cancellation."""
    boxes: list[Sandbox] = []

    def solve(task: Any, config: Any) -> None:
        boxes.append(open_sandbox("subprocess", limits=Limits(wall_s=600)))
        boxes[0].exec(f"echo $$ > {tmp_path / 'new'}; mv {tmp_path / 'new'} {tmp_path / 'pid'}; sleep 600")

    async with files.runtime(tmp_path, solve, timeout_s=600) as worker:
        call = asyncio.create_task(worker.run({"run_id": "a", "task": "four"}))
        await until((tmp_path / "pid").exists)
        shell = psutil.Process(int((tmp_path / "pid").read_text()))
        await worker.cancel("a")
        assert (await call).code == "cancelled"
        await until(lambda: not shell.is_running() or shell.status() == psutil.STATUS_ZOMBIE)
        assert boxes[0].exec("echo on").stdout == "on\n", "the sandbox itself goes on"
        boxes[0].close()


async def test_a_plain_function_ends_while_it_waits_for_its_tools(tmp_path: Path) -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> str:
        """Wait."""
        began.set()
        go_on.wait(60)
        return "done"

    def solve(task: Any, config: Any) -> None:
        try:
            MultiTool([Tool(function=slow)], timeout_s=60).call(
                {"function": {"name": "slow", "arguments": "{}"}}
            )
        finally:
            ended.set()

    async with files.runtime(tmp_path, solve, timeout_s=60) as worker:
        call = asyncio.create_task(worker.run({"run_id": "a", "task": "four"}))
        assert await asyncio.to_thread(began.wait, 30)
        await worker.cancel("a")
        assert (await call).code == "cancelled"
        assert await asyncio.to_thread(ended.wait, 30)
    go_on.set()


async def test_a_call_that_ends_its_run_leaves_one_that_others_wait_for(tmp_path: Path) -> None:
    held = files.HeldProgram()
    inputs = {"run_id": "a", "task": "four"}
    async with files.runtime(tmp_path, held.solve) as worker:
        calls = [asyncio.create_task(worker.run(inputs, ends_with_caller=True)) for _ in range(2)]
        await until(lambda: worker.counts["attempts"] and worker.counts["joined"])
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        held.go_on.set()
        assert (await calls[1]).is_ok
        assert worker.counts["attempts"] == 1
        held.go_on.clear()
        alone = asyncio.create_task(worker.run({"run_id": "b", "task": "x"}, ends_with_caller=True))
        await until(lambda: worker.counts["attempts"] == 2)
        alone.cancel()
        await asyncio.wait({alone})
        await until(lambda: not worker.is_under_way("b"))
        assert not worker._num_callers
