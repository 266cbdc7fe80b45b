"""A cluster as events: engines that conversations share, environments, a trainer, broadcasts.

    episode:  prompt ─► engine (its rows share every step) ─► environment ─┬─► the next turn, same engine
                                                                           └─► done: one of the step's
    step:     all episodes done ─► update ─► broadcast ─► the next step's weights

An engine is a processor that its rows share: every row gets one token a step, and a step of B rows takes
`decode_s(B)`. So an engine has an event only where a row comes or goes, however many tokens lie between, and
1,024 of them are simulated in seconds. That is why the queue is a heap of times here: process libraries such
as SimPy have resources that are held one by one, and none that is shared at a rate which changes.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


class Clock:
    """Simulated seconds, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), happens))

    def run(self, until_s: float = float("inf")) -> None:
        """Let everything happen up to `until_s`, by time, and what has the same time as it was planned."""
        while self._events and self._events[0][0] <= until_s:
            self.now, _, happens = heapq.heappop(self._events)
            happens()


class SharedEngine:
    """Rows that decode together; prompts are read in between, while nobody decodes."""

    def __init__(self, clock: Clock, decode_s: Callable[[int], float], num_slots: int) -> None:
        self.num_active = 0
        self.busy_s = self.row_s = 0.0
        """Seconds with any row, and the integral of the number of rows."""
        self._clock, self._decode_s, self._num_slots = clock, decode_s, num_slots
        self._tokens = 0.0
        """That a row which was there from the beginning would have."""
        self._reading_s = 0.0
        self._changed_s = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[tuple[float, float, Callable[[], None]]] = deque()
        self._order = itertools.count()
        self._version = 0

    def ask(self, prompt_s: float, num_tokens: float, answered: Callable[[], None]) -> None:
        """Read a prompt, which takes `prompt_s`, and decode so many tokens, as soon as a slot is free."""
        self._advance()
        if self.num_active == self._num_slots:
            self._waiting.append((prompt_s, num_tokens, answered))
        else:
            self._begin(prompt_s, num_tokens, answered)
        self._plan()

    @property
    def num_inside(self) -> int:
        """Rows that decode or wait."""
        return self.num_active + len(self._waiting)

    def _begin(self, prompt_s: float, num_tokens: float, answered: Callable[[], None]) -> None:
        self.num_active += 1
        self._reading_s += prompt_s
        heapq.heappush(self._ends, (self._tokens + num_tokens, next(self._order), answered))

    def _advance(self) -> None:
        """Count what was decoded since the last change."""
        elapsed_s = self._clock.now - self._changed_s
        self._changed_s = self._clock.now
        if not self.num_active:
            return
        self.busy_s += elapsed_s
        self.row_s += elapsed_s * self.num_active
        read_s = min(elapsed_s, self._reading_s)
        self._reading_s -= read_s
        self._tokens += (elapsed_s - read_s) / self._decode_s(self.num_active)

    def _plan(self) -> None:
        """The next row to end; whatever was planned before is forgotten."""
        self._version += 1
        if not self._ends:
            return
        version = self._version
        left_s = (self._ends[0][0] - self._tokens) * self._decode_s(self.num_active)
        self._clock.after(max(0.0, left_s) + self._reading_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        end, _, answered = heapq.heappop(self._ends)
        self._tokens = max(self._tokens, end)  # rounding
        self.num_active -= 1
        if self._waiting:
            self._begin(*self._waiting.popleft())
        self._plan()
        answered()


class Station:
    """One server, first come, first served."""

    def __init__(self, clock: Clock) -> None:
        self.busy_s = 0.0
        self._clock = clock
        self._free_at = 0.0

    def serve(self, service_s: float, served: Callable[[], None]) -> None:
        start = max(self._clock.now, self._free_at)
        self._free_at = start + service_s
        self.busy_s += service_s
        self._clock.after(self._free_at - self._clock.now, served)


@dataclass(kw_only=True, slots=True, frozen=True)
class Service:
    """Seconds of each kind of work, on one device."""

    decode_fixed_s: float
    """Of a decoding step, whatever its rows."""
    decode_row_s: float
    """Of each row in it …"""
    decode_context_s: float = 0.0
    """… and of each token that a row looks back at."""
    prefill_token_s: float
    turn_s: float = 0.0
    """Of agent, environment and store, where they run on the engine's own core."""
    update_token_s: float
    update_fixed_s: float = 0.0
    broadcast_s: float = 0.0


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """What a step is."""

    num_tasks: int
    group_size: int
    prompt_tokens: int
    """Of the first turn; the attempts at one task read them once."""
    turn_tokens: int
    """Sampled at each turn, on the average."""
    observation_tokens: int = 0
    """Read at each turn but the first."""
    num_turns: int = 1
    environment_s: float = 0.0
    """Mean of a turn."""
    environment_spread: float = 0.0
    """Of the logarithm; 0 takes the mean always."""
    token_spread: float = 0.0
    """The same, of the tokens of a turn."""

    @property
    def num_episodes(self) -> int:
        return self.num_tasks * self.group_size

    @property
    def sampled_tokens(self) -> int:
        return self.num_episodes * self.num_turns * self.turn_tokens

    @property
    def mean_context(self) -> float:
        """Tokens that a row looks back at, on the average of all that it decodes."""
        turn = self.turn_tokens + self.observation_tokens
        return self.prompt_tokens + (self.num_turns - 1) * turn / 2.0 + self.turn_tokens / 2.0

    @property
    def trained_tokens(self) -> int:
        """Of the rows of an update, the prompt of a group once."""
        own = self.num_turns * self.turn_tokens + (self.num_turns - 1) * self.observation_tokens
        return self.num_tasks * self.prompt_tokens + self.num_episodes * own


@dataclass(kw_only=True, slots=True)
class Report:
    """What a simulated run came to."""

    step_s: float
    """Seconds from one update to the next."""
    tokens_per_s: float
    sampler_idle: float
    """Share of the samplers' time in which they have no row."""
    trainer_idle: float
    mean_rows: float
    """Of a sampler that is busy."""
    finished: list[float] = field(default_factory=list[float])


class Run:
    """Steps of a run on so many samplers and trainers.

    `ahead`: how many steps sampling may be ahead of the updates that are done: 0 samples, then updates.
    """

    def __init__(
        self,
        service: Service,
        work: Work,
        *,
        num_samplers: int,
        num_trainers: int,
        num_slots: int,
        ahead: int = 0,
        seed: int = 0,
    ) -> None:
        self.clock = Clock()
        self._service, self._work, self._ahead = service, work, ahead
        self._num_trainers = num_trainers
        self._rng = np.random.default_rng(seed)
        self._engines = [SharedEngine(self.clock, self._decode_s, num_slots) for _ in range(num_samplers)]
        self._trainer = Station(self.clock)
        self._sampled = self._updated = 0
        self._begun = 0
        self._num_steps = 0
        self._ends: list[float] = []

    def report(self, num_steps: int) -> Report:
        """Of so many steps; the time to the first update is left out, because nothing was ahead then."""
        self._num_steps = num_steps
        self._begin_steps()
        self.clock.run()
        between = np.diff([0.0, *self._ends])
        step_s = float(between[1:].mean() if num_steps > 1 else between[0])
        total_s, engines = self.clock.now, self._engines
        busy_s = sum(each.busy_s for each in engines)
        return Report(
            step_s=step_s,
            tokens_per_s=self._work.sampled_tokens / step_s,
            sampler_idle=1.0 - busy_s / (len(engines) * total_s),
            trainer_idle=1.0 - self._trainer.busy_s / total_s,
            mean_rows=sum(each.row_s for each in engines) / max(busy_s, 1e-12),
            finished=self._ends,
        )

    def _decode_s(self, num_rows: int) -> float:
        service = self._service
        row_s = service.decode_row_s + self._work.mean_context * service.decode_context_s
        return service.decode_fixed_s + num_rows * row_s

    def _begin_steps(self) -> None:
        """Sample for every step that may begin with the weights that there are: one at a time."""
        if self._begun < self._num_steps and self._begun == self._sampled <= self._updated + self._ahead:
            self._begun += 1
            self._sample()

    def _sample(self) -> None:
        left = [self._work.num_episodes]

        def done() -> None:
            left[0] -= 1
            if not left[0]:
                self._sampled += 1
                self._update()
                self._begin_steps()

        for task in range(self._work.num_tasks):
            engine = self._engines[task % len(self._engines)]
            for attempt in range(self._work.group_size):
                read = self._work.prompt_tokens if attempt == 0 else 1
                self._turn(engine, read, self._work.num_turns, done)

    def _turn(self, engine: SharedEngine, read: int, turns_left: int, done: Callable[[], None]) -> None:
        service, work = self._service, self._work
        prompt_s = service.turn_s + read * service.prefill_token_s
        tokens = self._drawn(work.turn_tokens, work.token_spread)

        def answered() -> None:
            self.clock.after(self._drawn(work.environment_s, work.environment_spread), stepped)

        def stepped() -> None:
            if turns_left == 1:
                done()
            else:
                self._turn(engine, work.observation_tokens, turns_left - 1, done)

        engine.ask(prompt_s, tokens, answered)

    def _update(self) -> None:
        service = self._service
        seconds = (
            service.update_fixed_s + self._work.trained_tokens * service.update_token_s / self._num_trainers
        )

        def updated() -> None:
            self._updated += 1
            self._ends.append(self.clock.now)
            self._begin_steps()

        self._trainer.serve(seconds + service.broadcast_s, updated)

    def _drawn(self, mean: float, spread: float) -> float:
        """Log-normal with this mean."""
        if not spread or not mean:
            return mean
        return float(mean * np.exp(spread * self._rng.standard_normal() - spread**2 / 2.0))
