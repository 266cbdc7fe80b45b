"""Blackjack, one hand: the deck is settled, and drawn so that some number of hits wins.

Only to beat the dealer counts; a push does not. Hands that cannot be won, and those where the player has 21
to begin with, are not drawn: so a score here is no estimate of what one wins at a table.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove
from rllm.environments.games.parsing import one_of
from rllm.environments.games.world import game_world
from rllm.errors import ConfigError

_MOVES = ("Hit", "Stand")
_RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
_NUM_CARDS = 24
"""More than one deck lets two hands come to."""
_DEALER_STANDS = 17


class Blackjack(Game):
    """An instance is the deck from the top: player, dealer, player, dealer, then as they are asked for."""

    name = "blackjack"
    title = "Blackjack"
    turns = 10
    instance_keys = ("cards",)

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        cards = instance["cards"]
        if not isinstance(cards, list) or len(cards) < 4 or any(card not in _RANKS for card in cards):
            raise ConfigError(f"`cards` is {cards!r:.200}; give four or more out of {' '.join(_RANKS)}.")
        self._player = [cards[0], cards[2]]
        self._dealer = [cards[1], cards[3]]
        self._deck = cards[4:]
        self._has_stood = False

    @staticmethod
    def draw(rng: Random) -> dict[str, Any] | None:
        cards = rng.sample([rank for rank in _RANKS for _ in range(4)], _NUM_CARDS)
        return None if worth([cards[0], cards[2]]) == 21 else {"cards": cards}

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """What the player sees to begin with; the cards to come are chance."""
        first, up, second = ("10" if card in "JQK" else card for card in instance["cards"][:3])
        return [sorted((first, second)), up]

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        return "soft" if "A" in (instance["cards"][0], instance["cards"][2]) else "hard"

    @property
    def rules(self) -> str:
        return (
            "Blackjack: come nearer to 21 than the dealer without going above. 2 to 10 count as they say, J, "
            "Q and K 10, an ace 1 or 11. Hit takes a card, Stand takes no more; then the dealer takes cards "
            "up to 17 or more. Above 21 you lose, and the same worth as the dealer's is no win. "
            "Answer with one word: Hit or Stand."
        )

    def board(self) -> str:
        dealer = f"{_hand(self._dealer)}" if self._has_stood else f"{self._dealer[0]} ?"
        return f"You: {_hand(self._player)}\nDealer: {dealer}"

    def play(self, move: str) -> str:
        if one_of(move, _MOVES) == "Hit":
            if not self._deck:
                raise InvalidMove("no cards are left.")
            self._player.append(self._deck.pop(0))
        else:
            self._has_stood = True
            self._dealer, self._deck = _dealt_out(self._dealer, self._deck)
        return ""

    @property
    def is_won(self) -> bool:
        return self._has_stood and _beats(self._player, self._dealer)

    @property
    def is_lost(self) -> bool:
        return worth(self._player) > 21 or (self._has_stood and not self.is_won)

    def moves(self) -> list[str]:
        return list(_MOVES) if self._deck else ["Stand"]

    def expert_move(self) -> str:
        """It knows the deck: Hit while more cards are needed for a win, and Stand where nothing wins."""
        for num_hits in range(len(self._deck) + 1):
            player = [*self._player, *self._deck[:num_hits]]
            if worth(player) > 21:
                break
            dealer, _ = _dealt_out(self._dealer, self._deck[num_hits:])
            if _beats(player, dealer):
                return "Hit" if num_hits else "Stand"
        return "Stand"


def worth(cards: Sequence[str]) -> int:
    """The best worth: aces count 11 as long as that stays within 21."""
    total = sum(1 if card == "A" else 10 if card in "JQK" else int(card) for card in cards)
    return total + 10 if "A" in cards and total + 10 <= 21 else total


def _dealt_out(dealer: Sequence[str], deck: Sequence[str]) -> tuple[list[str], list[str]]:
    """The dealer's hand at the end, and what is left of the deck."""
    hand, rest = list(dealer), list(deck)
    while rest and worth(hand) < _DEALER_STANDS:
        hand.append(rest.pop(0))
    return hand, rest


def _beats(player: Sequence[str], dealer: Sequence[str]) -> bool:
    return worth(player) <= 21 and (worth(dealer) > 21 or worth(player) > worth(dealer))


def _hand(cards: Sequence[str]) -> str:
    return f"{' '.join(cards)} ({worth(cards)})"


class BlackjackEnv(GameEnv):
    """Blackjack for agents."""

    game_class = Blackjack


WORLD = game_world(BlackjackEnv)
