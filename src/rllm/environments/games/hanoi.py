"""The Tower of Hanoi, from any arrangement of the disks to any peg."""

from collections.abc import Mapping
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, InvalidMove, require_integer
from rllm.environments.games.parsing import shown
from rllm.environments.games.world import game_world
from rllm.errors import ConfigError

_PEGS = "ABC"


class Hanoi(Game):
    """An instance says where each disk lies, from the smallest to the largest, and where all shall be."""

    name = "hanoi"
    title = "Tower of Hanoi"
    turns = 16
    instance_keys = ("disks", "goal")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__(instance)
        disks, goal = instance["disks"], instance["goal"]
        if not isinstance(disks, str) or not 1 <= len(disks) <= 10 or set(disks) - set(_PEGS):
            raise ConfigError(f"`disks` is {disks!r:.200}; give the peg of each disk, such as AAB.")
        if not isinstance(goal, str) or len(goal) != 1 or goal not in _PEGS or disks == goal * len(disks):
            raise ConfigError(f"`goal` is {goal!r:.200}; it must be A, B or C, and not where all disks are.")
        self._peg_of = list(disks)
        self._goal: str = goal

    @staticmethod
    def draw(rng: Random, *, num_disks: int = 3) -> dict[str, Any] | None:
        require_integer("num_disks", num_disks, 2, 8)
        disks, goal = "".join(rng.choice(_PEGS) for _ in range(num_disks)), rng.choice(_PEGS)
        return None if disks == goal * num_disks else {"disks": disks, "goal": goal}

    @property
    def rules(self) -> str:
        return (
            f"Tower of Hanoi: bring all disks to peg {self._goal}. Each line is a peg with its disks from "
            "bottom to top; a larger number is a larger disk. Move the top disk of a peg onto an empty peg "
            'or onto a larger disk. Answer with two pegs, from and to, such as "A C".'
        )

    def board(self) -> str:
        return "\n".join(f"{peg}: {' '.join(map(str, self._disks_on(peg)))}".rstrip() for peg in _PEGS)

    def play(self, move: str) -> str:
        source, target = self._pegs(move)
        self._require_legal(source, target)
        self._peg_of[self._top(source) - 1] = target
        return ""

    @property
    def is_won(self) -> bool:
        return all(peg == self._goal for peg in self._peg_of)

    @property
    def is_lost(self) -> bool:
        return False

    def moves(self) -> list[str]:
        return [
            f"{source} {target}"
            for source in _PEGS
            for target in _PEGS
            if source != target and self._disks_on(source) and self._top(source) < self._top(target)
        ]

    def expert_move(self) -> str:
        """First move of the shortest way: the largest disk that is not home needs the smaller ones aside."""
        target, move = self._goal, ""
        for disk in range(len(self._peg_of) - 1, -1, -1):
            peg = self._peg_of[disk]
            if peg != target:
                move = f"{peg} {target}"
                target = next(each for each in _PEGS if each not in (peg, target))
        return move

    def progress(self) -> float:
        return sum(peg == self._goal for peg in self._peg_of) / len(self._peg_of)

    def _disks_on(self, peg: str) -> list[int]:
        return [disk + 1 for disk in range(len(self._peg_of) - 1, -1, -1) if self._peg_of[disk] == peg]

    def _top(self, peg: str) -> int:
        """The smallest disk of a peg; larger than any for an empty one."""
        return min(self._disks_on(peg), default=len(self._peg_of) + 1)

    def _pegs(self, move: str) -> tuple[str, str]:
        parts = move.upper().split()
        if len(parts) != 2 or not all(len(part) == 1 and part in _PEGS for part in parts):
            raise InvalidMove(f"{shown(move)} is not two pegs, such as A C.")
        return parts[0], parts[1]

    def _require_legal(self, source: str, target: str) -> None:
        if source == target:
            raise InvalidMove(f"peg {source} is where the disk already is.")
        if not self._disks_on(source):
            raise InvalidMove(f"peg {source} is empty.")
        if self._top(source) > self._top(target):
            raise InvalidMove(f"disk {self._top(source)} is larger than disk {self._top(target)}.")


class HanoiEnv(GameEnv):
    """Tower of Hanoi for agents."""

    game_class = Hanoi


WORLD = game_world(HanoiEnv)
