"""New weights for one vLLM server as tensors, from the trainer's GPU to the server's.

    /get_world_size ──► unique id ──► /init_weight_transfer_engine ‖ join          once, and after a failure
    /start_weight_update ──► /update_weights ‖ send ──► /finish_weight_update      each time

What is beside ‖ goes on at the same time: the server waits in NCCL for what this process sends, and the other
way round. When one of the two fails, or whoever waits for them is cancelled, the group is left, so that the
other one cannot wait for ever. Nobody has run this on a GPU yet.
"""

import asyncio
import base64
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from rllm.errors import ConfigError, InferenceError
from rllm.inference.vllm_http import VLLMHttp

NEEDS = (
    'vLLM 0.32 or newer, `--weight-transfer-config \'{"backend": "nccl"}\'` and VLLM_SERVER_DEV_MODE=1 in '
    "its environment"
)
REFUSED_WITHIN_S = 1.0
"""A server that refuses to join does so at once; who waits for it in NCCL waits for ever."""
JOINED_WITHIN_S = 300.0
Result = TypeVar("Result")

HoldWeights = Callable[[], AbstractAsyncContextManager[int]]
"""Opens a block in which the weights stay those of the policy version that it yields."""


class ServerGroup(Protocol):
    """The processes that one server's workers and this one are of."""

    def abort(self) -> None: ...


class TensorSender(Protocol):
    """The trainer's side, whose calls block but for `describe`; `rllm.models.weight_sending` has it."""

    chunk_bytes: int

    def unique_id(self) -> bytes: ...

    def join(self, name: bytes, num_ranks: int, /) -> Any:
        """The group, once all ranks are there."""
        ...

    def describe(self) -> dict[str, Any]: ...

    def send(self, group: Any, /) -> None: ...


class WeightLink:
    """A server that takes tensors, and what sends them."""

    def __init__(self, http: VLLMHttp, sender: TensorSender) -> None:
        self._http, self._sender = http, sender
        self._group: ServerGroup | None = None

    async def join(self) -> None:
        """Connect, where that has not happened yet. Raises ConfigError or InferenceError."""
        if self._group is not None:
            return
        reply = await self._http.get(f"{self._http.root}/get_world_size")
        num_workers = reply.get("world_size") if isinstance(reply, dict) else None
        if type(num_workers) is not int:
            raise ConfigError(
                f"The server at {self._http.base_url} does not say how many GPUs it has, so it takes no "
                f"weights over NCCL; start it with {NEEDS}, or set `inference.weight_transfer` to files."
            )
        await self._release_server()
        name = self._sender.unique_id()
        info = {
            "nccl_unique_id_b64": base64.b64encode(name).decode(),
            "rank_offset": 1,  # behind this process
            "world_size": 1 + num_workers,
            "packed": True,
            "packed_buffer_size_bytes": self._sender.chunk_bytes,
        }
        request = asyncio.create_task(
            self._http.tell("/init_weight_transfer_engine", {"init_info": info}, NEEDS)
        )
        try:
            await self._require_waiting(request)
            async with asyncio.timeout(JOINED_WITHIN_S):
                joining = _in_thread(lambda: self._sender.join(name, 1 + num_workers))
                self._group = await _both(request, joining)
        except TimeoutError as error:
            raise InferenceError(
                f"The server at {self._http.base_url} did not come to the NCCL group within "
                f"{JOINED_WITHIN_S:g} s; its GPUs have to reach this machine, and not to be the trainer's."
            ) from error
        finally:
            request.cancel()

    async def _release_server(self) -> None:
        """End what a run before this one, or a push that failed, has left in the server."""
        try:
            await self._http.tell("/shutdown_weight_transfer_engine", {}, NEEDS)
        except InferenceError:  # it refuses during an update, also one that nobody goes on with
            await self._http.tell("/finish_weight_update", {}, NEEDS)
            await self._http.tell("/shutdown_weight_transfer_engine", {}, NEEDS)

    async def _require_waiting(self, request: "asyncio.Task[Any]") -> None:
        """Raises InferenceError for a server that has answered before anybody could have joined it."""
        await asyncio.wait({request}, timeout=REFUSED_WITHIN_S)
        if not request.done():
            return
        try:
            request.result()
        except InferenceError as error:
            raise InferenceError(
                f"{error} It takes weights over NCCL when it is started with {NEEDS}."
            ) from error
        raise InferenceError(
            f"The server at {self._http.base_url} joined a group of one: NCCL is off there; unset "
            "VLLM_DISABLE_PYNCCL in its environment."
        )

    async def push(self, hold_weights: HoldWeights) -> int:
        """Give the server the weights, and return the policy version that they are of. The caller has paused
        it, and `join` has returned.

        Raises InferenceError, and leaves the group, when the server has not got all of them.
        """
        group = self._group
        assert group is not None, "it has joined"
        try:
            await self._http.tell("/start_weight_update", {}, NEEDS)
            async with hold_weights() as policy_version:
                body = {"update_info": self._sender.describe()}
                request = asyncio.create_task(self._http.tell("/update_weights", body, NEEDS))
                await _both(request, _in_thread(lambda: self._sender.send(group)))
            await self._http.tell("/finish_weight_update", {}, NEEDS)
        except BaseException:
            self.drop()
            raise
        return policy_version

    def drop(self) -> None:
        """The server may have begun anew, or hang: the next push joins it again."""
        if self._group is not None:
            self._group.abort()
            self._group = None

    async def close(self) -> None:
        """Let the server go, which may be gone."""
        if self._group is not None:
            try:
                await self._http.tell("/shutdown_weight_transfer_engine", {}, NEEDS)
            finally:
                self.drop()


async def _both(request: "asyncio.Future[Any]", work: "asyncio.Future[Result]") -> Result:
    """The result of `work`, once both are done. Raises the first error of one, and waits for neither then."""
    both = (request, work)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        for error in [each.exception() for each in both if each.done()]:
            if error is not None:
                raise error
        return work.result()
    finally:
        for each in both:
            each.cancel()


def _in_thread(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """The result of `work`, in a thread that the end of the process does not wait for: NCCL may hang."""
    future = Future[Result]()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)

    # From here on nobody can cancel it, or setting its result in the thread would raise.
    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name="rllm-weights", daemon=True).start()
    return asyncio.wrap_future(future)
