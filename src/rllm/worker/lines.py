"""Workers over standard input and output: a request a line in, its answer a line out.

    {"inputs": {…}, "worker_id"?, "version"?, "trace"?, "constraints"?, "id"?}  ──►  the response and the `id`

Requests run at the same time, and answers leave as they come: who needs to tell them apart sends an `id`.
What is no request is answered too, so that every line has exactly one answer. It ends with its input.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from rllm.contracts.contract import RunStatus
from rllm.engine.failures import leaves_of
from rllm.errors import StorageError
from rllm.worker.envelope import envelope_problem
from rllm.worker.host import WorkerHost

MAX_LINE_CHARACTERS = 32 << 20
MAX_OPEN = 4096
"""Requests that are read and not answered; the next line is read when there is room."""


async def serve_lines(host: WorkerHost, lines: Iterable[str], write: Callable[[str], object]) -> int:
    """Answer all lines; how many there were. `lines` may block: it is read in a thread."""
    loop = asyncio.get_running_loop()
    room = asyncio.Semaphore(MAX_OPEN)
    num_lines = 0

    async def answer(line: str) -> None:
        try:
            write(await _answer(host, line))
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as answers:
            async for line in _lines(lines, loop):
                num_lines += 1
                await room.acquire()
                answers.create_task(answer(line))
    except BaseExceptionGroup as errors:  # such as that nobody reads the answers any more
        raise leaves_of(errors)[0] from errors
    return num_lines


async def _lines(lines: Iterable[str], loop: asyncio.AbstractEventLoop) -> AsyncIterator[str]:
    """The lines that are not blank. The thread is one that nobody waits for: stdin may never end."""
    queue: asyncio.Queue[str | BaseException | None] = asyncio.Queue(MAX_OPEN)

    def put(item: str | BaseException | None) -> None:
        # Waits for room in the queue, so that the input is not read into memory faster than it is answered.
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def read() -> None:
        try:
            for line in lines:
                if line.strip():
                    put(line)
            put(None)
        except BaseException as error:  # noqa: BLE001  raised again in the loop
            put(error)

    threading.Thread(target=read, name="worker-lines", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item


async def _answer(host: WorkerHost, line: str) -> str:
    if len(line) > MAX_LINE_CHARACTERS:
        return _refusal(None, f"The line has {len(line):,} characters; a request has at most 32 Mi.")
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _refusal(None, f"The line is no JSON: {error}.")
    name = request.pop("id", None) if isinstance(request, dict) else None
    if not isinstance(request, dict):
        return _refusal(name, 'The line is no object; send {"inputs": {…}}.')
    worker_id = request.get("worker_id", next(iter(host.workers)) if len(host.workers) == 1 else None)
    worker = host.workers.get(worker_id) if isinstance(worker_id, str) else None
    if worker is None:
        return _refusal(name, f"`worker_id` is {worker_id!r:.100}; there are {', '.join(host.workers)}.")
    problem = envelope_problem(worker.contract, request)
    if problem:
        return _refusal(name, problem)
    try:
        response = await worker.run(
            request["inputs"],
            trace=request.get("trace") or "",
            timeout_s=(request.get("constraints") or {}).get("timeout_seconds"),
        )
    except StorageError as error:
        return _refusal(name, str(error), status=RunStatus.RETRYABLE_ERROR, code="storage")
    return response.body.decode() if name is None else json.dumps({"id": name, **response.to_dict()})


def _refusal(
    name: Any, message: str, *, status: RunStatus = RunStatus.INVALID_REQUEST, code: str = "bad_request"
) -> str:
    id_field = {} if name is None else {"id": name}
    return json.dumps({**id_field, "status": str(status), "error": {"code": code, "message": message}})
