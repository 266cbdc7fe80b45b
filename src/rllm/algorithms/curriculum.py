"""Which tasks a step plays: new ones, and again some of those that were not solved every time.

    tasks, in their order ──► new ones ─────────────────┐
    pool: task ──► share of attempts that solved it ────┴──► a step ──► episodes ──► pool

Several steps may be under way: what became of one is observed once it is learned from, so which tasks a step
gets is a function of which steps were observed before it, whatever is still being played.

A task that every attempt solves teaches nothing, and late in training most new ones are such; those in the
pool are drawn again the likelier, the nearer to one half their share is, where attempts differ most. After
the idea of prioritised level replay (Jiang et al. 2021, arXiv:2010.03934); what a comparison within a group
learns from, the variance of success, stands in the place of their regret.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic

import numpy as np

from rllm.algorithms.task_sampler import AnyTask, TaskSampler
from rllm.types.draws import draw_seed
from rllm.types.episode import Episode, Outcome
from rllm.types.task import task_id_of

FLOOR = 0.05
"""Added to share * (1 - share): tasks that nobody has solved yet are tried again as well."""


class Curriculum(Generic[AnyTask]):
    """A function of the seed and of what was observed; `state` is all that a resumed run needs."""

    def __init__(
        self,
        tasks: TaskSampler[AnyTask],
        *,
        seed: int,
        replay_fraction: float = 0.0,
        capacity: int = 256,
    ) -> None:
        """`replay_fraction`: the part of a step's tasks that comes from the pool, as far as it holds them; 0
        plays all tasks in their order. `capacity`: tasks that the pool holds; the one that was played longest
        ago leaves first."""
        self._tasks = tasks
        self._seed = seed
        self._replay_fraction = replay_fraction
        self._capacity = capacity
        self._cursor = 0
        """New tasks that have been played."""
        self._pool: dict[int, float] = {}
        """Position of a task in the order of all ──► share of its attempts that solved it; the one that was
        played last stands last."""
        self._under_way: dict[int, dict[str, int]] = {}
        """Step ──► task id ──► position, of the steps that are being played."""
        self._positions_by_step: dict[int, list[int]] = {}
        """Step ──► positions, of steps that were being played when the run ended: they begin anew."""
        self._left_over: list[int] = []
        """Positions that were planned for a step which then needed fewer: played before new ones."""

    @property
    def num_pooled(self) -> int:
        return len(self._pool)

    def batch(self, step: int, count: int) -> list[AnyTask]:
        """`count` tasks of a step; asked again before `observe`, further ones. No two are alike."""
        places = self._positions_by_step.pop(step, [])
        positions, later = places[:count], places[count:]
        if later:
            self._positions_by_step[step] = later
        if (num_missing := count - len(positions)) > 0:
            again = self._draw(step, round(self._replay_fraction * num_missing))
            num_new = num_missing - len(again)
            first, self._left_over = self._left_over[:num_new], self._left_over[num_new:]
            end = self._cursor + num_new - len(first)
            positions += [*first, *range(self._cursor, end), *again]
            self._cursor = end
        tasks = [task for position in positions for task in self._tasks.batch(position, 1)]
        places_by_id = self._under_way.setdefault(step, {})
        task_ids = [task_id_of(task, place) for place, task in enumerate(tasks, start=len(places_by_id))]
        places_by_id |= dict(zip(task_ids, positions, strict=True))
        return tasks

    def observe(self, step: int, episodes: Sequence[Episode]) -> None:
        """Note what became of a step's tasks. Failures say nothing about how hard a task is."""
        places_by_id = self._under_way.pop(step, {})
        self._left_over += [each for each in self._positions_by_step.pop(step, ()) if each not in self._pool]
        successes: dict[int, list[bool]] = {}
        for episode in episodes:
            if episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED) and episode.task_id in places_by_id:
                successes.setdefault(places_by_id[episode.task_id], []).append(episode.is_correct)
        for position in sorted(successes):
            share = sum(successes[position]) / len(successes[position])
            self._pool.pop(position, None)
            if share < 1.0 and self._replay_fraction > 0.0:
                self._pool[position] = share
        for position in list(self._pool)[: max(0, len(self._pool) - self._capacity)]:
            del self._pool[position]

    def state(self) -> dict[str, Any]:
        """As JSON."""
        under_way = {step: [*places.values()] for step, places in self._under_way.items()}
        return {
            "cursor": self._cursor,
            "pool": [[*each] for each in self._pool.items()],
            **({"under_way": [[*each] for each in under_way.items()]} if under_way else {}),
            **({"left_over": [*self._left_over]} if self._left_over else {}),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, between two steps; those that were under way begin anew."""
        self._cursor, self._pool = state["cursor"], dict(state["pool"])
        self._under_way, self._positions_by_step = {}, dict(state.get("under_way", ()))
        self._left_over = [*state.get("left_over", ())]

    def _draw(self, step: int, count: int) -> list[int]:
        played_places = set(self._under_way.get(step, {}).values())
        positions = [position for position in self._pool if position not in played_places]
        if not (count := min(count, len(positions))):
            return []
        shares = np.array([self._pool[position] for position in positions])
        weights = shares * (1.0 - shares) + FLOOR
        rng = np.random.default_rng(draw_seed(self._seed, "curriculum", step, len(played_places)))
        places = rng.choice(len(positions), size=count, replace=False, p=weights / weights.sum())
        return [positions[place] for place in sorted(places)]
