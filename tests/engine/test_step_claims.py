"""Which call each step of a workflow is: by its id, else by all that it says of it."""

from typing import Any

import pytest

from rllm.engine.step_claims import claim_steps
from rllm.errors import AgentError
from rllm.inference.rollout_engine import RecordedCall
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.messages import ModelOutput

ASKED = [{"role": "user", "content": "q"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def call(
    name: str, *, role: str = "solver", messages: Any = ASKED, policy: str = "p", **fields: Any
) -> RecordedCall:
    output = ModelOutput(
        **{"text": "yes", "content": "yes", "completion_id": name, "prompt_ids": [1]} | fields
    )
    return RecordedCall(role=role, policy=policy, messages=messages, output=output)


def claimed_by(step: Step, *calls: RecordedCall, role: str = "solver") -> str:
    """The call that it is; empty where it is none, `?` where nobody can tell."""
    trajectory = Trajectory(name=role, steps=[step])
    try:
        call_of, left = claim_steps(Episode(trajectories=[trajectory]), calls, "W")
    except AgentError:
        return "?"
    assert len(call_of) + len(left) == len({each.output.completion_id for each in calls})
    return call_of[step.id].output.completion_id if step.id in call_of else ""


def test_a_step_is_the_call_that_fits_all_that_it_says() -> None:
    answer = {"role": "assistant", "content": "yes"}
    one = call("c0", completion_ids=[7], content="plain")
    other = call("c1", completion_ids=[8], messages=[{"role": "user", "content": "other"}])
    for says, name in (
        ({}, ""),
        ({"model_response": "yes"}, "?"),
        ({"model_response": "no"}, ""),
        ({"model_response": "plain"}, "c0"),
        ({"response_ids": [7], "model_response": "yes"}, "c0"),
        ({"response_ids": [8], "model_response": "yes"}, "c1"),
        ({"response_ids": [9], "model_response": "yes"}, ""),
        ({"chat_completions": ASKED, "model_response": "yes"}, "c0"),
        ({"chat_completions": ASKED}, ""),
        ({"chat_completions": [*ASKED, answer]}, "c0"),
        ({"chat_completions": [*ASKED, {**answer, "content": "plain"}]}, "c0"),
        ({"chat_completions": [*ASKED, {**answer, "content": "no"}]}, ""),
        ({"chat_completions": [*ASKED, {**answer, "content": "no"}], "model_response": "yes"}, ""),
        ({"chat_completions": [*ASKED, *ASKED, answer]}, ""),
        ({"chat_completions": [{"role": "user", "content": ["other"]}, answer]}, "c1"),
        ({"chat_completions": [{"role": "user", "content": [PICTURE]}, answer]}, ""),
        ({"model_output": ModelOutput(completion_id="c1")}, "c1"),
        ({"model_output": ModelOutput(completion_id="c9"), "model_response": "plain"}, "c0"),
    ):
        assert claimed_by(Step(**says), one, other) == name, says


def test_a_role_that_called_is_answered_by_its_own_calls_and_another_by_any() -> None:
    calls = [call("c0", role="solver"), call("c1", role="judge", prompt_ids=[2])]
    says = {"model_response": "yes"}
    assert claimed_by(Step(**says), *calls, role="solver") == "c0"
    assert claimed_by(Step(**says), *calls, role="judge") == "c1"
    assert claimed_by(Step(**says), *calls, role="writer") == "?"
    assert claimed_by(Step(**says), calls[1], role="writer") == "c1"


def test_only_calls_that_nothing_tells_apart_are_taken_in_order() -> None:
    for fields, name in (
        ({}, "c0"),
        ({"policy": "other"}, "?"),
        ({"prompt_ids": [2]}, "?"),
        ({"completion_ids": [2]}, "?"),
        ({"messages": [{"role": "user", "content": "q", "name": "a"}]}, "c0"),
        ({"messages": [{"role": "system", "content": "q"}]}, "?"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "?"),
    ):
        assert claimed_by(Step(model_response="yes"), call("c0"), call("c1", **fields)) == name, fields


def test_a_call_fills_its_step_and_leaves_what_the_workflow_says_of_it() -> None:
    made = call("c0", reasoning="hm", latency_s=0.5, completion_ids=[7], logprobs=[-1.0])
    plain = Step(model_output=made.output)
    said = Step(
        model_output=made.output,
        model_response="mine",
        thought="own",
        chat_completions=[{"role": "user", "content": "x"}],
        timings={"model_s": 9.0},
    )
    for step in (plain, said):
        claimed_by(step, made)
        assert (step.response_ids, step.logprobs, step.prompt_ids) == ([7], [-1.0], [1])
    assert (plain.model_response, plain.thought, plain.timings) == ("yes", "hm", {"model_s": 0.5})
    assert plain.chat_completions == [*ASKED, {"role": "assistant", "content": "yes"}]
    assert (said.model_response, said.thought, said.timings) == ("mine", "own", {"model_s": 9.0})
    assert said.chat_completions == [{"role": "user", "content": "x"}]


def test_a_call_in_two_steps_is_refused_with_both_places() -> None:
    made = call("c0")
    steps = [Step(), Step(model_output=made.output), Step(model_output=made.output)]
    with pytest.raises(AgentError, match=r"step 2 of .*'solver' .*step 1 of .*'solver'"):
        claim_steps(Episode(trajectories=[Trajectory(name="solver", steps=steps)]), [made], "W")
