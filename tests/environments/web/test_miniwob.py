"""MiniWoB++'s tasks, their rewards and seeds, in a real Chromium."""

import asyncio
import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from rllm.agents.web import WebAgent
from rllm.cli.main import rllm
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.web import MiniWobEnv
from rllm.environments.web.browser import MAX_IDLE, BrowserThread
from rllm.environments.web.miniwob import task_names
from rllm.environments.worlds import world_named
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named, benchmark_names
from rllm.inference.scripted import ScriptedClient

MOVES = ("chase-circle", "click-pie", "moving-items", "stock-market")
"""Their pages change by themselves, so that no two observations are the same."""


def test_every_task_of_the_wheel_is_a_benchmark(chromium: str) -> None:
    assert {f"miniwob/{name}" for name in task_names()} == {
        name for name in benchmark_names() if name.startswith("miniwob/")
    }
    tasks = world_named(benchmark_named("miniwob").environment).tasks("test", 2 * len(task_names()))
    assert {task["name"] for task in tasks} == set(task_names())
    with pytest.raises(ConfigError, match="did you mean `click-test`"):
        MiniWobEnv("click-tset", 0)


def test_splits_share_no_seed(chromium: str) -> None:
    world = world_named("miniwob/click-test")
    seeds = [{task["seed"] for task in world.tasks(split, 50)} for split in ("train", "validation", "test")]
    assert len(set.union(*seeds)) == 150


async def test_a_task_is_solved_and_failed_and_pays_its_own_reward(chromium: str) -> None:
    env = MiniWobEnv("click-checkboxes", 5)
    text, _ = await env.reset()
    names = re.match(r"Goal: Select (.*) and click Submit", text)[1].split(", ")  # type: ignore[index]
    boxes = {name: bid for bid, name in re.findall(r'\[(\d+)\] checkbox "(.*)"', text)}
    submit = re.search(r'\[(\d+)\] button "Submit"', text)[1]  # type: ignore[index]
    clicks = [f'click("{boxes[name]}")' for name in names if name != "nothing"]
    *_, reward, done, info = await env.step("\n".join([*clicks, f'click("{submit}")']))
    assert (reward, done, info["is_correct"]) == (1.0, True, True)
    again, _ = await env.reset()
    assert again == text, "the same seed is the same page, whatever was done before"
    wrong = [f'click("{bid}")' for name, bid in boxes.items() if name not in names]
    *_, reward, done, info = await env.step("\n".join([*wrong, f'click("{submit}")']))
    assert reward < 1
    assert (done, info["is_correct"]) == (True, False)
    env.close()


async def test_an_easier_task_is_not_played_in_place_of_the_real_one(chromium: str) -> None:
    """Nor the same one, loaded again. Another tab is no way out; other episodes are not gone back to."""
    other = MiniWobEnv("click-test-2", 2)
    await other.reset()
    other.close()
    env = MiniWobEnv("click-checkboxes", 5)
    await env.reset()
    text, _, done, _ = await env.step("go_back()")
    assert "no such page" in text
    assert not done
    _, _, done, info = await env.step("new_tab()")
    assert not done
    assert info["valid"]
    await env.step("tab_focus(0)")
    *_, reward, done, info = await env.step('goto("http://miniwob.test/miniwob/click-test.html")')
    assert (reward, done, info["is_correct"]) == (0.0, True, False)
    await env.reset()
    *_, reward, done, info = await env.step('goto("http://miniwob.test/miniwob/click-checkboxes.html")')
    assert (reward, done, info["reason"]) == (0.0, True, "the page of the task was left")
    env.close()


@pytest.mark.slow
async def test_an_episode_does_not_depend_on_those_before_it_in_the_context(chromium: str) -> None:
    """Each task after another episode of the same page, with clicks in it, is what it is in a new page."""
    differing: list[str] = []
    for name in task_names():
        env = MiniWobEnv(name, 7)
        fresh, _ = await env.reset()
        other = MiniWobEnv(name, 8)
        env.close()
        await other.reset()
        *_, done, _ = await other.step('click("1")\nclick("2")')
        if not done:
            await other.step('click("3")')
        other.close()
        again, _ = await env.reset()
        env.close()
        if fresh != again and name not in MOVES:
            differing.append(name)
    assert differing == []


@pytest.mark.slow
async def test_a_timed_episode_ends_by_its_own_clock(chromium: str) -> None:
    env = MiniWobEnv("click-button", 1, has_limit=True)
    await env.reset()
    done = False
    for _ in range(5):
        _, reward, done, _ = await env.step("noop(5000)")
        if done:
            break
    assert (done, reward) == (True, -1.0)
    env.close()


@pytest.mark.parametrize("name", ["click-button", "enter-text-dynamic", "click-checkboxes"])
def test_an_expert_solves_it_and_gives_up_at_the_end_where_it_errs(chromium: str, name: str) -> None:
    demonstrates_in_browser(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "choose-list",
        "click-checkboxes-transfer",
        "click-color",
        "click-option",
        "enter-text",
        "form-sequence-2",
        "identify-shape",
    ],
)
def test_other_experts_solve_theirs(chromium: str, name: str) -> None:
    demonstrates_in_browser(name)


def demonstrates_in_browser(name: str) -> None:
    world = world_named(f"miniwob/{name}")
    expert = world.expert({})
    assert expert is not None
    for task in world.tasks("validation", 3):
        (turn,) = expert(task, 0.0, np.random.default_rng(0))
        assert asyncio.run(paid(task, turn)) == 1.0
        (erring,) = expert(task, 1.0, np.random.default_rng(0))
        assert erring[0] == turn[0]
        assert str(erring[1]).splitlines()[:-1] == str(turn[1]).splitlines()[:-1]
        assert asyncio.run(paid(task, erring)) == 0.0


async def paid(task: dict[str, Any], turn: tuple[Any, Any]) -> float:
    env = MiniWobEnv.from_dict(task)
    page, _ = await env.reset()
    assert page == turn[0], "it answers the page that an agent is shown"
    *_, reward, done, _ = await env.step(turn[1])
    env.close()
    assert done
    return reward


def test_pages_of_demonstrations_are_played_once_whatever_a_task_is_called(
    chromium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_named("miniwob/click-button")
    expert, (task,) = world.expert({}), world.tasks("train", 1, start=77)
    resets: list[int] = []
    reset = MiniWobEnv.reset_in

    async def counted(env: MiniWobEnv, thread: BrowserThread) -> Any:
        resets.append(env.seed)
        return await reset(env, thread)

    monkeypatch.setattr(MiniWobEnv, "reset_in", counted)
    assert expert is not None
    for epoch in range(3):  # the sampler calls a task anew each time that it comes up
        expert({**task, "task_id": f"{task['task_id']}@{epoch}"}, 0.5, np.random.default_rng(epoch))
    assert resets == [task["seed"]]


def test_a_block_of_one_page_says_all_that_a_run_needs(chromium: str) -> None:
    words = ["train", "miniwob/enter-text-dynamic", "--dry-run", "--json"]
    plan = CliRunner().invoke(rllm, words, catch_exceptions=False)
    config = json.loads(plan.stdout)["config"]
    assert config["task"]["environment_args"] == {"max_turns": 1}
    assert config["rollout"]["num_parallel"] <= MAX_IDLE, "else contexts are closed and opened at each step"


def test_simple_policies_are_played_in_the_browser(chromium: str) -> None:
    world = world_named("miniwob/enter-text-dynamic")
    assert world.baselines is not None
    returns = world.baselines(world.tasks("validation", 3))
    random, constant, best = returns.values()
    assert list(returns)[0::2] == ["random", "optimum"]
    assert list(returns)[1].startswith('always fill("1", ')
    assert (list(random), list(best)) == ([-1.0] * 3, [1.0] * 3)
    assert sorted(constant) == [-1.0, -1.0, 1.0]
    assert world_named("miniwob/terminal").expert({}) is None


def test_what_an_expert_notes_beside_its_actions_makes_no_other_policy(chromium: str) -> None:
    """Signs differ nearly always; that most of them are letters, say, is what a policy can know."""
    world = world_named("miniwob/identify-shape")
    expert, tasks = world.expert({}), world.tasks("validation", 16)
    assert expert is not None
    assert world.baselines is not None
    answers = [str(expert(task, 0.0, np.random.default_rng(0))[0][1]).split("\n") for task in tasks]
    notes, clicks = zip(*answers, strict=True)
    assert {note[:2] for note in notes} == {"# "}
    (click, number), *_ = Counter(clicks).most_common(1)
    assert number > Counter(notes).most_common(1)[0][1]
    constant = world.baselines(tasks)[f"always {click}"]
    assert sum(reward == 1.0 for reward in constant) == number


async def test_an_agent_plays_it_through_the_engine(chromium: str) -> None:
    task = world_named("miniwob/click-test").tasks("test", 1)[0]
    client = ScriptedClient(['I see the button.\n```\nclick("1")\n```'])
    engine = AgentExecutionEngine(WebAgent, MiniWobEnv, rollout_engine=client, max_prompt_length=8192)
    (trajectory,) = await engine.execute_tasks([task])
    assert trajectory.reward == 1.0
