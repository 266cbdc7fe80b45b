"""Blackjack, one hand against the dealer, from cards that are dealt already: a win pays 1, a loss costs 1.

Cards come from very many decks, so that each is as likely as ever, whatever has been dealt. Which ones will
come is settled by the instance; the expert does not know them, and plays what pays most on average, worked
out exactly. The baselines are played on the very cards, so that luck is the same for all who are compared.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import one_of
from rllm.environments.games.world import game_world
from rllm.environments.world import OPTIMUM, RANDOM
from rllm.errors import ConfigError

_MOVES = ("Hit", "Stand")
_RANKS = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
_NUM_CARDS = 32
"""In the deck; more than two hands can come to."""
_DEALER_STANDS = 17
_HANDS = ("player", "dealer", "deck")


class Blackjack(Game):
    """An instance is the cards of the player and the dealer, and those that will come."""

    name = "blackjack"
    title = "Blackjack"
    turns = 10
    instance_keys = _HANDS
    has_expert = False
    losing_pays = -1.0

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        for key in _HANDS:
            cards = instance[key]
            if not isinstance(cards, list) or any(card not in _RANKS for card in cards):
                raise ConfigError(
                    f"`{key}` is {cards!r:.200}; give a list of cards out of {' '.join(_RANKS)}."
                )
        self._player, self._dealer, self._deck = (list(instance[key]) for key in _HANDS)
        if len(self._player) < 2 or len(self._dealer) != 2:
            raise ConfigError(
                f"`player` has {len(self._player)} cards and `dealer` {len(self._dealer)}; give the player "
                "two or more and the dealer two."
            )
        self._has_stood = False

    @staticmethod
    def draw(rng: Random, *, max_dealt: int = 3, max_worth: int = 18) -> dict[str, Any] | None:
        """Two to `max_dealt` cards of the player; None where they are worth more than `max_worth`."""
        require_integer("max_dealt", max_dealt, 2, 6)
        require_integer("max_worth", max_worth, 4, 20)
        player = rng.choices(_RANKS, k=rng.randint(2, max_dealt))
        if worth(player) > max_worth:
            return None
        return {
            "player": player,
            "dealer": rng.choices(_RANKS, k=2),
            "deck": rng.choices(_RANKS, k=_NUM_CARDS),
        }

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """The player's view at the beginning; the cards to come are chance."""
        return [sorted(map(_value, instance["player"])), _value(instance["dealer"][0])]

    @classmethod
    def kind(cls, instance: Mapping[str, Any]) -> str:
        """The move that pays more at the beginning."""
        return f"to {_best_move(instance['player'], instance['dealer'][0]).lower()}"

    @property
    def rules(self) -> str:
        return (
            "Blackjack: come nearer to 21 than the dealer without going above. 2 to 10 count as they say, J, "
            "Q and K 10, an ace 1 or 11. Hit takes a card, Stand takes no more; then the dealer takes cards "
            "up to 17 or more. Above 21 you lose; the same worth as the dealer's neither wins nor loses. "
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
        return worth(self._player) > 21 or (self._has_stood and not self.is_won and not self.is_drawn)

    @property
    def is_drawn(self) -> bool:
        return self._has_stood and worth(self._player) == worth(self._dealer)

    def moves(self) -> list[str]:
        return list(_MOVES) if self._deck else ["Stand"]

    def expert_move(self) -> str:
        """The move that pays most on average, for a player who sees what the agent sees."""
        return _best_move(self._player, self._dealer[0]) if self._deck else "Stand"


def worth(cards: Sequence[str]) -> int:
    """The best worth: aces count 11 as long as that stays within 21."""
    total = sum(map(_value, cards))
    return total + 10 if "A" in cards and total + 10 <= 21 else total


def _value(card: str) -> int:
    """An ace counts 1."""
    return 1 if card == "A" else 10 if card in "JQK" else int(card)


_SHARES = {value: (4 if value == 10 else 1) / len(_RANKS) for value in range(1, 11)}
"""The probability of each value."""
_Hand = tuple[int, bool]
"""(total with aces as 1, whether an ace is in it)."""


def _hand_of(cards: Sequence[str]) -> _Hand:
    return sum(map(_value, cards)), "A" in cards


def _with(hand: _Hand, value: int) -> _Hand:
    return hand[0] + value, hand[1] or value == 1


def _worth_of(hand: _Hand) -> int:
    return hand[0] + 10 if hand[1] and hand[0] + 10 <= 21 else hand[0]


@cache
def _dealer_ends(hand: _Hand) -> dict[int, float]:
    """The probability of each worth that the dealer ends with."""
    if _worth_of(hand) >= _DEALER_STANDS:
        return {_worth_of(hand): 1.0}
    ends: dict[int, float] = {}
    for value, share in _SHARES.items():
        for end, chance in _dealer_ends(_with(hand, value)).items():
            ends[end] = ends.get(end, 0.0) + share * chance
    return ends


@cache
def stand_pays(player: int, up: int) -> float:
    """The expected pay of standing on a worth of `player` against the dealer's card of value `up`."""
    ends = _dealer_ends(_with((0, False), up))
    return sum(chance * (1 if end > 21 else (player > end) - (player < end)) for end, chance in ends.items())


@cache
def hit_pays(player: _Hand, up: int) -> float:
    """The expected pay of taking a card, and of playing on in the best way."""
    return sum(share * _best_pays(_with(player, value), up) for value, share in _SHARES.items())


@cache
def _best_pays(player: _Hand, up: int) -> float:
    if _worth_of(player) > 21:
        return -1.0
    return max(stand_pays(_worth_of(player), up), hit_pays(player, up))


def _best_move(player: Sequence[str], up: str) -> str:
    stands = stand_pays(worth(player), _value(up))
    return "Hit" if hit_pays(_hand_of(player), _value(up)) > stands else "Stand"


def _dealt_out(dealer: Sequence[str], deck: Sequence[str]) -> tuple[list[str], list[str]]:
    """The dealer's hand at the end, and what is left of the deck."""
    hand, rest = list(dealer), list(deck)
    while rest and worth(hand) < _DEALER_STANDS:
        hand.append(rest.pop(0))
    return hand, rest


def _beats(player: Sequence[str], dealer: Sequence[str]) -> bool:
    return worth(player) <= 21 and (worth(dealer) > 21 or worth(player) > worth(dealer))


def _stood_pays(player: Sequence[str], dealer: Sequence[str], deck: Sequence[str]) -> float:
    """The pay of standing, with these very cards to come."""
    final_hand, _ = _dealt_out(dealer, deck)
    return float(_beats(player, final_hand)) - float(worth(player) > 21 or _beats(final_hand, player))


def _played_pays(instance: Mapping[str, Any], hits: Callable[[Sequence[str], str], float]) -> float:
    """The expected pay of a policy on an instance's cards; `hits`: (hand, dealer's card) -> chance of a
    hit."""
    player, dealer, deck = (list(instance[key]) for key in _HANDS)
    total, chance = 0.0, 1.0
    while chance and deck and worth(player) <= 21:
        hit = hits(player, dealer[0])
        total += chance * (1.0 - hit) * _stood_pays(player, dealer, deck)
        chance *= hit
        player.append(deck.pop(0))
    return total - chance * (worth(player) > 21)


def blackjack_baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The exact pay of simple policies and of the best one on the very cards of each task."""
    policies: dict[str, Callable[[Sequence[str], str], float]] = {
        RANDOM: lambda player, up: 0.5,
        "always Hit": lambda player, up: 1.0,
        "always Stand": lambda player, up: 0.0,
        OPTIMUM: lambda player, up: float(_best_move(player, up) == "Hit"),
    }
    instances = [BlackjackEnv.from_dict(dict(task)).instance for task in tasks]
    return {name: [_played_pays(each, hits) for each in instances] for name, hits in policies.items()}


def _hand(cards: Sequence[str]) -> str:
    return f"{' '.join(cards)} ({worth(cards)})"


class BlackjackEnv(GameEnv):
    """Blackjack for agents."""

    game_class = Blackjack


WORLD = game_world(BlackjackEnv, baselines=blackjack_baselines)
