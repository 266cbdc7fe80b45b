# verl has an environment of its own.
# pyright: reportMissingImports=false
"""Our agents, environments and workflows as an agent loop of verl, in a run that verl drives.

    @register("lake")                       actor_rollout_ref.rollout.agent.default_agent_loop=lake
    class LakeLoop(RllmAgentLoop):
        agent_class, env_class = FrozenLakeAgent, FrozenLakeEnv

    verl's AgentLoopWorker ──► run ──► Episode ──► rows of its trajectories ──► AgentLoopOutput each
                                          └─ VerlClient ──► verl's servers, ids in and ids out

A row of the data set is a task: what its column `task` holds, a mapping or JSON, goes to the environment's
`from_dict`, or to the workflow.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from rllm.agents.base import BaseAgent
from rllm.engine.agent_workflow import AgentWorkflowEngine
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError, InferenceError
from rllm.integrations.verl.client import VerlClient
from rllm.integrations.verl.contract import AGENT_LOOP, require_contract, require_installed
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Trajectory
from rllm.types.messages import SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample
from rllm.workflows.workflow import Workflow

TRAJECTORY, ROLE = "rllm_trajectory", "rllm_role"
"""In `AgentLoopOutput.extra_fields`: which trajectory of its episode a row is of, and what its agent is
called."""

MAX_TRAJECTORIES = 1000
"""The number of trajectories of one episode: verl numbers its attempts, and here each trajectory of an
attempt has a number."""


class RllmAgentLoop(AgentLoopBase):
    """To be subclassed at the top of a module, because verl finds loops by their qualified name.

    Set `agent_class` and `env_class`, or `workflow_class`.
    """

    agent_class: type[BaseAgent] | None = None
    env_class: type[BaseEnv] | None = None
    agent_args: Mapping[str, Any] = {}
    workflow_class: type[Workflow] | None = None
    workflow_args: Mapping[str, Any] = {}
    limits = RolloutLimits()
    max_tokens = 0
    """Maximum tokens per answer; 0 leaves it the whole of `data.max_response_length`."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises ConfigError for a verl that does not fit, and for a loop of nothing."""
        super().__init_subclass__(**options)
        require_installed()
        require_contract(AGENT_LOOP)
        plays_agent = cls.agent_class is not None and cls.env_class is not None
        if plays_agent == (cls.workflow_class is not None):
            raise ConfigError(
                f"{cls.__name__} must have either `agent_class` and `env_class`, or `workflow_class`."
            )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        """One episode: an AgentLoopOutput, or a list of them where it has several rows.

        Raises InferenceError, or what a workflow raised, for an episode that failed: it has no reward.
        """
        lengths = self.rollout_config
        tokenizer = HuggingFaceTokenizer(Path(self.tokenizer.name_or_path))
        client = VerlClient(
            self.server_manager,
            ChatRenderer(tokenizer),
            sampling_params,
            max_context=lengths.prompt_length + lengths.response_length,
            end_token_ids=() if tokenizer.end_token_id is None else (tokenizer.end_token_id,),
        )
        sampling = SamplingParams(
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            top_k=max(0, int(sampling_params.get("top_k", 0))),
            max_tokens=self.max_tokens or lengths.response_length,
        )
        play = self._play_agent if self.workflow_class is None else self._play_workflow
        task = row["task"]
        task = json.loads(task) if isinstance(task, str) else dict(task)
        trajectories = await play(task, client, sampling)
        outputs = [
            self._output(each, trajectory, place)
            for place, trajectory in enumerate(trajectories)
            for each in trajectory_rows(trajectory, "", 0, place, 0.0)
        ]
        if not outputs:
            raise InferenceError("The episode has no answer of the model, so there is nothing to train on.")
        return outputs if len(outputs) > 1 else outputs[0]

    async def _play_agent(
        self, task: dict[str, Any], client: VerlClient, sampling: SamplingParams
    ) -> list[Trajectory]:
        agent_class, env_class = self.agent_class, self.env_class
        assert agent_class is not None, "`__init_subclass__` requires it"
        assert env_class is not None, "`__init_subclass__` requires it"
        agent = agent_class(**self.agent_args)
        trajectory = await run_trajectory(
            agent, lambda: env_class.from_dict(task), client, limits=self.limits, sampling=sampling
        )
        if trajectory.reward is None:
            raise InferenceError(f"The episode failed and has no reward: {trajectory.info}.")
        return [trajectory]

    async def _play_workflow(
        self, task: dict[str, Any], client: VerlClient, sampling: SamplingParams
    ) -> list[Trajectory]:
        assert self.workflow_class is not None, "`run` plays the agent otherwise"
        engine = AgentWorkflowEngine(
            self.workflow_class,
            self.workflow_args,
            client,
            n_parallel_tasks=1,
            raise_on_error=True,
            sampling_params=sampling,
        )
        return (await engine.execute_tasks([task]))[0].trajectories

    def _output(self, sample: TrainingSample, trajectory: Trajectory, place: int) -> AgentLoopOutput:
        """verl's form of a sample. Ids before the first sampled token are the prompt; those between later
        ones have mask 0."""
        lengths = self.rollout_config
        sampled_T = sample.policy_versions_T != NOT_SAMPLED
        start = int(sampled_T.argmax())
        end = start + lengths.response_length
        if start > lengths.prompt_length:
            raise ConfigError(
                f"`data.max_prompt_length` is {lengths.prompt_length}, and a prompt of `{trajectory.name}` "
                f"has {start} tokens; raise it."
            )
        assert trajectory.reward is not None, "the episode was paid"
        return AgentLoopOutput(
            prompt_ids=sample.token_ids_T[:start].tolist(),
            response_ids=sample.token_ids_T[start:end].tolist(),
            response_mask=sampled_T[start:end].astype(int).tolist(),
            response_logprobs=sample.logprobs_T[start:end].tolist(),
            reward_score=float(trajectory.reward),
            num_turns=2 * len(trajectory.steps) + 1,
            metrics=AgentLoopMetrics(),
            extra_fields={
                TRAJECTORY: place,
                ROLE: trajectory.name,
                "reward_extra_info": {},
                "min_global_steps": int(sample.policy_versions_T[sampled_T].min()),
                "max_global_steps": int(sample.policy_versions_T[sampled_T].max()),
            },
        )


class _EpisodeWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's own takes the reward of an episode's last row for all of its rows. This one keeps what each
    trajectory was paid, and compares the trajectories of one role with each other."""

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **row: Any) -> None:
        """`output`: an AgentLoopOutput, or a list of them."""
        outputs: list[Any] = list(output) if isinstance(output, list) else [output]
        if validate or any(ROLE not in each.extra_fields for each in outputs):
            await super()._agent_loop_postprocess(outputs, validate, **row)
            return
        # verl finds an episode by what its key has before the first "_", groups by the uid, and numbers
        # sessions.
        for place, group in itertools.groupby(outputs, key=lambda each: each.extra_fields[TRAJECTORY]):
            rows = list(group)
            identity = {
                "uid": f"{row['uid']}_{rows[0].extra_fields[ROLE]}",
                "session_id": MAX_TRAJECTORIES * int(row["session_id"]) + place,
            }
            await super()._agent_loop_postprocess(rows, validate, **{**row, **identity})


class EpisodeLoopManager(AgentLoopManagerTQ):
    """For `actor_rollout_ref.rollout.agent.agent_loop_manager_class`: roles have rewards of their own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.agent_loop_workers_class = ray.remote(_EpisodeWorker)
