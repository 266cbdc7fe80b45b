"""The address that a gateway listens on: host and port in, a socket that holds them out."""

import socket

from rllm.errors import ConfigError

BACKLOG = 16_384
"""Connections that wait to be accepted."""


def listening_socket(host: str, port: int) -> socket.socket:
    """Takes an address, before anything else is made that would have to be unmade when it cannot be had."""
    if not 0 <= port <= 65_535:
        raise ConfigError(f"`port` is {port}; choose from 0 (any free one) to 65535.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"`host` is {host!r}, which is no address of this machine ({error}); use 127.0.0.1, "
            "or 0.0.0.0 for all."
        ) from error
    listening = socket.socket(family, kind, protocol)
    try:
        # Or a gateway that is started again would wait for old connections in TIME_WAIT.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"{host}:{port} cannot be listened on ({error.strerror}); "
            "stop what uses it, or choose another --port or --host."
        ) from error
    return listening
