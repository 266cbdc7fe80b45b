"""A process that serves until it is stopped: its event loop, its garbage, its threads, its signals."""

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from rllm.build.gateways import Address

if TYPE_CHECKING:
    from rllm.gateway.server import Gateway

GatewayOpener = Callable[[Address], "AbstractAsyncContextManager[Gateway]"]
_Result = TypeVar("_Result")
_SWITCH_INTERVAL_S = 0.001


def run_server(server: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a server to its end, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(server)


def settle_process() -> None:
    """Make room for many requests at once; to be called when all that serves them is in memory.

    Thousands of open requests are many objects and hardly any garbage: to look through them all the time is a
    third of the CPU of a model call. Threads give the interpreter back within a millisecond, so that one with
    long work holds up no other.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


@dataclass(kw_only=True, slots=True, frozen=True)
class Listening:
    """The facts that clients of a gateway need."""

    url: str
    base_url: str
    token: str | None
    models: list[str]


def serve_until_stopped(
    open_gateway: GatewayOpener, address: Address, on_listening: Callable[[Listening], None]
) -> signal.Signals:
    """Serve until SIGTERM or Ctrl-C, and let what is in flight end; the signal that came first."""
    return run_server(_until_stopped(open_gateway, address, on_listening))


async def _until_stopped(
    open_gateway: GatewayOpener, address: Address, on_listening: Callable[[Listening], None]
) -> signal.Signals:
    loop = asyncio.get_running_loop()
    stop_signal: asyncio.Future[signal.Signals] = loop.create_future()
    second_signal = asyncio.Event()

    def stop(by: signal.Signals) -> None:
        if stop_signal.done():
            second_signal.set()
        else:
            stop_signal.set_result(by)

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop, each)
    async with open_gateway(address) as gateway, gateway:
        settle_process()
        on_listening(
            Listening(
                url=gateway.url,
                base_url=gateway.base_url,
                token=gateway.token,
                models=list(gateway.policy.models()),
            )
        )
        by = await stop_signal
        hurry = asyncio.create_task(_stop_at_once(gateway, second_signal))
        await gateway.close()
        hurry.cancel()
    return by


async def _stop_at_once(gateway: "Gateway", second_signal: asyncio.Event) -> None:
    """Asked twice to stop, what is in flight is not waited for."""
    await second_signal.wait()
    await gateway.calls.finish(0.0)
