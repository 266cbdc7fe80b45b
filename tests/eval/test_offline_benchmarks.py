"""Every benchmark that runs without a network: tasks are made, shown, solved by their expert and failed by
junk.

benchmark ──seed──► the tasks ──► expert's turns ──agent──► environment ──► 1
                              └──► junk ───────────agent──► environment ──► nothing
"""

import json
from typing import Any

import numpy as np
import pytest

from rllm.agents.base import BaseAgent
from rllm.agents.named import agent_named
from rllm.build.asked import Asked
from rllm.build.presentation import Presentation, presentation_of
from rllm.build.providers import resolve_model
from rllm.environments.base import BaseEnv, unpack_step
from rllm.errors import ConfigError
from rllm.eval.catalogue import Benchmark, benchmark_named, benchmarks
from rllm.eval.tasks import benchmark_tasks, benchmark_world
from rllm.sandbox.backends import require_backend

FEW = 4
"""Tasks of a benchmark; `make test-all` plays ten."""
MAX_TURNS = 200
JUNK = ("", "xyzzy")
STRANGER = resolve_model("somebody", base_url="http://127.0.0.1:9/v1")
"""A model that was trained elsewhere, and knows nothing but what it is told."""
CALLS_TOOLS = {"calculator", "shop-desk"}
"""What its expert says are calls, which the engine parses; tests/environments plays it."""
DECIDED_BY_CHANCE = {"blackjack", "frozenlake-slippery"}
"""Their expert does the best there is, which tests/environments compares with exact values, and may lose."""
IN_A_BROWSER = "web"
"""The extra of benchmarks that tests/environments/web plays."""
MODULES = {"games": ("reasoning_gym", "textarena", "minigrid"), "mcp": ("mcp",)}
"""Extra -> what it brings."""


def offline(*, every_member: bool) -> list[str]:
    """Offline benchmarks by name: all but members of families, and one member of each family; or all
    others."""
    names = [
        each.name
        for each in benchmarks()
        if each.offline and each.name not in CALLS_TOOLS and each.extra != IN_A_BROWSER
    ]
    quick = {
        "minigrid/Empty-Random-5x5",
        "reasoning-gym/chain_sum",
        "textarena/Sudoku",
    }
    quick |= {name for name in names if "/" not in name}
    assert quick <= set(names)
    return [name for name in names if (name not in quick) == every_member]


@pytest.mark.parametrize("name", offline(every_member=False))
def test_tasks_are_made_shown_solved_and_failed(name: str) -> None:
    play_tasks(name, FEW)


@pytest.mark.slow
@pytest.mark.filterwarnings(  # of data files and threads that libraries leave open
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::pytest.PytestUnhandledThreadExceptionWarning",
)
@pytest.mark.parametrize("name", offline(every_member=False) + offline(every_member=True))
def test_ten_tasks_of_every_member_of_the_families(name: str) -> None:
    play_tasks(name, 10)


def play_tasks(name: str, num_tasks: int) -> None:
    benchmark = usable(name)
    tasks = benchmark_tasks(benchmark, count=num_tasks, seed=1)
    assert len(tasks) == num_tasks
    assert len({task["task_id"] for task in tasks}) == num_tasks
    assert json.dumps(tasks) == json.dumps(benchmark_tasks(benchmark, count=num_tasks, seed=1))
    assert json.dumps(tasks) != json.dumps(benchmark_tasks(benchmark, count=num_tasks, seed=2))
    for task in tasks:
        if has_expert(benchmark) and name not in DECIDED_BY_CHANCE:
            assert solved(benchmark, task), f"the expert fails at {task['task_id']}"
        for junk in JUNK:
            assert not failed(benchmark, task, junk), f"{junk!r} is paid at {task['task_id']}"


def usable(name: str) -> Benchmark:
    benchmark = benchmark_named(name)
    for module in MODULES.get(benchmark.extra, ()):
        pytest.importorskip(module)
    if benchmark.category == "code":
        try:
            require_backend("bubblewrap")
        except ConfigError as missing:
            pytest.skip(str(missing))
    return benchmark


def has_expert(benchmark: Benchmark) -> bool:
    """Every world has one, but for games of TextArena and levels of MiniGrid that nobody here solves."""
    known = benchmark_world(benchmark).demonstrate is not None
    assert known or benchmark.name.startswith(("textarena/", "minigrid/", "babyai/"))
    return known


def solved(benchmark: Benchmark, task: dict[str, Any]) -> bool:
    """Whether what the expert says, turn by turn and in the form that the prompt names, earns the whole
    reward."""
    demonstrate = benchmark_world(benchmark).demonstrate
    assert demonstrate is not None
    turns = demonstrate(task, noise=0.0, rng=np.random.default_rng(0))
    rewards = [reward for reward, _ in play(benchmark, task, [answer for _, answer in turns])]
    return sum(rewards) == pytest.approx(1.0, abs=0.05)


def failed(benchmark: Benchmark, task: dict[str, Any], junk: str) -> bool:
    """Whether saying the same nonsense until the end earns anything."""
    return sum(reward for reward, _ in play(benchmark, task, [junk] * MAX_TURNS)) > 0.0


def play(benchmark: Benchmark, task: dict[str, Any], answers: list[str]) -> list[tuple[float, bool]]:
    """(reward, done) of each turn until the episode ends or the answers do."""
    agent: BaseAgent = agent_named(benchmark.agent)(**shown_to_strangers(benchmark).agent_args)
    environment: BaseEnv = benchmark_world(benchmark).env_class.from_dict(task)
    played: list[tuple[float, bool]] = []
    try:
        agent.reset()
        observation, info = environment.reset()
        agent.update_from_env(observation, 0.0, False, info)
        for answer in answers:
            assert shown(agent), "the model is asked something"
            written = in_form(answer, agent) if answer not in JUNK else answer
            said = unpack_step(environment, environment.step(agent.update_from_model(written)))
            agent.update_from_env(said.observation, said.reward, said.done, said.info)
            played.append((said.reward, said.done))
            if said.done:
                break
        assert played[-1][1], "the episode ended"
    finally:
        environment.close()
    return played


def shown_to_strangers(benchmark: Benchmark) -> Presentation:
    return presentation_of(Asked(benchmark=benchmark.name, place=STRANGER), benchmark)


def in_form(answer: str, agent: BaseAgent) -> str:
    """The answer after a thought, marked as the conversation asks for it."""
    prompt = "\n".join(str(message.get("content")) for message in agent.chat_completions)
    if "```" in answer or "<answer>" in answer:
        return f"So be it.\n{answer}"
    if "```python" in prompt:
        return f"So be it.\n```python\n{answer}\n```"
    assert "<answer>" in prompt, f"no form of an answer is named: {prompt}"
    return f"So be it.\n<answer>{answer}</answer>"


def shown(agent: BaseAgent) -> bool:
    return any(message.get("content") for message in agent.chat_completions)
