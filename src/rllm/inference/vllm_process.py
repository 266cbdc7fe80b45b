"""vLLM servers of our own: started on free ports, begun anew when they end, ended with whoever started them.

    ServerProcess ──► python -m vllm… on a port of its own ──► ready, within START_WITHIN_S
          ▲                                                      │ it ends, or hangs for HANGS_AFTER_S
          └── at most MAX_FAILED_STARTS in a row that never get ready

What a server prints goes to its log file. Each is a process group, which is ended with SIGTERM and, after a
while, SIGKILL; where its starter is killed, the kernel ends it.
"""

import asyncio
import ctypes
import itertools
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from rllm.distributed.launch import free_port
from rllm.errors import ConfigError, InferenceError

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
START_WITHIN_S = 1_800.0
"""A large model takes minutes to be read; what is not ready by then hangs."""
HANGS_AFTER_S = 120.0
"""Without an answer of one that was ready: it is begun anew."""
CHECK_EVERY_S = 10.0
"""Between two questions to one that was ready, and to answer one."""
END_WITHIN_S = 10.0
_PR_SET_PDEATHSIG = 1
_LAST_CHARS = 1_500
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MODULE = "vllm.entrypoints.openai.api_server"


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerSettings:
    """Settings that every replica is started with."""

    python: str
    """The Python of an environment that has vLLM."""
    model: Path
    max_context: int
    max_requests: int
    max_prefill_tokens: int
    dtype: str
    device: str = "cpu"
    adapter_rank: int = 0
    """The rank of the adapters that it gets; 0 where it gets whole models."""
    takes_tensors: bool = False
    """Whether it gets new weights over NCCL."""
    reads_images: bool = False
    """Whether its prompts of ids show images."""
    cache_gb: int = 1
    """The memory of keys and values, on a CPU."""

    def command(self, port: int) -> list[str]:
        return [
            self.python,
            "-m",
            MODULE,
            *("--model", str(self.model)),
            *("--served-model-name", "policy"),
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--dtype", self.dtype),
            *("--max-model-len", str(self.max_context)),
            *("--max-num-seqs", str(self.max_requests)),
            *("--max-num-batched-tokens", str(max(self.max_prefill_tokens, self.max_context))),
            *("--logprobs-mode", "processed_logprobs"),
            "--enforce-eager",
            *("--structured-outputs-config.backend", "guidance"),  # the one that reads Lark grammars
            *(("--enable-scale-out",) if self.reads_images else ()),
            *(("--weight-transfer-config", '{"backend": "nccl"}') if self.takes_tensors else ()),
            *(("--enable-lora", "--max-loras", "2") if self.adapter_rank else ()),
            *(("--max-lora-rank", str(_lora_rank(self.adapter_rank))) if self.adapter_rank else ()),
        ]

    def environment(self, gpu: int) -> dict[str, str]:
        own = {
            "VLLM_SERVER_DEV_MODE": "1",  # without it a server takes no new weights
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # nor a new adapter
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.device == "cpu":
            own |= {
                "VLLM_CPU_KVCACHE_SPACE": str(self.cache_gb),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_USE_V2_MODEL_RUNNER": "0",
            }
        else:
            own["CUDA_VISIBLE_DEVICES"] = _card_named(gpu)
        return {**os.environ, **own}


def _card_named(gpu: int) -> str:
    """The name of the GPU with this number among those that this process may use. Raises ConfigError where
    CUDA_VISIBLE_DEVICES leaves it none of that number: any other is somebody else's."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        return str(gpu)
    usable = [each for each in variable.split(",") if each]
    if gpu >= len(usable):
        raise ConfigError(
            f"A model server is to run on GPU {gpu}, counted from 0, and CUDA_VISIBLE_DEVICES is "
            f"{variable!r}, which leaves {len(usable)}; name more GPUs there, or start fewer replicas."
        )
    return usable[gpu]


def _lora_rank(rank: int) -> int:
    """The least that vLLM knows and that is enough."""
    return next((each for each in LORA_RANKS if each >= rank), rank)


def require_vllm(python: str, key: str) -> None:
    """Raises ConfigError for a Python, which `key` names, that cannot be run or has no vLLM."""
    try:
        done = subprocess.run(
            [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"],
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{key} is {python!r}, which cannot be run ({error}); name the Python of an "
            "environment that vLLM is installed in."
        ) from error
    if done.returncode:
        raise ConfigError(
            f"{key} is {python!r}, which has no vLLM; name the Python of an environment "
            "that it is installed in."
        )


class ServerProcess:
    """One server that is kept alive; use it as a context."""

    def __init__(self, settings: ServerSettings, gpu: int, log_path: Path) -> None:
        self.port = free_port()
        self.log_path = log_path
        self.num_starts = 0
        self._settings = settings
        self._gpu = gpu
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def pid(self) -> int:
        """Process id of the server, as long as it runs."""
        assert self._process is not None, "it was started"
        return self._process.pid

    async def __aenter__(self) -> "ServerProcess":
        self._keeper = asyncio.create_task(self._keep())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait((self._keeper, ready), return_when=asyncio.FIRST_COMPLETED)
            if self._keeper.done():
                await self._keeper
        except BaseException:
            await self.__aexit__()
            raise
        finally:
            ready.cancel()
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await asyncio.to_thread(self._end)
        self._process = None  # its number may soon be that of somebody else's

    async def _keep(self) -> None:
        num_failed = 0
        while num_failed < MAX_FAILED_STARTS:
            self._start()
            was_ready = await self._watch()
            num_failed = 0 if was_ready else num_failed + 1
        error = (
            f"The server at {self.url} ended {num_failed} times before it was ready; the end of "
            f"{self.log_path}:\n{self._last_words()}"
        )
        if self._ready.is_set():  # the run goes on with the others, if there are any
            log.error(error)
        raise InferenceError(error)

    def _start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.num_starts += 1
        # In the thread of the event loop, because the kernel ends the server with the thread that started it.
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._settings.command(self.port),
                env=self._settings.environment(self._gpu),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    async def _watch(self) -> bool:
        """Until the process has ended, took too long to get ready, or hangs; whether it was ever ready."""
        assert self._process is not None
        was_ready, now = False, time.monotonic()
        check_at, give_up_at = now, now + START_WITHIN_S
        while self._process.poll() is None and (now := time.monotonic()) < give_up_at:
            if now >= check_at and await asyncio.to_thread(self._is_healthy):
                was_ready = True
                self._ready.set()
                check_at, give_up_at = now + CHECK_EVERY_S, now + HANGS_AFTER_S
            await asyncio.sleep(0.5)
        if was_ready and self._process.poll() is None:
            log.error(
                "The server at %s has not answered for %g s; it is begun anew.", self.url, HANGS_AFTER_S
            )
        await asyncio.to_thread(self._end)  # children of it may still be there
        return was_ready

    def _is_healthy(self) -> bool:
        with (
            suppress(OSError, HTTPException),
            urlopen(f"http://127.0.0.1:{self.port}/health", timeout=CHECK_EVERY_S) as response,
        ):
            return response.status == 200
        return False

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_WITHIN_S)
                # Its workers may outlive the server itself.
                if number == signal.SIGKILL or not _group_lives(process.pid, END_WITHIN_S):
                    return

    def _last_words(self) -> str:
        return self.log_path.read_text(errors="replace")[-_LAST_CHARS:]


async def start_replicas(
    settings: ServerSettings,
    num_replicas: int,
    logs: Path,
    open_until_done: AsyncExitStack,
    *,
    first_gpu: int = 0,
    spared_gpu: int | None = None,
) -> list[ServerProcess]:
    """Servers that are ready, and end with `open_until_done`; what they print goes to `logs`.

    On GPUs the first has `first_gpu`, and each other the next one, where `spared_gpu` does not count: NCCL
    lets no two processes of a group share one. Raises ConfigError where there are not as many.
    """
    free = (each for each in itertools.count() if each != spared_gpu)
    gpus = list(itertools.islice(free, first_gpu, first_gpu + num_replicas))
    for gpu in gpus:
        settings.environment(gpu)  # refuses a GPU that is not ours before any server starts
    processes = [
        ServerProcess(settings, gpu, logs / f"replica-{index}.log") for index, gpu in enumerate(gpus)
    ]
    starts = (open_until_done.enter_async_context(each) for each in processes)
    # All of them, also after one has failed: what is on its way to being started is on its way to be ended.
    for outcome in await asyncio.gather(*starts, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
    return processes


def _group_lives(group: int, wait_s: float) -> bool:
    """Whether any process of a group is left after a while."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
