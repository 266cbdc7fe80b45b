"""The result of a program, joined with the calls that were captured while it ran.

    None                       ──► one trajectory, one Step per call, in the order of capture
    Trajectory, Episode        ──► each Step gets the tokens of its call:
        Step(id=response.id)           the call with that completion id
        Step(info={"completion_id": …, "choice": 1})   the same said otherwise; a choice of several
        Step(model_response=…, chat_completions=…)     the call with this answer to these messages

Never by position: programs call in parallel. Of calls that are equal in prompt, answer and ids each Step gets
the next one. A call that no Step claims is counted and not trained on.
"""

import json
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllm.engine.step_matching import match_by_content
from rllm.errors import AgentError
from rllm.types.call_budget import CallBudget, exhausted_limit
from rllm.types.episode import CUT_THOUGHT, Episode, Step, Trajectory
from rllm.types.messages import FinishReason, ModelOutput, ToolCall
from rllm.types.wire import CallRecord, CallStatus

_DEFAULT_ROLE = Trajectory().name
_MOST_IDS_SHOWN = 8


class BrokenOffCall(Exception):
    """A Step refers to a call whose answer never became whole."""


@dataclass(slots=True)
class Captured:
    """The calls of one session."""

    records: list[CallRecord]

    @property
    def answers(self) -> list[CallRecord]:
        """Whole answers: all that may become a Step."""
        return [record for record in self.records if record.status is CallStatus.OK]

    def counts(self) -> dict[str, float]:
        """For `Episode.metrics`."""
        by_status = dict.fromkeys(CallStatus, 0)
        for record in self.records:
            by_status[record.status] += 1
        return {
            "calls": float(by_status[CallStatus.OK]),
            "partial_calls": float(by_status[CallStatus.PARTIAL]),
            "failed_calls": float(by_status[CallStatus.ERROR]),
        }

    @property
    def last_error(self) -> dict[str, Any] | None:
        return next((record.error for record in reversed(self.records) if record.error is not None), None)

    def budget_end(self, budget: CallBudget) -> tuple[str, str]:
        """(limit of the budget that was reached, what was refused because of it); both empty where none was.

        An answer that was cut off by the last token counts, too, where nothing was asked afterwards.
        """
        for record in self.records:
            error = record.error or {}
            if limit := exhausted_limit(error.get("code")):
                return limit, str(error.get("message"))
        answers = self.answers
        # By id, because all choices of a call carry the usage of the whole call.
        num_sampled = sum({each.id: each.usage.get("completion_tokens", 0) for each in answers}.values())
        if 0 < budget.tokens <= num_sampled and answers[-1].finish_reason == FinishReason.LENGTH:
            return "tokens", f"An answer was cut off by the last of {budget.tokens} tokens."
        return "", ""

    def infrastructure_error(self) -> dict[str, Any] | None:
        """The fault of the engine or server that no later try of the same call made good."""
        answers = self.answers
        # SDKs retry by themselves: a failure counts only where no equal request was answered.
        for record in reversed(self.records):
            if _is_infrastructure(record) and not any(_same_request(record, other) for other in answers):
                return record.error
        return None


def join(result: Episode | Trajectory | None, calls: Captured, role: str) -> tuple[Episode, list[str]]:
    """The episode with the tokens of its calls, and the ids of calls that no Step claims.

    `role` names trajectories that have no name of their own. What the program returned is copied, not
    changed. Raises AgentError for a Step that is no captured call, BrokenOffCall for one that has no answer.
    """
    if isinstance(result, Episode):
        episode = replace(result, trajectories=[_own(each, role) for each in result.trajectories])
    else:
        episode = Episode(trajectories=[] if result is None else [_own(result, role)])
    answers = calls.answers
    if not any(trajectory.steps for trajectory in episode.trajectories):
        if len(episode.trajectories) > 1 and answers:
            names = ", ".join(trajectory.name for trajectory in episode.trajectories)
            raise AgentError(
                f"{role} returned {len(episode.trajectories)} trajectories ({names}) without steps, so "
                f"nobody knows whose the {len(answers)} calls are; give each its Step(id=response.id)."
            )
        if not episode.trajectories:
            episode.trajectories.append(Trajectory(name=role))
        episode.trajectories[0].steps = [step_of(record) for record in answers]
        return episode, []
    claims = _Claims(calls, role)
    steps = [(trajectory, step) for trajectory in episode.trajectories for step in trajectory.steps]
    steps_without_id = [each for each in steps if not claims.by_id(*each)]
    claims.by_content(steps_without_id)
    return episode, [record.id for record in answers if _key(record) not in claims.step_of_call]


def step_of(record: CallRecord) -> Step:
    """A Step that is made of a call alone."""
    step = Step(id=record.id)
    _fill(step, record)
    return step


class _Claims:
    """Which Step is which call."""

    def __init__(self, calls: Captured, role: str) -> None:
        self.step_of_call: dict[tuple[str, int], tuple[Trajectory, Step]] = {}
        self._answers = calls.answers
        self._choices: dict[str, dict[int, CallRecord]] = {}
        for record in self._answers:
            self._choices.setdefault(record.id, {})[record.choice] = record
        self._broken_ids = {record.id for record in calls.records} - self._choices.keys()
        self._role = role

    def by_id(self, trajectory: Trajectory, step: Step) -> bool:
        """Fill a step that says which call it is; False for one that does not."""
        completion_id = _completion_id(step)
        call_id = completion_id or step.id
        choices = self._choices.get(call_id, {})
        if not choices:
            if call_id in self._broken_ids:
                raise BrokenOffCall(f"The answer of call {call_id} broke off.")
            if completion_id:
                raise AgentError(
                    f"{self._where(trajectory, step)} refers to the call {completion_id!r}, which was not "
                    f"captured in this session; {self._available()}"
                )
            return False
        choice = step.info.get("choice", 0 if len(choices) == 1 else None)
        if choice is None:
            choice = self._choice_by_content(step, choices)
        if choice not in choices:
            raise AgentError(
                f"{self._where(trajectory, step)} refers to the call {call_id!r}, which has the "
                f'choices {", ".join(map(str, choices))}; say which one: Step(..., info={{"choice": 0}}).'
            )
        self._claim(trajectory, step, choices[choice])
        return True

    def _choice_by_content(self, step: Step, choices: dict[int, CallRecord]) -> int | None:
        """The choice that the step fits, the first free one of equal ones; None where they differ."""
        fitting = [record for record in choices.values() if _fits(step, record)]
        if len({_identity(record) for record in fitting}) != 1:
            return None
        return next((each for each in fitting if _key(each) not in self.step_of_call), fitting[0]).choice

    def by_content(self, steps_without_id: Sequence[tuple[Trajectory, Step]]) -> None:
        """Fill steps by what they say, wherever that leaves one call only, or equal ones."""
        pairs, left = match_by_content(
            steps_without_id,
            [record for record in self._answers if _key(record) not in self.step_of_call],
            answer_of=lambda each: _answer_of(each[1]) or None,
            answers_of=lambda record: (_text_of(record),),
            fits=lambda each, record: _fits(each[1], record),
            identity_of=_identity,
        )
        for (trajectory, step), record in pairs:
            self._claim(trajectory, step, record)
        for (trajectory, step), fitting in left:
            for record in self._answers if not fitting else ():
                if _fits(step, record):
                    self._claim(trajectory, step, record)  # raises: another step is this call
            raise AgentError(
                f"{self._where(trajectory, step)} fits {len(fitting) or 'none'} of the calls that no "
                "other step is; make it Step(id=response.id, ...) with the id of its completion. "
                f"{self._available()}"
            )

    def _claim(self, trajectory: Trajectory, step: Step, record: CallRecord) -> None:
        key = _key(record)
        if key in self.step_of_call:
            raise AgentError(
                f"{self._where(trajectory, step)} and {self._where(*self.step_of_call[key])} are the same "
                f"call {record.id}; a call belongs to one step, or its tokens would be trained on twice."
            )
        self.step_of_call[key] = trajectory, step
        _fill(step, record)

    def _where(self, trajectory: Trajectory, step: Step) -> str:
        place = next(index for index, each in enumerate(trajectory.steps) if each is step)
        return f"Step {place} of trajectory {trajectory.name!r} of {self._role}"

    def _available(self) -> str:
        ids = list(
            dict.fromkeys(record.id for record in self._answers if _key(record) not in self.step_of_call)
        )
        more = f" and {len(ids) - _MOST_IDS_SHOWN} more" if len(ids) > _MOST_IDS_SHOWN else ""
        return f"Calls that are left: {', '.join(ids[:_MOST_IDS_SHOWN]) or 'none'}{more}."


def _own(trajectory: Trajectory, role: str) -> Trajectory:
    """A copy that can be filled, so that two runs which return the same object do not share it."""
    return replace(
        trajectory,
        name=role if trajectory.name == _DEFAULT_ROLE else trajectory.name,
        steps=[replace(step, info=dict(step.info), timings=dict(step.timings)) for step in trajectory.steps],
        signals=dict(trajectory.signals),
        info=dict(trajectory.info),
    )


def _completion_id(step: Step) -> str:
    output = step.model_output
    return str(step.info.get("completion_id") or (output.completion_id if output is not None else "") or "")


def _key(record: CallRecord) -> tuple[str, int]:
    return record.id, record.choice


def _identity(record: CallRecord) -> Hashable:
    """Equal for calls that nothing tells apart: prompt, answer and ids. Ids of tool calls are always new."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in record.response.get("tool_calls") or ()
    ]
    prompt = record.prompt if isinstance(record.prompt, str | None) else tuple(record.prompt)
    return (
        repr(_message_keys(record.messages)),
        prompt,
        tuple(record.prompt_ids),
        _text_of(record),
        tuple(calls),
        tuple(record.completion_ids),
    )


def _answer_of(step: Step) -> str:
    """The text of its answer; empty where it gives none."""
    return step.model_response or (step.model_output.text if step.model_output is not None else "")


def _fits(step: Step, record: CallRecord) -> bool:
    """Whether the step may be this call, by all that it says of it."""
    text = _answer_of(step)
    messages = step.chat_completions
    if text and text != _text_of(record):
        return False
    if step.response_ids and step.response_ids != record.completion_ids:
        return False
    if not messages:
        return True
    # A step's messages may end with its own answer, which is no part of the prompt.
    if messages[-1].get("role") == "assistant":
        answer = messages[-1].get("content") or ""
        if isinstance(answer, str) and answer != (record.response.get("content") or ""):
            return False
        messages = messages[:-1]
    return _message_keys(messages) == _message_keys(record.messages)


def _message_keys(messages: Iterable[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Roles and texts: what a client keeps of a message, whatever else it adds to it."""
    return [(message.get("role"), _plain_text(message.get("content"))) for message in messages]


def _plain_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


def _text_of(record: CallRecord) -> str:
    return _plain_text(record.response.get("content"))


def _fill(step: Step, record: CallRecord) -> None:
    """Tokens and messages of the call; what the program says about its step stays."""
    step.record_output(_output_of(record))
    step.chat_completions = [*record.messages, record.response]
    step.model_response = step.model_response or _text_of(record)
    step.thought = step.thought or record.response.get("reasoning_content") or ""
    step.timings["model_s"] = record.latency_s
    step.info.setdefault("completion_id", record.id)
    if record.choice:
        step.info["choice"] = record.choice
    if record.conversation:
        step.info["conversation"] = record.conversation
    if record.segment:
        step.info["segment"], step.info["segment_reason"] = record.segment, record.segment_reason
    if record.mixed_versions:
        step.info["mixed_versions"] = True
    if record.has_cut_thought:
        step.info[CUT_THOUGHT] = True
    if record.unparsed_markup:
        step.info["unparsed_markup"] = True
    if record.no_ids_because:
        step.info["no_ids_because"] = record.no_ids_because


def _output_of(record: CallRecord) -> ModelOutput:
    text = _text_of(record)
    return ModelOutput(
        text=text,
        content=text,
        reasoning=record.response.get("reasoning_content") or "",
        tool_calls=[_tool_call(call) for call in record.response.get("tool_calls") or ()],
        prompt_ids=record.prompt_ids,
        completion_ids=record.completion_ids,
        logprobs=record.logprobs,
        logprob_meaning=record.logprob_meaning,
        temperature=1.0 if record.temperature is None else record.temperature,
        policy_versions=record.policy_versions,
        stop_sequence=record.stop_sequence,
        completion_id=record.id,
        finish_reason=_finish_reason(record.finish_reason),
        usage=record.usage,
        latency_s=record.latency_s,
    )


def _finish_reason(reason: str) -> FinishReason:
    """Servers know reasons of their own, such as `content_filter`: the answer is whole, so it stopped."""
    return FinishReason(reason) if reason in set(FinishReason) else FinishReason.STOP


def _tool_call(call: dict[str, Any]) -> ToolCall:
    """Arguments that are no JSON object stay in the step's messages alone; so do numbers that JSON cannot
    hold."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"], parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        arguments = None
    return ToolCall(
        name=function["name"], arguments=arguments if isinstance(arguments, dict) else {}, id=call["id"]
    )


def _finite(number: str) -> float:
    """Raises ValueError for NaN, Infinity and what is too large, such as 1e999."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not finite")
    return value


# Timeouts and rate limits are of the servers, although their statuses are those of a client's faults.
_INFRASTRUCTURE_STATUS = (408, 429)
_OF_THE_CLIENT = ("client_disconnected", "session_closed")


def _is_infrastructure(record: CallRecord) -> bool:
    error = record.error or {}
    status = error.get("status") or 0
    return (
        record.status is not CallStatus.OK
        and error.get("code") not in _OF_THE_CLIENT
        and (status >= 500 or status in _INFRASTRUCTURE_STATUS)
    )


def _same_request(one: CallRecord, other: CallRecord) -> bool:
    return one.messages == other.messages and one.prompt == other.prompt
