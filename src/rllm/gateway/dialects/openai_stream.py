"""The events of a streamed answer of an OpenAI-compatible upstream, put together.

    (event, data) ──feed──► pieces: as they came for a client of the same protocol, structured for another
                       └──► HeardChoice by index ──answer──► Answer

A stream is complete after `[DONE]`, or when every choice has its finish reason. After an error it never is.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import orjson

from rllm.errors import RequestRefused
from rllm.gateway.dialects.openai_upstream import (
    HeardChoice,
    bad_reply,
    choices_of,
    error_in_reply,
    finish_answer,
    hide_injected,
    index_of,
    text_of,
)
from rllm.gateway.dialects.server_events import as_it_came
from rllm.types.wire import Answer, CallRequest, Dialect, Piece, completion_id, unix_time

_LONGEST_DONE = 32
"""Bytes of `[DONE]` with whatever space is around it."""


class EventReader(ABC):
    """The common part of the readers of chat and completions."""

    dialect: ClassVar[Dialect]

    def __init__(self, request: CallRequest) -> None:
        self.request = request
        self.same_dialect = request.dialect is self.dialect
        self.id = completion_id(request.dialect)
        """Until the upstream says its own. A client of another protocol keeps this one."""
        self.error: RequestRefused | None = None
        """The error in the middle of the stream."""
        self._model = request.model
        self._created_at: int | None = None
        self._choices: dict[int, HeardChoice] = {}
        self._usage: object = None
        self._prompt_ids: object = None
        self._has_begun = False
        self._done = False
        self.complete = False
        """Whether the upstream said that the answer is whole."""

    @abstractmethod
    def hear(self, choice_read: HeardChoice, choice: dict[str, Any]) -> list[Piece]:
        """Adds what a chunk says of one choice. Pieces only for a client of another protocol."""

    def feed(self, event: str, data: bytes) -> list[Piece]:
        if not data or self.error is not None or self._done:
            return []
        if len(data) < _LONGEST_DONE and data.strip() == b"[DONE]":
            self._done = self.complete = True
            return [as_it_came(event, data)] if self.same_dialect else []
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            return self._break_off(bad_reply(f"an event of its stream is no JSON ({error})"))
        if not isinstance(chunk, dict):
            return self._break_off(bad_reply("an event of its stream is no JSON object"))
        if chunk.get("error") or event == "error":
            return self._break_off(error_in_reply(chunk.get("error") or chunk))
        choices = choices_of(chunk)
        if choices is None:
            return self._break_off(bad_reply("an event of its stream has no `choices`"))
        if not self._has_begun:
            self._begin(chunk)
        if (usage := chunk.get("usage")) is not None:
            self._usage = usage
        if (ids := chunk.get("prompt_token_ids")) is not None:
            self._prompt_ids = ids
        pieces: list[Piece] = []
        for choice in choices:
            index = index_of(choice)
            choice_read = self._choices.get(index)
            if choice_read is None:
                choice_read = self._choices[index] = HeardChoice(index, keep_tokens=self.request.logprobs)
                # A choice that begins late: until it has ended as well, finish reasons alone make no whole
                # answer.
                self.complete = False
            pieces += self.hear(choice_read, choice)
            if choice_read.finish_reason is not None:
                self.complete = self._all_finished()
        return self._raw(event, data, chunk) if self.same_dialect else pieces

    def _all_finished(self) -> bool:
        num_finished = sum(choice_read.finish_reason is not None for choice_read in self._choices.values())
        return num_finished >= self.request.n and num_finished == len(self._choices)

    def answer(self) -> Answer:
        answer = Answer(
            id=self.id,
            model=self._model,
            created=unix_time() if self._created_at is None else self._created_at,
        )
        return finish_answer(answer, self._choices.values(), self.request, self._usage, self._prompt_ids)

    def _begin(self, chunk: dict[str, Any]) -> None:
        """Read the facts about the whole answer in the first chunk."""
        self._has_begun = True
        self._created_at = created_at if isinstance(created_at := chunk.get("created"), int) else None
        self._model = text_of(chunk.get("model")) or self._model
        # Its chunks are passed on as they are, so the record has to have the id that the client sees.
        if self.same_dialect:
            self.id = text_of(chunk.get("id")) or self.id

    def _raw(self, event: str, data: bytes, chunk: dict[str, Any]) -> list[Piece]:
        is_changed = hide_injected(chunk, self.request)
        if not self.request.include_usage and chunk.get("usage") is not None:
            if not chunk["choices"]:  # the chunk that only reports usage
                return []
            del chunk["usage"]
            is_changed = True
        # An event from which nothing had to be taken out goes on byte for byte: written again, its numbers
        # and spaces could differ.
        if is_changed:
            try:
                data = orjson.dumps(chunk)
            except (
                orjson.JSONEncodeError
            ) as error:  # it could be read, but is nested too deeply to be written
                return self._break_off(bad_reply(f"an event of its stream cannot be passed on ({error})"))
        return [as_it_came(event, data)]

    def _break_off(self, error: RequestRefused) -> list[Piece]:
        self.error = error
        self.complete = False
        return []
