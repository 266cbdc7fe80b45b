"""The base class: who takes part, what is collected, how it is judged."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError, ConfigError
from rllm.inference import ScriptedClient
from rllm.inference.rollout_engine import RolloutEngine
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.workflows import Workflow

Play = Callable[..., Any]
TASK = {"question": "2+2?"}


class Idle(Workflow):
    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        return None


def idle(**args: Any) -> Idle:
    return Idle(RolloutEngine(ScriptedClient(["4"])), **args)


def trajectory(*rewards: float, name: str = "solver") -> Trajectory:
    return Trajectory(name=name, steps=[Step(reward=reward) for reward in rewards])


def test_a_committed_trajectory_stays_as_it_was() -> None:
    workflow, agent = idle(), ConversationAgent()
    agent.update_from_env("?", 0.0, False, {})
    agent.update_from_model("4")
    workflow.commit(name="solver", agent=agent)
    agent.update_from_model("5")
    agent.trajectory.steps[0].reward = 9.0
    (kept,) = workflow.collect_trajectories().trajectories
    assert (kept.name, [(step.model_response, step.reward) for step in kept.steps]) == (
        "solver",
        [("4", 0.0)],
    )


def test_commit_may_let_the_agent_begin_another_trajectory() -> None:
    workflow, agent = idle(), ConversationAgent()
    for answer in ("4", "5"):
        agent.update_from_model(answer)
        workflow.commit(name=f"said {answer}", agent=agent, reset=True)
    workflow.commit(agent=agent)  # nothing since: no trajectory
    assert [each.name for each in workflow.collect_trajectories().trajectories] == ["said 4", "said 5"]
    with pytest.raises(AgentError, match=r"Idle\.commit .*`agent` .*`trajectory`"):
        workflow.commit(name="x")


def test_agents_that_are_attributes_are_collected_under_their_names() -> None:
    workflow = idle()
    workflow.planner, workflow.critic, workflow.silent = (ConversationAgent() for _ in range(3))
    workflow.critic.trajectory.name = "reviewer"
    for number in range(2):
        worker = ConversationAgent()
        worker.update_from_model(str(number))
        workflow.register(agent=worker, name=f"worker {number}")
    workflow.planner.update_from_model("plan")
    workflow.critic.update_from_model("bad")
    names = [each.name for each in workflow.collect_trajectories().trajectories]
    assert names == ["planner", "reviewer", "worker 0", "worker 1"]
    with pytest.raises(AgentError, match=r"Idle\.register needs the `name`"):
        workflow.register(agent=ConversationAgent())


def test_an_agent_that_was_committed_is_not_collected_a_second_time() -> None:
    workflow = idle()
    workflow.solver = ConversationAgent()
    workflow.solver.update_from_model("4")
    workflow.commit(agent=workflow.solver, name="first")
    assert [each.name for each in workflow.collect_trajectories().trajectories] == ["first"]


def test_attributes_may_be_set_before_the_base_class_is_ready() -> None:
    class Early(Idle):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.solver = ConversationAgent()
            super().__init__(*args, **kwargs)

    workflow = Early(RolloutEngine(ScriptedClient(["4"])))
    workflow.solver.update_from_model("4")
    assert len(workflow.collect_trajectories().trajectories) == 1


def test_reset_forgets_what_was_done() -> None:
    workflow = idle()
    workflow.solver = ConversationAgent()
    workflow.solver.update_from_model("4")
    workflow.commit(trajectory=trajectory(1.0))
    workflow.reset(TASK, "t:0")
    assert workflow.collect_trajectories().trajectories == []
    assert (workflow.task, workflow.uid) == (TASK, "t:0")


def test_rewards_are_summed_shaped_and_discounted_by_hand_computed_numbers() -> None:
    workflow = idle(gamma=0.5, reward_bonus_coeff=2.0)
    episode = workflow.postprocess_episode(Episode(trajectories=[trajectory(1.0, 3.0, 2.0), trajectory(4.0)]))
    first, second = episode.trajectories
    # shaped: 1, 3 + 2·(3 - 1), 2 + 2·(2 - 3) = 1, 7, 0; discounted from the end: 0, 7, 1 + 3.5
    assert [step.reward for step in first.steps] == [1.0, 7.0, 0.0]
    assert [step.mc_return for step in first.steps] == [4.5, 7.0, 0.0]
    assert second.steps[0].mc_return == 4.0
    assert (first.reward, second.reward, second.steps[0].reward) == (6.0, 4.0, 4.0)
    assert (episode.is_correct, episode.metrics) == (True, {"solver_acc": 5.0})
    assert episode.termination_reason is TerminationReason.UNKNOWN


def test_an_episode_that_earned_nothing_is_not_correct() -> None:
    episode = idle().postprocess_episode(
        Episode(trajectories=[trajectory(1.0, name="a"), trajectory(-1.0, name="b")]),
        TerminationReason.TIMEOUT,
        error={"message": "late"},
    )
    assert (episode.is_correct, episode.metrics) == (False, {"a_acc": 1.0, "b_acc": -1.0})
    assert episode.info["error"] == {"message": "late"}
    assert episode.termination_reason is TerminationReason.TIMEOUT


@pytest.mark.parametrize(
    "how", [{"gamma": 1.5}, {"gamma": float("nan")}, {"reward_bonus_coeff": float("inf")}, {"timeout": 0.0}]
)
def test_a_number_that_makes_no_sense_is_refused_by_name(how: dict[str, float]) -> None:
    (name, value) = next(iter(how.items()))
    with pytest.raises(ConfigError, match=f"`{name}` is {value}"):
        idle(**how)


def test_what_the_base_class_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Idle.*`colour`.*Workflow"):
        idle(colour="red")
    with pytest.raises(ConfigError, match="`timeout` is 0"):
        idle(timeout=0)
    assert idle(store={"a": 1}).store == {"a": 1}


class House:
    """What the doors of one test have in common."""

    def __init__(self) -> None:
        self.opening = threading.Event()
        self.may_open = threading.Event()
        self.closed: list[Door] = []


class Door(BaseEnv):
    """Opens when it is told to."""

    def __init__(self, house: House) -> None:
        self.house = house
        house.opening.set()
        house.may_open.wait(10.0)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: Any) -> Any: ...

    def close(self) -> None:
        self.house.closed.append(self)

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "Door":
        raise NotImplementedError


async def test_environments_are_closed_whichever_way_they_were_registered(play: Play) -> None:
    house = House()
    house.may_open.set()

    class Many(Workflow):
        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            self.env = Door(house)
            self.env = self.env  # the same again
            for _ in range(2):
                self.register(env=Door(house))

    assert (await play(Many, ["x"], TASK)).outcome is Outcome.SCORED
    assert len(house.closed) == 3


async def test_an_environment_that_is_ready_too_late_is_closed_all_the_same(play: Play) -> None:
    house = House()
    left: list[asyncio.Future[None]] = []

    class Impatient(Workflow):
        def open(self) -> None:
            self.env = Door(house)

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            left.append(asyncio.ensure_future(self.run_in_executor(self.open)))
            while not house.opening.is_set():
                await asyncio.sleep(0.001)
            raise ValueError("I cannot wait")

    assert (await play(Impatient, ["x"], TASK)).outcome is Outcome.POLICY_FAILURE
    assert house.closed == []
    house.may_open.set()
    with pytest.raises(TimeoutError, match=r"Door .*ready .*after"):
        await left[0]
    assert len(house.closed) == 1


class SlowDoor(Door):
    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.house.closed.append(self)


@pytest.mark.parametrize("in_thread", [True, False])
async def test_an_environment_that_closes_asynchronously_is_closed_too_where_it_is_ready_too_late(
    play: Play, in_thread: bool
) -> None:
    house = House()
    house.may_open.set()
    flows: list[Workflow] = []

    class Over(Workflow):
        def open(self) -> None:
            self.env = SlowDoor(house)

        async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> None:
            flows.append(self)

    await play(Over, ["x"], TASK)
    open_door: Callable[[], None] = flows[0].open  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError, match=r"SlowDoor .*ready .*after"):
        await asyncio.to_thread(open_door) if in_thread else open_door()
    async with asyncio.timeout(20.0):
        while not house.closed:
            await asyncio.sleep(0)


# ---- programs as they are written for the published library ----------------------------------------------


class PublishedPair(Workflow):
    """Two agents and an environment as attributes; ends by an exception; nothing is registered by hand."""

    def __init__(self, rollout_engine: Any, max_rounds: int = 2, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.writer = ConversationAgent()
        self.editor = ConversationAgent()
        self.max_rounds = max_rounds

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode | None:
        await self.run_in_executor(self.reset, task=task, uid=uid)
        self.writer.update_from_env(task["question"], 0, False, {})
        for _ in range(self.max_rounds):
            draft = await self._turn(self.writer, uid, **kwargs)
            self.editor.update_from_env(draft, 0, False, {})
            verdict = await self._turn(self.editor, uid, **kwargs)
            good = verdict == "good"
            for agent in (self.writer, self.editor):
                agent.get_current_state().reward = float(good)
            if good:
                raise self.ended(TerminationReason.ENV_DONE)
            self.writer.update_from_env(verdict, 0, False, {})
        raise self.ended(TerminationReason.MAX_TURNS_EXCEEDED)

    async def _turn(self, agent: ConversationAgent, uid: str, **kwargs: Any) -> str:
        output = await self.rollout_engine.get_model_response(
            agent.chat_completions, application_id=uid, **kwargs
        )
        return agent.update_from_model(output.text).action

    def ended(self, reason: TerminationReason) -> Exception:
        from rllm.workflows.workflow import TerminationEvent  # the published module

        return TerminationEvent(reason)

    def assign_episode_correctness(self, episode: Episode) -> None:
        episode.is_correct = episode.trajectories[-1].steps[-1].reward == 1.0


async def test_a_published_program_with_agents_as_attributes_runs_as_written(play: Play) -> None:
    script = ["draft", "bad", "better", "good"]
    episode = await play(PublishedPair, script, TASK)
    assert (episode.outcome, episode.termination_reason) == (Outcome.SCORED, TerminationReason.ENV_DONE)
    assert {each.name: [step.model_response for step in each.steps] for each in episode.trajectories} == {
        "writer": ["draft", "better"],
        "editor": ["bad", "good"],
    }
    assert [each.reward for each in episode.trajectories] == [1.0, 1.0]
    assert episode.is_correct
    assert (episode.metrics["writer_acc"], episode.metrics["unclaimed_calls"]) == (1.0, 0.0)
    for each in episode.trajectories:  # every turn goes on with the tokens of the one before
        first, second = each.steps
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert first.response_ids
        assert second.response_ids
    cut = await play(PublishedPair, ["draft", "bad"], TASK, max_rounds=1)
    assert (cut.outcome, cut.is_correct) == (Outcome.TRUNCATED, False)


class PublishedSolver:
    """A helper that is handed the rollout engine, as published multi-agent programs have them."""

    def __init__(self, rollout_engine: Any) -> None:
        self.rollout_engine = rollout_engine

    async def solve(self, problem: str) -> Trajectory:
        messages = [{"role": "user", "content": problem}]
        output = await self.rollout_engine.get_model_response(messages)
        return Trajectory(
            name="solver",
            steps=[
                Step(
                    chat_completions=[
                        *messages,
                        {"role": "assistant", "content": output.content, "reasoning": output.reasoning},
                    ],
                    thought=output.reasoning,
                    action=output.content,
                    model_output=output,
                )
            ],
        )


class PublishedSolvers(Workflow):
    def __init__(self, rollout_engine: Any, n_solutions: int = 2, **kwargs: Any) -> None:
        super().__init__(rollout_engine, **kwargs)
        self.n_solutions = n_solutions
        self.solver = PublishedSolver(rollout_engine)

    async def run(self, task: dict[str, Any], uid: str, **kwargs: Any) -> Episode:
        self.reset(task, uid)
        tasks = [asyncio.create_task(self.solver.solve(task["question"])) for _ in range(self.n_solutions)]
        solved = await asyncio.gather(*tasks)
        for each in solved:
            each.steps[0].reward = float(each.steps[0].action == "4")
        return Episode(
            id=uid, task=task, trajectories=list(solved), is_correct=True, metrics={"solver_acc": 1}
        )


async def test_a_published_program_that_returns_its_episode_runs_as_written() -> None:
    engine = AgentWorkflowEngine(
        workflow_cls=PublishedSolvers,
        workflow_args={"n_solutions": 3},
        rollout_engine=ScriptedClient(["4", "<think>hm</think>4", "5"]),
        n_parallel_tasks=4,
        retry_limit=1,
    )
    await engine.initialize_pool()
    (episode,) = await engine.execute_tasks([TASK], task_ids=["a"])
    engine.shutdown()
    assert [each.reward for each in episode.trajectories] == [1.0, 1.0, 0.0]
    assert [each.steps[0].thought for each in episode.trajectories] == ["", "hm", ""]
    assert all(each.steps[0].response_ids and each.steps[0].prompt_ids for each in episode.trajectories)
    assert (episode.id, episode.metrics["solver_acc"], episode.metrics["unclaimed_calls"]) == (
        "a:0",
        1.0,
        0.0,
    )
