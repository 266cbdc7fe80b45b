"""The caller of a model, and the conversation that its call continues, when one attempt asks from several
places at once.

    asyncio task ──► Branch: the first that it asked, and how many before it began with the same
    messages     ──► BranchConversation: the one with an answer that they go on from
                        └ of answers that read alike: the branch's own; else by the number of the branch

Neither depends on when an answer comes. Parallel tasks begin in the order in which they were made, so two
solvers that are asked the same stay apart, and each goes on with its own tokens however fast the other is.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from rllm.inference.client import ModelSession
from rllm.rendering.conversations import ConversationTree
from rllm.types.content import text_of
from rllm.types.draws import draw_seed
from rllm.types.messages import Message

Branch = tuple[str, int]
_RULES = ("system", "developer")


@dataclass(slots=True)
class BranchConversation:
    """The messages between one agent and the model, forks included."""

    tree: ConversationTree | None = None
    """Its ids, where the client is given ids."""
    session: ModelSession | None = None
    """Where the client is given messages."""
    first_prompt_tokens: int = -1
    """-1 until it is known."""
    known_tokens: int = 0
    """Tokens of the latest prompt and its answer."""


@dataclass(slots=True)
class BranchRequest:
    """One call: where it belongs, and the key of its draws."""

    policy: str
    branch: Branch
    digest: str
    """A digest of messages and tools."""
    times_before: int
    """The number of times that this branch had asked the very same."""
    links: list[bytes] = field(repr=False)

    def seed(self, *key: str | int) -> int:
        return draw_seed(*key, "call", *self.branch, self.digest, self.times_before, "sample")


class Branches:
    """The conversations of one attempt."""

    def __init__(self) -> None:
        # By the task itself: an id may be that of a later task again.
        self._branches: WeakKeyDictionary[asyncio.Task[Any], Branch] = WeakKeyDictionary()
        self._num_begun: Counter[str] = Counter()
        self._num_asked: Counter[tuple[Branch, str]] = Counter()
        self._conversations_by_answer: dict[tuple[str, bytes], dict[Branch, BranchConversation]] = {}
        """By policy and the messages up to and including an answer."""
        self._conversations_by_start: dict[tuple[str, Branch, bytes], BranchConversation] = {}
        """By what a branch has asked, beginnings of it included."""

    def ask(
        self, policy: str, role: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> BranchRequest:
        """Register the request that the running task is about to make. Call it before anything is awaited."""
        links = _links(messages)
        digest = hashlib.blake2b(links[-1], digest_size=16)
        digest.update(f"{policy}\0{role}".encode())
        if tools:
            digest.update(json.dumps(list(tools), sort_keys=True, default=str).encode())
        name = digest.hexdigest()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        branch = self._branches.get(task)
        if branch is None:
            branch = self._branches[task] = (name, self._num_begun[name])
            self._num_begun[name] += 1
        times_before = self._num_asked[branch, name]
        self._num_asked[branch, name] += 1
        return BranchRequest(
            policy=policy, branch=branch, digest=name, times_before=times_before, links=links
        )

    def conversation(self, request: BranchRequest, messages: Sequence[Message]) -> BranchConversation:
        """The one that a call goes on with: that of the longest answered beginning, or one that the same
        branch has begun like this before it rewrote it; a new one otherwise."""
        parent = (
            self._longest_answered(request) or self._begun_alike(request, messages) or BranchConversation()
        )
        for link in _beginnings(messages, request.links):
            self._conversations_by_start.setdefault((request.policy, request.branch, link), parent)
        return parent

    def record(
        self, request: BranchRequest, conversation: BranchConversation, answers: Iterable[Message]
    ) -> None:
        """An answer has come; `answers` are the messages in which the workflow may say it again."""
        for answer in answers:
            link = _link(request.links[-1], answer)
            self._conversations_by_answer.setdefault((request.policy, link), {})[request.branch] = (
                conversation
            )

    def _longest_answered(self, request: BranchRequest) -> BranchConversation | None:
        for link in reversed(request.links):
            alike = self._conversations_by_answer.get((request.policy, link))
            if alike and request.branch in alike:
                return alike[request.branch]
            if alike:
                return alike[sorted(alike)[request.branch[1] % len(alike)]]
        return None

    def _begun_alike(self, request: BranchRequest, messages: Sequence[Message]) -> BranchConversation | None:
        for link in reversed(_beginnings(messages, request.links)):
            if (request.policy, request.branch, link) in self._conversations_by_start:
                return self._conversations_by_start[request.policy, request.branch, link]
        return None


def _beginnings(messages: Sequence[Message], links: Sequence[bytes]) -> list[bytes]:
    """Links of the beginnings that hold more than rules."""
    num_rules = next(
        (place for place, message in enumerate(messages) if message.get("role") not in _RULES), len(messages)
    )
    return list(links[num_rules + 1 :])


def _links(messages: Sequence[Message]) -> list[bytes]:
    """[M + 1] digests of the first 0, 1, … M messages, each made from the one before it."""
    links = [b""]
    for message in messages:
        links.append(_link(links[-1], message))
    return links


def _link(previous: bytes, message: Message) -> bytes:
    """By what a model reads of a message, whatever else a workflow keeps in it."""
    content = f"{message.get('role')}\0{text_of(message.get('content'))}"
    if "tool_calls" in message or "tool_call_id" in message:
        calls = [call.get("function") for call in message.get("tool_calls") or ()]
        content += "\0" + json.dumps([calls, message.get("tool_call_id")], sort_keys=True, default=str)
    return hashlib.blake2b(previous + content.encode("utf-8", "surrogatepass"), digest_size=16).digest()
