"""NCCL's library, called by its C interface: a group of this process, as rank 0, and the GPUs of one server.

    unique_id() ──to the server, however──► every rank: NcclGroup(unique_id, num_ranks, device) ──► broadcast

torch's own groups meet in a store that all ranks reach; a server of vLLM meets whoever hands it the 128 bytes
of a unique id. NCCL of both sides has to be of one version. Nobody has run this on a GPU yet.
"""

import ctypes
import threading
import time
from typing import Any

import torch
from torch import Tensor

from rllm.errors import ConfigError, InferenceError

LIBRARY = "libnccl.so.2"
"""Part of torch for CUDA, which has loaded it already."""
ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
"""Values of `ncclDataType_t` and `ncclRedOp_t`."""
_LOOK_EVERY_S = 0.001


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


_POINTER = ctypes.c_void_p
_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), ctypes.c_int, _UniqueId, ctypes.c_int],
    "ncclAllReduce": [
        *(_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(_POINTER, _POINTER),
    ],
    "ncclBroadcast": [
        *(_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(_POINTER, _POINTER),
    ],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [_POINTER],
}


def require_nccl() -> None:
    """Raises ConfigError where torch came without NCCL."""
    _library()


def unique_id() -> bytes:
    """A name for a new group, which this process is the first rank of."""
    name = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(name))
    return bytes(memoryview(name).cast("B"))


class NcclGroup:
    """This process and the others that were handed its unique id.

    `broadcast` puts work on the current stream of `device` and returns; `wait` returns when it is done.
    """

    def __init__(self, name: bytes, num_ranks: int, device: torch.device) -> None:
        """Returns when all ranks are there, which may be never."""
        self._device = device
        self._comm = _POINTER()
        self._is_aborted = False
        self._aborting = threading.Lock()
        with torch.cuda.device(device):
            unique = _UniqueId.from_buffer_copy(name)
            _call("ncclCommInitRank", ctypes.byref(self._comm), num_ranks, unique, 0)
            one = torch.zeros(1, device=device)  # by which vLLM's workers try a new group
            _call("ncclAllReduce", *_both(one), 1, _FLOAT32, _SUM, self._comm, self._stream())
            self.wait()

    def broadcast(self, chunk: Tensor) -> None:
        """Send bytes, [N] uint8 on the group's device, to all others."""
        self._require_whole()
        _call("ncclBroadcast", *_both(chunk), chunk.numel(), _UINT8, 0, self._comm, self._stream())

    def wait(self) -> None:
        """Until all work on the current stream is done. Raises InferenceError once a rank is gone, or after
        `abort`: the work of a broken group is never done."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self._device))
        failure = ctypes.c_int()
        # Polled, because a synchronization would never return once a rank is gone.
        while not done.query():
            self._require_whole()
            _call("ncclCommGetAsyncError", self._comm, ctypes.byref(failure))
            _require_success("a broadcast", failure.value)
            time.sleep(_LOOK_EVERY_S)
        self._require_whole()

    def abort(self) -> None:
        """Leave, whatever is under way. The library may take its time, which nobody has to wait for."""
        with self._aborting:
            if self._is_aborted:
                return
            self._is_aborted = True
        threading.Thread(
            target=_library().ncclCommAbort, args=(self._comm,), name="rllm-nccl-abort", daemon=True
        ).start()

    def _require_whole(self) -> None:
        if self._is_aborted:
            raise InferenceError("The NCCL group was left while it was at work.")

    def _stream(self) -> ctypes.c_void_p:
        return _POINTER(torch.cuda.current_stream(self._device).cuda_stream)


def _both(tensor: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """The tensor as what is sent and what is received."""
    return _POINTER(tensor.data_ptr()), _POINTER(tensor.data_ptr())


def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise ConfigError(
            f"`inference.weight_transfer` is 'nccl', and {LIBRARY} cannot be loaded ({error}); install torch "
            "for CUDA, which brings it, or set the key to files."
        ) from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _call(name: str, *arguments: Any) -> None:
    _require_success(name, getattr(_library(), name)(*arguments))


def _require_success(name: str, result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        raise InferenceError(f"NCCL failed in {name} with code {result} of ncclResult_t.")
