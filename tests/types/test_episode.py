import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.types.episode import (
    Action,
    Episode,
    Outcome,
    Step,
    TerminationEvent,
    TerminationReason,
    Trajectory,
    TrajectoryGroup,
)
from rllm.types.messages import FinishReason, LogprobMeaning, ModelOutput, ToolCall
from rllm.types.task import EpisodeId, Task

texts = st.text(max_size=6)
floats = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | st.integers() | floats | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
infos = st.dictionaries(texts, values, max_size=3)
token_ids = st.lists(st.integers(0, 200_000), max_size=4)
messages = st.lists(st.fixed_dictionaries({"role": texts, "content": values}), max_size=3)
counts = st.dictionaries(texts, st.integers(0, 9), max_size=2)


@st.composite
def outputs(draw: st.DrawFn) -> ModelOutput:
    completion_ids = draw(token_ids)
    size = len(completion_ids)
    return ModelOutput(
        text=draw(texts),
        content=draw(texts),
        reasoning=draw(texts),
        tool_calls=draw(
            st.lists(st.builds(ToolCall, name=texts, arguments=infos, id=texts), max_size=2),
        ),
        prompt_ids=draw(token_ids),
        completion_ids=completion_ids,
        logprobs=draw(st.lists(floats, min_size=size, max_size=size)),
        logprob_meaning=draw(st.sampled_from(LogprobMeaning)),
        temperature=draw(floats),
        policy_versions=draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        usage=draw(counts),
        latency_s=draw(floats),
    )


@st.composite
def steps(draw: st.DrawFn) -> Step:
    response_ids = draw(token_ids)
    size = len(response_ids)
    return Step(
        prompt_ids=draw(token_ids),
        response_ids=response_ids,
        logprobs=draw(st.just([]) | st.lists(floats, min_size=size, max_size=size)),
        policy_versions=draw(st.just([]) | st.lists(st.integers(0, 9), min_size=size, max_size=size)),
        chat_completions=draw(messages),
        observation=draw(values),
        thought=draw(texts),
        action=draw(values | values.map(Action)),
        model_response=draw(texts),
        model_output=draw(st.none() | outputs()),
        reward=draw(floats),
        done=draw(st.booleans()),
        mc_return=draw(floats),
        advantage=draw(st.none() | floats | st.lists(floats, max_size=3)),
        policy_version=draw(st.none() | st.integers(0, 9)),
        usage=draw(counts),
        timings=draw(st.dictionaries(texts, floats, max_size=2)),
        info=draw(infos),
    )


trajectories = st.builds(
    Trajectory,
    name=texts,
    task=values,
    steps=st.lists(steps(), max_size=2),
    reward=st.none() | floats,
    signals=st.dictionaries(texts, floats, max_size=2),
    input=values,
    output=values,
    termination_reason=st.sampled_from(TerminationReason),
    outcome=st.none() | st.sampled_from(Outcome),
    info=infos,
)
episodes = st.builds(
    Episode,
    id=texts,
    task=values,
    task_id=texts,
    rollout_idx=st.integers(0, 99),
    trajectories=st.lists(trajectories, max_size=2),
    is_correct=st.booleans(),
    termination_reason=st.sampled_from(TerminationReason),
    outcome=st.none() | st.sampled_from(Outcome),
    artifacts=infos,
    metrics=infos,
    session_id=st.none() | texts,
    info=infos,
)


@given(episodes)
def test_an_episode_comes_back_from_a_dict_and_from_json_as_it_was(episode: Episode) -> None:
    assert Episode.from_dict(episode.to_dict()) == episode
    assert Episode.from_dict(json.loads(json.dumps(episode.to_dict()))) == episode


@given(outputs())
def test_a_model_output_comes_back_from_json_as_it_was(output: ModelOutput) -> None:
    assert ModelOutput.from_dict(json.loads(json.dumps(output.to_dict()))) == output


@given(episodes)
def test_what_comes_back_has_the_enums_and_not_only_their_text(episode: Episode) -> None:
    again = Episode.from_dict(json.loads(json.dumps(episode.to_dict())))
    assert type(again.termination_reason) is TerminationReason
    for before, after in zip(episode.trajectories, again.trajectories, strict=True):
        assert type(after.termination_reason) is TerminationReason
        assert type(after.outcome) is type(before.outcome)


def test_every_field_has_a_default_so_an_action_alone_makes_a_step() -> None:
    step = Step(action="2")
    assert (step.action, step.prompt_ids, step.reward, step.model_output) == ("2", [], 0.0, None)
    for other in (Trajectory(), Episode(), Action()):
        assert other is not None
    assert Step().id != Step().id
    assert Trajectory().uid != Trajectory().uid


def test_defaults_are_not_shared_between_two_objects() -> None:
    first, second = Trajectory(), Trajectory()
    first.steps.append(Step())
    first.info["seen"] = True
    assert second.steps == []
    assert second.info == {}


@pytest.mark.parametrize(
    ("cls", "alias", "field", "value"),
    [
        (Step, "metadata", "info", {"a": 1}),
        (Step, "weight_version", "policy_version", 7),
        (Trajectory, "metadata", "info", {"a": 1}),
        (Trajectory, "result", "output", "42"),
        (Episode, "metadata", "info", {"a": 1}),
    ],
)
def test_both_spellings_work_in_the_constructor_and_as_attributes(
    cls: type, alias: str, field: str, value: Any
) -> None:
    for given_name in (alias, field):
        made = cls(**{given_name: value})
        assert getattr(made, alias) == getattr(made, field) == value
    made = cls()
    setattr(made, alias, value)
    assert getattr(made, field) == value
    setattr(made, field, None)
    assert getattr(made, alias) is None


def test_both_spellings_at_once_are_refused_because_one_would_be_lost() -> None:
    with pytest.raises(TypeError, match=r"`weight_version` .*`policy_version`"):
        Step(policy_version=1, weight_version=2)


def test_a_dict_with_the_other_spelling_is_read() -> None:
    step = Step.from_dict({"id": "x", "metadata": {"a": 1}, "weight_version": 3})
    assert step == Step(id="x", info={"a": 1}, policy_version=3)


@pytest.mark.parametrize("name", ["logprobs", "policy_versions"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_step_refuses_values_for_another_number_of_tokens(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} {name} for 2 response_ids"):
        Step(response_ids=[5, 6], **{name: [1] * size})


def test_a_step_takes_over_a_model_call_with_the_oldest_version_of_its_tokens() -> None:
    step = Step()
    step.record_output(
        ModelOutput(
            prompt_ids=[1],
            completion_ids=[2, 3],
            logprobs=[-0.5, -0.25],
            policy_versions=[5, 4],
            usage={"a": 1},
        )
    )
    assert (step.prompt_ids, step.response_ids, step.logprobs) == ([1], [2, 3], [-0.5, -0.25])
    assert (step.policy_versions, step.policy_version, step.weight_version) == ([5, 4], 4, 4)
    assert ModelOutput().weight_version is None


def _said(*contents: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


def test_a_trajectory_is_cumulative_when_each_step_repeats_the_messages_before() -> None:
    growing = [Step(chat_completions=_said("a")), Step(chat_completions=_said("a", "b"))]
    assert Trajectory().is_cumulative()
    assert Trajectory(steps=growing[:1]).is_cumulative()
    assert Trajectory(steps=growing).is_cumulative()
    assert not Trajectory(steps=growing[::-1]).is_cumulative()
    rewritten = [Step(chat_completions=_said("a")), Step(chat_completions=_said("A", "b"))]
    assert not Trajectory(steps=rewritten).is_cumulative()


def test_an_episode_is_named_after_its_task_and_attempt_unless_it_has_a_name() -> None:
    episode = Episode(task_id="lake:7", rollout_idx=3)
    assert episode.id == "lake:7:3"
    assert episode.episode_id == EpisodeId(task_id="lake:7", attempt=3)
    assert Episode(id="mine", task_id="lake", rollout_idx=3).id == "mine"
    assert Episode().id == ""


def test_an_episode_is_paid_what_its_trajectories_were_paid() -> None:
    assert Episode(trajectories=[Trajectory(reward=0.5), Trajectory(reward=None)]).reward == 0.5


def test_a_group_and_a_termination_say_what_they_are() -> None:
    assert TrajectoryGroup(task_id="t", role="judge").group_id == "t:judge"
    event = TerminationEvent(TerminationReason.TIMEOUT)
    assert (event.reason, str(event)) == (TerminationReason.TIMEOUT, "timeout")


def test_a_task_directory_is_the_data_sets_or_its_own_below_it(tmp_path) -> None:
    assert Task("a", dataset_dir=tmp_path).task_dir == tmp_path
    assert Task("a", dataset_dir=tmp_path, sub_dir="x").task_dir == tmp_path / "x"


def test_a_step_of_a_model_call_holds_its_tokens_and_the_conversation() -> None:
    asked = [{"role": "user", "content": "Where to?"}]
    output = ModelOutput(
        text="Left",
        reasoning="no hole",
        completion_ids=[5, 0],
        logprobs=[-0.5, -0.25],
        policy_versions=[3, 4],
    )
    step = Step.from_model_output(output, asked, action="Left", reward=0.5)
    assert step.chat_completions == [*asked, {"role": "assistant", "content": "Left"}]
    assert asked == [{"role": "user", "content": "Where to?"}]
    assert (step.response_ids, step.logprobs, step.policy_version) == ([5, 0], [-0.5, -0.25], 3)
    assert (step.thought, step.action, step.reward) == ("no hole", "Left", 0.5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_processes_that_are_forked_give_ids_of_their_own() -> None:
    """Pools fork workers: ids that go on from the parent's would be given twice."""
    script = (
        "import os\n"
        "from rllm.types.episode import Step\n"
        "ids = [Step().id]\n"
        "for _ in range(2):\n"
        "    read, write = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        os.write(write, Step().id.encode()); os._exit(0)\n"
        "    os.wait(); ids.append(os.read(read, 99).decode())\n"
        "print(len({*ids, Step().id}))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "4\n"
