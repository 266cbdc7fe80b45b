# verl has an environment of its own.
# pyright: reportMissingImports=false
"""Our agents and environments as an agent loop of verl, in a run that verl drives.

    @register("lake")                       actor_rollout_ref.rollout.agent.default_agent_loop=lake
    class LakeLoop(RllmAgentLoop):
        agent_class, env_class = FrozenLakeAgent, FrozenLakeEnv

    verl's AgentLoopWorker ──► run ──► run_trajectory ──► agent ⇄ environment
                                           └─ VerlSession ──► verl's server_manager, ids in and ids out

A row of the data set is a task: what its column `task` holds goes to the environment's `from_dict`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from rllm.agents.base import BaseAgent
from rllm.engine.rollout import RolloutLimits, run_trajectory
from rllm.environments.base import BaseEnv
from rllm.errors import ConfigError, ContextLengthError, InferenceError
from rllm.inference.client import Tools
from rllm.inference.reading import as_it_may_come_back, parsed_text, read_into
from rllm.integrations.verl.contract import AGENT_LOOP, require_contract
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.rendering.chat import ChatRenderer, Conversation
from rllm.trainer.samples import trajectory_rows
from rllm.types.messages import FinishReason, LogprobMeaning, Message, ModelOutput, SamplingParams
from rllm.types.sample import NOT_SAMPLED, TrainingSample

_NO_CLIENT: Any = None
"""Every rollout is handed its session."""


class VerlSession:
    """A `ModelSession` whose answers verl's servers sample."""

    def __init__(
        self,
        server_manager: Any,
        renderer: ChatRenderer,
        sampling_params: Mapping[str, Any],
        max_context: int,
    ) -> None:
        self._server_manager, self._max_context = server_manager, max_context
        self._sampling_params = dict(sampling_params)
        self._conversation = Conversation(renderer=renderer)
        self._request_id = f"rllm-{id(self):x}"

    async def respond(
        self, messages: Sequence[Message], sampling: SamplingParams, tools: Tools = ()
    ) -> ModelOutput:
        prompt_ids = list(self._conversation.prompt(messages, tools))
        if len(prompt_ids) >= self._max_context:
            raise ContextLengthError(
                f"The prompt has {len(prompt_ids)} tokens, and the context holds {self._max_context}."
            )
        answer = await self._server_manager.generate(
            self._request_id, prompt_ids=prompt_ids, sampling_params=self._sampling_params
        )
        if answer.log_probs is None or len(answer.log_probs) != len(answer.token_ids):
            raise InferenceError(
                "verl's server gave no log-probability for each token; set "
                "`actor_rollout_ref.rollout.calculate_log_probs` to true."
            )
        renderer = self._conversation.renderer
        output = ModelOutput(
            text=renderer.tokenizer.decode(answer.token_ids),
            prompt_ids=prompt_ids,
            completion_ids=list(answer.token_ids),
            logprobs=list(answer.log_probs),
            logprob_meaning=LogprobMeaning.TEMPERATURE,
            temperature=float(self._sampling_params.get("temperature", 1.0)),
            policy_versions=[0] * len(answer.token_ids),
            finish_reason=FinishReason.LENGTH if answer.stop_reason == "length" else FinishReason.STOP,
        )
        output.content = output.text
        if tools:
            read_into(output, parsed_text(output.text, renderer, tools))
        self._conversation.record(output.completion_ids, *as_it_may_come_back(output))
        return output

    def prompt_tokens(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        return self._conversation.prompt_tokens(messages, tools)

    def close(self) -> None:
        """verl's servers keep nothing of a conversation that would have to be closed."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RllmAgentLoop(AgentLoopBase):
    """To be subclassed at the top of a module, because verl finds loops by their qualified name."""

    agent_class: type[BaseAgent]
    env_class: type[BaseEnv]
    agent_args: Mapping[str, Any] = {}
    limits = RolloutLimits()

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises ConfigError for a verl that does not fit."""
        super().__init_subclass__(**options)
        require_contract(AGENT_LOOP)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """One episode. Raises InferenceError for one that failed, ConfigError for one with several rows."""
        lengths = self.rollout_config
        session = VerlSession(
            self.server_manager,
            ChatRenderer(HuggingFaceTokenizer(Path(self.tokenizer.name_or_path))),
            sampling_params,
            lengths.prompt_length + lengths.response_length,
        )

        def make_env() -> BaseEnv:
            return self.env_class.from_dict(dict(row["task"]))

        agent = self.agent_class(**self.agent_args)
        trajectory = await run_trajectory(agent, make_env, _NO_CLIENT, limits=self.limits, session=session)
        if trajectory.reward is None:
            raise InferenceError(f"The episode failed and has no reward: {trajectory.info}.")
        rows = trajectory_rows(trajectory, "", 0, 0, 0.0)
        if len(rows) > 1:
            raise ConfigError(
                f"{self.agent_class.__name__} rewrote its history, so its episode has {len(rows)} rows, and "
                'an agent loop of verl hands on one; train it with `backend = "verl"` instead.'
            )
        return _output(rows[0], float(trajectory.reward), len(trajectory.steps), lengths.response_length)


def _output(sample: TrainingSample, reward: float, num_turns: int, longest: int) -> AgentLoopOutput:
    """What is before the first sampled token is the prompt; what stands between later ones has mask 0."""
    sampled_T = sample.policy_versions_T != NOT_SAMPLED
    start = int(sampled_T.argmax())
    end = start + longest
    return AgentLoopOutput(
        prompt_ids=sample.token_ids_T[:start].tolist(),
        response_ids=sample.token_ids_T[start:end].tolist(),
        response_mask=sampled_T[start:end].astype(int).tolist(),
        response_logprobs=sample.logprobs_T[start:end].tolist(),
        reward_score=reward,
        num_turns=2 * num_turns + 1,
        metrics=AgentLoopMetrics(),
    )
