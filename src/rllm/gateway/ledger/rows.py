"""A captured call as a database row, and back without loss.

    CallRecord + what earlier calls of its session left (Tips) ──► CallRow: what is new in it
    CallRow + the decoded call it goes on from                 ──► the same CallRecord

Ids lie in planes (all lowest bytes, then all second bytes, …) without the planes that are zero: two or three
bytes an id, at the price of a copy. Compressing them further would cost more than the space is worth.
Log-probabilities are float32 where that loses nothing, which is so for what engines report, else float64:
what is read is what was written, bit for bit. The rest is JSON, compressed from 2 kB up.
"""

import json
import math
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from rllm.errors import MissingExtraError
from rllm.gateway.ledger.file import name_bytes, name_of
from rllm.gateway.ledger.prefixes import Beginning, Kept, Tip, Trail, digest, part_digests
from rllm.gateway.wire import CallRecord, CallStatus

try:
    import orjson
except ModuleNotFoundError as error:
    raise MissingExtraError("orjson", "gateway") from error

_COMPRESS_FROM_BYTES = 2048
"""Below this it costs more than the bytes it saves are worth."""
_RAW = -zlib.MAX_WBITS
_DEEPEST = 200
_ID_BYTES = 4


_of_thread = threading.local()


class CallRow(NamedTuple):
    """Columns of `calls` after the row's number, in their order."""

    session: int
    id: bytes
    choice: int
    status: str
    is_first: bool
    """The first choice of its call: calls are counted by it."""
    retry_key: bytes | None
    parent: int | None
    """Row of the call that the kept parts come from."""
    num_ids_kept: int
    """How many of the parent's prompt and completion ids this prompt begins with."""
    num_messages_kept: int
    """The same of its messages and its response."""
    num_prompt_bytes_kept: int
    tokens: bytes
    """Prompt ids, completion ids, log-probabilities, policy versions, `prompt`: what is not kept of them."""
    payload: bytes
    """JSON: all that no other column holds."""


@dataclass(kw_only=True, slots=True)
class EncodedCall:
    """A row without the numbers that only the writer knows: its session's and its parent's."""

    record: CallRecord
    kept: Kept
    tip: Tip
    id: bytes
    status: CallStatus
    retry_key: bytes | None
    tokens: bytes
    payload: bytes

    def row(self, *, session: int, is_first: bool) -> CallRow:
        kept = self.kept
        return CallRow(
            session=session,
            id=self.id,
            choice=self.record.choice,
            status=self.status.value,
            is_first=is_first,
            retry_key=self.retry_key,
            parent=None if kept.parent is None else kept.parent.call,
            num_ids_kept=kept.id_bytes // _ID_BYTES,
            num_messages_kept=kept.messages,
            num_prompt_bytes_kept=kept.prompt_bytes,
            tokens=self.tokens,
            payload=self.payload,
        )


def encode_call(record: CallRecord, tips: Iterable[Tip]) -> EncodedCall:
    """Raises ValueError, naming record and field, for a value that cannot be kept exactly."""
    where = f"Record {record.id!r} (session {record.session[:80]!r}, choice {record.choice})"
    if not -(2**63) <= record.choice < 2**63:
        raise ValueError(f"{where}: `choice` is {record.choice}; it must fit in 64 bits.")
    writer = _JsonWriter(where)
    messages = [writer.text(message, "messages") for message in record.messages]
    response = writer.text(record.response, "response")
    tools = writer.text(record.tools, "tools") if record.tools else b""
    prompt_ids = _id_bytes(record.prompt_ids, where, "prompt_ids")
    completion_ids = _id_bytes(record.completion_ids, where, "completion_ids")
    logprobs = _pack_logprobs(record.logprobs, where)
    prompt = _prompt_bytes(record.prompt, where)
    ids = prompt_ids + completion_ids
    beginning = Beginning(
        ids=Trail(ids),
        prompt_id_bytes=len(prompt_ids),
        num_id_bytes=len(ids),
        messages=part_digests([*messages, response]),
        message_sizes=[len(message) for message in messages],
        prompt=Trail(prompt),
        num_prompt_bytes=len(prompt),
        tools=digest(tools) if tools else b"",
        num_tools_bytes=len(tools),
        num_own_bytes=len(response) + len(completion_ids) + len(logprobs),
    )
    kept = beginning.kept_of(tips)

    for message in record.messages[kept.messages :]:
        require_json(message, where, "messages")
    require_json(record.response, where, "response")
    small = _small_fields(record, where)
    spliced = {"messages": b"[" + b",".join(messages[kept.messages :]) + b"]", "response": response}
    if kept.tools:
        small["tools_kept"] = True
    elif tools:
        require_json(record.tools, where, "tools")
        spliced["tools"] = tools
    if record.prompt is not None:
        small["prompt_is_text"] = isinstance(record.prompt, str)
    members = [b'"%s":%s' % (name.encode(), text) for name, text in spliced.items()]
    if small:
        members.append(writer.text(small, "record")[1:-1])
    return EncodedCall(
        record=record,
        kept=kept,
        tip=beginning.tip(kept),
        id=name_bytes(record.id),
        status=CallStatus(record.status),
        retry_key=name_bytes(record.retry_key) if record.retry_key else None,
        tokens=b"".join(
            _section(part)
            for part in (
                _planes(prompt_ids[kept.id_bytes :]),
                _planes(completion_ids),
                logprobs,
                _pack_versions(record.policy_versions, where),
                prompt[kept.prompt_bytes :],
            )
        ),
        payload=_packed_json(b"{" + b",".join(members) + b"}", plain=writer.plain),
    )


def decode_call(row: CallRow, session: str, parent: CallRecord | None) -> CallRecord:
    """`parent` is the decoded call of `row.parent`. Messages are shared with it, not copied."""
    prompt_ids, completion_ids, logprobs, versions, prompt = _sections(row.tokens)
    known = _unpacked_json(row.payload)
    if known.pop("tools_kept", False) and parent is not None:
        known["tools"] = parent.tools
    prompt_is_text = known.pop("prompt_is_text", None)
    record = CallRecord(
        id=name_of(row.id),
        session=session,
        choice=row.choice,
        retry_key="" if row.retry_key is None else name_of(row.retry_key),
    )
    for name, value in known.items():
        setattr(record, name, _RESTORE[name](value) if name in _RESTORE else value)
    record.status = CallStatus(row.status)
    record.prompt_ids = _ids_of_planes(prompt_ids)
    if parent is not None:
        earlier = parent.prompt_ids + parent.completion_ids
        record.prompt_ids = earlier[: row.num_ids_kept] + record.prompt_ids
        record.messages = [*parent.messages, parent.response][: row.num_messages_kept] + record.messages
        prompt = _prompt_bytes(parent.prompt, "")[: row.num_prompt_bytes_kept] + prompt
    record.completion_ids = _ids_of_planes(completion_ids)
    record.logprobs = _unpack(logprobs)
    record.policy_versions = _unpack_versions(versions)
    if prompt_is_text is not None:
        record.prompt = name_of(prompt) if prompt_is_text else _longs(prompt)
    return record


_IN_COLUMNS = {
    *("id", "session", "choice", "status", "retry_key", "prompt", "messages", "response", "tools"),
    *("prompt_ids", "completion_ids", "logprobs", "policy_versions"),
}
_SMALL_FIELDS: tuple[tuple[str, Any], ...] = tuple(
    (each.name, each.default if each.default_factory is MISSING else each.default_factory())
    for each in fields(CallRecord)
    if each.name not in _IN_COLUMNS
)
_RESTORE: dict[str, Callable[[Any], Any]] = {
    each.name: type(each.default)
    for each in fields(CallRecord)
    if each.name in ("dialect", "logprob_meaning")
}


def _small_fields(record: CallRecord, where: str) -> dict[str, Any]:
    """Fields that are not as they are by default."""
    small: dict[str, Any] = {}
    for name, default in _SMALL_FIELDS:
        value = getattr(record, name)
        if value is not default and not _same(value, default):
            require_json(value, where, name)
            small[name] = value
    return small


def _same(mine: Any, theirs: Any) -> bool:
    """Equality alone is not enough: 1 == True == 1.0 and 0.0 == -0.0, and JSON tells them apart."""
    return type(mine) is type(theirs) and mine == theirs and repr(mine) == repr(theirs)


class _JsonWriter:
    """JSON of the parts of one record. `plain` until a part needed more than orjson reads back."""

    def __init__(self, where: str) -> None:
        self.plain = True
        self._where = where

    def text(self, value: Any, place: str) -> bytes:
        try:
            return orjson.dumps(value)
        except TypeError:
            # Halves of surrogate pairs and whole numbers beyond 64 bits; or nothing that JSON can hold.
            require_json(value, self._where, place)
            self.plain = False
            return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


_Place = tuple["_Place | None", str | int]


def require_json(value: Any, where: str, place: str | _Place, depth: int = 0) -> None:
    """Raise ValueError for what JSON would silently change: NaN, tuples, keys that are no text."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return
    if depth > _DEEPEST:
        raise ValueError(
            f"{where}: `{_spelled(place)[:40]}…` is nested deeper than {_DEEPEST} levels, or holds itself."
        )
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: `{_spelled(place)}` has the key {key!r}; JSON's keys are text.")
            require_json(each, where, (_placed(place), key), depth + 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            require_json(each, where, (_placed(place), index), depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"{where}: `{_spelled(place)}` is {value}, which JSON cannot hold; leave it out, "
                "or write it as text."
            )
    elif not isinstance(value, str | int):
        raise ValueError(
            f"{where}: `{_spelled(place)}` is a {kind.__name__}, which JSON does not give back; "
            "make it text, a number, a list or a dict."
        )


def _placed(place: str | _Place) -> _Place:
    return (None, place) if isinstance(place, str) else place


def _spelled(place: str | _Place) -> str:
    """`messages['content'][3]`, as one would write it in Python."""
    if isinstance(place, str):
        return place
    holder, key = place
    return str(key) if holder is None else f"{_spelled(holder)}[{key!r}]"


def _packed_json(text: bytes, *, plain: bool) -> bytes:
    if len(text) >= _COMPRESS_FROM_BYTES:
        compressor = _compressor()
        # A full flush forgets what came before, so that each text can be read by itself.
        compressed = compressor.compress(text) + compressor.flush(zlib.Z_FULL_FLUSH)
        if len(compressed) < 0.9 * len(text):
            return (b"O" if plain else b"J") + compressed
    return (b"o" if plain else b"j") + text


def _compressor() -> Any:
    """This thread's, used again and again: to set one up costs as much as to compress 10 kB."""
    if not hasattr(_of_thread, "compressor"):
        _of_thread.compressor = zlib.compressobj(1, zlib.DEFLATED, _RAW)
    return _of_thread.compressor


def _unpacked_json(payload: bytes) -> dict[str, Any]:
    kind, text = payload[:1], payload[1:]
    if kind in b"OJ":
        text = zlib.decompressobj(_RAW).decompress(text)
    return orjson.loads(text) if kind in b"oO" else json.loads(text)


def _id_bytes(ids: Sequence[int], where: str, field: str) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}I", *ids)
    except struct.error as error:
        raise ValueError(
            f"{where}: `{field}` must hold whole numbers from 0 to {2**32 - 1} ({error})."
        ) from error


def _planes(id_bytes: bytes) -> bytes:
    if not id_bytes:
        return b""
    num_ids, planes = len(id_bytes) // _ID_BYTES, [id_bytes[place::_ID_BYTES] for place in range(_ID_BYTES)]
    while len(planes) > 1 and planes[-1] == bytes(num_ids):
        planes.pop()
    return bytes([len(planes)]) + b"".join(planes)


def _ids_of_planes(packed: bytes) -> list[int]:
    if not packed:
        return []
    num_ids = (len(packed) - 1) // packed[0]
    id_bytes = bytearray(num_ids * _ID_BYTES)
    for place in range(packed[0]):
        id_bytes[place::_ID_BYTES] = packed[1 + place * num_ids : 1 + (place + 1) * num_ids]
    return list(struct.unpack(f"<{num_ids}I", id_bytes))


def _pack_logprobs(logprobs: Sequence[float], where: str) -> bytes:
    count = len(logprobs)
    try:
        exact = struct.pack(f"<{count}d", *logprobs)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{where}: `logprobs` holds something else than numbers ({error}).") from error
    if not all(map(math.isfinite, logprobs)):
        place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
        raise ValueError(
            f"{where}: `logprobs[{place}]` is {logprobs[place]}; a log-probability is a finite number. "
            "Record the call as an error, or without ids and log-probabilities."
        )
    try:
        short = struct.pack(f"<{count}f", *logprobs)
    except OverflowError:
        return b"d" + exact
    return b"f" + short if struct.unpack(f"<{count}f", short) == tuple(logprobs) else b"d" + exact


def _pack_versions(versions: Sequence[int], where: str) -> bytes:
    if not versions:
        return b""
    try:
        if versions.count(versions[0]) == len(versions):
            return b"c" + struct.pack("<qI", versions[0], len(versions))
        for code in "bhiq":
            try:
                return code.encode() + struct.pack(f"<{len(versions)}{code}", *versions)
            except struct.error:
                if code == "q":
                    raise
    except struct.error as error:
        raise ValueError(f"{where}: `policy_versions` must hold whole numbers ({error}).") from error
    return b""


def _unpack_versions(packed: bytes) -> list[int]:
    if packed[:1] == b"c":
        version, count = struct.unpack("<qI", packed[1:])
        return [version] * count
    return _unpack(packed)


def _unpack(packed: bytes) -> list[Any]:
    if not packed:
        return []
    code = chr(packed[0])
    return list(struct.unpack(f"<{(len(packed) - 1) // struct.calcsize('<' + code)}{code}", packed[1:]))


def _prompt_bytes(prompt: str | list[int] | None, where: str) -> bytes:
    if prompt is None:
        return b""
    if isinstance(prompt, str):
        return name_bytes(prompt)
    try:
        return struct.pack(f"<{len(prompt)}q", *prompt)
    except struct.error as error:
        raise ValueError(f"{where}: `prompt` must be text or whole numbers ({error}).") from error


def _longs(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 8}q", packed))


def _section(part: bytes) -> bytes:
    return struct.pack("<I", len(part)) + part


def _sections(blob: bytes) -> list[bytes]:
    parts: list[bytes] = []
    place = 0
    while place < len(blob):
        (size,) = struct.unpack_from("<I", blob, place)
        parts.append(blob[place + 4 : place + 4 + size])
        place += 4 + size
    return parts
