import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rllm.engine.captured import BrokenOffCall, Captured, join
from rllm.errors import AgentError
from rllm.types.call_budget import _EXHAUSTED, CallBudget
from rllm.types.episode import Episode, Step, Trajectory
from rllm.types.messages import ModelOutput
from rllm.types.sample import NOT_SAMPLED
from rllm.types.wire import CallRecord, CallStatus


def call(name: str, asked: str = "q", said: str = "yes", **more: Any) -> CallRecord:
    return CallRecord(
        **{
            "id": name,
            "session": "s",
            "messages": [{"role": "user", "content": asked}],
            "response": {"role": "assistant", "content": said},
            "finish_reason": "stop",
            "prompt_ids": [ord(letter) for letter in asked],
            "completion_ids": [ord(letter) for letter in said],
            "logprobs": [-1.0] * len(said),
            "policy_versions": [0] * len(said),
            **more,
        }
    )


def join_records(returned: Any, *records: CallRecord) -> tuple[Episode, list[str]]:
    return join(returned, Captured(list(records)), "solve")


def texts(steps: Sequence[Step]) -> list[str]:
    return ["".join(map(chr, step.response_ids)) for step in steps]


CALLS = (call("c0", "one", "A"), call("c1", "two", "B"), call("c2", "three", "C"))


def test_parallel_calls_get_their_own_tokens_whatever_their_order() -> None:
    returned = Episode(
        trajectories=[
            Trajectory(name="solver", steps=[Step(id="c2", action="c")]),
            Trajectory(name="solver", steps=[Step(id="c0", action="a")]),
            Trajectory(name="judge", steps=[Step(info={"completion_id": "c1"})]),
        ]
    )
    episode, unclaimed = join_records(returned, *CALLS)
    assert [texts(each.steps) for each in episode.trajectories] == [["C"], ["A"], ["B"]]
    assert [each.steps[0].action for each in episode.trajectories] == ["c", "a", None]
    assert unclaimed == []
    assert returned.trajectories[0].steps[0].response_ids == [], "what the program returned is not changed"


def test_a_step_may_say_it_by_its_model_output() -> None:
    step = Step(model_output=ModelOutput(text="B", completion_id="c1"))
    episode, unclaimed = join_records(Trajectory(steps=[step]), *CALLS)
    assert texts(episode.trajectories[0].steps) == ["B"]
    assert episode.trajectories[0].name == "solve"
    assert unclaimed == ["c0", "c2"]


def test_a_step_without_an_id_is_the_one_call_that_it_fits() -> None:
    conversation = [{"role": "user", "content": "three"}, {"role": "assistant", "content": "C"}]
    steps = [Step(chat_completions=conversation), Step(model_response="A"), Step(action="what is left")]
    episode, unclaimed = join_records(Trajectory(steps=steps), *CALLS)
    assert texts(episode.trajectories[0].steps) == ["C", "A", "B"]
    assert unclaimed == []


def test_equal_answers_to_equal_prompts_are_taken_in_order() -> None:
    """Two solvers that ask the same and get the same: whose call is whose makes no difference."""
    calls = (call("c0"), call("c1"), call("c2", "other", "no"), call("c3"))
    asked = [{"role": "user", "content": "q"}]
    says = [{"model_response": "yes"}, {"model_response": "yes", "chat_completions": asked}]
    for one, other in itertools.product(says, repeat=2):
        solvers = [Trajectory(name="solver", steps=[Step(**each)]) for each in (one, other)]
        episode, unclaimed = join_records(Episode(trajectories=solvers), *calls)
        steps = [each.steps[0] for each in episode.trajectories]
        assert [step.info["completion_id"] for step in steps] == ["c0", "c1"]
        assert unclaimed == ["c2", "c3"]
    choices = [call("c0", choice=number) for number in range(3)]
    episode, _ = join_records(
        Trajectory(steps=[Step(id="c0", model_response="yes") for _ in range(3)]), *choices
    )
    assert [step.info.get("choice", 0) for step in episode.trajectories[0].steps] == [0, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        {"completion_ids": [1, 2, 3]},
        {"prompt_ids": [1]},
        {"asked": "another prompt"},
    ],
)
def test_equal_texts_of_calls_that_differ_are_not_guessed(other: dict[str, Any]) -> None:
    with pytest.raises(AgentError, match="2 of the calls"):
        join_records(Trajectory(steps=[Step(model_response="yes")]), call("c0"), call("c1", **other))


def test_messages_tell_equal_answers_apart_and_part_lists_are_text() -> None:
    calls = (call("c0", "one", "same"), call("c1", "two", "same"))
    asked = [{"role": "user", "content": [{"type": "text", "text": "two"}]}]
    steps = [Step(model_response="same", chat_completions=asked)]
    episode, unclaimed = join_records(Trajectory(steps=steps), *calls)
    assert episode.trajectories[0].steps[0].info["completion_id"] == "c1"
    assert unclaimed == ["c0"]


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ([Step(), Step()], r"Step 0 of trajectory 'solve' of solve fits 3 of the calls .*: c0, c1, c2"),
        ([Step(model_response="Z")], r"fits none of the calls"),
        (
            [Step(info={"completion_id": "c9"})],
            r"'c9'.*captured.*c0, c1, c2",
        ),
        ([Step(id="c1"), Step(id="c1")], r"Step 1.*Step 0.*c1"),
        ([Step(model_response="A"), Step(model_response="A")], r"are the same call c0"),
    ],
)
def test_a_step_that_cannot_be_matched_is_an_error_that_says_what_there_is(
    steps: list[Step], named: str
) -> None:
    with pytest.raises(AgentError, match=named):
        join_records(Trajectory(steps=steps), *CALLS)


def test_a_choice_of_several_is_named_or_known_by_its_text() -> None:
    calls = (call("c0", said="A", choice=0), call("c0", said="B", choice=1), call("c0", said="B", choice=2))
    named = [Step(id="c0", info={"choice": 2}), Step(id="c0", model_response="A")]
    episode, unclaimed = join_records(Trajectory(steps=named), *calls)
    assert [step.info.get("choice", 0) for step in episode.trajectories[0].steps] == [2, 0]
    assert unclaimed == ["c0"]
    with pytest.raises(AgentError, match=r'choices 0, 1, 2; .*Step\(..., info=\{"choice": 0\}\)'):
        join_records(Trajectory(steps=[Step(id="c0")]), *calls)
    everything, _ = join_records(None, *calls)
    assert texts(everything.trajectories[0].steps) == ["A", "B", "B"]


def test_a_trajectory_without_steps_gets_all_calls_and_several_would_have_to_share() -> None:
    episode, _ = join_records(Trajectory(name="mine", output=4), *CALLS)
    assert (episode.trajectories[0].name, episode.trajectories[0].output) == ("mine", 4)
    assert texts(episode.trajectories[0].steps) == ["A", "B", "C"]
    episode, _ = join_records(Episode(artifacts={"answer": 4}), *CALLS)
    assert texts(episode.trajectories[0].steps) == ["A", "B", "C"]
    assert episode.artifacts == {"answer": 4}
    with pytest.raises(AgentError, match=r"2 trajectories \(a, b\) without steps"):
        join_records(Episode(trajectories=[Trajectory(name="a"), Trajectory(name="b")]), *CALLS)
    episode, _ = join_records(Episode(trajectories=[Trajectory(name="a"), Trajectory(name="b")]))
    assert [each.steps for each in episode.trajectories] == [[], []]


def test_only_whole_answers_are_steps() -> None:
    records = (
        call("c0", status=CallStatus.PARTIAL),
        call("c1", said="A"),
        CallRecord(id="c2", session="s", status=CallStatus.ERROR, error={"status": 500}),
    )
    episode, _ = join_records(None, *records)
    assert texts(episode.trajectories[0].steps) == ["A"]
    with pytest.raises(BrokenOffCall, match="call c0 broke off"):
        join_records(Trajectory(steps=[Step(id="c0")]), *records)


def test_a_failed_call_is_the_infrastructures_by_its_status_and_code(subtests: pytest.Subtests) -> None:
    for status, code, is_ours in [
        (500, None, True),
        (503, "no_upstream", True),
        (408, None, True),
        (429, None, True),
        (400, None, False),
        (404, None, False),
        (499, "client_disconnected", False),
        (503, "session_closed", False),
    ]:
        with subtests.test(status=status, code=code, is_ours=is_ours):
            error = {"status": status, "code": code}
            failed = CallRecord(id="c1", session="s", status=CallStatus.ERROR, error=error)
            assert Captured([call("c0"), failed]).infrastructure_error() == (error if is_ours else None)


def test_a_temperature_that_nobody_chose_is_that_of_the_model() -> None:
    records = (call("c0", "one"), call("c1", "two", temperature=0.5))
    episode, _ = join_records(None, *records)
    outputs = [step.model_output for step in episode.trajectories[0].steps]
    assert [output and output.temperature for output in outputs] == [1.0, 0.5]


def test_what_a_call_was_like_is_on_its_step() -> None:
    record = call(
        "c0",
        response={
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                {"id": "t1", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
            ],
        },
        finish_reason="content_filter",
        policy_versions=[4, NOT_SAMPLED, 5],
        conversation=2,
        segment=1,
        segment_reason="history_rewritten",
        usage={"prompt_tokens": 1},
        latency_s=0.5,
    )
    episode, _ = join_records(None, record)
    (step,) = episode.trajectories[0].steps
    assert step.thought == "hm"
    assert step.model_output is not None
    assert [(each.id, each.arguments) for each in step.model_output.tool_calls] == [
        ("t0", {"a": 1}),
        ("t1", {}),
    ]
    assert (step.policy_version, step.timings["model_s"], step.usage) == (4, 0.5, {"prompt_tokens": 1})
    assert step.info == {
        "completion_id": "c0",
        "conversation": 2,
        "segment": 1,
        "segment_reason": "history_rewritten",
    }
    assert Episode.from_dict(episode.to_dict()).to_dict() == episode.to_dict()


@pytest.mark.parametrize("written", ['{"a": 1e999}', '{"a": Infinity}', '{"a": NaN}', "[1]", "[" * 100_000])
def test_arguments_that_json_cannot_hold_do_not_end_a_run(written: str) -> None:
    calls = [{"id": "t0", "type": "function", "function": {"name": "add", "arguments": written}}]
    record = call("c0", response={"role": "assistant", "content": None, "tool_calls": calls})
    (step,) = join_records(None, record)[0].trajectories[0].steps
    assert step.model_output is not None
    assert step.model_output.tool_calls[0].arguments == {}
    assert step.chat_completions[-1]["tool_calls"][0]["function"]["arguments"] == written


def claimed_by(step: Step, *records: CallRecord) -> str:
    """The call that it is; empty where that is refused."""
    try:
        episode, _ = join_records(Trajectory(steps=[step]), *records)
    except AgentError:
        return ""
    return episode.trajectories[0].steps[0].info["completion_id"]


def test_everything_that_a_step_says_of_its_call_has_to_fit() -> None:
    asked, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}
    one, other = call("c0", completion_ids=[7]), call("c1", completion_ids=[8])
    for says, name in (
        ({"response_ids": [7]}, "c0"),
        ({"response_ids": [8]}, "c1"),
        ({"response_ids": [9]}, ""),
        ({"response_ids": [8], "model_response": "yes"}, "c1"),
        ({"response_ids": [8], "model_response": "no"}, ""),
        ({"response_ids": [7], "chat_completions": [asked]}, "c0"),
        ({"response_ids": [7], "chat_completions": [asked, answer]}, "c0"),
        ({"response_ids": [7], "chat_completions": [asked, {**answer, "content": "no"}]}, ""),
        ({"response_ids": [7], "chat_completions": [asked, {**answer, "content": ["part"]}]}, "c0"),
        ({"response_ids": [7], "chat_completions": [{"role": "system", "content": "q"}]}, ""),
        ({"response_ids": [7], "chat_completions": [asked, asked]}, ""),
        ({"response_ids": [7], "model_output": ModelOutput(text="yes")}, "c0"),
        ({"response_ids": [7], "model_output": ModelOutput(text="no")}, ""),
        ({"model_response": "yes"}, ""),
        ({"info": {"completion_id": "c1"}}, "c1"),
        ({"model_output": ModelOutput(completion_id="c1")}, "c1"),
        ({"info": {"completion_id": "c9"}, "response_ids": [7]}, ""),
    ):
        step = Step(**says)
        assert claimed_by(step, one, other) == name, says


def test_calls_that_differ_in_anything_but_the_ids_of_tool_calls_are_not_equal() -> None:
    def tool(name: str, arguments: str, number: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"response": {"content": "yes", "tool_calls": [{"id": number, "function": function}]}}

    for fields, is_equal in (
        ({}, True),
        (tool("go", "{}", "t9"), True),
        (tool("stop", "{}", "t1"), False),
        (tool("go", '{"a": 1}', "t1"), False),
        ({"messages": [{"role": "user", "content": "other"}]}, False),
        ({"prompt": "x"}, False),
        ({"prompt": [1, 2]}, False),
        ({"prompt_ids": [1]}, False),
        ({"completion_ids": [1]}, False),
    ):
        records = (call("c0", **tool("go", "{}", "t1")), call("c1", **tool("go", "{}", "t2") | fields))
        assert (claimed_by(Step(model_response="yes"), *records) == "c0") is is_equal, fields


def test_what_a_program_said_of_its_step_stays_and_what_was_captured_is_added() -> None:
    record = call(
        "c0", latency_s=0.5, mixed_versions=True, unparsed_markup=True, no_ids_because="none", choice=0,
        response={"content": "yes", "reasoning_content": "hm"}, stop_sequence="!",
    )  # fmt: skip
    step = Step(id="c0", model_response="mine", thought="own", info={"note": 1}, timings={"env_s": 2.0})
    episode, _ = join_records(Trajectory(steps=[step]), record)
    (own,) = episode.trajectories[0].steps
    assert (own.model_response, own.thought, own.timings) == ("mine", "own", {"env_s": 2.0, "model_s": 0.5})
    assert own.info == {
        "note": 1,
        "completion_id": "c0",
        "mixed_versions": True,
        "unparsed_markup": True,
        "no_ids_because": "none",
    }
    assert own.chat_completions == [*record.messages, record.response]
    assert own.model_output is not None
    assert (own.model_output.stop_sequence, own.model_output.reasoning) == ("!", "hm")
    plain, _ = join_records(None, call("c1", choice=3))
    assert plain.trajectories[0].steps[0].info == {"completion_id": "c1", "choice": 3}
    assert step.info == {"note": 1}, "what the program returned is not changed"


def test_calls_are_counted_by_how_they_ended() -> None:
    failed = CallRecord(id="e", session="s", status=CallStatus.ERROR, error={"status": 500})
    later = CallRecord(id="f", session="s", status=CallStatus.ERROR, error={"status": 400})
    captured = Captured([call("a"), call("b"), call("c", status=CallStatus.PARTIAL), failed, later])
    assert captured.counts() == {"calls": 2.0, "partial_calls": 1.0, "failed_calls": 2.0}
    assert captured.last_error == {"status": 400}
    assert Captured([call("a")]).last_error is None


def test_a_budget_has_ended_where_a_call_was_refused_or_cut_off_by_its_last_token() -> None:
    cut = call("b", finish_reason="length", usage={"completion_tokens": 4})
    spent = [call("a", usage={"completion_tokens": 3}), cut]
    for budget, records, limit in (
        (CallBudget(tokens=7), spent, "tokens"),
        (CallBudget(tokens=8), spent, ""),
        (CallBudget(tokens=6), spent, "tokens"),
        (CallBudget(), spent, ""),
        (CallBudget(tokens=7), spent[::-1], ""),
        (CallBudget(tokens=4), [cut, replace(cut, choice=1)], "tokens"),
        (CallBudget(tokens=5), [cut, replace(cut, choice=1)], ""),
        (CallBudget(tokens=1), [call("a")], ""),
        (CallBudget(tokens=1), [replace(cut, usage={"completion_tokens": 1})], "tokens"),
        (CallBudget(tokens=1), [replace(cut, usage={})], ""),
        (CallBudget(tokens=1), [], ""),
    ):
        assert Captured(records).budget_end(budget)[0] == limit, (budget, records)
    refused = CallRecord(id="r", session="s", error={"code": f"turns{_EXHAUSTED}", "message": "no more"})
    assert Captured([call("a"), refused]).budget_end(CallBudget()) == ("turns", "no more")


def test_a_failure_that_a_later_try_made_good_is_none() -> None:
    failed = CallRecord(id="e", session="s", status=CallStatus.ERROR, error={"status": 500}, prompt="one")
    for other, is_good in (
        (call("a", messages=[], prompt="one"), True),
        (call("a", messages=[], prompt="two"), False),
        (call("a", messages=[{"role": "user", "content": "q"}], prompt="one"), False),
        (call("a", messages=[], prompt="one", status=CallStatus.PARTIAL), False),
    ):
        assert (Captured([failed, other]).infrastructure_error() is None) is is_good
    for status, is_ours in (
        (499, False),
        (500, True),
        (407, False),
        (409, False),
        (430, False),
        (None, False),
    ):
        error = {"status": status}
        failed = CallRecord(id="e", session="s", status=CallStatus.ERROR, error=error)
        assert Captured([failed]).infrastructure_error() == (error if is_ours else None), status
        assert Captured([replace(failed, status=CallStatus.OK)]).infrastructure_error() is None


def test_so_many_calls_are_named_that_one_can_read_them() -> None:
    for number, shown in (
        (8, "c6, c7."),
        (9, "c6, c7 and 1 more."),
        (20, "c7 and 12 more."),
        (0, "left: none."),
    ):
        records = [call(f"c{place}", said=str(place)) for place in range(number)]
        with pytest.raises(AgentError, match=re.escape(shown)):
            join_records(Trajectory(steps=[Step(model_response="other")]), *records)
