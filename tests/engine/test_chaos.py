"""Everything goes wrong at once: 16 places, each in a fifth of all tries, in one run.

plan (a hash of place, task and try) ──► environment, agent and model go wrong where it says
            └──► fate_of: what each episode must come to, told without the engine ──► the same, one by one
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import BaseEnv
from rllm.errors import ContextLengthError, InferenceError
from rllm.inference.scripted import ScriptedAnswer, ScriptedClient
from rllm.types.draws import draw_seed
from rllm.types.episode import Action, Episode, Outcome, TerminationEvent, TerminationReason
from rllm.types.messages import FinishReason, Message

PLACES = (
    "task is junk",
    "environment cannot be made",
    "reset raises",
    "reset hangs",
    "messages raise",
    "context overflows",
    "call raises",
    "call hangs",
    "answer is cut off",
    "parse raises",
    "agent ends it",
    "step exits",
    "step raises",
    "step hangs",
    "observation is junk",
    "close raises",
)
CALL_FAILURES = ("call raises", "call hangs", "answer is cut off")
ONE_IN = 5
EPISODES, TURNS, TRIES, CALL_RETRIES = 240, 3, 3, 2
LIMIT_S = 1.5
"""What hangs costs so much; all that hangs does so at the same time."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a rollout stands: its task, which try it is, which turn."""

    task: str
    number: int
    turn: int = 0

    def meets(self, place: str) -> bool:
        """Whether it goes wrong at this place, in this turn."""
        number = 0 if place == "task is junk" else self.number
        drawn = draw_seed("chaos", place, self.task, number)
        return drawn % ONE_IN == 0 and (not self.turn or drawn // ONE_IN % TURNS == self.turn - 1)

    def __str__(self) -> str:
        return f"{self.task}/{self.number}/{self.turn}"

    @classmethod
    def shown(cls, observation: Any) -> "Spot":
        task, number, turn = observation.split("/")
        return cls(task, int(number), int(turn))


class Told(dict[str, int]):
    """How often each place was met."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(PLACES, 0))
        self.lock = threading.Lock()

    def meets(self, spot: Spot, place: str) -> bool:
        met = spot.meets(place)
        with self.lock:
            self[place] += met
        return met


class Chaos:
    """The environments, the agents and the model of one run, and what has become of them."""

    def __init__(self) -> None:
        self.told = Told()
        self.release = threading.Event()
        """What hangs in a thread goes on when it is set."""
        self.made: list[Any] = []
        self.tries: Counter[str] = Counter()
        self.asked: Counter[Spot] = Counter()
        self.client = ScriptedClient(self.answer)
        self.threads_before = threading.active_count()

    def engine(self) -> AgentExecutionEngine:
        return AgentExecutionEngine(
            _agent_class(self),
            _env_class(self),
            rollout_engine=self.client,
            n_parallel_agents=EPISODES,
            max_workers=EPISODES,
            max_steps=TURNS + 1,
            step_timeout_s=LIMIT_S,
            call_timeout_s=LIMIT_S,
            retry_limit=TRIES,
            api_retries=CALL_RETRIES,
            retry_wait_s=0.0,
        )

    def answer(self, messages: Sequence[Message]) -> str | ScriptedAnswer | Exception:
        """The failures of one turn come one after the other, whenever it is asked again."""
        spot = Spot.shown(messages[-1]["content"])
        if self.told.meets(spot, "context overflows"):
            return ContextLengthError("it does not fit")
        failures = [place for place in CALL_FAILURES if spot.meets(place)]
        self.asked[spot] += 1
        if self.asked[spot] > len(failures):
            return str(spot)
        failure = failures[self.asked[spot] - 1]
        self.told[failure] += 1
        if failure == "call raises":
            return InferenceError("died")
        if failure == "call hangs":
            return ScriptedAnswer(text="never", wait_for=asyncio.Event().wait)
        return ScriptedAnswer(text="hal", finish_reason=FinishReason.CANCELLED)


def _env_class(chaos: Chaos) -> type[BaseEnv]:
    class Env(BaseEnv):
        def __init__(self, task: str, number: int, turns: int) -> None:
            self.task, self.number, self.turns, self.turn, self.num_closed = task, number, turns, 0, 0
            with chaos.told.lock:
                chaos.made.append(self)

        @property
        def spot(self) -> Spot:
            return Spot(self.task, self.number, self.turn)

        def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
            if chaos.told.meets(self.spot, "reset raises"):
                raise OSError("no sandbox")
            if chaos.told.meets(self.spot, "reset hangs"):
                chaos.release.wait()
            self.turn = 1
            return str(self.spot), {}

        def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
            spot = Spot.shown(action)
            assert spot == self.spot, "the action of another rollout"
            if chaos.told.meets(spot, "step exits"):
                raise SystemExit("an environment must not end the run")
            if chaos.told.meets(spot, "step raises"):
                raise KeyError("lost")
            if chaos.told.meets(spot, "step hangs"):
                chaos.release.wait()
            self.turn += 1
            over = spot.turn == self.turns
            seen = None if chaos.told.meets(spot, "observation is junk") else str(self.spot)
            return seen, float(over), over, {}

        def close(self) -> None:
            self.num_closed += 1
            if chaos.told.meets(Spot(self.task, self.number), "close raises"):
                raise RuntimeError("already gone")

        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            with chaos.told.lock:
                chaos.tries[info["task_id"]] += 1
                spot = Spot(info["task_id"], chaos.tries[info["task_id"]])
            chaos.told.meets(spot, "task is junk")
            turns = int(info["turns"])
            if chaos.told.meets(spot, "environment cannot be made"):
                raise OSError("no room")
            return Env(spot.task, spot.number, turns)

    return Env


def _agent_class(chaos: Chaos) -> type[ConversationAgent]:
    class Agent(ConversationAgent):
        spot = Spot("nobody's", 0)

        @property
        def chat_completions(self) -> list[Message]:
            if chaos.told.meets(self.spot, "messages raise"):
                raise IndexError("nothing to say")
            return super().chat_completions

        def update_from_env(
            self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
        ) -> None:
            self.spot = Spot.shown(observation)
            super().update_from_env(observation, reward, done, info)

        def update_from_model(self, response: str, **kwargs: Any) -> Action:
            assert self.spot == Spot.shown(response), "the answer to another rollout"
            if chaos.told.meets(self.spot, "parse raises"):
                raise ValueError("unreadable")
            if chaos.told.meets(self.spot, "agent ends it"):
                raise TerminationEvent(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
            return super().update_from_model(response)

    return Agent


# ---- what must come of it ----------------------------------------------------------------------------------


@dataclass(kw_only=True, frozen=True, slots=True)
class Fate:
    """What one episode must come to."""

    outcome: Outcome
    reason: TerminationReason
    tries: int = 1
    call_retries: int = 0
    """In all its tries."""
    num_steps: int = 0
    close_fails: bool = False


def fate_of(task: str) -> Fate:
    number, call_retries = 1, 0
    while True:
        fate, starts_over = _fate_of_try(task, number)
        call_retries += fate.call_retries
        if not starts_over:
            return replace(fate, call_retries=call_retries)
        number += 1


def _fate_of_try(task: str, number: int) -> tuple[Fate, bool]:
    """What one try comes to, and whether another one follows."""
    start, again = Spot(task, number), number < TRIES
    failed, late = TerminationReason.ERROR, TerminationReason.TIMEOUT
    is_made = not (start.meets("task is junk") or start.meets("environment cannot be made"))
    close_fails = is_made and start.meets("close raises")
    asked_again = 0

    def ends(outcome: Outcome, reason: TerminationReason, num_steps: int) -> Fate:
        return Fate(
            outcome=outcome,
            reason=reason,
            tries=number,
            call_retries=asked_again,
            num_steps=num_steps,
            close_fails=close_fails,
        )

    infrastructure, policy = Outcome.INFRASTRUCTURE_FAILURE, Outcome.POLICY_FAILURE
    if not is_made or start.meets("reset raises"):
        return ends(infrastructure, failed, 0), again
    if start.meets("reset hangs"):
        return ends(infrastructure, late, 0), again
    for turn in range(1, TURNS + 1):
        spot, before = Spot(task, number, turn), turn - 1
        if spot.meets("messages raise"):
            return ends(policy, failed, before), False
        if spot.meets("context overflows"):
            return ends(Outcome.TRUNCATED, TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, before), False
        failures = sum(spot.meets(place) for place in CALL_FAILURES)
        asked_again += min(failures, CALL_RETRIES)
        if failures > CALL_RETRIES:
            return ends(infrastructure, failed, before), False
        if spot.meets("parse raises"):
            return ends(policy, failed, turn), False
        if spot.meets("agent ends it"):
            return ends(Outcome.TRUNCATED, TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED, turn), False
        if spot.meets("step exits") or spot.meets("step raises"):
            return ends(infrastructure, failed, turn), again
        if spot.meets("step hangs"):
            return ends(infrastructure, late, turn), again
        if spot.meets("observation is junk"):
            return ends(policy, failed, turn), False
    return ends(Outcome.SCORED, TerminationReason.ENV_DONE, TURNS), False


def _became(episode: Episode) -> Fate:
    (trajectory,) = episode.trajectories
    assert episode.outcome is not None
    return Fate(
        outcome=episode.outcome,
        reason=episode.termination_reason,
        tries=episode.info["tries"],
        call_retries=trajectory.info.get("call_retries", 0),
        num_steps=len(trajectory.steps),
        close_fails="close_error" in trajectory.info,
    )


TASKS = [
    {"task_id": name, "turns": "junk" if Spot(name, 0).meets("task is junk") else TURNS}
    for name in (f"t{index}" for index in range(EPISODES))
]


@pytest.fixture
def chaos() -> Iterator[Chaos]:
    chaos = Chaos()
    yield chaos
    chaos.release.set()


async def _counted(
    engine: AgentExecutionEngine, tasks: list[dict[str, Any]]
) -> AsyncGenerator[Episode, None]:
    """The episodes of a run, with a look at the books at every one."""
    seen: Counter[Outcome] = Counter()
    async with aclosing(engine.run(tasks)) as episodes:
        async for episode in episodes:
            assert episode.outcome is not None
            seen[episode.outcome] += 1
            counts = engine.counts
            counts.check()
            assert counts.submitted == len(tasks)
            assert counts.by_outcome == {**dict.fromkeys(Outcome, 0), **seen}
            assert counts.in_flight == len(tasks) - seen.total()
            assert len(engine.live()) <= counts.in_flight + 1  # its worker is on its way to the next
            yield episode


async def test_a_run_survives_every_fault_at_once_and_every_count_is_exact(
    chaos: Chaos, settled: Callable[..., Any]
) -> None:
    engine = chaos.engine()
    fates = {task["task_id"]: fate_of(task["task_id"]) for task in TASKS}
    async with asyncio.timeout(120.0):
        episodes = [episode async for episode in _counted(engine, TASKS)]

    assert {episode.task_id: _became(episode) for episode in episodes} == fates
    assert len(episodes) == EPISODES
    assert engine.counts.in_flight == 0
    assert engine.counts.retries == sum(fate.tries - 1 for fate in fates.values())
    assert engine.counts.call_retries == sum(fate.call_retries for fate in fates.values())
    for episode in episodes:
        (trajectory,) = episode.trajectories
        paid = {Outcome.SCORED: 1.0, Outcome.TRUNCATED: 0.0}.get(episode.outcome or Outcome.CANCELLED)
        assert trajectory.reward == paid, "a failure is never a zero"
        assert ("error" in trajectory.info) == (episode.outcome is not Outcome.SCORED)
    # The plan is a plan: everything happened, and often.
    assert min(Counter(fate.outcome for fate in fates.values()).values()) >= 5
    assert min(chaos.told.values()) >= 5, chaos.told
    await _nothing_is_left(chaos, engine, settled)


async def test_leaving_in_the_middle_of_it_closes_everything(
    chaos: Chaos, settled: Callable[..., Any]
) -> None:
    engine = chaos.engine()
    seen = 0
    async with asyncio.timeout(120.0), aclosing(_counted(engine, TASKS)) as episodes:
        async for _ in episodes:
            seen += 1
            if seen == 40:
                break
    assert engine.counts.by_outcome[Outcome.CANCELLED] == EPISODES - seen
    assert engine.counts.in_flight == 0
    engine.counts.check()
    await _nothing_is_left(chaos, engine, settled)


async def _nothing_is_left(chaos: Chaos, engine: AgentExecutionEngine, settled: Callable[..., Any]) -> None:
    """Sessions, rollouts and asyncio tasks are gone at once; threads as soon as what they are stuck in ends,
    and with them the environments that they were about to make."""
    assert chaos.client.open_sessions == 0
    assert engine.live() == []
    assert asyncio.all_tasks() == {asyncio.current_task()}
    chaos.release.set()
    await settled(lambda: threading.active_count() <= chaos.threads_before)
    assert [str(env.spot) for env in chaos.made if env.num_closed != 1] == []
