"""The judge of an evaluation's answers, when it is not the world itself, whoever plays.

    its own grader ──┐                   ┌─► reward_fn     of an environment of questions
    --evaluator    ──┼──► Evaluator ─────┼─► evaluator     of a program
    --judge-model  ──┘                   └─► judged        of a stored episode

One row that a judge cannot judge fails one attempt, is counted and named, and is never a zero.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from rllm.engine.attempts import EpisodeCounts, EpisodeEngine
from rllm.engine.rollout import GRADE
from rllm.environments.follow_ups import FOLLOW_UPS, conversation_verdict
from rllm.environments.judging import GraderFailure, RewardFn, judge_of, prepare
from rllm.errors import ConfigError, InferenceError
from rllm.rewards.evaluator import Evaluator
from rllm.rewards.evaluators import GraderEvaluator, grading_fields, with_own_names
from rllm.rewards.extraction import last_assistant_text
from rllm.store.encoding import require_storable
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.evaluation import EvalOutput
from rllm.types.messages import SamplingParams
from rllm.types.task import EpisodeId

_COULD_NOT = "could_not_judge"
"""Key of a judgement's metadata: why there is none."""


def task_evaluator() -> Evaluator:
    """Judges by the grader that each task names.

    Raises ConfigError for a task that names none: a world that pays for moves cannot be asked without being
    played.
    """

    def grade_episode(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
        judge = judge_of(task)
        if judge is None:
            raise ConfigError(
                f"Task {episode.task_id!r} names no grader: its environment paid for what was done, and is "
                "not there to be asked again. Say who judges with --evaluator."
            )
        verdict = (
            conversation_verdict(task, _answers(episode))
            if task.get(FOLLOW_UPS)
            else judge(last_assistant_text(episode))
        )
        return EvalOutput(reward=verdict.reward, is_correct=verdict.is_correct, metadata=verdict.info)

    return Evaluator(grade_episode, "the tasks' graders")


def _answers(episode: Episode) -> list[str]:
    """The answers turn by turn, of whoever spoke last."""
    return [step.model_response for step in episode.trajectories[-1].steps] if episode.trajectories else []


def judged(evaluator: Evaluator, episode: Episode) -> EvalOutput:
    """The judgement of an episode, from a thread without an event loop."""
    task = episode.task if isinstance(episode.task, Mapping) else {}
    judgement_or_awaitable = evaluator.evaluate(task, episode)
    return (
        asyncio.run(_await_judgement(judgement_or_awaitable))
        if inspect.isawaitable(judgement_or_awaitable)
        else judgement_or_awaitable
    )


def as_reward_fn(evaluator: Evaluator) -> RewardFn:
    """The reward function of an environment of questions. Raises GraderFailure where the judge raised."""

    def pay(task: dict[str, Any], answer: Any) -> EvalOutput:
        step = Step(
            chat_completions=[{"role": "assistant", "content": str(answer)}], model_response=str(answer)
        )
        episode = Episode(
            task=task,
            task_id=str(task.get("task_id", "")),
            trajectories=[Trajectory(task=task, steps=[step])],
        )
        try:
            return judged(evaluator, episode)
        except ConfigError:
            raise
        except Exception as error:
            raise GraderFailure(_could_not_judge(evaluator, error)) from error

    return pay


def row_by_row(evaluator: Evaluator) -> Evaluator:
    """The same for a program, whose engine ends everything where its judge raises and asks the model again
    where it cannot be reached: what it raises becomes a note, which `JudgedEngine` reads."""

    async def judged_in_loop(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
        try:
            judgement = evaluator.evaluate(task, episode)
            return await judgement if inspect.isawaitable(judgement) else judgement
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a judge raises is a failure of its row
            return _note(evaluator, error)

    def judged_in_thread(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
        try:
            judgement = evaluator.evaluate(task, episode)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  whatever a judge raises is a failure of its row
            return _note(evaluator, error)
        assert isinstance(judgement, EvalOutput), "it is not async"
        return judgement

    return Evaluator(judged_in_loop if evaluator.is_async else judged_in_thread, evaluator.name)


def failing_alone(evaluator: Evaluator) -> Evaluator:
    """The same for a program that is trained, whose engine ends the run where its judge raises: a row that
    the task's own grader cannot judge fails its attempt alone."""

    def judged_alone(task: Mapping[str, Any], episode: Episode) -> EvalOutput:
        try:
            judgement = evaluator.evaluate(task, episode)
        except GraderFailure as error:
            raise InferenceError(_could_not_judge(evaluator, error)) from error
        assert isinstance(judgement, EvalOutput), "the tasks' graders are not async"
        return judgement

    return Evaluator(judged_alone, evaluator.name)


class JudgedEngine:
    """An engine whose episodes are judged here, however they were paid: each once, and the model is not asked
    again where the judge fails."""

    def __init__(self, engine: EpisodeEngine, evaluator: Evaluator | None) -> None:
        """Without `evaluator` the engine has judged, `row_by_row`."""
        self._engine = engine
        self._evaluator = evaluator

    @property
    def counts(self) -> EpisodeCounts:
        return self._engine.counts

    def live(self) -> Sequence[object]:
        return self._engine.live()

    async def run(
        self,
        tasks: Sequence[Any],
        *,
        group_size: int = 1,
        purpose: str = "",
        sampling: SamplingParams | None = None,
        skip: Collection[EpisodeId] = (),
    ) -> AsyncGenerator[Episode, None]:
        """As of every engine."""
        running = self._engine.run(
            tasks, group_size=group_size, purpose=purpose, sampling=sampling, skip=skip
        )
        async with aclosing(running) as episodes:
            async for episode in episodes:
                note = episode.info.get("evaluation", {}).get(_COULD_NOT)
                if note is not None:
                    pay(episode, GraderFailure(note))
                elif self._evaluator is not None and episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED):
                    pay(episode, await asyncio.to_thread(verdict, self._evaluator, episode))
                yield episode


def verdict(evaluator: Evaluator, episode: Episode) -> EvalOutput | GraderFailure:
    """The judgement, or why there is none. Raises ConfigError for what is wrong of every task alike."""
    try:
        output = judged(evaluator, episode)
        # Metadata that cannot be stored fails its own row here, and not the whole batch when that is saved.
        require_storable(Episode(id=episode.id, info={"evaluation": output.metadata}))
        return output
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a judge raises is a failure of its row
        return GraderFailure(_could_not_judge(evaluator, error))


def pay(episode: Episode, output: EvalOutput | GraderFailure) -> None:
    """Every trajectory what the judgement says; an episode that could not be judged has failed."""
    if isinstance(output, GraderFailure):
        episode.is_correct, episode.outcome = False, Outcome.INFRASTRUCTURE_FAILURE
        for trajectory in episode.trajectories:
            trajectory.reward, trajectory.outcome = None, episode.outcome
            trajectory.info.pop(GRADE, None)
            trajectory.info["error"] = {"type": type(output).__name__, "message": str(output)}
        episode.info.pop("evaluation", None)
        return
    for trajectory in episode.trajectories:
        trajectory.reward = output.reward
        trajectory.signals |= {signal.name: signal.value for signal in output.signals}
        trajectory.info[GRADE] = {
            name: output.metadata[name]
            for name in ("extracted", "reason", "readings")
            if output.metadata.get(name)
        } | {"is_correct": output.is_correct}
    episode.is_correct = output.is_correct


def require_gradable(evaluator: Evaluator, tasks: Sequence[Mapping[str, Any]], dataset: str) -> None:
    """Raises ConfigError with the number of the first row that lacks a field which the grader reads."""
    owner = getattr(evaluator.function, "__self__", None)
    if not isinstance(owner, GraderEvaluator):
        return
    for number, task in enumerate(tasks):
        fields = with_own_names(grading_fields(task), owner.name)
        for field_name in owner.grader.task_fields:
            if all(fields.get(name) is None for name in field_name.split("|")):
                raise ConfigError(
                    f"{dataset}: row {number} has no {field_name.replace('|', ' or ')}, which the grader "
                    f"`{owner.name}` reads; it has {', '.join(map(str, fields)) or 'nothing'}."
                )
        prepare(owner.grader, fields)


def _note(evaluator: Evaluator, error: Exception) -> EvalOutput:
    return EvalOutput(reward=0.0, is_correct=False, metadata={_COULD_NOT: _could_not_judge(evaluator, error)})


def _could_not_judge(evaluator: Evaluator, error: Exception) -> str:
    return f"{evaluator.name} could not judge: {type(error).__name__}: {error}"


async def _await_judgement(result: Any) -> EvalOutput:
    return await result
