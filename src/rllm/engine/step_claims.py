"""Which step of a workflow's episode is which model call.

    Step(model_output=output)                         the call that gave this output
    Step(chat_completions=…, model_response=…)        the call with this answer to these messages

Never by position: workflows call in parallel. Of calls that are equal in prompt, answer and ids each step
gets the next one. A call that no step is stays behind: it is counted and not trained on.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from rllm.engine.step_matching import match_by_content
from rllm.errors import AgentError
from rllm.inference.rollout_engine import RecordedCall
from rllm.types.content import is_image_part, text_of, words_of
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.messages import Message


def claim_steps(
    episode: Episode, calls: Sequence[RecordedCall], workflow: str
) -> tuple[dict[str, RecordedCall], list[RecordedCall]]:
    """Fill the steps of `episode` from the calls that they are: each step's call by the step's id, and the
    calls that are left.

    A step that is no call, such as what a person did, stays as it is. Raises AgentError for two steps that
    are the same call, and for a step that fits several calls which differ.
    """
    by_id = {call.output.completion_id: call for call in calls}
    owner: dict[str, tuple[Trajectory, Step]] = {}
    call_of: dict[str, RecordedCall] = {}

    def claim(trajectory: Trajectory, step: Step, call: RecordedCall) -> None:
        call_id = call.output.completion_id
        if call_id in owner:
            raise AgentError(
                f"{workflow}: {_where(trajectory, step)} and {_where(*owner[call_id])} are the same model "
                "call; a call belongs to one step, or its tokens would be trained on twice."
            )
        owner[call_id] = trajectory, step
        call_of[step.id] = call
        _fill(step, call)

    steps_without_id: list[tuple[Trajectory, Step]] = []
    for trajectory in episode.trajectories:
        for step in trajectory.steps:
            output = step.model_output
            call = by_id.get(output.completion_id) if output is not None else None
            if call is not None:
                claim(trajectory, step, call)
            elif _answer_of(step) is not None:
                steps_without_id.append((trajectory, step))
    roles = {call.role for call in calls}
    pairs, left = match_by_content(
        steps_without_id,
        [call for call_id, call in by_id.items() if call_id not in owner],
        answer_of=lambda each: _answer_of(each[1]),
        # A workflow may keep the whole answer, or the part without reasoning and tool calls.
        answers_of=lambda call: (call.output.text, call.output.content),
        # Names of trajectories tell calls apart only where calls were made under these names.
        fits=lambda each, call: (
            (each[0].name == call.role or each[0].name not in roles) and _fits(each[1], call)
        ),
        identity_of=_identity,
    )
    for (trajectory, step), call in pairs:
        claim(trajectory, step, call)
    for (trajectory, step), fitting in left:
        if fitting:
            raise AgentError(
                f"{workflow}: {_where(trajectory, step)} fits {len(fitting)} model calls that differ; make "
                "it Step.from_model_output(output, messages), or give it `chat_completions`."
            )
    return call_of, [call for call_id, call in by_id.items() if call_id not in owner]


def _where(trajectory: Trajectory, step: Step) -> str:
    place = next(place for place, each in enumerate(trajectory.steps) if each is step)
    return f"step {place} of trajectory {trajectory.name!r}"


def _identity(call: RecordedCall) -> Hashable:
    """Equal for calls that nothing tells apart: policy, prompt, answer and ids."""
    output = call.output
    return (
        call.policy,
        repr(_message_keys(call.messages)),
        output.text,
        tuple(output.prompt_ids),
        tuple(output.completion_ids),
    )


def _answer_of(step: Step) -> str | None:
    """The text of its answer; None where it gives none, so that it is no call."""
    if step.model_response:
        return step.model_response
    last = step.chat_completions[-1] if step.chat_completions else {}
    return text_of(last.get("content")) if last.get("role") == "assistant" else None


def _fits(step: Step, call: RecordedCall) -> bool:
    """Whether a step that gives its answer may be this call, by all that it says of it."""
    answers = (call.output.text, call.output.content)
    if step.response_ids and step.response_ids != call.output.completion_ids:
        return False
    if step.model_response and step.model_response not in answers:
        return False
    messages = step.chat_completions
    if not messages:
        return True
    if messages[-1].get("role") == "assistant":
        if text_of(messages[-1].get("content")) not in answers:
            return False
        messages = messages[:-1]
    return _message_keys(messages) == _message_keys(call.messages)


def _message_keys(messages: Iterable[Mapping[str, Any]]) -> list[tuple[Any, str, list[Any]]]:
    """Roles, texts and images: what stays of a message, whatever else is added to it."""
    keys: list[tuple[Any, str, list[Any]]] = []
    for message in messages:
        content = message.get("content")
        images = [part for part in content if is_image_part(part)] if isinstance(content, list) else []
        keys.append((message.get("role"), words_of(content), images))
    return keys


def _fill(step: Step, call: RecordedCall) -> None:
    """Tokens of the call; what the workflow says about its step stays."""
    output = call.output
    step.record_output(output)
    answer: Message = {"role": "assistant", "content": output.text}
    step.chat_completions = step.chat_completions or [*call.messages, answer]
    step.model_response = step.model_response or output.text
    step.thought = step.thought or output.reasoning
    step.timings.setdefault("model_s", output.latency_s)
