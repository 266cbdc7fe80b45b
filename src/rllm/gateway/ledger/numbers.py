"""The numbers of a call as bytes, and back without loss.

    ids               ──► planes: all lowest bytes, then all second bytes, … without the planes that are zero
                          (tokens of images have ids of eight bytes)
    log-probabilities ──► float32 where that loses nothing, which is so for what engines report, else float64
    policy versions   ──► one number and a count where all are equal, else the shortest integers that do

An id takes two or three bytes, at the price of a copy; to compress them further would cost more than the
space is worth. What is read is what was written, bit for bit.
"""

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rllm.gateway.ledger.file import name_bytes

ID_BYTES = 8


def id_bytes(ids: Sequence[int], where: object, field: str) -> bytes:
    try:
        return struct.pack(f"<{len(ids)}Q", *ids)
    except struct.error as error:
        raise ValueError(
            f"{where}: `{field}` must hold whole numbers from 0 to {2**64 - 1} ({error})."
        ) from error


def planes_of(packed_ids: bytes) -> bytes:
    if not packed_ids:
        return b""
    num_planes, zeros = ID_BYTES, bytes(len(packed_ids) // ID_BYTES)
    while num_planes > 1 and packed_ids[num_planes - 1 :: ID_BYTES] == zeros:
        num_planes -= 1
    return bytes([num_planes]) + b"".join([packed_ids[place::ID_BYTES] for place in range(num_planes)])


def ids_of_planes(data: bytes) -> list[int]:
    if not data:
        return []
    num_ids = (len(data) - 1) // data[0]
    together = bytearray(num_ids * ID_BYTES)
    for place in range(data[0]):
        together[place::ID_BYTES] = data[1 + place * num_ids : 1 + (place + 1) * num_ids]
    return list(struct.unpack(f"<{num_ids}Q", together))


def pack_logprobs(logprobs: Sequence[float], where: object) -> bytes:
    count = len(logprobs)
    try:
        exact = struct.pack(f"<{count}d", *logprobs)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{where}: `logprobs` holds something else than numbers ({error}).") from error
    # The sum tells: nothing that is added to an infinity, or to no number, makes it finite.
    if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
        place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
        raise ValueError(
            f"{where}: `logprobs[{place}]` is {logprobs[place]}; a log-probability is a finite number. "
            "Record the call as an error, or without ids and log-probabilities."
        )
    # `pack` rounds without a word; it raises only for what is beyond the range of 32 bits.
    try:
        short = struct.pack(f"<{count}f", *logprobs)
    except OverflowError:
        return b"d" + exact
    return b"f" + short if struct.unpack(f"<{count}f", short) == tuple(logprobs) else b"d" + exact


def pack_versions(versions: Sequence[int], where: object) -> bytes:
    if not versions:
        return b""
    try:
        if versions.count(versions[0]) == len(versions):
            return b"c" + struct.pack("<qI", versions[0], len(versions))
        for code in "bhi":
            with suppress(struct.error):
                return code.encode() + struct.pack(f"<{len(versions)}{code}", *versions)
        return b"q" + struct.pack(f"<{len(versions)}q", *versions)
    except struct.error as error:
        raise ValueError(f"{where}: `policy_versions` must hold whole numbers ({error}).") from error


def unpack_versions(data: bytes) -> list[int]:
    if data[:1] == b"c":
        version, count = struct.unpack("<qI", data[1:])
        return [version] * count
    return unpack(data)


def unpack(data: bytes) -> list[Any]:
    if not data:
        return []
    code = chr(data[0])
    return list(struct.unpack(f"<{(len(data) - 1) // struct.calcsize('<' + code)}{code}", data[1:]))


def prompt_bytes(prompt: str | list[int] | None, where: object) -> bytes:
    if prompt is None:
        return b""
    if isinstance(prompt, str):
        return name_bytes(prompt)
    try:
        return struct.pack(f"<{len(prompt)}q", *prompt)
    except struct.error as error:
        raise ValueError(f"{where}: `prompt` must be text or whole numbers ({error}).") from error


def longs_of(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}q", data))


def sections(*parts: bytes) -> bytes:
    sizes = struct.pack(f"<{len(parts)}I", *map(len, parts))
    return b"".join([each for at, part in enumerate(parts) for each in (sizes[4 * at : 4 * at + 4], part)])


def sections_of(blob: bytes) -> list[bytes]:
    parts: list[bytes] = []
    place = 0
    while place < len(blob):
        (size,) = struct.unpack_from("<I", blob, place)
        parts.append(blob[place + 4 : place + 4 + size])
        place += 4 + size
    return parts
