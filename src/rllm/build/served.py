"""`rllm serve environment NAME` ──► the world of that name as a server of OpenEnv's protocol."""

import socket
from collections.abc import Callable

from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.eval.tasks import benchmark_world


def environment_server(name: str, *, host: str, port: int, sessions: int) -> tuple[str, Callable[[], None]]:
    """(its address, what serves it until a signal comes). Raises ConfigError for an unknown name, one without
    training tasks, and an address that cannot be had."""
    from rllm.integrations.openenv.server import environment_app, serve  # needs its extra

    spec = benchmark_named(name)
    world = benchmark_world(spec)
    split = "train" if "train" in spec.splits else spec.eval_split
    world.tasks(split, 1, **spec.task)  # an extra or rows that are missing are not found out by a client
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened on: {error}. Choose another --port.") from error
    app = environment_app(world, {"split": split, **spec.task}, sessions)
    return f"http://{host}:{listener.getsockname()[1]}", lambda: serve(app, listener)
