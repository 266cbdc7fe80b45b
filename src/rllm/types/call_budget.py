"""The budget for the model calls of one episode: a plain value, held by the gateway call by call."""

from dataclasses import dataclass, fields, replace
from typing import Any

from rllm.types.episode import TerminationReason

TOKENS_OF_A_PRICE = 1_000_000


@dataclass(kw_only=True, slots=True)
class CallBudget:
    """Limits of one session of the gateway; 0 is no limit."""

    turns: int = 0
    """Calls that were answered, whole or in part."""
    tokens: int = 0
    """Tokens that were sampled, over all calls."""
    seconds: float = 0.0
    """From the opening of the session; a call that is on its way then is cut off."""
    cost: float = 0.0
    """In the currency of the prices. The call that reaches it is the last one."""
    prompt_price: float = 0.0
    """The price of a million tokens that the model reads."""
    completion_price: float = 0.0
    """The price of a million tokens that it samples."""

    @property
    def is_unlimited(self) -> bool:
        return not (self.turns or self.tokens or self.seconds or self.cost)

    @property
    def has_prices(self) -> bool:
        return bool(self.prompt_price or self.completion_price)

    def cost_of(self, prompt_tokens: int, completion_tokens: int) -> float:
        prices = prompt_tokens * self.prompt_price + completion_tokens * self.completion_price
        return prices / TOKENS_OF_A_PRICE

    def tightest(self, other: "CallBudget") -> "CallBudget":
        """Both at once: of each limit the lower one, and the prices of whoever names some."""
        limits: dict[str, Any] = {}
        for name in REASONS:
            own, others = getattr(self, name), getattr(other, name)
            limits[name] = min(own, others) if own and others else own or others
        return replace(self if self.has_prices else other, **limits)


REASONS = {
    "turns": TerminationReason.MAX_TURNS_EXCEEDED,
    "tokens": TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    "seconds": TerminationReason.TIMEOUT,
    "cost": TerminationReason.MAX_COST_EXCEEDED,
}
"""Limit -> why an episode ended that reached it."""
_EXHAUSTED = "_budget_exhausted"


def exhausted_code(limit: str) -> str:
    """The word for machines in the refusal of a call, such as `turns_budget_exhausted`."""
    return f"{limit}{_EXHAUSTED}"


def exhausted_limit(code: str | None) -> str:
    """The limit that a refused call had reached; empty where it was refused for another reason."""
    limit = (code or "").removesuffix(_EXHAUSTED)
    return limit if limit in REASONS and limit != code else ""


def budget_problem(budget: CallBudget) -> tuple[str, str]:
    """(field, problem) of the first value that makes no sense; both empty where all do."""
    for each in fields(budget):
        value = getattr(budget, each.name)
        whole = each.name in ("turns", "tokens")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            return each.name, f"is {value!r:.80}; it must be a {'whole ' if whole else ''}number, 0 or more"
        if not 0 <= value < float("inf"):
            return each.name, f"is {value}; it must be a finite number, 0 or more"
    if budget.cost and not budget.has_prices:
        return "cost", f"is {budget.cost}, and no token has a price; set `prompt_price` or `completion_price`"
    if budget.has_prices and not budget.cost:
        name = "prompt_price" if budget.prompt_price else "completion_price"
        return (
            name,
            f"is {getattr(budget, name)}, and no `cost` limits anything; set it, or leave the price out",
        )
    return "", ""
