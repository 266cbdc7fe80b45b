# pyright: reportMissingImports=false
"""The answers of an actor, and the exceptions where there will be none."""

from typing import Any

from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from rllm.errors import ClusterError, RllmError

ENDED = (
    RayActorError,
    ActorUnschedulableError,
    NodeDiedError,
    WorkerCrashedError,
    ObjectLostError,
    OutOfMemoryError,
)
"""The exceptions of Ray for a worker that could not be started, or has ended before its answer was here, or
its node with the answer."""


def full_store(error: BaseException) -> str:
    """The message for an object store that is full."""
    return (
        f"A node's object store is full, and takes no more ({first_line(error)}). End what else fills it, "
        "or give it more (`cluster.object_store_mb`, `ray start "
        "--object-store-memory`); the same command goes on from the last checkpoint."
    )


class WorkerEnded(Exception):
    """The worker that was asked has ended; another one can be asked the same."""


async def answer(ref: Any) -> Any:
    """The return value of an actor's method.

    Raises what it raised, and WorkerEnded where there will be no answer.
    """
    try:
        return await ref
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
            raise ClusterError(full_store(cause)) from error
        if isinstance(cause, RllmError):
            raise cause from error
        raise ClusterError(f"A rollout worker failed: {type(cause).__name__}: {cause}") from error
    except ENDED as error:
        raise WorkerEnded(first_line(error)) from error
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise ClusterError(full_store(error)) from error
    except RayError as error:
        raise ClusterError(f"Ray failed: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Ray's messages have many."""
    return f"{str(error).splitlines()[0] if str(error) else type(error).__name__:.200}"
