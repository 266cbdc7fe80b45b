"""Agents and workflows behind a contract, as the programs that workers run.

    inputs ──► question: purpose, output schema, inputs ──► agent, one turn ──────────► its action
           └─► task: the question and the inputs' own fields ──► Workflow.run ──► Episode ──► its output
                    model calls through the session's own address, as those of every program

The workers that a workflow calls run in the same host, or are played by the workflow's model.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from rllm.agents.base import BaseAgent
from rllm.agents.flow import AgentFlow
from rllm.build.actors import Actor
from rllm.build.workers import WorkerModel
from rllm.contracts.answering import checked_outputs, messages_for, read_answer, repair_message
from rllm.contracts.contract import Contract
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.engine.attempt_state import Vitals
from rllm.engine.rollout import RolloutKey, RolloutLimits, run_trajectory
from rllm.environments.base import BaseEnv
from rllm.errors import AgentError
from rllm.inference.openai import OpenAIClient
from rllm.types.episode import Action, Episode
from rllm.types.task import AgentConfig, EpisodeId, Task
from rllm.worker.answers import answering_flow, run_id_of
from rllm.workflows.workers import WorkerRunner
from rllm.workflows.workflow import Workflow


def flow_behind(
    contract: Contract, actor: Actor | None, runner: WorkerRunner, model: WorkerModel | None
) -> AgentFlow:
    """The program that does the work of a contract, made in the loop of its host."""
    if actor is None:
        return answering_flow(contract)
    if actor.workflow is not None:
        return _workflow_flow(contract, actor.workflow, runner, model)
    if actor.agent is not None:
        return _agent_flow(contract, actor.agent)
    assert actor.flow is not None, "an actor is one of the three"
    return actor.flow


def question_of(contract: Contract, inputs: Mapping[str, Any]) -> str:
    """The question to an agent or workflow, as one text."""
    return "\n\n".join(message["content"] for message in messages_for(contract, inputs))


class ContractEnvironment(BaseEnv):
    """Shows the question, takes one action as the outputs. With `repair`, says once what does not fit."""

    def __init__(self, contract: Contract, task: Task) -> None:
        self.contract = contract
        self.task = task
        self.output: Any = None
        self._turns_left = 1 + contract.constraints.repair

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        return question_of(self.contract, self.task.metadata), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        value = action.action if isinstance(action, Action) else action
        self.output = read_answer(value) if isinstance(value, str) else value
        self._turns_left -= 1
        _, violation = checked_outputs(self.contract, self.output, run_id_of(self.contract, self.task))
        if violation is None or not self._turns_left:
            return "", 0.0, True, {}
        return repair_message(violation)["content"], 0.0, False, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "ContractEnvironment":
        return ContractEnvironment(info["contract"], info["task"])


def _agent_flow(contract: Contract, agent_class: type[BaseAgent]) -> AgentFlow:
    async def act(task: Task, config: AgentConfig) -> Episode:
        world = ContractEnvironment(contract, task)
        client = OpenAIClient(config.base_url, config.model, config.api_key)
        key = RolloutKey(episode=EpisodeId(task_id=str(task.id)))
        vitals = Vitals(key.episode)
        limits = RolloutLimits(
            max_turns=1 + contract.constraints.repair,
            episode_timeout_s=None,
            wall_timeout_s=contract.constraints.timeout_seconds,
        )
        try:
            await run_trajectory(agent_class(), lambda: world, client, limits=limits, key=key, vitals=vitals)
        finally:
            await client.close()
        if vitals.failure is not None:
            raise vitals.failure
        return Episode(artifacts={"output": world.output})

    return AgentFlow(act, contract.id)


def _workflow_flow(
    contract: Contract, workflow_class: type[Workflow], runner: WorkerRunner, model: WorkerModel | None
) -> AgentFlow:
    loop = asyncio.get_running_loop()

    async def follows_schema(schema: Mapping[str, Any]) -> bool:
        """Asked in the loop of programs; the model lives in the host's."""
        assert model is not None, "a workflow has one"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(model.can_enforce(schema), loop))

    async def play(task: Task, config: AgentConfig) -> Episode:
        client = OpenAIClient(config.base_url, config.model, config.api_key, follows_schema=follows_schema)
        engine = AgentWorkflowEngine(
            workflow_class,
            rollout_engine=client,
            # The runtime counts the attempts of a run, so the engine makes only one.
            retry_limit=1,
            workers=runner,
            wall_timeout_s=contract.constraints.timeout_seconds,
        )
        row = {"question": question_of(contract, task.metadata), **task.metadata}
        try:
            (episode,) = await engine.execute_tasks([row], [str(task.id)])
        finally:
            await client.close()
        steps = {"workers": records} if (records := episode.info.get("workers")) else {}
        return Episode(
            artifacts={**steps, **episode.artifacts, "output": _output_of(episode, workflow_class)}
        )

    return AgentFlow(play, contract.id)


def _output_of(episode: Episode, workflow_class: type[Workflow]) -> Any:
    """`artifacts["output"]`, else the output of the last trajectory that has one."""
    for name in ("output", "answer"):
        if name in episode.artifacts:
            return episode.artifacts[name]
    outputs = [each.output for each in episode.trajectories if each.output is not None]
    if not outputs:
        raise AgentError(
            f"{workflow_class.__name__} gave no output; put it into `Episode(artifacts={{'output': …}})` or "
            "set a trajectory's `output`."
        )
    return outputs[-1]
