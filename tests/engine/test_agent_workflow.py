"""The workflow engine: every exception is an outcome, tries and deadlines count, bad options are refused."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import AgentError, ConfigError, InferenceError, RewardError, SandboxError
from rllm.inference import ScriptedAnswer, ScriptedClient
from rllm.inference.rollout_engine import RoleSettings
from rllm.types.budget import TokenBudget
from rllm.types.episode import Episode, Outcome, Step, TerminationEvent, TerminationReason, Trajectory
from rllm.types.messages import Message
from rllm.types.task import Task
from rllm.workflows import SimpleWorkflow, Workflow

sys.path.insert(0, str(Path(__file__).parent))
from small_workflows import TASKS, Asks, engine_of, episodes_of, four, raising

# ---- outcomes --------------------------------------------------------------------------------------------


async def test_what_was_committed_is_the_episode_with_its_tokens_and_its_reward() -> None:
    engine = engine_of(Asks)
    episodes = await episodes_of(engine, group_size=2)
    assert sorted(episode.id for episode in episodes) == [f"t{n}:{k}" for n in range(4) for k in range(2)]
    for episode in episodes:
        (trajectory,) = episode.trajectories
        (step,) = trajectory.steps
        assert (episode.outcome, episode.termination_reason) == (Outcome.SCORED, TerminationReason.UNKNOWN)
        assert (trajectory.name, trajectory.reward, trajectory.outcome) == ("solver", 1.0, Outcome.SCORED)
        assert (episode.is_correct, episode.metrics["solver_acc"]) == (True, 1.0)
        assert len(step.response_ids) == len(step.logprobs) == len(step.policy_versions) == 2
        assert episode.metrics["unclaimed_calls"] == 0.0
    assert engine.counts.by_outcome[Outcome.SCORED] == engine.counts.submitted == 8
    assert engine.counts.turns == 8
    engine.counts.check()


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (TerminationEvent(TerminationReason.ENV_DONE), Outcome.SCORED, TerminationReason.ENV_DONE),
        (TerminationEvent(), Outcome.SCORED, TerminationReason.UNKNOWN),
        *(
            (TerminationEvent(reason), Outcome.TRUNCATED, reason)
            for reason in (
                TerminationReason.MAX_TURNS_EXCEEDED,
                TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
                TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
                TerminationReason.TIMEOUT,
            )
        ),
        (TerminationEvent(TerminationReason.ERROR), Outcome.POLICY_FAILURE, TerminationReason.ERROR),
        (ValueError("no number"), Outcome.POLICY_FAILURE, TerminationReason.ERROR),
        (OSError("disk"), Outcome.INFRASTRUCTURE_FAILURE, TerminationReason.ERROR),
        (InferenceError("away"), Outcome.INFRASTRUCTURE_FAILURE, TerminationReason.ERROR),
        (SandboxError("gone"), Outcome.INFRASTRUCTURE_FAILURE, TerminationReason.ERROR),
        (MemoryError("full"), Outcome.INFRASTRUCTURE_FAILURE, TerminationReason.ERROR),
        (TimeoutError(), Outcome.INFRASTRUCTURE_FAILURE, TerminationReason.TIMEOUT),
        (
            ExceptionGroup("both", [ValueError("x"), ExceptionGroup("", [OSError("disk")])]),
            Outcome.INFRASTRUCTURE_FAILURE,
            TerminationReason.ERROR,
        ),
        (
            ExceptionGroup("both", [TerminationEvent(TerminationReason.TIMEOUT)]),
            Outcome.TRUNCATED,
            TerminationReason.TIMEOUT,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Exception) else None,
)
async def test_what_a_workflow_raises_is_an_outcome(
    error: Exception, outcome: Outcome, reason: TerminationReason
) -> None:
    engine = engine_of(Asks, args={"trouble": raising(error)}, retry_limit=1)
    (episode,) = await episodes_of(engine, TASKS[:1])
    (trajectory,) = episode.trajectories  # what was sampled is on record, however it ended
    assert (episode.outcome, episode.termination_reason) == (outcome, reason)
    assert (trajectory.outcome, trajectory.termination_reason) == (outcome, reason)
    assert len(trajectory.steps[0].response_ids) == 2
    failed = outcome in (Outcome.POLICY_FAILURE, Outcome.INFRASTRUCTURE_FAILURE)
    assert trajectory.reward == (None if failed else 1.0)  # a failure is never a zero
    assert (episode.is_correct, episode.metrics["abandoned_attempts"]) == (not failed, 0.0)
    if failed:
        assert set(episode.info["error"]) == {"type", "message", "place", "traceback"}


@pytest.mark.parametrize(
    "error",
    [AgentError("broken"), RewardError("nan"), ConfigError("no"), ExceptionGroup("", [AgentError("x")])],
)
async def test_what_is_wrong_for_every_attempt_ends_the_run(error: Exception) -> None:
    engine = engine_of(Asks, args={"trouble": raising(error)})
    with pytest.raises((AgentError, RewardError, ConfigError)):
        await episodes_of(engine)
    engine.counts.check()
    assert engine.counts.in_flight == 0


async def test_an_attempt_that_takes_too_long_is_cut_off() -> None:
    async def hang(task: Any) -> None:
        await asyncio.Event().wait()

    for args, limits in [
        ({"trouble": hang, "timeout": 0.5}, {}),
        ({"trouble": hang}, {"episode_timeout_s": 0.5}),
    ]:
        (episode,) = await episodes_of(engine_of(Asks, args=args, **limits), TASKS[:1])
        assert (episode.outcome, episode.termination_reason) == (Outcome.TRUNCATED, TerminationReason.TIMEOUT)
        assert episode.trajectories[0].reward == 1.0


async def test_a_prompt_beyond_the_budget_truncates_and_says_why() -> None:
    engine = engine_of(Asks, budget=TokenBudget(max_prompt_tokens=3))
    (episode,) = await episodes_of(engine, TASKS[:1])
    assert episode.outcome is Outcome.TRUNCATED
    assert episode.termination_reason is TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
    assert "`max_prompt_tokens` is 3" in episode.info["error"]["message"]


async def test_a_returned_episode_keeps_what_it_says() -> None:
    class Returns(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            paid, unpaid = Trajectory(name="a", reward=0.25), Trajectory(name="b", steps=[Step(reward=2.0)])
            return Episode(
                trajectories=[paid, unpaid],
                is_correct=True,
                termination_reason=TerminationReason.MAX_TURNS_EXCEEDED,
                metrics={"found": 3},
                artifacts={"plan": "x"},
            )

    (episode,) = await episodes_of(engine_of(Returns), TASKS[:1])
    assert [trajectory.reward for trajectory in episode.trajectories] == [0.25, 2.0]
    assert (episode.is_correct, episode.metrics["found"], episode.artifacts) == (True, 3.0, {"plan": "x"})
    assert episode.outcome is Outcome.TRUNCATED
    assert (episode.task_id, episode.rollout_idx, episode.task) == ("t0", 0, TASKS[0])


async def test_junk_is_named_with_its_class() -> None:
    class Junk(Workflow):
        returned: Any = None

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any:
            return self.returned

    for returned, error, words in [
        (3, AgentError, r"Junk.run returned 3 \(a int\)"),
        (Episode(trajectories=[Trajectory(name="a", reward=float("nan"))]), RewardError, "trajectory 'a'"),
        (Episode(trajectories=[Trajectory(steps=[Step(reward=None)])]), RewardError, "step 0"),  # type: ignore[arg-type]
        (Episode(metrics={"x": "y"}), RewardError, "the metric 'x'"),  # type: ignore[dict-item]
    ]:
        Junk.returned = returned
        with pytest.raises(error, match=words):
            await episodes_of(engine_of(Junk), TASKS[:1])


async def test_a_hook_that_raises_is_named() -> None:
    class BadMetrics(Asks):
        def collect_metrics(self, episode: Episode) -> None:
            raise KeyError("x")

    with pytest.raises(AgentError, match=r"BadMetrics.postprocess_episode failed on t0:0 with KeyError"):
        await episodes_of(engine_of(BadMetrics), TASKS[:1])


# ---- tries -----------------------------------------------------------------------------------------------


async def test_an_infrastructure_failure_starts_the_same_attempt_over() -> None:
    left = {"t0": 2, "t1": 5}

    def trouble(task: dict[str, Any]) -> None:
        left[task["task_id"]] -= 1
        if left[task["task_id"]] >= 0:
            raise OSError("sandbox")

    engine = engine_of(Asks, args={"trouble": trouble}, retry_limit=3)
    episodes = {episode.task_id: episode for episode in await episodes_of(engine, TASKS[:2])}
    assert (episodes["t0"].outcome, episodes["t0"].info["tries"]) == (Outcome.SCORED, 3)
    assert (episodes["t1"].outcome, episodes["t1"].info["tries"]) == (Outcome.INFRASTRUCTURE_FAILURE, 3)
    assert engine.counts.retries == 4
    assert engine.counts.submitted == 2


async def test_a_policy_failure_is_not_tried_again() -> None:
    client = ScriptedClient(four)
    engine = engine_of(Asks, client, {"trouble": raising(ValueError("x"))})
    (episode,) = await episodes_of(engine, TASKS[:1])
    assert (episode.info["tries"], len(client.prompts)) == (1, 1)


async def test_retries_do_not_multiply() -> None:
    """A call is asked again api_retries times; the attempt does not start over because of it."""
    client = ScriptedClient(lambda messages: InferenceError("away"))
    engine = engine_of(Asks, client, api_retries=2, retry_limit=3)
    (episode,) = await episodes_of(engine, TASKS[:1])
    assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert (len(client.prompts), engine.counts.retries) == (3, 0)
    assert episode.info["error"]["type"] == "InferenceError"


async def test_a_failed_call_is_an_infrastructure_failure_also_where_the_workflow_goes_on() -> None:
    class Swallows(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
            with suppress(InferenceError):
                await self.rollout_engine.get_model_response([{"role": "user", "content": "?"}])
            return Episode(trajectories=[Trajectory(reward=0.0)])

    client = ScriptedClient(lambda messages: InferenceError("away"))
    (episode,) = await episodes_of(engine_of(Swallows, client, api_retries=0), TASKS[:1])
    assert episode.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert episode.trajectories[0].reward is None


# ---- long tails ------------------------------------------------------------------------------------------


async def test_with_oversampling_a_group_does_not_wait_for_its_slowest() -> None:
    def script(messages: Sequence[Message]) -> ScriptedAnswer:
        slow = messages[0]["content"].endswith(":1\nassistant:")
        return ScriptedAnswer(text="4", wait_for=asyncio.Event().wait if slow else None)

    class AsksByName(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            await self.rollout_engine.get_model_response([{"role": "user", "content": uid}])

    client = ScriptedClient(script)
    engine = engine_of(AsksByName, client, oversampling=1.5)
    episodes = await episodes_of(engine, group_size=2)
    assert sorted(episode.id for episode in episodes) == [f"t{n}:{k}" for n in range(4) for k in (0, 2)]
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 4
    assert client.in_flight == 0


async def test_a_deadline_truncates_what_runs_and_begins_nothing_more() -> None:
    client = ScriptedClient(lambda messages: ScriptedAnswer(text="4", wait_for=asyncio.Event().wait))
    engine = engine_of(Asks, client, deadline_s=0.2, n_parallel_tasks=2)
    episodes = await episodes_of(engine)
    assert [episode.termination_reason for episode in episodes] == [TerminationReason.TIMEOUT] * 2
    assert engine.counts.by_outcome[Outcome.CANCELLED] == 2


async def test_what_is_live_can_be_looked_at() -> None:
    client = ScriptedClient(lambda messages: ScriptedAnswer(text="4", wait_for=asyncio.Event().wait))
    engine = engine_of(Asks, client)
    playing = asyncio.create_task(episodes_of(engine, TASKS[:2]))
    while client.in_flight < 2:
        await asyncio.sleep(0)
    assert sorted((str(each.episode), each.turn, each.waits_for) for each in engine.live()) == [
        ("t0:0", 0, "model"),
        ("t1:0", 0, "model"),
    ]
    playing.cancel()
    await asyncio.wait({playing})
    assert engine.live() == []


# ---- execute_tasks ---------------------------------------------------------------------------------------


async def test_tasks_of_a_generator_are_all_played() -> None:
    engine = engine_of(Asks)
    episodes = await engine.execute_tasks(task for task in TASKS)
    assert [each.task for each in episodes] == [each.task for each in await engine.execute_tasks(TASKS)]
    assert len(episodes) == len(TASKS) > 0
    assert len([each async for each in engine.run(task for task in TASKS)]) == len(TASKS)


async def test_execute_tasks_gives_episodes_in_the_order_of_the_tasks() -> None:
    gate = asyncio.Event()

    def script(messages: Sequence[Message]) -> ScriptedAnswer:
        first = "0+1?" in messages[0]["content"]
        if not first:
            gate.set()
        return ScriptedAnswer(text="4", wait_for=gate.wait if first else None)

    engine = engine_of(Asks, ScriptedClient(script))
    tasks = [*TASKS[:2], Task(id="t9", metadata={"question": "9?"})]
    assert [episode.id for episode in await engine.execute_tasks(tasks)] == ["t0:0", "t1:0", "t9:0"]
    named = await engine.execute_tasks(TASKS[:3], task_ids=["x", "y", "x"])
    assert [episode.id for episode in named] == ["x:0", "y:0", "x:1"]
    with pytest.raises(ConfigError, match=r"`task_ids` has 1 .* 4 tasks"):
        await engine.execute_tasks(TASKS, task_ids=["x"])


async def test_execute_tasks_raises_what_made_an_attempt_fail_or_returns_it() -> None:
    trouble = raising(ValueError("no number"))
    with pytest.raises(ValueError, match="no number") as raised:
        await engine_of(Asks, args={"trouble": trouble}).execute_tasks(TASKS)
    assert "raise_on_error=False" in raised.value.__notes__[0]
    trouble = raising(ValueError("no number"))
    kept = await engine_of(Asks, args={"trouble": trouble}, raise_on_error=False).execute_tasks(TASKS)
    assert [episode.info["error"]["message"] for episode in kept] == ["no number"] * 4


async def test_every_episode_is_logged() -> None:
    logged: list[str] = []
    engine = engine_of(Asks, episode_logger=lambda episode: logged.append(episode.id))
    await engine.execute_tasks(TASKS)
    assert sorted(logged) == [f"t{number}:0" for number in range(4)]


# ---- what is refused at construction ---------------------------------------------------------------------


async def test_a_workflow_that_cannot_be_made_or_run_is_refused() -> None:
    class NoRun(Workflow): ...

    class PlainRun(Workflow):
        def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Any: ...

    class OtherRun(Workflow):
        async def run(self, task: dict[str, Any]) -> Any: ...  # type: ignore[override]

    class NoExecutor(Asks):
        def __init__(self, rollout_engine: Any) -> None: ...

    for workflow, args, words in [
        (dict, {}, "must be a subclass of rllm.Workflow"),
        (NoRun, {}, "NoRun does not define run"),
        (PlainRun, {}, "PlainRun.run"),
        (OtherRun, {}, r"OtherRun.run"),
        (NoExecutor, {}, r"NoExecutor.*rollout_engine"),
        (SimpleWorkflow, {}, "reward_function"),
    ]:
        with pytest.raises(AgentError, match=words):
            engine_of(workflow, args=args)  # type: ignore[arg-type]


async def test_arguments_that_a_workflow_refuses_are_found_before_the_first_task() -> None:
    class Picky(Asks):
        def __init__(self, rollout_engine: Any, size: int, **kwargs: Any) -> None:
            super().__init__(rollout_engine, **kwargs)
            self.half = 10 / size

    engine = engine_of(Picky, args={"size": 0})
    with pytest.raises(AgentError, match=r"Picky .*ZeroDivisionError"):
        await engine.initialize_pool()
    with pytest.raises(ConfigError, match=r"`colour`.*Workflow"):
        await engine_of(Picky, args={"size": 1, "colour": "red"}).initialize_pool()
    await engine_of(Picky, args={"size": 1}).initialize_pool()

    class Forgets(Asks):
        def __init__(self, rollout_engine: Any, **kwargs: Any) -> None:
            self.engine = rollout_engine

    with pytest.raises(AgentError, match=r"Forgets\.__init__ .*Workflow\.__init__"):
        await engine_of(Forgets).initialize_pool()


def test_options_that_cannot_be_honoured_are_refused(subtests: pytest.Subtests) -> None:
    for options, words in [
        ({"n_parallel_tasks": 0}, "`n_parallel_tasks` is 0"),
        ({"retry_limit": 0}, "`retry_limit` is 0"),
        ({"api_retries": -1}, "`api_retries` is -1"),
        ({"episode_timeout_s": 0.0}, "`episode_timeout_s` is 0.0"),
        ({"config": {"a": 1}}, "`config`"),
        ({"oversampling": 0.5}, "`oversampling` is 0.5"),
        ({"episode_logger": 3}, "`episode_logger` is 3"),
        ({"clients": {"a": ScriptedClient(four)}}, "either `rollout_engine`"),
        ({"roles": {"judge": RoleSettings(policy="b")}}, "Role `judge` is of policy `b`"),
    ]:
        with subtests.test(options=options, words=words), pytest.raises(ConfigError, match=words):
            engine_of(Asks, **options)


async def test_a_workflow_that_could_not_be_made_for_want_of_something_is_made_again() -> None:
    class MadeLate(Asks):
        times = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            MadeLate.times += 1
            if MadeLate.times == 1:
                raise OSError("the port is taken")
            super().__init__(*arguments, **options)

    (episode,) = await episodes_of(engine_of(MadeLate, retry_limit=2), TASKS[:1])
    assert 0.0 < episode.metrics["duration_s"] < 60.0
    assert (episode.outcome, episode.info["tries"], MadeLate.times) == (Outcome.SCORED, 2, 2)


@pytest.mark.parametrize("name", ["step_timeout_s", "episode_timeout_s"])
def test_a_limit_of_time_may_be_short_and_is_above_nothing(name: str) -> None:
    engine_of(Asks, **{name: 0.5})
    for value in (0.0, float("inf")):
        with pytest.raises(ConfigError, match=f"`{name}` is {value}"):
            engine_of(Asks, **{name: value})
