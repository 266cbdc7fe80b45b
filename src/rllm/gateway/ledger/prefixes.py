"""The beginning that a call shares with earlier calls of its session, without keeping those calls in memory.

    a call on disk ──► Tip: digests of how it began ──► Tips, of the sessions that were active last
    the next call  ──► Beginning ──compared with its session's tips──► Kept: which tip, how much of it

A digest stands for everything up to its place, so two equal ones mean equal beginnings: SHA-256 cut to 16
bytes, on which two different beginnings agree neither by accident nor on purpose. A tip that was forgotten
costs space, not truth: the next call of its conversation is stored whole.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_DIGEST_BYTES = 16
_BLOCK_BYTES = 1024
_TIPS_PER_SESSION = 8
_TIP_OVERHEAD_BYTES = 1500
"""The memory that Python takes for a tip beside its digests."""
_CALL_OVERHEAD_BYTES = 256
"""The cost of reading one more row, in bytes read."""


def part_digests(parts: Iterable[bytes]) -> bytes:
    """One digest a part, each of that part and all before it."""
    running = hashlib.sha256()
    digests: list[bytes] = []
    for part in parts:
        running.update(part)
        digests.append(running.copy().digest()[:_DIGEST_BYTES])
    return b"".join(digests)


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


class Trail:
    """Bytes with a digest after each whole block, and after any other place on demand."""

    __slots__ = ("_data", "_ends", "_states", "digests")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._ends: dict[int, bytes] = {}
        self._states = [hashlib.sha256()]
        digests: list[bytes] = []
        for start in range(0, len(data) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            state = self._states[-1].copy()
            state.update(data[start : start + _BLOCK_BYTES])
            self._states.append(state)
            digests.append(state.digest()[:_DIGEST_BYTES])
        self.digests = b"".join(digests)

    def ends(self, *places: int) -> tuple[tuple[int, bytes], ...]:
        return tuple((place, self._digest_at(place)) for place in places if place)

    def common_with(self, digests: bytes, ends: Sequence[tuple[int, bytes]], *, limit: int) -> int:
        """The number of the first `limit` bytes that are an earlier text's: exact at its ends, else in
        blocks."""
        if not limit:
            return 0
        mine = self.digests[: limit // _BLOCK_BYTES * _DIGEST_BYTES]
        common = num_equal_digests(mine, digests) * _BLOCK_BYTES
        for place, theirs in ends:
            # A block at the end is seldom full: without the ends, up to 1,023 bytes of each call would be
            # stored again.
            if common < place <= limit and self._digest_at(place) == theirs:
                common = place
        return common

    def _digest_at(self, num_bytes: int) -> bytes:
        """Once a place: most calls of a session end where another one does."""
        end = self._ends.get(num_bytes)
        if end is None:
            block = num_bytes // _BLOCK_BYTES
            state = self._states[block].copy()
            state.update(self._data[block * _BLOCK_BYTES : num_bytes])
            end = self._ends[num_bytes] = state.digest()[:_DIGEST_BYTES]
        return end


def num_equal_digests(mine: bytes, theirs: bytes) -> int:
    """Each digest covers all before it, so equality ends once and can be searched by halves."""
    if mine[:_DIGEST_BYTES] != theirs[:_DIGEST_BYTES]:  # nearly always, where they are of two conversations
        return 0
    count = min(len(mine), len(theirs)) // _DIGEST_BYTES
    if mine[: count * _DIGEST_BYTES] == theirs[: count * _DIGEST_BYTES]:
        return count
    # The first `equal` digests agree, and the first `unequal` do not. So only what lies between is compared.
    equal, unequal = 1, count
    while unequal - equal > 1:
        middle = (equal + unequal) // 2
        part = slice(equal * _DIGEST_BYTES, middle * _DIGEST_BYTES)
        if mine[part] == theirs[part]:
            equal = middle
        else:
            unequal = middle
    return equal


@dataclass(kw_only=True, slots=True, eq=False)
class Tip:
    """The beginning and the end of a call, for the calls that may go on from it."""

    call: int = field(init=False)
    """Its row; unset until it is written."""
    ids: bytes
    """Digests of prompt and completion ids together."""
    id_ends: tuple[tuple[int, bytes], ...]
    """Where the prompt and where the completion ends: (bytes, digest)."""
    messages: bytes
    """Digests of the messages and the response, one each."""
    prompt: bytes
    prompt_ends: tuple[tuple[int, bytes], ...]
    tools: bytes
    chain_bytes: int
    """The bytes to read to decode this call: its row, its parent's, and so on."""

    @property
    def num_bytes(self) -> int:
        return len(self.ids) + len(self.messages) + len(self.prompt) + _TIP_OVERHEAD_BYTES


@dataclass(kw_only=True, slots=True)
class Kept:
    """The part that a call takes over from `parent`; nothing where there is none."""

    parent: Tip | None = None
    id_bytes: int = 0
    messages: int = 0
    prompt_bytes: int = 0
    tools: bool = False
    chain_bytes: int

    @property
    def continues(self) -> bool:
        """The parent's answer is part of what the call begins with."""
        return self.parent is not None and (
            any(place == self.id_bytes for place, _ in self.parent.id_ends[-1:])
            or self.messages * _DIGEST_BYTES == len(self.parent.messages)
        )


@dataclass(kw_only=True, slots=True)
class Beginning:
    """A call about to be stored, ready to be compared."""

    ids: Trail
    """Prompt and completion; of the prompt, `prompt_id_bytes`, something can be kept."""
    prompt_id_bytes: int
    num_id_bytes: int
    messages: bytes
    """Digests of the messages and the response."""
    message_sizes: list[int]
    prompt: Trail
    num_prompt_bytes: int
    tools: bytes
    """Digest; empty where there are no tools."""
    num_tools_bytes: int
    num_own_bytes: int
    """The bytes that no other call can hold: the response, its ids and log-probabilities."""

    def kept_of(self, tips: Iterable[Tip]) -> Kept:
        """The part to keep of the tip that saves most.

        Nothing when decoding would then read several times what the call holds. To store it whole costs less
        than what was written since the last whole one, so that a conversation's size stays linear.
        """
        whole = _CALL_OVERHEAD_BYTES + self.num_own_bytes + self.prompt_id_bytes
        whole += sum(self.message_sizes) + self.num_prompt_bytes + self.num_tools_bytes
        longest_chain = 4 * whole + 16 * _BLOCK_BYTES
        best, most = Kept(chain_bytes=whole), 0
        most_beside_messages = self.prompt_id_bytes + self.num_prompt_bytes + self.num_tools_bytes
        for tip in tips:
            messages = min(num_equal_digests(self.messages, tip.messages), len(self.message_sizes))
            message_bytes = sum(self.message_sizes[:messages]) if messages else 0
            if message_bytes + most_beside_messages <= most:  # whatever else they share
                continue
            id_bytes = self.ids.common_with(tip.ids, tip.id_ends, limit=self.prompt_id_bytes)
            prompt_bytes = self.prompt.common_with(tip.prompt, tip.prompt_ends, limit=self.num_prompt_bytes)
            tools = self.tools == tip.tools and self.tools != b""
            num_bytes_saved = message_bytes + id_bytes + prompt_bytes
            num_bytes_saved += self.num_tools_bytes if tools else 0
            chain_bytes = tip.chain_bytes + whole - num_bytes_saved
            if num_bytes_saved > most and chain_bytes <= longest_chain:
                most = num_bytes_saved
                best = Kept(
                    parent=tip,
                    id_bytes=id_bytes,
                    messages=messages,
                    prompt_bytes=prompt_bytes,
                    tools=tools,
                    chain_bytes=chain_bytes,
                )
        return best

    def tip(self, prefix: Kept) -> Tip:
        return Tip(
            ids=self.ids.digests,
            id_ends=self.ids.ends(self.prompt_id_bytes, self.num_id_bytes),
            messages=self.messages,
            prompt=self.prompt.digests,
            prompt_ends=self.prompt.ends(self.num_prompt_bytes),
            tools=self.tools,
            chain_bytes=prefix.chain_bytes,
        )


class Tips:
    """The last tips of the sessions that were active last. Not for several threads at once."""

    def __init__(self, limit_bytes: int = 32 << 20) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._sessions: OrderedDict[str, list[Tip]] = OrderedDict()

    def of(self, session: str) -> list[Tip]:
        """The newest first."""
        return self._sessions.get(session, [])[::-1]

    def add(self, session: str, tip: Tip, prefix: Kept) -> None:
        """The tip that `tip` goes on from gives it its place."""
        tips = self._sessions.setdefault(session, [])
        self._sessions.move_to_end(session)
        # A conversation needs one place however long it is, so parallel ones of a session do not push each
        # other out.
        if prefix.continues and prefix.parent in tips:
            tips.remove(prefix.parent)
            self.num_bytes -= prefix.parent.num_bytes
        elif len(tips) == _TIPS_PER_SESSION:
            self.num_bytes -= tips.pop(0).num_bytes
        tips.append(tip)
        self.num_bytes += tip.num_bytes
        while self.num_bytes > self.limit_bytes:
            self.forget(next(iter(self._sessions)))

    def forget(self, session: str) -> None:
        self.num_bytes -= sum(tip.num_bytes for tip in self._sessions.pop(session, []))

    def forget_all(self) -> None:
        self._sessions.clear()
        self.num_bytes = 0
