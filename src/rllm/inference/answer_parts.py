"""One answer of model servers, in one or more parts.

    prompt + ids so far ──► part: one request, one server, one version of the weights ──► more ids
         ▲                          │ new weights, or the server ends
         └──────────────────────────┘

What has arrived is kept: the next part goes on behind it. So one sentence may have several versions, and each
of its tokens carries the one that sampled it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import InferenceError
from rllm.inference.client import TokenPiece
from rllm.inference.local.text import StopTexts, TextStream
from rllm.inference.openai_http import error_text
from rllm.types.messages import FinishReason, ModelOutput, SamplingParams, TopLogprobs

OnPiece = Callable[[TokenPiece], None]

NO_IDS = (
    "The server at {url} returned no {what}. vLLM from 0.10.2 on returns them for `return_token_ids: true` "
    "and `logprobs`, which this client sends; update the server, or serve the model with one that does."
)
_TOKEN_ID_NAME = re.compile(r"token_id:(\d+)")
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(kw_only=True, slots=True)
class AnswerParts:
    """Everything that servers said so far of one answer."""

    prompt_ids: list[int]
    sampling: SamplingParams
    text_stream: TextStream
    stops: StopTexts
    on_piece: OnPiece | None = None
    is_spoiled: bool = False
    """Nobody knows by which weights some of it was sampled."""
    id: str = ""
    text: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[TopLogprobs] = field(default_factory=list[TopLogprobs])
    policy_versions: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    cached_tokens: int = 0
    """Prompt tokens that the first server had read before."""

    def part(self, url: str, policy_version: int) -> "AnswerPart":
        """The next part, by the server at `url`, whose weights are of `policy_version`."""
        return AnswerPart(
            whole=self,
            url=url,
            policy_version=policy_version,
            read_ids=self.prompt_ids + self.ids,
            is_first=not self.ids,
        )

    @property
    def can_go_on(self) -> bool:
        """Whether another part may follow what has arrived."""
        # A server follows a grammar from the beginning of what it samples itself.
        return not (self.is_spoiled or (self.sampling.grammar and self.ids))

    def finish(self) -> None:
        """Hand out the text that was held back, after the last part."""
        if self.stops.match is not None:
            return
        rest = self.stops.feed(self.text_stream.rest())
        if self.stops.match is None:
            rest += self.stops.rest()
        self.text.append(rest)
        if self.on_piece is not None and rest:
            self.on_piece(TokenPiece(text=rest))

    def output(self) -> ModelOutput:
        """The whole answer, once a part of it was the last."""
        text = "".join(self.text)
        return ModelOutput(
            text=text,
            content=text,
            prompt_ids=self.prompt_ids,
            completion_ids=self.ids,
            logprobs=self.logprobs,
            temperature=self.sampling.temperature,
            policy_versions=self.policy_versions,
            top_logprobs=[each[: self.sampling.top_logprobs] for each in self.top_logprobs],
            stop_sequence=self.stops.match or self.stop_reason,
            completion_id=self.id,
            finish_reason=self.finish_reason or FinishReason.STOP,
            usage={
                "prompt_tokens": len(self.prompt_ids),
                "completion_tokens": len(self.ids),
                "cached_tokens": self.cached_tokens,
            },
        )


@dataclass(kw_only=True, slots=True)
class AnswerPart:
    """Part of an answer, by one server."""

    whole: AnswerParts
    url: str
    policy_version: int
    read_ids: list[int]
    """The ids that it was sent."""
    is_first: bool

    @property
    def has_tokens(self) -> bool:
        """Whether some of it has arrived."""
        return len(self.whole.prompt_ids) + len(self.whole.ids) > len(self.read_ids)

    def hear(self, chunk: dict[str, Any]) -> None:
        """A chunk of a stream, or a whole reply. Raises InferenceError for one that cannot be trusted."""
        if chunk.get("error"):
            raise InferenceError(f"The server at {self.url} failed: {error_text(chunk)}")
        try:
            # Before anything is kept: no token of a chunk that cannot be trusted gets into the answer.
            piece = self._read(chunk)
        except (AttributeError, TypeError, ValueError) as error:
            raise InferenceError(
                f"The server at {self.url} answered in a form that cannot be read: {error}"
            ) from error
        whole = self.whole
        whole.text.append(piece.text)
        whole.ids += piece.token_ids
        whole.logprobs += piece.logprobs
        whole.top_logprobs += piece.top_logprobs
        whole.policy_versions += [self.policy_version] * len(piece.token_ids)
        if whole.on_piece is not None and (piece.text or piece.token_ids):
            whole.on_piece(piece)

    def _read(self, chunk: dict[str, Any]) -> TokenPiece:
        whole = self.whole
        whole.id = whole.id or str(chunk.get("id") or "")
        if (usage := chunk.get("usage")) is not None and self.is_first:
            whole.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        piece = TokenPiece()
        for choice in chunk.get("choices") or ():
            self._read_choice(choice, piece)
        if len(piece.token_ids) != len(piece.logprobs):
            self._require_both(piece)
        for place, token in enumerate(piece.token_ids, 1):
            if whole.stops.match is None:
                piece.text += whole.stops.feed(whole.text_stream.add(token))
                if whole.stops.match is not None and not self.is_first:
                    # It began in an earlier part, of which this server knows the ids alone.
                    del piece.token_ids[place:], piece.logprobs[place:], piece.top_logprobs[place:]
                    whole.finish_reason = FinishReason.STOP
                    break
        return piece

    def _require_both(self, piece: TokenPiece) -> None:
        """Raises InferenceError for ids without log-probabilities, or the other way round."""
        if not piece.token_ids or not piece.logprobs:
            what = "log-probabilities" if piece.token_ids else "token ids"
            raise InferenceError(NO_IDS.format(url=self.url, what=what))
        raise InferenceError(
            f"The server at {self.url} returned {len(piece.token_ids)} token ids and {len(piece.logprobs)} "
            "log-probabilities for one answer, so neither can be trusted."
        )

    def _read_choice(self, choice: dict[str, Any], piece: TokenPiece) -> None:
        ids = choice.get("prompt_token_ids")
        if ids is not None and ids != self.read_ids:
            raise InferenceError(
                f"The server at {self.url} read a prompt of {len(ids)} ids where {len(self.read_ids)} others "
                "were sent; it must take prompts as they are."
            )
        if (reason := choice.get("finish_reason")) is not None:
            if reason not in _FINISH_REASONS:
                raise InferenceError(
                    f"The server at {self.url} ended the answer with `{reason}`: it was cut off."
                )
            self.whole.finish_reason = _FINISH_REASONS[reason]
        # The name that vLLM has for it, and SGLang's.
        stop_reason = choice.get("stop_reason", choice.get("matched_stop"))
        if isinstance(stop_reason, str):
            self.whole.stop_reason = stop_reason
        piece.token_ids += [_token_id(each) for each in choice.get("token_ids") or ()]
        logprobs = choice.get("logprobs") or {}
        piece.logprobs += [float(each) for each in logprobs.get("token_logprobs") or ()]
        if self.whole.sampling.top_logprobs:
            piece.top_logprobs += [_by_id(each) for each in logprobs.get("top_logprobs") or ()]

    def require_whole(self) -> None:
        """Raises InferenceError where the server ended before the answer did."""
        if self.whole.finish_reason is None:
            raise InferenceError(f"The server at {self.url} ended its answer before it was complete.")
        if not self.whole.ids:
            raise InferenceError(NO_IDS.format(url=self.url, what="token ids"))


def version_of(chunk: Mapping[str, Any]) -> int | None:
    """The version of the weights that a server says it answers by, where it does."""
    version = chunk.get("weight_version", (chunk.get("metadata") or {}).get("weight_version"))
    return int(str(version)) if str(version).isdecimal() else None


def _by_id(top: dict[str, float] | None) -> TopLogprobs:
    """Alternatives that are named `token_id:17`, best first."""
    matches = [(_TOKEN_ID_NAME.fullmatch(name), value) for name, value in (top or {}).items()]
    return sorted(((int(name[1]), value) for name, value in matches if name), key=lambda each: -each[1])


def _token_id(value: object) -> int:
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{value!r} is no token id")
