"""MiniGrid and BabyAI in words: `minigrid/NAME` and `babyai/NAME`, such as `babyai/GoToRedBall`.

    level, seed ──► MiniGrid's own rules ──► the 7 x 7 places in view as a map and a list ──► "forward"

What the player sees is what MiniGrid shows: a square in front of it, turned so that ahead is up. BabyAI's
levels come with a bot that knows the way. MiniGrid's levels whose goal is a green square are walked by a
search of our own, which sees the whole grid; of its others nobody here knows how to win.
"""

import difflib
import hashlib
from collections import deque
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from random import Random
from typing import TYPE_CHECKING, Any

from rllm.environments.games.env import GameEnv
from rllm.environments.games.game import Game, require_choice, require_integer
from rllm.environments.games.parsing import one_of
from rllm.environments.games.world import game_world
from rllm.environments.world import World
from rllm.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from minigrid.minigrid_env import MiniGridEnv

MOVES = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
"""In the order of MiniGrid's actions 0 to 6."""
_SYMBOLS = {"wall": "#", "door": "D", "key": "K", "ball": "B", "box": "X", "goal": "G", "lava": "~"}
_UNSEEN, _FLOOR, _YOU = "?", ".", "^"
_TO_GOAL = ("Empty", "SimpleCrossing", "LavaCrossing", "LavaGap", "FourRooms", "DistShift", "MultiRoom")
"""Levels of MiniGrid where one has to reach the green goal, and needs no key."""
_WITHOUT_BOT = (
    *("KeyInBox", "PutNextS5N2Carrying", "PutNextS6N3Carrying", "PutNextS7N4Carrying"),
    *("OpenDoorsOrderN2Debug", "OpenDoorsOrderN4Debug"),
)
"""Levels of BabyAI that its bot stumbles over or loses."""
_MAX_SEARCHES = 100
"""For one move of the bot; a few are usual."""
_MAP_RULES = (
    "The map shows what is in view: ^ is you, ahead of you is up; ? is not in sight, . free floor, # wall, "
    "D door, K key, B ball, X box, G goal, ~ lava, which is deadly. "
)
_LIST_RULES = (
    "You are shown the mission, and below it what is in view, each thing with the way to it, or nothing. "
)
_AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""(columns, rows) that a step forward goes, by MiniGrid's directions."""


class GridLevel(Game):
    """A level by its registered name without the version, such as BabyAI-GoToRedBall, and a seed.

    Without `show_map` the player sees the mission and what is in view as a list, and no map: less to read,
    and enough where no walls stand in the way.
    """

    name = "minigrid"
    title = "MiniGrid"
    turns = 64
    instance_keys = ("level", "seed", "show_map")

    def __init__(self, instance: Mapping[str, Any]) -> None:
        super().__init__({"show_map": True, **instance})
        require_choice("show_map", instance.get("show_map", True), (True, False))
        self._show_map: bool = instance.get("show_map", True)
        require_integer("seed", instance["seed"], 0, 2**31 - 1)
        self.has_expert = has_expert(instance["level"])
        self._level: str = instance["level"]
        self._env = _make(self._level)
        self._view = self._env.reset(seed=instance["seed"])[0]
        self._bot: Any = None
        self._planned_move: int | None = None
        """The bot's next move; None before it was asked."""
        self._planned_at = -1
        self._is_won = self._is_lost = False

    @staticmethod
    def draw(rng: Random, *, level: str = "BabyAI-GoToRedBall", show_map: bool = True) -> dict[str, Any]:
        _register(level)
        return {"level": level, "seed": rng.getrandbits(31), "show_map": show_map}

    @classmethod
    def turns_for(cls, arguments: Mapping[str, Any]) -> int:
        """The number of turns that the level itself allows."""
        return _own_turns(arguments["level"])

    @classmethod
    def identity(cls, instance: Mapping[str, Any]) -> Any:
        """The whole grid, the player and the mission: two seeds that make the same level are one instance."""
        env = _make(instance["level"])
        mission = env.reset(seed=instance["seed"])[0]["mission"]
        grid = hashlib.blake2b(env.grid.encode().tobytes(), digest_size=16).hexdigest()
        player = [int(each) for each in (*env.agent_pos, env.agent_dir)]
        return [instance["level"], str(mission), grid, player]

    @property
    def rules(self) -> str:
        view = _MAP_RULES if self._show_map else _LIST_RULES
        return (
            f"You walk through rooms and have a mission. {view}left and right turn you, forward takes a "
            "step, pickup takes what is just ahead, drop puts it down there, toggle opens or closes a door "
            "or box just ahead; a locked door opens with the key of its colour in your hands. To go to "
            f"something is to stand before it, facing it. Answer with one word: {', '.join(MOVES)}."
        )

    def board(self) -> str:
        if not self._show_map:
            return f"{self._view['mission']}\n{'; '.join(_things(self._view['image'])) or 'nothing'}"
        load = self._env.carrying
        return "\n".join(
            [
                f"Mission: {self._view['mission']}",
                *_drawing(self._view["image"]),
                f"In view: {'; '.join(_things(self._view['image'])) or 'nothing'}",
                f"In your hands: {'nothing' if load is None else f'{load.color} {load.type}'}",
            ]
        )

    def play(self, move: str) -> str:
        action = MOVES.index(one_of(move, MOVES))
        if action != self._planned_move or self._planned_at != self._env.step_count:
            self._bot = None
        self._view, reward, terminated, truncated, _ = self._env.step(action)
        self._is_won = bool(terminated and float(reward) > 0.0)
        self._is_lost = not self._is_won and bool(terminated or truncated)
        return ""

    @property
    def is_won(self) -> bool:
        return self._is_won

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def moves(self) -> list[str]:
        return list(MOVES[:-1])

    def expert_move(self) -> str:
        """The move of the bot, or of the search."""
        if self._level.startswith("BabyAI-"):
            return MOVES[self._bot_action()]
        way = _way_to_goal(self._env)
        return way[0] if way else MOVES[0]

    def _bot_action(self) -> int:
        """The bot cannot go on from what it did not plan, so after a mistake a new one begins.

        From some positions none can, and in some it would plan for ever: then it turns once and gives up.
        """
        if self._planned_at == self._env.step_count and self._planned_move is not None:
            return self._planned_move
        try:
            if self._bot is None:
                self._bot, self._planned_move = _bot_class()(self._env), None
            self._bot.num_searches = 0
            self._planned_move = int(self._bot.replan(self._planned_move))
        except (AssertionError, AttributeError, IndexError):
            self._planned_move, self.expert_gave_up = 0, True
        self._planned_at = self._env.step_count
        return self._planned_move


class GridLevelEnv(GameEnv):
    """A level of MiniGrid or BabyAI for agents."""

    game_class = GridLevel


def has_expert(level: str) -> bool:
    """Whether somebody here knows how to win the level."""
    family, _, rest = level.partition("-")
    return rest not in _WITHOUT_BOT if family == "BabyAI" else rest.startswith(_TO_GOAL)


def world_of_minigrid(level: str) -> World:
    """The world of `minigrid/LEVEL`."""
    return _world(f"MiniGrid-{level}", f"minigrid/{level}")


def world_of_babyai(level: str) -> World:
    """The world of `babyai/LEVEL`."""
    return _world(f"BabyAI-{level}", f"babyai/{level}")


def _world(level: str, label: str) -> World:
    return game_world(GridLevelEnv, label=label, has_expert=has_expert(level), level=level)


def _drawing(image: Any) -> list[str]:
    """The view, the line that is farthest ahead first."""
    rows: list[str] = []
    for row in range(image.shape[1]):
        kinds = [_kind_at(image, column, row) for column in range(image.shape[0])]
        symbols = [_UNSEEN if kind == "unseen" else _SYMBOLS.get(kind, _FLOOR) for kind in kinds]
        if row == image.shape[1] - 1:
            symbols[image.shape[0] // 2] = _YOU
        rows.append(" ".join(symbols))
    return rows


def _things(image: Any) -> list[str]:
    """The objects in view, the nearest first: "red ball 2 ahead, 1 left"."""
    from minigrid.core.constants import IDX_TO_COLOR

    things: list[tuple[int, str]] = []
    for column in range(image.shape[0]):
        for row in range(image.shape[1]):
            kind = _kind_at(image, column, row)
            ahead, right = image.shape[1] - 1 - row, column - image.shape[0] // 2
            if kind not in _SYMBOLS or kind == "wall" or (ahead, right) == (0, 0):
                continue
            colour = "" if kind in ("goal", "lava") else f"{IDX_TO_COLOR[int(image[column, row, 1])]} "
            state = f"{('open', 'closed', 'locked')[int(image[column, row, 2])]} " if kind == "door" else ""
            sideways = f"{abs(right)} {'right' if right > 0 else 'left'}" if right else ""
            where = ", ".join(part for part in (f"{ahead} ahead" if ahead else "", sideways) if part)
            things.append((ahead + abs(right), f"{state}{colour}{kind} {where}"))
    return [text for _, text in sorted(things)]


def _kind_at(image: Any, column: int, row: int) -> str:
    from minigrid.core.constants import IDX_TO_OBJECT

    return IDX_TO_OBJECT[int(image[column, row, 0])]


def _way_to_goal(env: "MiniGridEnv") -> list[str]:
    """Moves to the nearest goal, doors toggled on the way; empty where none is in reach."""
    x, y = (int(each) for each in env.agent_pos)
    start = (x, y, int(env.agent_dir))
    came_from: dict[tuple[int, int, int], tuple[tuple[int, int, int], tuple[str, ...]] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        x, y, facing = state
        cell = env.grid.get(x, y)
        if cell is not None and cell.type == "goal":
            return _moves_to(state, came_from)
        right, down = _AHEAD[facing]
        ahead: Any = env.grid.get(x + right, y + down)
        choices: list[tuple[tuple[int, int, int], tuple[str, ...]]] = [
            ((x, y, (facing - 1) % 4), ("left",)),
            ((x, y, (facing + 1) % 4), ("right",)),
        ]
        if ahead is None or ahead.type == "goal" or (ahead.type == "door" and ahead.is_open):
            choices.append(((x + right, y + down, facing), ("forward",)))
        elif ahead.type == "door" and not ahead.is_locked:
            choices.append(((x + right, y + down, facing), ("toggle", "forward")))
        for following, moves in choices:
            if following not in came_from:
                came_from[following] = state, moves
                queue.append(following)
    return []


def _moves_to(state: tuple[int, int, int], came_from: Mapping[Any, Any]) -> list[str]:
    moves: list[str] = []
    while (step := came_from[state]) is not None:
        state, moves_so_far = step
        moves[:0] = moves_so_far
    return moves


def _make(level: str) -> "MiniGridEnv":
    return _register(level)().unwrapped


@cache
def _bot_class() -> Any:
    """BabyAI's bot, which in some mazes plans in circles, with an end to that."""
    from minigrid.utils.baby_ai_bot import BabyAIBot  # heavy: only who is shown something waits for it

    class Bot(BabyAIBot):
        num_searches = 0
        """Since it was last asked for a move."""

        def _shortest_path(self, *what: Any, **how: Any) -> Any:
            self.num_searches += 1
            if self.num_searches > _MAX_SEARCHES:
                raise AssertionError("It plans in circles.")  # as the bot says that it is at a loss
            return super()._shortest_path(*what, **how)

    return Bot


@lru_cache(maxsize=512)
def _own_turns(level: str) -> int:
    env = _make(level)
    env.reset(seed=0)
    return int(env.max_steps)


@lru_cache(maxsize=512)
def _register(level: str) -> Any:
    """A maker of the newest version of a level. Raises ConfigError with the nearest name."""
    try:
        import gymnasium  # heavy: only who plays waits for it
        from gymnasium.envs.registration import load_env_creator
        from minigrid.envs.babyai.core import roomgrid_level
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "minigrid", "games") from error
    # It prints each rejected layout. To redirect stdout would swallow what other threads print meanwhile.
    roomgrid_level.print = _say_nothing  # pyright: ignore[reportAttributeAccessIssue]
    versions: dict[str, str] = {}
    for name in sorted(gymnasium.registry):
        if name.startswith(("BabyAI-", "MiniGrid-")):
            versions[name.rpartition("-v")[0]] = name
    if level not in versions:
        close = difflib.get_close_matches(str(level), versions, n=1)
        hint = (
            f"did you mean `{close[0]}`?" if close else f"there are {len(versions)}, such as BabyAI-GoToObj."
        )
        raise ConfigError(f"MiniGrid has no level `{level}`; {hint}")
    spec = gymnasium.registry[versions[level]]
    entry_point = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    return partial(entry_point, **spec.kwargs)  # `make` would copy and wrap it as well


def _say_nothing(*words: Any) -> None:
    """Drop the lines that MiniGrid prints while it tries layouts; nobody needs them."""
