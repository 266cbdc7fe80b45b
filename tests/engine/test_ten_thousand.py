"""FrozenLake by the thousand, a third of all tries lost to the infrastructure, and every count exact.

maps ──► played by hand, without an engine ──► what each episode is worth ─┐
    └──► AgentExecutionEngine, 30 % of tries fail ──► episodes ────────────┴─► the same, one by one
"""

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any

import pytest

from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.base import CUT_OFF
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.environments.lake_values import MOVES
from rllm.inference.scripted import ScriptedClient
from rllm.types.draws import draw_seed
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import Message, SamplingParams

NUM_MAPS, MAX_STEPS, TRIES = 200, 6, 3
FAILING = 0.3


def failing_turn(task_id: str, number: int) -> int | None:
    """Before which turn the environment fails in this try: 0 is when it is made; None lets it live."""
    drawn = draw_seed("flaky", task_id, number) % 10_000
    return drawn % (MAX_STEPS + 1) if drawn < 10_000 * FAILING else None


def move_on(grid: str) -> str:
    """What the scripted model does when it is shown this grid: the goal's direction more often than not."""
    drawn = draw_seed("move", grid) % 10
    return MOVES[drawn] if drawn < len(MOVES) else ("Right", "Down")[drawn % 2]


def model(messages: Sequence[Message]) -> str:
    return move_on(messages[-1]["content"])


@lru_cache(maxsize=NUM_MAPS)
def played_by_hand(seed: int) -> tuple[list[float], bool]:
    """Rewards of an episode on map `seed`, and whether it came to its own end."""
    env, rewards = FrozenLakeEnv(seed=seed, max_steps=MAX_STEPS), []
    grid, done, info = env.reset()[0], False, {}
    while not done:
        grid, reward, done, info = env.step(move_on(grid))
        rewards.append(reward)
    return rewards, CUT_OFF not in info


class Fate:
    """What must become of one task."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.rewards, came_to_its_end = played_by_hand(task["seed"])
        self.num_lost = 0
        for number in range(1, TRIES + 1):
            turn = failing_turn(task["task_id"], number)
            if turn is None or turn > len(self.rewards):  # it would have failed later than it ended
                break
            self.num_lost += 1
        if self.num_lost == TRIES:
            self.outcome = Outcome.INFRASTRUCTURE_FAILURE
        else:
            self.outcome = Outcome.SCORED if came_to_its_end else Outcome.TRUNCATED


def flaky_lake() -> tuple[type[FrozenLakeEnv], "Counter[str]"]:
    """An environment class that fails by the plan, and how many of its kind were made and closed."""
    tries: Counter[str] = Counter()
    books: Counter[str] = Counter()
    lock = threading.Lock()

    class FlakyLake(FrozenLakeEnv):
        fails_at: int | None = None
        turn = 0

        def step(self, action: Any) -> Any:
            self.turn += 1
            if self.fails_at == self.turn:
                raise ConnectionResetError("the sandbox is gone")
            return super().step(action)

        def close(self) -> None:
            with lock:
                books["closed"] += 1

        @staticmethod
        def from_dict(info: dict[str, Any]) -> FrozenLakeEnv:
            with lock:
                tries[info["task_id"]] += 1
                fails_at = failing_turn(info["task_id"], tries[info["task_id"]])
            if fails_at == 0:
                raise OSError("no sandbox to be had")
            env = FlakyLake(seed=info["seed"], max_steps=info["max_steps"])
            env.fails_at = fails_at
            with lock:
                books["made"] += 1
            return env

    return FlakyLake, books


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_thousands_of_episodes_with_a_third_of_failures_are_counted_exactly(count: int) -> None:
    tasks: list[dict[str, Any]] = [
        {"task_id": f"lake-{index}", "seed": index % NUM_MAPS, "max_steps": MAX_STEPS}
        for index in range(count)
    ]
    fates = {task["task_id"]: Fate(task) for task in tasks}
    env_class, books = flaky_lake()
    client = ScriptedClient(model)
    engine = AgentExecutionEngine(
        FrozenLakeAgent,
        env_class,
        rollout_engine=client,
        sampling_params=SamplingParams(max_tokens=8),
        n_parallel_agents=count // 10,
        max_steps=MAX_STEPS,
        retry_limit=TRIES,
        retry_wait_s=0.0,
        seed=3,
    )
    outcomes: Counter[Outcome] = Counter()
    seen: set[str] = set()
    num_tokens = 0
    async with aclosing(engine.run(tasks)) as episodes:
        async for episode in episodes:
            assert episode.task_id not in seen, "handed out twice"
            seen.add(episode.task_id)
            _require(episode, fates[episode.task_id])
            assert episode.outcome is not None
            outcomes[episode.outcome] += 1
            num_tokens += sum(len(step.response_ids) for step in episode.trajectories[0].steps)
            counts = engine.counts
            assert counts.by_outcome == {**dict.fromkeys(Outcome, 0), **outcomes}
            assert (counts.submitted, counts.in_flight) == (count, count - len(seen))

    assert seen == set(fates)
    assert outcomes == Counter(fate.outcome for fate in fates.values())
    assert min(outcomes.values()) > count // 100, "every outcome was there"
    assert engine.counts.retries == sum(min(fate.num_lost, TRIES - 1) for fate in fates.values())
    assert num_tokens > 0
    assert books["made"] == books["closed"] > count
    assert client.open_sessions == 0
    # Every answer was asked for once: by the episodes that are left, and by the tries that were lost.
    assert len(client.requests) == sum(_num_calls(task, fates[task["task_id"]]) for task in tasks)


def _require(episode: Episode, fate: Fate) -> None:
    (trajectory,) = episode.trajectories
    assert episode.outcome is fate.outcome
    assert episode.info["tries"] == min(TRIES, fate.num_lost + 1)
    if fate.outcome is Outcome.INFRASTRUCTURE_FAILURE:
        assert trajectory.reward is None, "a failure is never a zero"
    else:
        assert [step.reward for step in trajectory.steps] == fate.rewards
        assert trajectory.reward == sum(fate.rewards)


def _num_calls(task: dict[str, Any], fate: Fate) -> int:
    """Model calls of an episode in all its tries: one before each step, the failing one included."""
    lost = [failing_turn(task["task_id"], number + 1) or 0 for number in range(fate.num_lost)]
    return sum(lost) + (len(fate.rewards) if fate.num_lost < TRIES else 0)
