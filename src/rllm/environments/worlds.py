"""Worlds by name.

    "sokoban" ──► WORLDS ──► the `WORLD` of its file
    "reasoning-gym/chain_sum" ──► FAMILIES ──► world_of("chain_sum")
    "openenv:http://127.0.0.1:8000" ──► the world behind that server

Files are imported when their world is asked for. A new world is a file with a `WORLD`, and a row here.
"""

import difflib
import importlib
from typing import Any

from rllm.environments.world import World
from rllm.errors import ConfigError

WORLDS = {
    "2048": "rllm.environments.games.twenty48:WORLD",
    "arithmetic": "rllm.environments.sums:WORLD",
    "blackjack": "rllm.environments.games.blackjack:WORLD",
    "calculator": "rllm.environments.calculator:WORLD",
    "connect-four": "rllm.environments.games.connect_four:WORLD",
    "countdown": "rllm.environments.countdown:WORLD",
    "frozenlake": "rllm.environments.frozenlake:WORLD",
    "frozenlake-pixels": "rllm.environments.lake_pictures:WORLD",
    "guess-number": "rllm.environments.games.guess_number:WORLD",
    "hanoi": "rllm.environments.games.hanoi:WORLD",
    "lights-out": "rllm.environments.games.lights_out:WORLD",
    "mastermind": "rllm.environments.games.mastermind:WORLD",
    "dark-maze": "rllm.environments.games.dark_maze:WORLD",
    "live-web": "rllm.environments.web.live:WORLD",
    "maze": "rllm.environments.games.maze:WORLD",
    "minesweeper": "rllm.environments.games.minesweeper:WORLD",
    "n-queens": "rllm.environments.games.n_queens:WORLD",
    "picture-questions": "rllm.environments.picture_questions:WORLD",
    "program-repair": "rllm.environments.program_repair:WORLD",
    "small-programs": "rllm.environments.small_programs:WORLD",
    "shop-desk": "rllm.environments.shop_desk:WORLD",
    "sokoban": "rllm.environments.games.sokoban:WORLD",
    "swe": "rllm.environments.swe.swe:WORLD",
    "swe-small": "rllm.environments.swe.small:WORLD",
    "task-directory": "rllm.environments.task_directory:WORLD",
    "sudoku": "rllm.environments.games.sudoku:WORLD",
    "tic-tac-toe": "rllm.environments.games.tic_tac_toe:WORLD",
    "wordle": "rllm.environments.games.wordle:WORLD",
    "word-problems": "rllm.environments.word_problems:WORLD",
}
"""Name -> where its World is."""

FAMILIES = {
    "babyai": "rllm.environments.minigrid:world_of_babyai",
    "browsergym": "rllm.environments.web.browsergym:world_of",
    "minigrid": "rllm.environments.minigrid:world_of_minigrid",
    "miniwob": "rllm.environments.web.miniwob:world_of",
    "reasoning-gym": "rllm.environments.reasoning_gym:world_of",
    "textarena": "rllm.environments.textarena:world_of",
    "web-code": "rllm.environments.web.sites.issue_tracker:world_of",
    "web-forum": "rllm.environments.web.sites.forum:world_of",
    "web-office": "rllm.environments.web.sites.office:world_of",
    "web-shop": "rllm.environments.web.sites.shop_tasks:world_of",
}
"""First part of a name with a slash -> the function that makes a World of the second part."""


OPENENV = "openenv:"
"""The prefix of names of OpenEnv servers."""


def world_named(name: str) -> World:
    """Raises ConfigError with the nearest name for one that is not there."""
    if name.startswith(OPENENV):
        return _load("rllm.environments.openenv:world_of")(name)
    family, slash, member = name.partition("/")
    if slash and family in FAMILIES:
        return _load(FAMILIES[family])(member)
    if name in WORLDS:
        return _load(WORLDS[name])
    names = [*WORLDS, *(f"{each}/…" for each in FAMILIES)]
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(names)}."
    raise ConfigError(f"There is no environment `{name}`; {hint}")


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)
