"""The calculator's world: problems, a server that really answers, and an expert who knows how to use it."""

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rllm.agents import ToolAgent
from rllm.build.demonstrations import demonstration_samples, play_demonstration
from rllm.engine.rollout import run_trajectory
from rllm.environments import MCPEnvironment, check_env
from rllm.environments.calculator import MISTAKES, WORLD, calculator_tasks, demonstration, tools_of
from rllm.errors import ConfigError
from rllm.eval.catalogue import benchmark_named
from rllm.inference.scripted import ScriptedClient
from rllm.models.builtin import create_model
from rllm.models.directory import LoadedModel, load_model
from rllm.rendering.chat import ChatRenderer
from rllm.tools.mcp import MCPServer
from rllm.tools.mcp_sessions import shared_pool
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Outcome

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    create_model(directory)
    return load_model(directory)


def test_problems_are_functions_of_their_split_and_number_and_splits_share_none() -> None:
    sets: dict[str, set[tuple[Any, ...]]] = {}
    for split in ("train", "validation", "test"):
        tasks = calculator_tasks(split, 200)
        assert tasks[50:60] == calculator_tasks(split, 10, start=50)
        sets[split] = {(*sorted(task["numbers"]), task["sign"]) for task in tasks}
    assert not sets["train"] & sets["test"]
    assert not sets["train"] & sets["validation"]
    assert not sets["test"] & sets["validation"]


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_256_tasks_in_a_row_are_as_many_problems_half_of_them_sums(split: str) -> None:
    tasks = calculator_tasks(split, 256, operators="+-")
    assert len({(*sorted(task["numbers"]), task["sign"]) for task in tasks}) == 256
    assert len(set(map(WORLD.identity, tasks))) == 256
    assert Counter(map(WORLD.kind, tasks)) == {"sums": 128, "differences": 128}


def test_who_always_takes_one_tool_is_right_half_of_the_time_and_who_guesses_hardly_ever() -> None:
    tasks = calculator_tasks("validation", 64, operators="+-")
    assert WORLD.baselines is not None
    means = {name: np.mean(values) for name, values in WORLD.baselines(tasks).items()}
    assert means["always add"] == means["always subtract"] == 0.5
    assert means["optimum"] == 1.0
    constants = [name for name in means if name.startswith("always ") and name[7:].lstrip("-").isdigit()]
    assert all(means[name] < 0.1 for name in ("random", *constants))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"min_number": 5, "max_number": 5}, "`min_number` is 5"),
        ({"operators": "+/"}, "`operators` is '\\+/'"),
        ({"operators": ""}, "`operators` is ''"),
        ({"server": "docker"}, "in-process or stdio"),
        ({"start": -1}, "`start` is -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changes: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        calculator_tasks("train", 1, **changes)
    with pytest.raises(ConfigError, match="`split` is 'tset'"):
        calculator_tasks("tset", 1)


async def _played(task: dict[str, Any], turns: Any) -> Any:
    """The expert's answers through the real environment and its server."""
    script = [_text(answer) for _, answer in turns]
    client = ScriptedClient(script)
    trajectory = await run_trajectory(ToolAgent(""), MCPEnvironment.from_dict(task), client)
    return trajectory, client


def _text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    function = answer["tool_calls"][0]["function"]
    return (
        f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
    )


async def test_the_expert_is_right_and_sees_what_the_server_really_answers() -> None:
    for task in calculator_tasks("test", 12):
        turns = demonstration(task, noise=0.0, rng=np.random.default_rng(0))
        trajectory, client = await _played(task, turns)
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 1.0)
        assert client.requests[1][-1]["content"] == turns[1][0]["tool_outputs"]["call_0"]
        assert client.offered[0] == turns[0][0]["tools"] == tools_of(task["mcp_servers"]["calculator"])


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_each_mistake_of_the_expert_costs_the_reward(mistake: str) -> None:
    expert = WORLD.expert({"mistakes": [mistake]})
    assert expert is not None
    for number, task in enumerate(calculator_tasks("train", 6)):
        turns = expert(task, 1.0, np.random.default_rng(number))
        assert len(turns) == (1 if mistake == "no_tool" else 2)
        trajectory, _ = await _played(task, turns)
        assert (trajectory.outcome, trajectory.reward) == (Outcome.SCORED, 0.0)


def test_an_expert_knows_its_mistakes_only() -> None:
    task = calculator_tasks("train", 1)[0]
    with pytest.raises(ConfigError, match="experts know no_tool"):
        demonstration(task, noise=1.0, rng=np.random.default_rng(0), mistakes=["sleeps"])
    (alone,) = calculator_tasks("train", 1, operators="-")
    with pytest.raises(ConfigError, match=r"subtract .*only"):
        demonstration(alone, noise=1.0, rng=np.random.default_rng(0), mistakes=["wrong_tool"])
    with pytest.raises(ConfigError, match="`noise` is 2"):
        demonstration(task, noise=2.0, rng=np.random.default_rng(0))


async def test_the_server_may_be_a_process_of_its_own() -> None:
    (task,) = calculator_tasks("test", 1, server="stdio")
    turns = demonstration(task, noise=0.0, rng=np.random.default_rng(0))
    trajectory, _ = await _played(task, turns)
    assert trajectory.reward == 1.0


def test_the_shipped_block_calls_a_server_in_another_process_over_mcp() -> None:
    (task,) = calculator_tasks("train", 1, **benchmark_named("calculator").task)
    server = MCPServer.from_dict(task["mcp_servers"]["calculator"], "calculator")
    with shared_pool(server).lease() as lease:
        assert lease.pid not in (None, os.getpid())
        names = [tool["function"]["name"] for tool in tools_of(task["mcp_servers"]["calculator"])]
        assert names == ["add", "subtract"]
        assert lease.call("add", {"a": 472, "b": 385}).content[0].text == "857"


def test_it_keeps_the_contract_of_environments() -> None:
    (task,) = calculator_tasks("test", 1)
    env = MCPEnvironment.from_dict(task)
    check_env(env, "857")
    env.close()


def test_a_demonstration_becomes_rows_in_the_models_own_format(tiny: LoadedModel) -> None:
    """Calls as its template writes them; what the tool said is read and not learned."""
    renderer = ChatRenderer(tiny.tokenizer)
    tasks = calculator_tasks("train", 8)
    samples = demonstration_samples(
        tasks,
        lambda task, noise, rng: demonstration(task, noise=noise, rng=rng),
        lambda: ToolAgent(""),
        renderer,
        tiny.end_token_ids[0],
        noise=0.0,
        key=(0, "warm_start"),
        num_experts=1,
    )
    for sample, task in zip(samples, tasks, strict=True):
        answer = task["grading"]["answer"]
        ids, learned = sample.token_ids_T, sample.trainable_T
        said = "".join(map(tiny.tokenizer.token_text, ids[learned].tolist()))
        tool = {"+": "add", "-": "subtract", "*": "multiply"}[task["sign"]]
        first, second = task["numbers"]
        assert said == (
            f'<tool_call>\n{{"name": "{tool}", "arguments": {{"a": {first}, "b": {second}}}}}\n</tool_call>'
            f"<|end|>{answer}<|end|>"
        )
        read = "".join(map(tiny.tokenizer.token_text, ids[~learned].tolist()))
        assert read.endswith(f"{task['question']}<|end|><|assistant|><|tool|>{answer}<|end|><|assistant|>")


def test_a_played_demonstration_is_the_conversation_as_the_template_writes_it(tiny: LoadedModel) -> None:
    renderer = ChatRenderer(tiny.tokenizer)
    (task,) = calculator_tasks("train", 1)
    turns = demonstration(task, noise=0.0, rng=np.random.default_rng(0))
    agent = play_demonstration(turns, ToolAgent("rules"), renderer, tiny.end_token_ids[0])
    for step in agent.trajectory.steps:
        assert step.prompt_ids == renderer.render(step.chat_completions[:-1], agent.tool_schemas)
    (row,) = trajectory_rows(agent.trajectory, "task", 0, 0, 1.0)
    last = agent.trajectory.steps[-1]
    assert row.token_ids_T.tolist() == last.prompt_ids + last.response_ids
