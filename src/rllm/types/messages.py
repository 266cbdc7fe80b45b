"""The input and the output of a model call."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
"""A chat message in the OpenAI form: `role` and `content`, and what else the role allows."""
TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position, best first: (token id, log-probability)."""


class LogprobMeaning(StrEnum):
    """Which distribution a log-probability belongs to. Two meanings are never compared with each other."""

    RAW = "raw"
    """log softmax(logits): the model itself, temperature 1."""
    TEMPERATURE = "temperature"
    """log softmax(logits / T): equal to RAW at T = 1."""
    TRUNCATED = "truncated"
    """Renormalised after top-k or top-p: not comparable with any forward pass, so never trained on."""
    UNKNOWN = "unknown"
    """The meaning of log-probabilities of a server that samples by defaults of its own, which it does not
    tell: never trained on."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingParams:
    """Sampling parameters of a model call. Every field is set: there is no provider default to inherit."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_tokens: int = 256
    """At most this many new tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the answer in addition to the model's own end tokens; the stop token is part of the answer."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer. `text` ends before the first of them; the ids are all that were sampled."""
    top_logprobs: int = 0
    """Number of most likely tokens to report at each position, with their log-probabilities."""
    grammar: str = ""
    """The grammar of the answer: a Lark grammar in llguidance's form, whose terminals may be JSON schemas.
    For a server that samples by schemas it is one, as JSON text. Tokens are sampled among those that it
    allows; log-probabilities stay those of the model without it."""
    seed: int = 0
    """Every draw is a function of (seed, position in the answer): nothing else in the batch matters."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"`temperature` is {self.temperature}; it must be 0 (greedy) or a finite number above."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"`top_p` is {self.top_p}; it must be above 0 and at most 1.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` is {self.top_k}; it must be 0 (off) or a count of tokens.")
        if self.max_tokens < 1:
            raise ValueError(f"`max_tokens` is {self.max_tokens}; it must be at least 1.")
        if isinstance(self.stop, str) or "" in self.stop:
            raise ValueError(f"`stop` is {self.stop!r}; it must be a tuple of texts that are not empty.")
        if self.top_logprobs < 0:
            raise ValueError(
                f"`top_logprobs` is {self.top_logprobs}; it must be 0 (none) or a count of tokens."
            )

    @property
    def logprob_meaning(self) -> LogprobMeaning:
        """The meaning of the log-probability of a token sampled this way.

        Greedy answers are scored by the raw model.
        """
        if self.temperature == 0.0:
            return LogprobMeaning.RAW
        if self.top_p < 1.0 or self.top_k > 0:
            return LogprobMeaning.TRUNCATED
        return LogprobMeaning.RAW if self.temperature == 1.0 else LogprobMeaning.TEMPERATURE


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """A call that the model wants made."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    id: str = ""


@dataclass(kw_only=True, slots=True)
class ModelOutput:
    """One answer of a model."""

    text: str = ""
    """The decoded answer without its end token. A view: the ids are the truth."""
    content: str = ""
    """`text` without reasoning and tool-call markup."""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])
    unparsed_markup: bool = False
    """Something looked like a tool call and could not be read; it is in `text`."""
    prompt_ids: list[int] = field(default_factory=list[int])
    """[P] tokens the model read."""
    completion_ids: list[int] = field(default_factory=list[int])
    """[R] tokens the model wrote, end token included."""
    logprobs: list[float] = field(default_factory=list[float])
    """[R] log-probability of each written token when it was sampled, in nats."""
    logprob_meaning: LogprobMeaning = LogprobMeaning.RAW
    temperature: float = 1.0
    """The divisor of the logits when `logprob_meaning` is `temperature`."""
    policy_versions: list[int] = field(default_factory=list[int])
    """[R] optimizer updates that the sampling weights had seen, per token; -1 (`NOT_SAMPLED`) for a token
    that a grammar left no choice about: the policy did not choose it, so it is not trained on."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    """[R] filled when `SamplingParams.top_logprobs` asks for them."""
    stop_sequence: str | None = None
    """Which text of `SamplingParams.stop` ended the answer."""
    completion_id: str = ""
    """The server's name for this answer."""
    finish_reason: FinishReason = FinishReason.STOP
    has_cut_thought: bool = False
    """A thought was closed for the model (`model.max_thinking_tokens`), or ended with the room for the
    answer."""
    usage: dict[str, int] = field(default_factory=dict[str, int])
    """`prompt_tokens`, `completion_tokens`, `cached_tokens`."""
    latency_s: float = 0.0
    queue_s: float = 0.0
    """The part of `latency_s` before the engine began to read the prompt; 0 where nobody tells."""

    @property
    def weight_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; None when the server does not say."""
        return oldest_version(self.policy_versions)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ModelOutput":
        fields = dict(data)
        fields["tool_calls"] = [ToolCall(**call) for call in fields.get("tool_calls", [])]
        fields["logprob_meaning"] = LogprobMeaning(fields.get("logprob_meaning", LogprobMeaning.RAW))
        fields["top_logprobs"] = [
            [(token, logprob) for token, logprob in each] for each in fields.get("top_logprobs", [])
        ]
        fields["finish_reason"] = FinishReason(fields.get("finish_reason", FinishReason.STOP))
        return cls(**fields)


def oldest_version(policy_versions: Sequence[int]) -> int | None:
    """The lowest of the sampled tokens' versions; None where no token has one."""
    lowest = min(policy_versions, default=None)
    if lowest is None or lowest >= 0:  # nearly always: no need to look at each of them in Python
        return lowest
    return min((version for version in policy_versions if version >= 0), default=None)
