"""Server-sent events, taken apart as their bytes arrive.

    bytes, cut anywhere ──feed──► (event name, data), …          end of the stream ──finish──► what was left

Lines may end in LF, CR or CRLF; comments, ids and retry hints are dropped; data of several lines is joined by
LF.
"""

import re

MAX_EVENT_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_CARRIAGE_RETURN = re.compile(rb"\r\n?")


class EventSplitter:
    """Finds the events of one stream. Raises ValueError for an event longer than `max_event_bytes`."""

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._parts: list[bytes] = []
        """The parts since the last whole event, as they came: joined once, not at every part."""
        self._num_bytes = 0
        self._last = b""
        """The last byte: an empty line may be cut in two."""
        self._carriage_return = b""
        """A CR at the end of a part, which may be the first half of a CRLF."""
        self._has_begun = False

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        if not self._num_bytes and not self._carriage_return and (events := _plain_events(data)):
            self._has_begun = True
            return events
        data = self._with_plain_line_ends(data)
        if not data:
            return []
        if not self._has_begun:
            data = self._without_bom(data)
        self._parts.append(data)
        self._num_bytes += len(data)
        if b"\n\n" not in data and not (self._last == b"\n" and data[:1] == b"\n"):
            self._last = data[-1:]
            if self._num_bytes > self._max_event_bytes:
                raise ValueError(f"one event has more than {self._max_event_bytes} bytes")
            return []
        blocks = b"".join(self._parts).split(b"\n\n")
        rest = blocks.pop()
        self._parts = [rest] if rest else []
        self._num_bytes = len(rest)
        self._last = rest[-1:]
        return [event for block in blocks if (event := _event_of(block)) is not None]

    def finish(self) -> list[tuple[str, bytes]]:
        """The last event where only the empty line behind it is missing."""
        event = _event_of(b"".join(self._parts))
        self._parts = []
        return [] if event is None else [event]

    def _with_plain_line_ends(self, data: bytes) -> bytes:
        if b"\r" not in data and not self._carriage_return:
            return data
        data = self._carriage_return + data
        self._carriage_return = b"\r" if data.endswith(b"\r") else b""
        return _CARRIAGE_RETURN.sub(b"\n", data[:-1] if self._carriage_return else data)

    def _without_bom(self, data: bytes) -> bytes:
        """The mark stands in the first bytes; three bytes that come in pieces are not waited for."""
        self._has_begun = True
        return data.removeprefix(_BOM)


def _plain_events(data: bytes) -> list[tuple[str, bytes]]:
    """Whole events of one line of data each and nothing else, as engines send them: nearly every part of a
    stream. Else none."""
    if not data.startswith(b"data: ") or not data.endswith(b"\n\n") or b"\r" in data:
        return []
    events = data[6:-2].split(b"\n\ndata: ")
    # Every line end is then one of those between them.
    return [("", event) for event in events] if data.count(b"\n") == 2 * len(events) else []


def _event_of(block: bytes) -> tuple[str, bytes] | None:
    """None for a block without data, such as a comment that keeps the connection alive."""
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of them
        return "", block[6:]
    name = ""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ").decode("utf-8", "replace")
    return (name, b"\n".join(data)) if data else None
