"""A game as a world: its tasks, its expert, what its instances are, and what simple policies come to.

task  ──► game_identity  ──► the instance, by the rules of its game
tasks ──► game_baselines ──► "random": legal moves drawn evenly, some plays of each instance
                         ──► "optimum": 1 where the game's expert wins
                         ──► "always Right": one move for every turn, the best of the commonest first moves

The optimum is that of one who sees all there is; a game that hides cards has baselines of its own.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from rllm.environments.games.env import GameEnv, demonstration, game_tasks
from rllm.environments.games.game import Game, expert_wins, identity_of
from rllm.environments.world import OPTIMUM, RANDOM, Baselines, World
from rllm.types.draws import draw_seed

_PLAYS = 2
"""Random plays of each instance."""
_CONSTANTS = 8
"""Moves that are tried as the only answer."""
_CONSTANTS_KEPT = 2
_SCREENED = 32
"""Instances on which constants are tried first; only the best of them are played everywhere."""


def game_world(
    env_class: type[GameEnv],
    *,
    label: str = "",
    has_expert: bool = True,
    baselines: Baselines | None = None,
    **arguments: Any,
) -> World:
    """The entry in `worlds`: the game with its tasks and its expert; `arguments` are settled for all tasks.

    `baselines`: what simple policies come to, where the game knows it better than plays of it tell.
    """
    return World(
        env_class=env_class,
        tasks=partial(game_tasks, env_class, label=label, **arguments),
        demonstrate=partial(demonstration, env_class) if has_expert else None,
        expert_args=("tags", "habit", "whole_games"),
        identity=partial(game_identity, env_class),
        identity_draws=True,
        kind=partial(game_kind, env_class),
        baselines=baselines or partial(game_baselines, env_class),
    )


def game_identity(env_class: type[GameEnv], task: Mapping[str, Any]) -> str:
    """The identity of the task's instance by the rules of its game, whatever the task's name or number."""
    return identity_of(env_class.game_class, env_class.from_dict(dict(task)).instance)


def game_kind(env_class: type[GameEnv], task: Mapping[str, Any]) -> str:
    """Which kind of instance the task's is, by the rules of its game."""
    return env_class.game_class.kind(env_class.from_dict(dict(task)).instance)


def game_baselines(
    env_class: type[GameEnv], tasks: Sequence[Mapping[str, Any]], *, plays: int = _PLAYS
) -> dict[str, list[float]]:
    """Expected return of each simple policy on each task; no `optimum` where nobody knows how to win.

    `random` is an average of `plays` games of each instance; equal instances have equal ones. Of a game that
    is slow to play, some instances are played, and the others are expected to pay what those pay on average.
    """
    instances = [json.dumps(env_class.from_dict(dict(task)).instance, sort_keys=True) for task in tasks]
    distinct = dict(zip(instances, tasks, strict=True))
    affordable = _affordable(env_class, distinct, plays + _CONSTANTS + _CONSTANTS_KEPT)
    returns = {
        RANDOM: {name: _random_return(env_class, task, name, plays) for name, task in affordable.items()},
        **{
            f"always {move}": {
                name: _constant_return(env_class, task, move) for name, task in affordable.items()
            }
            for move in _best_constants(env_class, list(affordable.values()))
        },
    }
    optimum = {name: _optimum(env_class, task) for name, task in distinct.items()}
    if None not in optimum.values():
        returns[OPTIMUM] = {name: float(bool(wins)) for name, wins in optimum.items()}
    means = {policy: sum(by_name.values()) / max(1, len(by_name)) for policy, by_name in returns.items()}
    return {
        policy: [by_name.get(name, means[policy]) for name in instances]
        for policy, by_name in returns.items()
    }


def _affordable(
    env_class: type[GameEnv], distinct: Mapping[str, Mapping[str, Any]], plays: int
) -> dict[str, Mapping[str, Any]]:
    """As many instances, evenly among all, as may be played so often."""
    names = list(distinct)
    most_moves = sum(env_class.from_dict(dict(task)).max_turns for task in distinct.values()) * plays
    every = math.ceil(most_moves / env_class.game_class.most_moves) if names else 1
    return {name: distinct[name] for name in names[:: max(1, every)]}


def _best_constants(env_class: type[GameEnv], tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """The commonest legal first moves that come to most, always made, on some of the tasks."""
    some = tasks[:_SCREENED]
    counts = Counter(move for task in some for move in env_class.from_dict(dict(task)).game.moves())
    moves = [move for move, _ in counts.most_common(_CONSTANTS)]
    totals = {move: sum(_constant_return(env_class, task, move) for task in some) for move in moves}
    return sorted(moves, key=lambda move: -totals[move])[:_CONSTANTS_KEPT]


def _constant_return(env_class: type[GameEnv], task: Mapping[str, Any], move: str) -> float:
    return _return_of(env_class.from_dict(dict(task)), lambda game: move)


def _random_return(env_class: type[GameEnv], task: Mapping[str, Any], name: str, plays: int) -> float:
    total = 0.0
    for play in range(plays):
        rng = Random(draw_seed("baseline", env_class.game_class.name, name, play))
        total += _return_of(env_class.from_dict(dict(task)), lambda game, rng=rng: rng.choice(game.moves()))
    return total / plays


def _return_of(env: GameEnv, move: Callable[[Game], str]) -> float:
    """One game, every answer of which is what `move` says of the position."""
    env.reset()
    total, done = 0.0, False
    while not done:
        _, reward, done, _ = env.step(move(env.game))
        total += reward
    return total


def _optimum(env_class: type[GameEnv], task: Mapping[str, Any]) -> bool | None:
    """Whether the expert wins; None where there is no expert. What was drawn has been won by it."""
    env = env_class.from_dict(dict(task))
    if not env.game.has_expert:
        return None
    return "instance" not in task or expert_wins(env.game, env.max_turns)
