"""Server-sent events with names, as the Responses and the Messages protocol have them: JSON in, bytes out."""

from typing import Any

import orjson

from rllm.types.wire import Piece


def server_event(data: dict[str, Any]) -> bytes:
    """One event; both protocols repeat its name as `type` in the data."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), orjson.dumps(data))


def event_up_to(field: str, data: dict[str, Any]) -> bytes:
    """The beginning of an event that is sent a thousand times, each with another value of `field`.

    The JSON of the value is to be appended, then the end of the object and an empty line.
    """
    return b'event: %b\ndata: %b,"%b":' % (data["type"].encode(), orjson.dumps(data)[:-1], field.encode())


def as_it_came(event: str, data: bytes) -> Piece:
    """An upstream's event for a client that speaks the same protocol."""
    # Data of several lines is an event of several `data:` lines; put in as it is, its rest would be lost.
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    if event and event != "message":
        return Piece(raw=b"event: %b\ndata: %b\n\n" % (event.encode(), data))
    return Piece(raw=b"data: %b\n\n" % data)
