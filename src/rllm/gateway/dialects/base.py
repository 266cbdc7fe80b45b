"""The interface of every protocol: a client's side, and an upstream's side for policies behind HTTP."""

from typing import Any, Protocol

from rllm.errors import RequestRefused
from rllm.types.wire import Answer, CallRequest, Dialect, Piece


class StreamWriter(Protocol):
    """Server-sent events of one streamed answer. Every method returns bytes to send, possibly none."""

    def begin(self) -> bytes: ...

    def piece(self, piece: Piece) -> bytes: ...

    def end(self, answer: Answer) -> bytes:
        """Finish reasons, usage, and the event that tells a client that the answer is whole."""
        ...

    def failed(self, error: RequestRefused) -> bytes:
        """An error event. Whatever ends a good stream is not sent."""
        ...


class ClientDialect(Protocol):
    """The reading and answering of clients of one protocol."""

    name: Dialect

    def parse(self, body: dict[str, Any]) -> CallRequest:
        """Raises RequestRefused (4xx) that names the parameter; unknown fields are tolerated."""
        ...

    def reply(self, request: CallRequest, answer: Answer) -> dict[str, Any]: ...

    def stream(self, request: CallRequest, answer_id: str, model: str, created_at: int) -> StreamWriter: ...

    def error(self, error: RequestRefused) -> dict[str, Any]: ...


class StreamReader(Protocol):
    """Puts an upstream's events together."""

    error: RequestRefused | None
    """The error that the upstream reported in the middle of its stream, or the reason that an event could not
    be read. Nothing counts after it."""

    def feed(self, event: str, data: bytes) -> list[Piece]:
        """Pieces of one event; a piece with `raw` where client and upstream speak the same protocol."""
        ...

    @property
    def complete(self) -> bool:
        """The upstream said that the answer is whole. A stream that ends before is a PartialAnswer."""
        ...

    def answer(self) -> Answer:
        """Everything that came so far."""
        ...


class UpstreamDialect(Protocol):
    """The requests to an upstream of one protocol, and the reading of its answers."""

    name: Dialect
    path: str
    """Behind the upstream's base URL, such as `/chat/completions`."""

    def body(self, request: CallRequest, *, capture: frozenset[str]) -> dict[str, Any]:
        """The body to post. `capture` names what the gateway wants for itself and the upstream knows:
        `logprobs`, `token_ids`, `usage`.

        Raises RequestRefused (400) for what this protocol cannot express.
        """
        ...

    def read(self, request: CallRequest, reply: dict[str, Any]) -> Answer:
        """Raises RequestRefused (502) for a reply that is none."""
        ...

    def reader(self, request: CallRequest) -> StreamReader: ...

    def error_of(self, status: int, body: bytes, headers: dict[str, str]) -> RequestRefused:
        """The upstream's error, its status, code and Retry-After kept; text that is not JSON is wrapped."""
        ...
