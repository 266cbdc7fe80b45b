"""The values that pass through the gateway, whatever protocol a client speaks.

    bytes ──dialect.parse──► CallRequest ──Policy.answer──► Answer ──dialect.reply──► bytes
                                              │ Piece, Piece, …  ──dialect.stream──► server-sent events
                                              └──► CallRecord, one per choice ──► ledger

Messages are in the OpenAI chat form here: roles `system`, `user`, `assistant` and `tool`; `content` is text,
or a list of content parts only when one of them is not text; calls are under `tool_calls` with `arguments` as
text.
"""

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from rllm.types.messages import FinishReason, LogprobMeaning, Message


class Dialect(StrEnum):
    """The protocols that clients speak, by the path they post to."""

    CHAT = "chat"
    """POST /v1/chat/completions"""
    COMPLETIONS = "completions"
    """POST /v1/completions"""
    RESPONSES = "responses"
    """POST /v1/responses"""
    MESSAGES = "messages"
    """POST /v1/messages"""


class ToolMode(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolChoice:
    mode: ToolMode = ToolMode.AUTO
    name: str = ""
    """The tool to call when `mode` is `named`."""


@dataclass(kw_only=True, slots=True)
class CallRequest:
    """One model call as a client asked for it. None means that the client left it open."""

    dialect: Dialect
    body: dict[str, Any]
    """As sent: an upstream that speaks the same dialect gets this, unknown fields and all."""
    model: str = ""
    messages: list[Message] = field(default_factory=list[Message])
    prompt: str | list[int] | None = None
    """Completions only: the prompt as text or ids; then `messages` is empty."""
    echo: bool = False
    """Completions only: the prompt is part of the text that is answered."""
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """{"type": "function", "function": {"name", "description", "parameters", "strict"?}} each."""
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    response_schema: dict[str, Any] | None = None
    """JSON schema that the text of the answer must follow; `{"type": "object"}` for json_object."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    tokens_left: int | None = None
    """The rest of the session's budget, for all choices together: no answer is longer, whatever else is
    asked."""
    stop: list[str] = field(default_factory=list[str])
    seed: int | None = None
    n: int = 1
    penalties: dict[str, Any] = field(default_factory=dict[str, Any])
    """`presence_penalty`, `frequency_penalty`, `logit_bias`, `best_of`, `suffix` and the like where they are
    set to something that changes the answer: an engine that does not know them refuses the request."""
    logprobs: bool = False
    """The client wants log-probabilities in its answer. They are captured in any case."""
    top_logprobs: int = 0
    return_token_ids: bool = False
    """The client wants `prompt_token_ids` and `token_ids` in its answer."""
    stream: bool = False
    include_usage: bool = False
    """Chat and completions: send a last chunk with the usage when streaming."""
    previous_response_id: str = ""
    """Responses only: the answer that the conversation goes on from; the server puts it before `messages`."""
    num_bytes: int = 0
    """The size of the body as sent; 0 where there was none. A large one is worked on off the event loop."""


@dataclass(kw_only=True, slots=True)
class WireToolCall:
    """A call as it goes over the wire: arguments are the text that the model wrote."""

    id: str
    name: str
    arguments: str


@dataclass(kw_only=True, slots=True)
class TokenLogprob:
    """One sampled token with its alternatives, for clients that ask for log-probabilities."""

    token_id: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = field(default_factory=list[tuple[int, str, float]])
    """(token id, text, log-probability), best first."""


@dataclass(kw_only=True, slots=True)
class ToolCallPiece:
    """A part of a tool call: `id` and `name` in the first piece of each call, argument text in all."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(kw_only=True, slots=True)
class Piece:
    """The part of a streamed answer that arrived since the last piece."""

    choice: int = 0
    text: str = ""
    reasoning: str = ""
    tool_call: ToolCallPiece | None = None
    logprobs: Sequence[TokenLogprob] = ()
    raw: bytes | None = None
    """Whole server-sent events in the client's own dialect, from an upstream that speaks it; then nothing
    else is set, and `StreamWriter` is not asked."""


@dataclass(kw_only=True, slots=True)
class Choice:
    """One answer to one request, with everything that is known about its tokens."""

    index: int = 0
    text: str = ""
    """The text that the model wrote without reasoning and tool calls."""
    reasoning: str = ""
    tool_calls: list[WireToolCall] = field(default_factory=list[WireToolCall])
    finish_reason: FinishReason = FinishReason.STOP
    stop_sequence: str | None = None
    """Which of the request's `stop` texts ended it."""
    has_cut_thought: bool = False
    """See `ModelOutput.has_cut_thought`."""
    unparsed_markup: bool = False
    """The text holds the markup of a tool call that could not be read."""
    prompt_ids: list[int] = field(default_factory=list[int])
    completion_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    logprob_meaning: LogprobMeaning = LogprobMeaning.RAW
    temperature: float | None = None
    """None where it was left to the server, which does not tell."""
    seed: int | None = None
    """The seed of its draws, where the policy knows it."""
    policy_versions: list[int] = field(default_factory=list[int])
    mixed_versions: bool = False
    """New weights were published while it was sampled: some tokens may be of those, whatever
    `policy_versions` says."""
    token_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Filled only when the client asked for log-probabilities."""
    conversation: int = 0
    """Which of a session's interleaved conversations this call goes on with."""
    segment: int = 0
    segment_reason: str = ""
    """The reason that this segment began; see `rllm.rendering.chat.SegmentReason`."""

    def message(self) -> Message:
        """The assistant message that a chat client gets, and echoes in its next request."""
        message: Message = {"role": "assistant", "content": self.text or (None if self.tool_calls else "")}
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(kw_only=True, slots=True)
class Answer:
    """All choices of one call."""

    id: str
    """Completion id: what the client sees as `id`, and what its steps are matched by."""
    model: str
    created: int
    """Unix time, s."""
    choices: list[Choice] = field(default_factory=list[Choice])
    usage: dict[str, int] = field(default_factory=dict[str, int])
    """`prompt_tokens`, `completion_tokens`, `cached_tokens`."""
    raw: dict[str, Any] | None = None
    """The upstream's own reply in the client's dialect, without what only the gateway had asked for."""
    no_ids_because: str = ""
    """The reason that there are no token ids, and the setting that brings them; empty when they are there."""
    upstream: str = ""
    first_token_s: float | None = None

    def pieces(self) -> Iterator[Piece]:
        """The whole answer as it would have been streamed."""
        for choice in self.choices:
            at = choice.index
            if choice.reasoning:
                yield Piece(choice=at, reasoning=choice.reasoning)
            if choice.text or choice.token_logprobs:
                yield Piece(choice=at, text=choice.text, logprobs=choice.token_logprobs)
            for index, call in enumerate(choice.tool_calls):
                yield Piece(
                    choice=at,
                    tool_call=ToolCallPiece(
                        index=index, id=call.id, name=call.name, arguments=call.arguments
                    ),
                )


class CallStatus(StrEnum):
    OK = "ok"
    PARTIAL = "partial"
    """The answer was cut off: the client went away or the upstream dropped the connection. Never a sample."""
    ERROR = "error"


@dataclass(kw_only=True, slots=True)
class CallRecord:
    """One captured choice: a line of `GET /sessions/{sid}/traces`."""

    id: str
    """Completion id."""
    session: str
    choice: int = 0
    dialect: Dialect = Dialect.CHAT
    model: str = ""
    stream: bool = False
    status: CallStatus = CallStatus.OK
    error: dict[str, Any] | None = None
    """`status` (HTTP), `type`, `code`, `message`."""
    messages: list[Message] = field(default_factory=list[Message])
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """The sampling parameters of the client or of its session, and the seed where the policy chose it.
    Parameters that are not here were left to the server."""
    response: Message = field(default_factory=dict[str, Any])
    """The assistant message, tool calls merged; reasoning under `reasoning_content`."""
    finish_reason: str = ""
    stop_sequence: str | None = None
    """Which of the request's `stop` texts ended the answer."""
    has_cut_thought: bool = False
    """See `ModelOutput.has_cut_thought`."""
    unparsed_markup: bool = False
    """The answer holds the markup of a tool call that could not be read."""
    prompt_ids: list[int] = field(default_factory=list[int])
    completion_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    logprob_meaning: LogprobMeaning = LogprobMeaning.RAW
    temperature: float | None = None
    """None where it was left to the server, which does not tell."""
    policy_versions: list[int] = field(default_factory=list[int])
    mixed_versions: bool = False
    """New weights were published while it was sampled: some tokens may be of those, whatever
    `policy_versions` says."""
    no_ids_because: str = ""
    response_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """The fields of a /v1/responses call that its Response repeats, for when it is retrieved. `instructions`
    is true where the first message is those."""
    token_logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The log-probabilities that a client asked for, for each token: `token_id`, `text`, `logprob` and `top`,
    the alternatives as [token id, text, log-probability]. Empty where nobody asked."""
    usage: dict[str, int] = field(default_factory=dict[str, int])
    conversation: int = 0
    segment: int = 0
    segment_reason: str = ""
    upstream: str = ""
    retry_key: str = ""
    """Identifies the request, so that its retry is answered with this record instead of a second sample."""
    started_at: float = 0.0
    """Unix time, s."""
    latency_s: float = 0.0
    first_token_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "CallRecord":
        fields = dict(data)
        fields["dialect"] = Dialect(fields["dialect"])
        fields["status"] = CallStatus(fields["status"])
        fields["logprob_meaning"] = LogprobMeaning(fields["logprob_meaning"])
        return cls(**fields)


Emit = Callable[[Piece], Awaitable[None]]
"""Hands a piece to the client; returns when the connection can take more."""


class Policy(Protocol):
    """Something that answers model calls: the built-in engine, or other servers."""

    async def answer(
        self, request: CallRequest, session: "PolicySession", emit: Emit | None = None
    ) -> Answer:
        """The whole answer. With `emit`, its pieces are handed over as they come.

        Cancelling the task that waits stops the work behind it. Raises RequestRefused, with an HTTP status,
        for what the client got wrong and for what the upstream refused, and PartialAnswer when an answer
        broke off.
        """
        ...

    async def count_tokens(self, request: CallRequest) -> int: ...

    def models(self) -> list[str]: ...

    def health(self) -> dict[str, Any]:
        """For people and scripts: `healthy`, `queued`, `in_flight`, `policy_versions`, one entry per
        upstream."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class PolicySession(Protocol):
    """The facts of a call's session that a policy may use."""

    id: str
    seed: int
    """Draws of calls that name no seed derive from it."""
    sampling: dict[str, Any]
    """Sampling parameters set for the whole session; they win over what the client asks for."""
    state: dict[str, Any]
    """The policy's own memory of the session, such as its conversations; may be dropped and is then built
    anew from `history`."""

    def history(self) -> list[CallRecord]:
        """Calls of the session that are in the ledger, oldest first."""
        ...


def completion_id(dialect: Dialect) -> str:
    """A new id in the form that the dialect's clients expect."""
    prefix = {
        Dialect.CHAT: "chatcmpl-",
        Dialect.COMPLETIONS: "cmpl-",
        Dialect.RESPONSES: "resp_",
        Dialect.MESSAGES: "msg_",
    }[dialect]
    return prefix + uuid.uuid4().hex


def unix_time() -> int:
    return int(time.time())
