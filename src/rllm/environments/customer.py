"""A simulated customer: says what it wants, tells what it is asked for, and nothing else.

    Customer(wish, facts) ──opening──► "Hello, I want to cancel an order."
    "Which order, and what is your name?" ──answer──► "It is order W1234. My name is ada."

It follows rules instead of a model, so an episode repeats and costs nothing: a fact is told when one of its
words is in the message. Who asks for nothing that it knows is told so; who asks too often is left.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

FACTS: dict[str, tuple[tuple[str, ...], str]] = {
    "name": (("name", "who"), "My name is {value}."),
    "order": (("order", "number", "id"), "It is order {value}."),
    "address": (("address", "where", "street"), "Send it to {value}."),
}
"""Fact -> the words that ask for it, and how it is told; in the order in which they are told."""
OPENINGS = {
    "cancel": "Hello, I want to cancel an order.",
    "return": "Hello, I want to return something.",
    "readdress": "Hello, I want an order to be sent to another address.",
}
CONFIRMED = "Yes, please."
PUZZLED = "I do not know what you need. Ask me for something."
LEAVES = "This takes too long. Goodbye."
_CONFIRMATIONS = ("confirm", "correct", "sure", "proceed", "shall", "should")


@dataclass(kw_only=True, slots=True)
class Customer:
    """One person with one wish."""

    wish: str
    """Key of OPENINGS."""
    facts: Mapping[str, str]
    """The facts that it knows, by key of FACTS."""
    patience: int = 5
    """Messages that it answers."""

    @property
    def opening(self) -> str:
        return OPENINGS[self.wish]

    @property
    def has_left(self) -> bool:
        return self.patience < 0

    def answer(self, message: str) -> str:
        """The customer's reply to a message; goodbye when it is tired of them."""
        self.patience -= 1
        if self.has_left:
            return LEAVES
        words = set(re.findall(r"[a-z]+", message.lower()))
        facts = [
            how.format(value=self.facts[fact])
            for fact, (asking, how) in FACTS.items()
            if fact in self.facts and words & {*asking, *(f"{each}s" for each in asking)}
        ]
        if facts:
            return " ".join(facts)
        return CONFIRMED if words & set(_CONFIRMATIONS) else PUZZLED
