"""A captured call as a database row, and back without loss.

    CallRecord + what earlier calls of its session left (Tips) ──► CallRow: what is new in it
    CallRow + the decoded call it goes on from                 ──► the same CallRecord

Ids, log-probabilities and versions lie in `tokens`, as numbers.py packs them. The rest is JSON, compressed
from 2 kB up.
"""

import json
import math
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

from rllm.errors import MissingExtraError
from rllm.errors.redaction import bytes_without_keys, hints_at_key, may_hold_key, values_without_keys
from rllm.gateway.ledger.file import name_bytes, name_of
from rllm.gateway.ledger.numbers import (
    ID_BYTES,
    id_bytes,
    ids_of_planes,
    longs_of,
    pack_logprobs,
    pack_versions,
    planes_of,
    prompt_bytes,
    sections,
    sections_of,
    unpack,
    unpack_versions,
)
from rllm.gateway.ledger.prefixes import Beginning, Kept, Tip, Trail, digest, part_digests
from rllm.types.wire import CallRecord, CallStatus

try:
    import orjson
except ModuleNotFoundError as error:
    raise MissingExtraError("orjson", "gateway") from error

_COMPRESS_FROM_BYTES = 2048
"""Below this it costs more than the bytes it saves are worth."""
_RAW = -zlib.MAX_WBITS
_DEEPEST = 200


_NOTHING = Trail(b"")
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
    """The number of the parent's prompt and completion ids that this prompt begins with."""
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
    kept_prefix: Kept
    tip: Tip
    id: bytes
    status: CallStatus
    retry_key: bytes | None
    tokens: bytes
    payload: bytes

    def row(self, *, session: int, is_first: bool) -> CallRow:
        prefix = self.kept_prefix
        return CallRow(
            session=session,
            id=self.id,
            choice=self.record.choice,
            status=self.status.value,
            is_first=is_first,
            retry_key=self.retry_key,
            parent=None if prefix.parent is None else prefix.parent.call,
            num_ids_kept=prefix.id_bytes // ID_BYTES,
            num_messages_kept=prefix.messages,
            num_prompt_bytes_kept=prefix.prompt_bytes,
            tokens=self.tokens,
            payload=self.payload,
        )


class _Where:
    """Which record an error is about; spelt only where there is an error."""

    __slots__ = ("_record",)

    def __init__(self, record: CallRecord) -> None:
        self._record = record

    def __str__(self) -> str:
        record = self._record
        return f"Record {record.id!r} (session {record.session[:80]!r}, choice {record.choice})"


def encode_call(record: CallRecord, tips: Iterable[Tip]) -> EncodedCall:
    """Raises ValueError, naming record and field, for a value that cannot be kept exactly."""
    where = _Where(record)
    if not -(2**63) <= record.choice < 2**63:
        raise ValueError(f"{where}: `choice` is {record.choice}; it must fit in 64 bits.")
    writer = _JsonWriter(where)
    messages = [writer.text(message, "messages") for message in record.messages]
    response = writer.text(record.response, "response")
    tools = writer.text(record.tools, "tools") if record.tools else b""
    prompt_ids = id_bytes(record.prompt_ids, where, "prompt_ids")
    completion_ids = id_bytes(record.completion_ids, where, "completion_ids")
    logprobs = pack_logprobs(record.logprobs, where)
    prompt = prompt_bytes(record.prompt, where)
    if isinstance(record.prompt, str):
        prompt = bytes_without_keys(prompt)
    ids = prompt_ids + completion_ids
    beginning = Beginning(
        ids=Trail(ids) if ids else _NOTHING,
        prompt_id_bytes=len(prompt_ids),
        num_id_bytes=len(ids),
        messages=part_digests([*messages, response]),
        message_sizes=[len(message) for message in messages],
        prompt=Trail(prompt) if prompt else _NOTHING,
        num_prompt_bytes=len(prompt),
        tools=digest(tools) if tools else b"",
        num_tools_bytes=len(tools),
        num_own_bytes=len(response) + len(completion_ids) + len(logprobs),
    )
    prefix = beginning.kept_of(tips)

    # What is kept is equal, as JSON, to what was checked when it was stored. But NaN is written as null.
    for index, message in enumerate(record.messages):
        if index >= prefix.messages or b"null" in messages[index]:
            require_json(message, where, "messages")
    require_json(record.response, where, "response")
    small = _small_fields(record, where)
    members = [b'"messages":[%b]' % b",".join(messages[prefix.messages :]), b'"response":%b' % response]
    if not prefix.tools or b"null" in tools:
        require_json(record.tools, where, "tools")
    if prefix.tools:
        small["tools_kept"] = True
    elif tools:
        members.append(b'"tools":%b' % tools)
    if record.prompt is not None:
        small["prompt_is_text"] = isinstance(record.prompt, str)
    if small:
        # Without its braces: the members of one object.
        members.append(writer.text(small, "record")[1:-1])
    return EncodedCall(
        record=record,
        kept_prefix=prefix,
        tip=beginning.tip(prefix),
        id=name_bytes(record.id),
        status=CallStatus(record.status),
        retry_key=name_bytes(record.retry_key) if record.retry_key else None,
        tokens=sections(
            planes_of(prompt_ids[prefix.id_bytes :]),
            planes_of(completion_ids),
            logprobs,
            pack_versions(record.policy_versions, where),
            prompt[prefix.prompt_bytes :],
        ),
        payload=_packed_json(*_without_keys(b"{%b}" % b",".join(members), writer.plain)),
    )


def _without_keys(text: bytes, plain: bool) -> tuple[bytes, bool]:
    """All that is new in a record, searched for keys once: what came in small pieces is whole here.

    What is kept of an earlier call was searched with it.
    """
    if not (hints_at_key(text) if plain else may_hold_key(text)):
        return text, plain
    writer = _JsonWriter("The record")
    value = orjson.loads(text) if plain else json.loads(text)
    return writer.text(values_without_keys(value), "record"), writer.plain


def decode_call(row: CallRow, session: str, parent: CallRecord | None) -> CallRecord:
    """`parent` is the decoded call of `row.parent`. Messages are shared with it, not copied."""
    prompt_ids, completion_ids, logprobs, versions, prompt = sections_of(row.tokens)
    payload = _unpacked_json(row.payload)
    if payload.pop("tools_kept", False) and parent is not None:
        payload["tools"] = parent.tools
    prompt_is_text = payload.pop("prompt_is_text", None)
    record = CallRecord(
        id=name_of(row.id),
        session=session,
        choice=row.choice,
        retry_key="" if row.retry_key is None else name_of(row.retry_key),
    )
    for name, value in payload.items():
        setattr(record, name, _RESTORE[name](value) if name in _RESTORE else value)
    record.status = CallStatus(row.status)
    record.prompt_ids = ids_of_planes(prompt_ids)
    if parent is not None:
        earlier = parent.prompt_ids + parent.completion_ids
        record.prompt_ids = earlier[: row.num_ids_kept] + record.prompt_ids
        record.messages = [*parent.messages, parent.response][: row.num_messages_kept] + record.messages
        prompt = prompt_bytes(parent.prompt, "")[: row.num_prompt_bytes_kept] + prompt
    record.completion_ids = ids_of_planes(completion_ids)
    record.logprobs = unpack(logprobs)
    record.policy_versions = unpack_versions(versions)
    if prompt_is_text is not None:
        record.prompt = name_of(prompt) if prompt_is_text else longs_of(prompt)
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
_small_values = attrgetter(*(name for name, _ in _SMALL_FIELDS))
_EQUAL_IS_SAME = (str, dict, list)
"""Texts, and the containers among the defaults, which are empty: equal ones are the same JSON."""
_RESTORE: dict[str, Callable[[Any], Any]] = {
    each.name: type(each.default)
    for each in fields(CallRecord)
    if each.name in ("dialect", "logprob_meaning")
}


def _small_fields(record: CallRecord, where: object) -> dict[str, Any]:
    """Fields that are not as they are by default."""
    small: dict[str, Any] = {}
    for (name, default), value in zip(_SMALL_FIELDS, _small_values(record), strict=True):
        if value is not default and not _same(value, default):
            if type(value) not in _PLAIN:
                require_json(value, where, name)
            small[name] = value
    return small


def _same(mine: Any, theirs: Any) -> bool:
    """Equality alone is not enough: 1 == True == 1.0 and 0.0 == -0.0, and JSON tells them apart."""
    kind = type(mine)
    if kind is not type(theirs) or mine != theirs:
        return False
    return kind in _EQUAL_IS_SAME or repr(mine) == repr(theirs)


class _JsonWriter:
    """JSON of the parts of one record. `plain` until a part needed more than orjson reads back."""

    def __init__(self, where: object) -> None:
        self.plain = True
        self._where = where

    def text(self, value: Any, place: str) -> bytes:
        try:
            return orjson.dumps(value)
        except TypeError:
            # Halves of surrogate pairs and whole numbers beyond 64 bits; or nothing that JSON can hold.
            require_json(value, self._where, place)
            self.plain = False
            return json.dumps(value, separators=(",", ":")).encode()


_PLAIN = frozenset((str, int, bool, type(None)))
_Place = tuple["_Place | None", str | int]


def require_json(value: Any, where: object, place: str | _Place, depth: int = 0) -> None:
    """Raise ValueError for what JSON would silently change: NaN, tuples, keys that are no text."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if depth > _DEEPEST:
        raise ValueError(
            f"{where}: `{_spelling(place)[:40]}…` is nested deeper than {_DEEPEST} levels, or holds itself."
        )
    if kind is float and math.isfinite(value):
        return
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: `{_spelling(place)}` has the key {key!r}; JSON's keys are text.")
            if type(each) not in _PLAIN:
                require_json(each, where, (_as_place(place), key), depth + 1)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            if type(each) not in _PLAIN:
                require_json(each, where, (_as_place(place), index), depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"{where}: `{_spelling(place)}` is {value}, which JSON cannot hold; leave it out, "
                "or write it as text."
            )
    elif not isinstance(value, str | int):
        raise ValueError(
            f"{where}: `{_spelling(place)}` is a {kind.__name__}, which JSON does not give back; "
            "make it text, a number, a list or a dict."
        )


def _as_place(place: str | _Place) -> _Place:
    return (None, place) if isinstance(place, str) else place


def _spelling(place: str | _Place) -> str:
    """`messages['content'][3]`, as one would write it in Python."""
    if isinstance(place, str):
        return place
    holder, key = place
    return str(key) if holder is None else f"{_spelling(holder)}[{key!r}]"


def _packed_json(text: bytes, plain: bool) -> bytes:
    if len(text) >= _COMPRESS_FROM_BYTES:
        compressor = _compressor()
        # A full flush forgets what came before, so that each text can be read by itself.
        data = compressor.compress(text) + compressor.flush(zlib.Z_FULL_FLUSH)
        return (b"O" if plain else b"J") + data
    return (b"o" if plain else b"j") + text


def _compressor() -> Any:
    """This thread's, used again and again: to set one up costs as much as to compress 10 kB."""
    if not hasattr(_of_thread, "compressor"):
        _of_thread.compressor = zlib.compressobj(1, zlib.DEFLATED, _RAW)
    return _of_thread.compressor


def _unpacked_json(payload: bytes) -> dict[str, Any]:
    # The first byte says how to read the rest: o by orjson, j by json, capitals where it is compressed.
    kind, text = payload[:1], payload[1:]
    if kind in b"OJ":
        text = zlib.decompressobj(_RAW).decompress(text)
    return orjson.loads(text) if kind in b"oO" else json.loads(text)
