"""`verifiers:NAME`: an environment of verifiers as a program that brings its tasks and its rubric.

    row ──► env.rollout ──► its OpenAI client ──► the session of the gateway, which captures every call
                │
                └─ state ──► rubric ──► reward, metrics       state["error"] ──► whose failure it is

Only environments that score one rollout at a time are played: GRPO groups are made here, not by a rubric.
"""

import copy
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rllm.errors import ActionError, AgentError, ConfigError, SandboxError
from rllm.integrations.task_program import INPUT, TaskProgram
from rllm.integrations.verifiers.library import load_environment, module_source, verifiers_library
from rllm.integrations.verifiers.scoring import score, watch_rubric
from rllm.types.call_budget import exhausted_limit
from rllm.types.episode import Episode, TerminationReason, Trajectory
from rllm.types.task import AgentConfig, Task

_REASONS = {
    "prompt_too_long": TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    "max_total_completion_tokens_reached": TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED,
    "timeout_reached": TerminationReason.TIMEOUT,
}


class VerifiersProgram(TaskProgram):
    """An environment by the name that `vf-eval` knows; the query of the name is its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._library = verifiers_library()
        self.environment = environment = load_environment(self.target, self.arguments)
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"`{name}` scores whole groups of rollouts, and episodes are judged one by one here; give "
                "its rubric reward functions of one completion."
            )
        if not environment.score_rollouts:
            raise ConfigError(f"`{name}` has `score_rollouts` off, so nothing would be paid; turn it on.")
        watch_rubric(environment.rubric)

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        environment = self.environment
        parts = [environment.build_dataset(), environment.build_eval_dataset()]
        train, held_out = ([] if part is None else part.to_list() for part in parts)
        return train, held_out

    def content(self) -> dict[str, Any]:
        return {
            "verifiers": metadata.version("verifiers"),
            "environment": module_source(self.target),
            "arguments": self.arguments,
        }

    def instruction(self, row: Mapping[str, Any]) -> str:
        prompt = row["prompt"]
        content = prompt if isinstance(prompt, str) else prompt[-1].get("content")
        return content if isinstance(content, str) else str(content)

    async def run(self, task: Task, config: AgentConfig) -> Episode:
        from rllm.integrations.verifiers.client import session_client  # imports verifiers

        row = copy.deepcopy(task.metadata[INPUT])
        sampling = copy.deepcopy(self.environment.sampling_args)
        async with session_client(config) as client:
            try:
                state = await self.environment.rollout(row, client, config.model, sampling)
            except Exception as error:
                raise AgentError(f"{self.name} raised {type(error).__name__}: {error!s:.500}") from error
            reason = self._end(state)
            await score(self.environment.rubric, state)
        reward = float(state["reward"])
        trajectory = Trajectory(
            name=self.label, reward=reward, signals=dict(state["metrics"] or {}), termination_reason=reason
        )
        return Episode(
            trajectories=[trajectory],
            termination_reason=reason,
            is_correct=reward >= self.environment.pass_threshold,
            info={"verifiers": {"stop_condition": state.get("stop_condition")}},
        )

    def _end(self, state: Any) -> TerminationReason:
        """The reason that the rollout ended. Raises what says whose failure it was, where it failed."""
        error, stop = state.get("error"), state.get("stop_condition")
        if error is not None:
            return self._limit_of(error)
        if stop in _REASONS:
            return _REASONS[stop]
        steps = state["trajectory"]
        if steps and steps[-1]["is_truncated"]:
            return TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED
        if stop == "max_turns_reached" and len(steps) > 1:
            return TerminationReason.MAX_TURNS_EXCEEDED
        return TerminationReason.ENV_DONE

    def _limit_of(self, error: Exception) -> TerminationReason:
        """The limit that a refused call had reached."""
        library = self._library
        code = getattr(error.__cause__, "code", None)
        words = f"{self.name}: {type(error).__name__}: {error.__cause__ or error!s:.500}"
        if code == "context_length_exceeded":
            return TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED
        if exhausted_limit(code):  # the engine knows which, and counts it
            return TerminationReason.MAX_TURNS_EXCEEDED
        if isinstance(error, library.InvalidModelResponseError | library.ToolParseError):
            raise ActionError(words) from error
        if isinstance(error, library.InfraError):
            raise SandboxError(words) from error
        raise AgentError(words) from error
