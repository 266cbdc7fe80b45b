"""Bad input: what can be known when an engine is made is said then, with class, method and mend."""

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from rllm.agents.base import BaseAgent
from rllm.engine import AgentExecutionEngine, TokenBudget
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError, ConfigError, RewardError
from rllm.inference.scripted import ScriptedClient
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import ModelOutput, SamplingParams

Env = type[Any]
Agent = type[Any]


def _engine(agent_class: Any, env_class: Any, **how: Any) -> AgentExecutionEngine:
    how.setdefault("rollout_engine", ScriptedClient(lambda messages: "go"))
    return AgentExecutionEngine(agent_class, env_class, **how)


async def _all(engine: AgentExecutionEngine, tasks: list[dict[str, Any]], **how: Any) -> list[Episode]:
    async with aclosing(engine.run(tasks, **how)) as episodes:
        return [episode async for episode in episodes]


async def _async_answer(self: Any, response: str, **kwargs: Any) -> Any: ...


def _with(base: type, name: str, method: Any) -> type:
    return type("Bad", (base,), {name: method})


@pytest.mark.parametrize(
    ("name", "method", "says"),
    [
        ("update_from_env", lambda self, observation: None, r"Bad.update_from_env\(.*too many"),
        ("update_from_model", lambda self: None, r"update_from_model\(response\)"),
        ("reset", lambda self, task: None, "missing a required argument: 'task'"),
        ("chat_completions", lambda self: [], "put @property above it"),
        ("trajectory", lambda self: None, "put @property above it"),
        ("update_from_model", _async_answer, "Bad.update_from_model is async, but agents are called"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_by_method(
    agent_class: Agent, env_class: Env, name: str, method: Any, says: str
) -> None:
    with pytest.raises(AgentError, match=says):
        _engine(_with(agent_class, name, method), env_class)


@pytest.mark.parametrize(
    ("name", "method", "says"),
    [
        ("step", lambda self: None, r"Bad.step.*cannot.*step\(action\)"),
        ("reset", lambda self, task: None, "Bad.reset"),
        ("close", lambda self, now: None, "Bad.close"),
        ("from_dict", lambda self, info: None, "put @staticmethod above it"),
        ("from_dict", staticmethod(lambda: None), r"from_dict\(info\)"),
        ("is_multithread_safe", staticmethod(lambda: "yes"), "must be True or False"),
    ],
)
def test_an_environment_that_cannot_be_called_is_refused_by_method(
    agent_class: Agent, env_class: Env, name: str, method: Any, says: str
) -> None:
    with pytest.raises(AgentError, match=says):
        _engine(agent_class, _with(env_class, name, method))


def test_methods_that_are_left_to_be_written_are_listed(agent_class: Agent, env_class: Env) -> None:
    class Half(BaseEnv):
        def reset(self, seed: int | None = None) -> Any: ...

    with pytest.raises(AgentError, match=r"Half .*from_dict, step"):
        _engine(agent_class, Half)
    half = type("HalfAgent", (BaseAgent,), {"reset": lambda self: None})
    with pytest.raises(AgentError, match=r"HalfAgent does not define .*update_from_env"):
        _engine(half, env_class)


def test_arguments_that_the_agent_does_not_take_are_refused(agent_class: Agent, env_class: Env) -> None:
    with pytest.raises(AgentError, match=r"'size'.*`agent_args`"):
        _engine(agent_class, env_class, agent_args={"size": 3})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"chat_parser": object()}, "`chat_parser`"),
        ({"config": {"a": 1}}, "`config`"),
        ({"engine_name": "openai"}, "`engine_name` is 'openai', but `rollout_engine` is given"),
        ({"rollout_engine_args": {"model": "m"}}, "`rollout_engine_args`"),
        ({"tokenizer": "dir"}, "`tokenizer`"),
        ({"rollout_engine": None, "engine_name": "sglang"}, "`engine_name` is 'sglang'"),
        ({"rollout_engine": None, "engine_name": "verl"}, 'AgentTrainer\\(backend="verl"\\).*"vllm"'),
        ({"max_workers": 0}, "`max_workers` is 0"),
        ({"max_workers": "4"}, r"`max_workers`.*'4'"),
        ({"max_steps": 2.5}, r"`max_steps`.*2.5"),
        ({"seed": "x"}, "`seed` is 'x'"),
        ({"gamma": float("nan")}, "`gamma` is nan"),
        ({"gamma": 1.5}, "`gamma` is 1.5"),
        ({"max_prompt_length": -1}, "`max_prompt_length` is -1"),
        ({"max_response_length": -1}, "`max_response_length` is -1"),
        ({"trajectory_timeout": 0.0}, "`trajectory_timeout` is 0"),
        ({"step_timeout_s": -1.0}, "`step_timeout_s` is -1"),
        ({"call_timeout_s": 0.0}, "`call_timeout_s` is 0"),
        ({"deadline_s": 0.0}, "`deadline_s` is 0"),
        ({"oversampling": 0.5}, "`oversampling` is 0.5"),
        ({"oversampling": float("inf")}, "`oversampling` is inf"),
        ({"api_retries": -1}, "`api_retries` is -1"),
        ({"retry_wait_s": -1.0}, "`retry_wait_s` is -1"),
        ({"sampling_params": {"temprature": 1.0}}, "did you mean `temperature`"),
        ({"sampling_params": {"logit_bias": {}}}, "`logit_bias`"),
        ({"sampling_params": {"temperature": -1.0}}, "`temperature` is -1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    agent_class: Agent, env_class: Env, how: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        _engine(agent_class, env_class, **how)


def test_an_engine_without_a_way_to_answer_is_refused(agent_class: Agent, env_class: Env) -> None:
    with pytest.raises(AgentError, match="get_model_response"):
        _engine(agent_class, env_class, rollout_engine=object())


def test_published_arguments_are_honoured_under_their_names(agent_class: Agent, env_class: Env) -> None:
    engine = _engine(
        agent_class,
        env_class,
        max_prompt_length=100,
        max_response_length=200,
        enforce_max_prompt_length=True,
        trajectory_timeout=None,
        sampling_params={"temperature": 0.6, "top_p": 0.95, "stop": "END"},
        max_steps=7,
        api_retries=2,
    )
    assert engine.limits.budget == TokenBudget(
        max_prompt_tokens=100, max_response_tokens=200, every_prompt=True
    )
    assert engine.sampling == SamplingParams(temperature=0.6, top_p=0.95, stop=("END",), max_tokens=200)
    assert (engine.limits.max_turns, engine.limits.episode_timeout_s) == (7, None)
    assert engine.limits.patience.retries == 2


async def test_a_named_engine_is_made_with_the_model_of_the_sampling_parameters_and_closed(
    agent_class: Agent, env_class: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    client = ScriptedClient(lambda messages: "go")

    def make_client(name: str, args: Mapping[str, Any], *, tokenizer: Any = None) -> ScriptedClient:
        made.append((name, dict(args), tokenizer))
        return client

    closed: list[bool] = []

    async def close(self: ScriptedClient) -> None:
        closed.append(True)

    monkeypatch.setattr(ScriptedClient, "close", close)
    monkeypatch.setattr("rllm.inference.engines.make_client", make_client)
    async with AgentExecutionEngine(
        agent_class,
        env_class,
        tokenizer="some/model",
        rollout_engine_args={"base_url": "http://127.0.0.1:1/v1"},
        sampling_params={"model": "m", "temperature": 0.0},
    ) as engine:
        (trajectory,) = await engine.execute_tasks([{"task_id": "t"}])
    assert made == [("openai", {"base_url": "http://127.0.0.1:1/v1", "model": "m"}, "some/model")]
    assert (trajectory.outcome, closed) == (Outcome.SCORED, [True])


async def test_an_engine_of_the_published_kind_needs_only_get_model_response(
    agent_class: Agent, env_class: Env
) -> None:
    asked: list[dict[str, Any]] = []

    class Published:
        async def get_model_response(self, messages: list[dict[str, Any]], **sampling: Any) -> ModelOutput:
            asked.append(sampling)
            return ModelOutput(text="go", usage={"prompt_tokens": 3, "completion_tokens": 1})

    engine = _engine(agent_class, env_class, rollout_engine=Published(), sampling_params={"temperature": 0.5})
    (episode,) = await _all(engine, [{"task_id": "t"}])
    assert episode.outcome is Outcome.SCORED
    assert [each["temperature"] for each in asked] == [0.5, 0.5]
    assert len({each["seed"] for each in asked}) == 2
    training = _engine(agent_class, env_class, rollout_engine=Published(), requires_ids=True)
    with pytest.raises(ConfigError, match=r"PublishedClient .*turn 1 .*ids"):
        await _all(training, [{"task_id": "t"}])


async def test_an_engine_that_returns_junk_is_named(agent_class: Agent, env_class: Env) -> None:
    class Junk:
        async def get_model_response(self, messages: list[dict[str, Any]], **sampling: Any) -> Any:
            return "go"

    engine = _engine(agent_class, env_class, rollout_engine=Junk())
    with pytest.raises(AgentError, match=r"Junk.get_model_response returned 'go'"):
        await _all(engine, [{"task_id": "t"}])


@pytest.mark.parametrize(
    ("property_name", "value", "says"),
    [
        ("chat_completions", "hello", "chat_completions is 'hello'"),
        ("chat_completions", [], r"chat_completions is \[\]"),
        ("chat_completions", [{"role": "user", "content": 7}], "chat_completions ends with .* 7"),
        ("trajectory", None, "trajectory is None"),
    ],
)
async def test_an_agent_that_returns_junk_is_named(
    agent_class: Agent, env_class: Env, property_name: str, value: Any, says: str
) -> None:
    bad = _with(agent_class, property_name, property(lambda self: value))
    with pytest.raises(AgentError, match=f"Bad.{says}"):
        await _all(_engine(bad, env_class), [{"task_id": "t"}])


async def test_an_environment_that_returns_nan_is_named(agent_class: Agent, env_class: Env) -> None:
    task = {"task_id": "t", "trouble": {1: {"answer:1": ("o", float("nan"), False, {})}}}
    with pytest.raises(RewardError, match=r"Env.step returned nan"):
        await _all(_engine(agent_class, env_class), [task])


async def test_from_dict_that_returns_something_else_is_named(agent_class: Agent, env_class: Env) -> None:
    bad = _with(env_class, "from_dict", staticmethod(lambda info: None))
    with pytest.raises(AgentError, match=r"Bad\.from_dict returned None"):
        await _all(_engine(agent_class, bad), [{"task_id": "t"}])


@pytest.mark.parametrize("value", [float("nan"), {"heat": float("inf")}, np.array([0.0, np.nan])])
@pytest.mark.parametrize("method", ["reset", "step"])
async def test_an_observation_that_is_no_number_is_named(
    agent_class: Agent, env_class: Env, method: str, value: Any
) -> None:
    def reset(self: Any) -> Any:
        return value, {}

    def step(self: Any, action: Any) -> Any:
        return value, 0.0, False, {}

    bad = _with(env_class, method, {"reset": reset, "step": step}[method])
    bad.from_dict = staticmethod(lambda info: bad(info))  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AgentError, match=rf"Bad\.{method} .*observation .*(nan|inf)"):
        await _all(_engine(agent_class, bad), [{"task_id": "t"}])


async def test_the_record_of_an_environment_that_raises_names_class_and_method(
    agent_class: Agent, env_class: Env
) -> None:
    def make(info: dict[str, Any]) -> Any:
        return bad(info) if info["kind"] == "reset" else info["map"]

    def reset(self: Any) -> Any:
        raise OSError("boom")

    bad = _with(env_class, "reset", reset)
    bad.from_dict = staticmethod(make)  # pyright: ignore[reportAttributeAccessIssue]
    engine = _engine(agent_class, bad, retry_wait_s=0.0)
    tasks = [{"task_id": "a", "kind": "reset"}, {"task_id": "b", "kind": "from_dict"}]
    episodes = sorted(await _all(engine, tasks), key=lambda each: each.task_id)
    assert [each.trajectories[0].info["error"]["message"] for each in episodes] == [
        "boom (Bad.reset raised OSError)",
        "'map' (Bad.from_dict raised KeyError)",
    ]


@pytest.mark.parametrize("task", ["lake", None, 3])
async def test_a_task_that_has_no_fields_is_refused(agent_class: Agent, env_class: Env, task: Any) -> None:
    with pytest.raises(ConfigError, match=r"Task 1 is .*; .*dict"):
        await _all(_engine(agent_class, env_class), [{"task_id": "t"}, task])


async def test_an_overlong_trajectory_is_marked_where_that_is_asked_for(
    agent_class: Agent, env_class: Env
) -> None:
    engine = _engine(agent_class, env_class, max_response_length=2, overlong_filter=True)
    (episode,) = await _all(engine, [{"task_id": "t"}])
    assert episode.trajectories[0].info["masked_out"] == "max_response_length_exceeded"
