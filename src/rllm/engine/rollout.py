"""One agent in one environment, until done: the only place where an exception becomes data.

      ┌────────────── observation, reward, done ◄────────────── environment (worker thread, or async)
      ▼                                                             ▲
agent.update_from_env ─► messages ─► session.respond ─► agent.update_from_model ─► action
                            │           │
                            │           └─► Step: prompt ids, response ids, log-probabilities, policy versions
                            └─► budget: a request that cannot fit is never sent

A model call that failed is asked again here, and nowhere else. What the rest becomes:

    scored                  the environment said that it is done
    truncated               turns, tokens or time ran out, or the agent said so; the reward is what was earned
                            (time of its own: waiting for the model does not count, see `EpisodeClock`)
    policy failure          the agent's own code raised, or the environment cannot read what the model wrote
    infrastructure failure  the environment raised or hung, the model failed every time or was silent for too
                            long, or a class of the user's broke its contract, say by a reward of NaN
    cancelled               nobody wants it any more

Whether failures end the run is for `rllm.engine.failures` to say.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from rllm.agents.base import BaseAgent
from rllm.engine.attempt_state import Vitals
from rllm.engine.contracts import require_trajectory
from rllm.engine.environment_pool import EnvironmentPool
from rllm.engine.failures import CONTRACT_ERRORS, contract_error_of, error_record, is_infrastructure
from rllm.engine.turnstile import Turnstile
from rllm.engine.world import EnvironmentWorker, MakeEnv
from rllm.environments.base import StepResult
from rllm.errors import ActionError, AgentError, ContextLengthError, RewardError, error_text
from rllm.inference.call_retries import CallPatience, answer_of
from rllm.inference.client import ModelClient, ModelSession, Tools, takes_tools
from rllm.inference.reading import no_tools
from rllm.types.budget import BudgetExceeded, BudgetMeter, TokenBudget
from rllm.types.draws import draw_seed
from rllm.types.episode import Action, Outcome, Step, TerminationEvent, TerminationReason, Trajectory
from rllm.types.episode_clock import EpisodeClock, EpisodeLimits, ModelPulse
from rllm.types.judgements import finite_number
from rllm.types.messages import FinishReason, Message, ModelOutput, SamplingParams
from rllm.types.task import EpisodeId

T = TypeVar("T")

HURRY_S = 5.0
"""The time that a cancelled rollout waits for its environment to close; it closes later all the same."""

ENVIRONMENT, MODEL, AGENT = "environment", "model", "agent"
"""Where a rollout failed: `info["error"]["place"]`."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutLimits:
    max_turns: int = 5
    step_timeout_s: float = 60.0
    """The time limit of one environment call."""
    episode_timeout_s: float | None = 600.0
    """The episode's own time, model calls not counted. None: as long as its turns take, each of which is
    limited."""
    wall_timeout_s: float | None = None
    """All of its time."""
    model_timeout_s: float | None = None
    """The longest silence of the model."""
    budget: TokenBudget = field(default_factory=TokenBudget)
    patience: CallPatience = field(default_factory=lambda: CallPatience(retries=0))
    """With the model."""

    @property
    def times(self) -> EpisodeLimits:
        return EpisodeLimits(
            work_s=self.episode_timeout_s, wall_s=self.wall_timeout_s, silence_s=self.model_timeout_s
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class RolloutKey:
    """The key that every random draw of one rollout is derived from."""

    seed: int = 0
    purpose: str = ""
    """Phase and step, such as `train/17`."""
    episode: EpisodeId = field(default_factory=lambda: EpisodeId(task_id=""))

    def draw(self, turn: int, what: str) -> int:
        return draw_seed(self.seed, self.purpose, self.episode.task_id, self.episode.attempt, turn, what)


GRADE = "grade"
"""Key of `Trajectory.info`: what the environment said of the answer when it ended the episode."""
_GRADE_FIELDS = ("is_correct", "extracted", "reason")

PAID = (Outcome.SCORED, Outcome.TRUNCATED)
"""The ends of an episode that have a reward."""

_SAMPLING_NAMES = tuple(each.name for each in fields(SamplingParams))


class _Ended(Exception):
    """The end of a rollout."""

    def __init__(
        self,
        reason: TerminationReason,
        outcome: Outcome,
        cause: BaseException | None = None,
        place: str = "",
    ) -> None:
        super().__init__(str(reason))
        self.reason = reason
        self.outcome = outcome
        self.cause = cause
        self.place = place


async def run_trajectory(
    agent: BaseAgent,
    make_env: MakeEnv,
    client: ModelClient,
    *,
    pool: EnvironmentPool | None = None,
    limits: RolloutLimits = RolloutLimits(),
    sampling: SamplingParams = SamplingParams(),
    key: RolloutKey = RolloutKey(),
    session: ModelSession | None = None,
    vitals: Vitals | None = None,
    deadline_at: float | None = None,
    pulse: ModelPulse | None = None,
    slot: int = 0,
    turnstile: Turnstile | None = None,
) -> Trajectory:
    """Play one rollout and say what it counts as. Always closes the environment, and the session unless it
    was handed in.

    The reward is the sum of the environment's rewards, and None when something failed: a failure is never a
    zero. What failed is in `vitals.failure`. `deadline_at`, by the loop's clock, ends it as its own time
    limit would. `turnstile` and `pulse` are shared by rollouts that run together.
    """
    used_pool = EnvironmentPool(1) if pool is None else pool
    used_session = client.session((key.episode.task_id, key.episode.attempt)) if session is None else session
    world = EnvironmentWorker(make_env, used_pool, step_timeout_s=limits.step_timeout_s, slot=slot)
    vitals = Vitals(key.episode) if vitals is None else vitals
    clock = EpisodeClock(limits.times, pulse, deadline_at=deadline_at)
    rollout = _Rollout(agent, used_session, world, limits, sampling, key, vitals, turnstile, clock)
    start_s = time.perf_counter()
    hurry = False
    try:
        end = await rollout.play_to_end()
    except asyncio.CancelledError:
        hurry = True
        raise
    finally:
        # Before the environment: a lockstep engine waits for every open session, and `close` may take long.
        if session is None:
            used_session.close()
        vitals.waits_for = "environment.close"
        # Who is not in a hurry waits for `step_timeout_s` at most, which limits every call of an environment.
        close_error = await world.close(HURRY_S if hurry else None)
        if pool is None:
            used_pool.close()
    trajectory = rollout.finish(end)
    if close_error is not None:
        trajectory.info["close_error"] = f"{type(close_error).__name__}: {error_text(close_error)}"
    trajectory.info["duration_s"] = time.perf_counter() - start_s
    return trajectory


def failed_trajectory(trajectory: Trajectory, error: BaseException, place: str, vitals: Vitals) -> Trajectory:
    """The trajectory as one that failed through no fault of the policy: with the cause, without a reward."""
    vitals.failure = error
    trajectory.reward = None
    trajectory.termination_reason, trajectory.outcome = (
        TerminationReason.ERROR,
        Outcome.INFRASTRUCTURE_FAILURE,
    )
    trajectory.info["error"] = _record(trajectory, error, place)
    return trajectory


def _record(trajectory: Trajectory, error: BaseException, place: str) -> dict[str, Any]:
    return error_record(error, place) | {"step": len(trajectory.steps)}


def _expire(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


def _let_through_if_cancelled(error: BaseException) -> None:
    """Raises a CancelledError that somebody asked for; one of user code is an error like any other."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


class _Rollout:
    """The state of one rollout while it is played."""

    def __init__(
        self,
        agent: BaseAgent,
        session: ModelSession,
        world: EnvironmentWorker,
        limits: RolloutLimits,
        sampling: SamplingParams,
        key: RolloutKey,
        vitals: Vitals,
        turnstile: Turnstile | None,
        clock: EpisodeClock,
    ) -> None:
        self.agent = agent
        self.session = session
        self.world = world
        self.limits = limits
        self.sampling = sampling
        self.sampling_fields: dict[str, Any] = {name: getattr(sampling, name) for name in _SAMPLING_NAMES}
        self.key = key
        self.vitals = vitals
        self.turnstile = turnstile
        self.clock = clock
        self.meter = None if limits.budget.unlimited else BudgetMeter(limits.budget)
        self.trajectory = Trajectory()
        """The agent's own, as soon as it has one."""
        self.env_s: float
        self.model_s: float
        """The seconds of the latest call of each."""

    async def play_to_end(self) -> _Ended:
        """Play until it ends, and say how."""
        return self.require_end(await self.end_of_play())

    async def end_of_play(self) -> _Ended:
        try:
            async with asyncio.timeout(None) as scope:
                self.vitals.interrupt = partial(_expire, scope)
                self.clock.begin(self.vitals.interrupt)
                try:
                    # A stop that came before `interrupt` was set has ended nothing.
                    if self.vitals.stop_outcome is None:
                        await self.play()
                finally:
                    self.vitals.interrupt = None
                    self.clock.stop()
        except _Ended as end:
            return end
        except TimeoutError:
            # The scope's own: timeouts of model, environment and agent have become `_Ended` by now.
            pass
        except Exception as error:  # noqa: BLE001  the agent broke its contract, or gave what nobody can read
            return _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, error, AGENT)
        if self.vitals.stop_outcome is not None:
            return _Ended(TerminationReason.UNKNOWN, self.vitals.stop_outcome)
        if (silence := self.clock.silence_error()) is not None:
            return _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, silence, MODEL)
        late = TimeoutError(
            f"The time of the episode was up in turn {self.vitals.turn}, when it waited for "
            f"{self.vitals.waits_for}."
        )
        return _Ended(TerminationReason.TIMEOUT, Outcome.TRUNCATED, late)

    def require_end(self, end: _Ended) -> _Ended:
        """The end; a failure where the agent made its trajectory something else, or where what is no number
        would have been paid."""
        name = type(self.agent).__name__
        try:
            require_trajectory(self.trajectory, f"{name}.trajectory")
        except Exception as error:  # noqa: BLE001  of users' values, which may do anything when looked at
            cause: BaseException = contract_error_of(error, f"{name}.trajectory cannot be read")
            # What can be read of it stays on record, as all that was sampled does.
            steps: Any = self.trajectory.steps
            self.trajectory = Trajectory(
                steps=[each for each in steps if isinstance(each, Step)] if isinstance(steps, list) else []
            )
        else:
            try:
                for step in self.trajectory.steps if end.outcome in PAID else ():
                    step.reward = finite_number(step.reward, f"{name} set", "a step's reward")
                return end
            except RewardError as error:
                cause = error
        # It has failed before, and that cause says more.
        if end.outcome not in PAID:
            return end
        return _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, cause, AGENT)

    async def play(self) -> None:
        """Turn after turn; ends by raising _Ended."""
        self.in_agent(self.agent.reset)
        self.trajectory = self.own_trajectory()
        # 31 bits: environments hand their seed to generators such as NumPy's RandomState, which take 32.
        observation, info = await self.in_world(
            "environment.reset", self.world.reset(self.key.draw(0, "environment") % 2**31)
        )
        self.tell(observation, 0.0, False, info)
        for turn in range(self.limits.max_turns):
            self.vitals.turn = turn + 1
            messages, tools = self.messages(), self.tools()
            output = await self.ask(turn, messages, tools)
            if self.turnstile is not None:
                await self.turnstile.wait_to_pass()
            action = self.action_for(output, messages, tools)
            result: StepResult = await self.in_world("environment.step", self.world.step(action))
            timings = self.trajectory.steps[-1].timings
            timings["env_s"] = self.env_s
            if result.grader_s:
                timings["grader_s"] = result.grader_s
            self.tell(result.observation, result.reward, result.done, result.info)
            # Only now: watchdogs take a turn for progress, and one that the environment never answered is
            # none.
            self.vitals.counts.turns += 1
            if result.done and (grade := _grade_in(result.info)):
                self.trajectory.info[GRADE] = grade
            if result.truncated:
                raise _Ended(TerminationReason.MAX_TURNS_EXCEEDED, Outcome.TRUNCATED)
            if result.done:
                raise _Ended(TerminationReason.ENV_DONE, Outcome.SCORED)
        raise _Ended(TerminationReason.MAX_TURNS_EXCEEDED, Outcome.TRUNCATED)

    # ---- the model ---------------------------------------------------------------------------------------

    async def ask(self, turn: int, messages: list[Message], tools: Tools) -> ModelOutput:
        """A whole answer, asked for with the seed of this turn, within what is left of the budget."""
        seed = self.key.draw(turn, "sample")
        self.vitals.waits_for = MODEL
        start_s = time.perf_counter()
        try:
            with self.clock.call():
                sampling = self.sampling_for(seed, self.max_tokens_left(messages, tools))
                output = await answer_of(
                    self.question(messages, sampling, tools),
                    self.limits.patience,
                    seed=seed,
                    on_retry=self.note_retry,
                )
        except BudgetExceeded as budget_error:
            raise _Ended(budget_error.reason, Outcome.TRUNCATED, budget_error) from budget_error
        except ContextLengthError as error:
            raise _Ended(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, Outcome.TRUNCATED, error) from error
        except (Exception, asyncio.CancelledError) as error:
            _let_through_if_cancelled(error)
            raise _Ended(TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, error, MODEL) from error
        self.model_s = time.perf_counter() - start_s
        return output

    def question(
        self, messages: list[Message], sampling: SamplingParams, tools: Tools
    ) -> Callable[[], Awaitable[ModelOutput]]:
        """A function that asks the model; it may be called several times."""
        if not tools:
            return lambda: self.session.respond(messages, sampling)
        if not takes_tools(type(self.session)):
            raise no_tools(tools, f"{type(self.session).__name__} takes none")
        return lambda: self.session.respond(messages, sampling, tools)

    def note_retry(self, wait_s: float, error: BaseException) -> None:
        self.vitals.call_retries += 1
        self.vitals.waits_for = (
            f"the model, again in {wait_s:.1f} s after {type(error).__name__}: {error_text(error)}"
        )

    def sampling_for(self, seed: int, max_tokens: int) -> SamplingParams:
        self.sampling_fields["seed"] = seed
        self.sampling_fields["max_tokens"] = max_tokens
        return SamplingParams(**self.sampling_fields)

    def max_tokens_left(self, messages: list[Message], tools: Tools) -> int:
        """Tokens that the next answer may have. Raises BudgetExceeded when there is none."""
        most = self.sampling.max_tokens
        # No limit depends on the length of a prompt, so none is measured, which costs a rendering.
        if self.meter is None:
            return min(most, self.limits.budget.max_turn_tokens or most)
        measure: Callable[..., int] | None = getattr(self.session, "prompt_tokens", None)
        tool_arguments = (tools,) if tools else ()
        return min(most, self.meter.allow(-1 if measure is None else measure(messages, *tool_arguments)))

    def record_use(self, output: ModelOutput, messages: list[Message]) -> None:
        """Count what the answer took. One that the budget cut off ends the rollout: it is on record, and
        nobody acts on half of it."""
        if self.meter is None:
            return
        usage = output.usage
        num_prompt = len(output.prompt_ids) or usage.get("prompt_tokens", 0)
        num_new = len(output.completion_ids) or usage.get("completion_tokens", 0)
        try:
            self.meter.record(num_prompt, num_new, cut_off=output.finish_reason is FinishReason.LENGTH)
        except BudgetExceeded as budget_error:
            self.trajectory.steps.append(Step.from_model_output(output, messages))
            self.trajectory.steps[-1].timings["model_s"] = self.model_s
            raise _Ended(budget_error.reason, Outcome.TRUNCATED, budget_error) from budget_error

    # ---- the agent ---------------------------------------------------------------------------------------

    def messages(self) -> list[Message]:
        messages = self.in_agent(lambda: self.agent.chat_completions)
        if not isinstance(messages, list) or not messages:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise AgentError(
                f"{type(self.agent).__name__}.chat_completions is {messages!r}; it must be a list with at "
                "least one message."
            )
        content: Any = messages[-1].get("content")
        if content is not None and not isinstance(content, str | list):
            raise AgentError(
                f"{type(self.agent).__name__}.chat_completions ends with a message whose `content` is "
                f"{content!r}; it must be text or a list of content parts."
            )
        return messages

    def own_trajectory(self) -> Trajectory:
        trajectory = self.in_agent(lambda: self.agent.trajectory)
        if not isinstance(trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise AgentError(
                f"{type(self.agent).__name__}.trajectory is {trajectory!r}; it must be a rllm.Trajectory."
            )
        return trajectory

    def tools(self) -> Tools:
        return self.in_agent(lambda: self.agent.tool_schemas)

    def action_for(self, output: ModelOutput, messages: list[Message], tools: Tools) -> Any:
        """The agent's response to an answer, which becomes one step of its trajectory."""
        self.record_use(output, messages)
        num_before = len(self.trajectory.steps)
        try:
            read = {"output": output} if tools else {}
            action = self.in_agent(lambda: self.agent.update_from_model(output.text, **read))
        except _Ended:
            # What was sampled is on record, whoever stumbled over it.
            if len(self.trajectory.steps) == num_before:
                self.trajectory.steps.append(Step(model_response=output.text))
            self.record(output, num_before)
            raise
        self.trajectory = self.own_trajectory()
        self.record(output, num_before)
        return action.action if isinstance(action, Action) else action

    def record(self, output: ModelOutput, num_before: int) -> None:
        steps = self.trajectory.steps
        if len(steps) != num_before + 1:
            raise AgentError(
                f"{type(self.agent).__name__}.update_from_model added {len(steps) - num_before} steps to its "
                "trajectory; it must append exactly one, because each model call is one step."
            )
        steps[-1].record_output(output)
        steps[-1].share_history(steps[-2] if len(steps) > 1 else None)
        steps[-1].timings["model_s"] = self.model_s
        if output.unparsed_markup:
            steps[-1].info["unparsed_markup"] = True

    def tell(self, observation: Any, reward: float, done: bool, info: dict[str, Any]) -> None:
        try:
            self.in_agent(lambda: self.agent.update_from_env(observation, reward, done, info))
        finally:
            # What the environment paid is on record also when the agent raises.
            if self.trajectory.steps:
                step = self.trajectory.steps[-1]
                step.reward, step.done = reward, done

    def in_agent(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except TerminationEvent as event:
            raise _Ended(event.reason, Outcome.TRUNCATED, event) from event
        except CONTRACT_ERRORS:
            # The fault of a class and not of the policy: `end_of_play` says what it counts as.
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit(), a panic of an extension
            if is_infrastructure(error):  # of a world that the agent asked: tried again as the environment is
                raise _Ended(
                    TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, error, ENVIRONMENT
                ) from error
            raise _Ended(TerminationReason.ERROR, Outcome.POLICY_FAILURE, error, AGENT) from error

    # ---- the environment ---------------------------------------------------------------------------------

    async def in_world(self, what: str, call: Any) -> Any:
        self.vitals.waits_for = what
        start_s = time.perf_counter()
        try:
            return await call
        except ActionError as error:
            raise _Ended(TerminationReason.ERROR, Outcome.POLICY_FAILURE, error, ENVIRONMENT) from error
        except TimeoutError as error:
            # Of one call. The timeout of the episode comes as a cancellation and is let through below.
            raise _Ended(
                TerminationReason.TIMEOUT, Outcome.INFRASTRUCTURE_FAILURE, error, ENVIRONMENT
            ) from error
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit(), a panic of an extension
            _let_through_if_cancelled(error)
            raise _Ended(
                TerminationReason.ERROR, Outcome.INFRASTRUCTURE_FAILURE, error, ENVIRONMENT
            ) from error
        finally:
            self.env_s = time.perf_counter() - start_s

    # ---- the result --------------------------------------------------------------------------------------

    def finish(self, end: _Ended) -> Trajectory:
        trajectory = self.trajectory
        trajectory.termination_reason = end.reason
        trajectory.outcome = end.outcome
        is_paid = end.outcome in PAID
        trajectory.reward = sum(step.reward for step in trajectory.steps) if is_paid else None
        # A truncation has a cause as well, and is no failure.
        self.vitals.failure = None if is_paid else end.cause
        if end.cause is not None:
            trajectory.info["error"] = _record(trajectory, end.cause, end.place)
        if self.vitals.call_retries:
            trajectory.info["call_retries"] = self.vitals.call_retries
        conversation = getattr(self.session, "conversation", None)
        if conversation is not None and conversation.num_segments > 1:
            trajectory.info["segments"] = conversation.num_segments
            trajectory.info["segment_reason"] = str(conversation.segment_reason)
        return trajectory


def _grade_in(info: dict[str, Any]) -> dict[str, Any]:
    grade = {name: info[name] for name in _GRADE_FIELDS if isinstance(info.get(name), bool | str)}
    if grade and isinstance(readings := info.get("readings"), dict):
        grade["readings"] = dict(readings)
    return grade
