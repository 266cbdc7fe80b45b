"""The number of tokens that an episode may take, checked before a request is sent.

    ├── first prompt ──┤── answer ──┤── observation ──┤── answer ──┤── …
    ├ max_prompt_tokens ┤   ├ max_turn_tokens ┤
                       ├─────────────── max_response_tokens ───────────────┤
    ├──────────────────────── max_model_tokens ────────────────────────────┤

    allowed = meter.allow(prompt_tokens)      ──► BudgetExceeded(reason), or what the request may ask for
    meter.record(prompt, completion, length)  ──► BudgetExceeded where the answer was cut off by the budget

A request that cannot fit is never sent: a server's complaint about its context length would look like a
failure, and the answer to it would be lost.
"""

from dataclasses import dataclass, field, fields

from rllm.errors import ConfigError
from rllm.types.episode import TerminationEvent, TerminationReason

NO_LIMIT = 2**31 - 1
"""Tokens that may be asked for when nothing limits them; fits the 32 bits of servers' fields."""


class BudgetExceeded(TerminationEvent):
    """An episode has no token left; `reason` says of what. It ends the rollout as TRUNCATED."""

    def __init__(self, reason: TerminationReason, message: str) -> None:
        super().__init__(reason)
        self.args = (message,)


@dataclass(kw_only=True, slots=True, frozen=True)
class TokenBudget:
    """Limits of one episode in tokens; 0 is no limit."""

    max_prompt_tokens: int = 0
    """Maximum tokens of the first prompt."""
    max_response_tokens: int = 0
    """Maximum tokens of everything after the first prompt: answers, and the messages in between."""
    max_turn_tokens: int = 0
    """Maximum tokens of one answer. An answer that is cut off by this limit alone does not end the
    episode."""
    max_model_tokens: int = 0
    """Maximum tokens of prompt and answer together: the model's context."""
    every_prompt: bool = False
    """Each prompt stands for itself, as in agents that write every prompt anew: `max_prompt_tokens` then
    limits each of them, and `max_response_tokens` each answer."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name != "every_prompt" and (not isinstance(value, int) or value < 0):
                raise ConfigError(
                    f"`{each.name}` is {value!r}; it must be 0 (no limit) or a count of tokens."
                )

    @property
    def unlimited(self) -> bool:
        """Whether no prompt has to be measured."""
        return not (self.max_prompt_tokens or self.max_response_tokens or self.max_model_tokens)

    def room(self, prompt_tokens: int, first_prompt_tokens: int) -> int:
        """Tokens that the episode has left behind a prompt, however long one answer may be; at least 1.

        Raises BudgetExceeded, with MAX_PROMPT_LENGTH_EXCEEDED or MAX_RESPONSE_LENGTH_EXCEEDED, when it has
        none.
        """
        num_prompt_tokens = prompt_tokens if self.every_prompt else first_prompt_tokens
        if self.max_prompt_tokens and num_prompt_tokens > self.max_prompt_tokens:
            which = "prompt" if self.every_prompt else "first prompt"
            raise BudgetExceeded(
                TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
                f"The {which} has {num_prompt_tokens} tokens and `max_prompt_tokens` is "
                f"{self.max_prompt_tokens}; raise it, or say less.",
            )
        room = NO_LIMIT
        if self.max_response_tokens:
            num_used = 0 if self.every_prompt else max(0, prompt_tokens - first_prompt_tokens)
            room = self.max_response_tokens - num_used
            if room < 1:
                raise BudgetExceeded(
                    TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
                    f"{num_used} tokens follow the first prompt and `max_response_tokens` is "
                    f"{self.max_response_tokens}, so no token is left for another answer.",
                )
        if self.max_model_tokens:
            room = min(room, self.max_model_tokens - prompt_tokens)
            if room < 1:
                raise BudgetExceeded(
                    TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
                    f"The prompt has {prompt_tokens} tokens and `max_model_tokens` is "
                    f"{self.max_model_tokens}, so no token fits behind it.",
                )
        return room

    def turn(self, prompt_tokens: int, first_prompt_tokens: int) -> int:
        """New tokens that may be sampled behind a prompt. Raises BudgetExceeded as `room` does."""
        return min(self.room(prompt_tokens, first_prompt_tokens), self.max_turn_tokens or NO_LIMIT)


@dataclass(slots=True)
class BudgetMeter:
    """The part of its budget that one episode has used.

    A client that cannot say how long a prompt would be is asked all the same: the length of what it was last
    asked and answered is a lower bound, and what the budget forbids is found out one turn later.
    """

    budget: TokenBudget
    first_prompt_tokens: int = -1
    """-1 until it is known."""
    known_tokens: int = 0
    """Tokens of the latest prompt and its answer."""
    room: int = field(default=NO_LIMIT, init=False)
    """Tokens that the episode had left behind the latest prompt."""

    def allow(self, prompt_tokens: int = -1) -> int:
        """New tokens that may be sampled behind a prompt of so many tokens; -1 when nobody knows.

        Raises BudgetExceeded when none may.
        """
        length = prompt_tokens if prompt_tokens >= 0 else self.known_tokens
        if self.first_prompt_tokens < 0 and prompt_tokens >= 0:
            self.first_prompt_tokens = prompt_tokens
        self.room = self.budget.room(length, max(0, self.first_prompt_tokens))
        return min(self.room, self.budget.max_turn_tokens or NO_LIMIT)

    def record(self, prompt_tokens: int, completion_tokens: int, *, cut_off: bool) -> None:
        """An answer has come. `cut_off`: it ended because no more tokens were allowed (`length`).

        Raises BudgetExceeded where it was the episode's budget that cut it off, and where only now it is seen
        that the prompt had been too long.
        """
        self.known_tokens = prompt_tokens + completion_tokens
        if self.first_prompt_tokens < 0:
            self.first_prompt_tokens = prompt_tokens
            self.room = self.budget.room(prompt_tokens, prompt_tokens)
        if cut_off and completion_tokens >= self.room:
            raise BudgetExceeded(
                TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
                f"The answer was cut off after {completion_tokens} tokens, when the episode's budget was "
                f"used up ({self.budget}).",
            )
