"""What engines do where nobody chose: programs that were written for them rely on it."""

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rllm.engine.agent_execution
import rllm.engine.agent_workflow
import rllm.engine.traced
import rllm.engine.workflow_attempt
from rllm.agents.conversation import ConversationAgent
from rllm.agents.frozenlake import FrozenLakeAgent
from rllm.engine.attempts import EpisodeCounts
from rllm.engine.rollout import RolloutLimits
from rllm.engine.split import SplitEngine, WriterEngine
from rllm.engine.supervision import LoopWatchdog, ProgressWatchdog
from rllm.environments.frozenlake import FrozenLakeEnv
from rllm.inference.scripted import ScriptedClient

sys.path.insert(0, str(Path(__file__).parent))
from bad_tasks import program_engine
from small_workflows import TASKS, Asks, engine_of


def chosen(function: Callable[..., Any]) -> dict[str, Any]:
    """Defaults that say something: neither None nor empty."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.default not in (each.empty, None, "")}


OF_ALL = {"seed": 0, "retry_limit": 3, "max_failed_fraction": 1.0, "stored": False}
OF_MODEL_CALLS = {
    "api_retries": 3,
    "retry_wait_s": 0.5,
    "call_timeout_s": 600.0,
    "step_timeout_s": 60.0,
    "model_timeout_s": 480.0,
    "oversampling": 1.0,
    "max_workers": 64,
}


def test_an_engine_of_agents() -> None:
    engine_class = rllm.engine.agent_execution.AgentExecutionEngine
    engine_class(ConversationAgent, FrozenLakeEnv, rollout_engine=ScriptedClient([]))
    assert chosen(engine_class.__init__) == OF_ALL | OF_MODEL_CALLS | {
        "n_parallel_agents": 128,
        "max_steps": 5,
        "max_response_length": 8192,
        "max_prompt_length": 1024,
        "enforce_max_prompt_length": False,
        "gamma": 1.0,
        "overlong_filter": False,
        "requires_ids": False,
    }


def test_an_engine_of_workflows() -> None:
    engine_class = rllm.engine.agent_workflow.AgentWorkflowEngine
    engine_class(Asks, {}, ScriptedClient([]))
    assert chosen(engine_class.__init__) == OF_ALL | OF_MODEL_CALLS | {
        "n_parallel_tasks": 128,
        "raise_on_error": True,
        "episode_timeout_s": 3600.0,
    }
    settings = rllm.engine.workflow_attempt.WorkflowSettings(
        workflow_cls=Asks, workflow_args={}, clients={"": ScriptedClient([])}
    )
    assert (settings.seed, settings.step_timeout_s, settings.episode_timeout_s) == (0, 60.0, 3600.0)


def test_an_engine_of_programs() -> None:
    engine_class = rllm.engine.traced.TracedEngine
    program_engine(lambda: None)
    assert chosen(engine_class.__init__) == OF_ALL | {
        "n_parallel_tasks": 128,
        "episode_timeout_s": 600.0,
        "model_timeout_s": 480.0,
        "evaluator_timeout_s": 60.0,
        "sets_max_tokens": True,
        "requires_ids": False,
    }


async def test_a_task_is_attempted_once_by_each_method_of_each_engine() -> None:
    agents = rllm.engine.agent_execution.AgentExecutionEngine(
        FrozenLakeAgent, FrozenLakeEnv, rollout_engine=ScriptedClient(lambda _: "Down"), max_steps=1
    )
    lake = {"task_id": "lake", "desc": ["SF", "HG"]}
    workflows = engine_of(Asks)
    for number, engine in enumerate((agents, workflows, program_engine(lambda: None))):
        task = ({**lake}, TASKS[0], {"task_id": "t", "is_bad": False})[number]
        assert [episode.rollout_idx async for episode in engine.run([task])] == [0]
        methods = [each for _, each in inspect.getmembers(engine, inspect.ismethod)]
        counts = {chosen(each)["group_size"] for each in methods if "group_size" in chosen(each)}
        assert counts == {1}


def test_watchdogs() -> None:
    class Engine:
        counts = EpisodeCounts()

        def live(self) -> list[Any]:
            return []

    ProgressWatchdog(Engine(), limit_s=1.0)
    LoopWatchdog()
    assert chosen(ProgressWatchdog.__init__) == {"clock": time.monotonic, "grace_s": 5.0}
    assert chosen(LoopWatchdog.__init__) == {"limit_s": 1.0}


def test_the_limits_of_a_rollout() -> None:
    limits = RolloutLimits()
    assert (limits.max_turns, limits.step_timeout_s, limits.episode_timeout_s) == (5, 60.0, 600.0)
    assert limits.patience.retries == 0


def test_an_engine_whose_attempts_are_split_among_ranks_runs_as_the_whole_one_does() -> None:
    whole = chosen(rllm.engine.agent_workflow.AgentWorkflowEngine.run)
    for split_engine in (SplitEngine, WriterEngine):
        assert chosen(split_engine.run) == whole
