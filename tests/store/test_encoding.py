"""Every field of an episode, each value that is easily lost, on the way into rows and back."""

import copy
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import AgentError
from rllm.store import payload
from rllm.store.encoding import decode_episode, encode_episode, require_storable
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import FinishReason, LogprobMeaning, ModelOutput, ToolCall
from rllm.types.prefix import Prefix

Conversation = Callable[..., Episode]


def episode_of(*steps: Step, **options: Any) -> Episode:
    return Episode(id="e", task_id="t", trajectories=[Trajectory(name="agent", steps=list(steps))], **options)


def read_back(episode: Episode) -> Episode:
    row, step_rows = encode_episode(episode)
    return decode_episode(row, step_rows[::-1])  # a database promises no order


def steps_read_back(*steps: Step) -> list[Step]:
    return read_back(episode_of(*steps)).trajectories[0].steps


VALUES_OF_STEP: dict[str, list[Any]] = {
    "reward": [-1.5, -0.0, 0.0, 2.0],
    "input": [0, "", {"question": "2 + 2?"}],
    "output": [False, [], "4"],
    "observation": [0, False, "", [], "ice", [None]],
    "thought": ["hm"],
    "action": [0, "", "Right", {"to": 1}],
    "model_response": ["Right"],
    "done": [True, 0, 1],
    "mc_return": [-0.0, 1.0, 1, False],
    "advantage": [0.0, -0.5, [0.5, 1.0]],
    "policy_version": [0, 3],
    "usage": [{"prompt_tokens": 0}],
    "timings": [{"model_s": -0.0}],
    "info": [{"a": None}],
    "prompt_ids": [[7]],
    "response_ids": [[7, 8]],
    "logprobs": [[-0.5, 0.0]],
    "policy_versions": [[-1, 3]],
    "chat_completions": [[{"role": "user", "content": "a"}]],
}
VALUES_OF_OUTPUT: dict[str, list[Any]] = {
    "text": ["other"],
    "content": ["", "other"],
    "reasoning": ["because"],
    "tool_calls": [[ToolCall(name="go", arguments={"to": 1}, id="c")]],
    "unparsed_markup": [True],
    "prompt_ids": [[9]],
    "completion_ids": [[9]],
    "logprobs": [[-1.0]],
    "policy_versions": [[1]],
    "usage": [{"prompt_tokens": 1}],
    "logprob_meaning": list(LogprobMeaning),
    "finish_reason": list(FinishReason),
    "temperature": [0.0, 0.6],
    "latency_s": [0.5],
    "queue_s": [0.25],
}


def test_each_field_of_a_step_comes_back_as_it_was() -> None:
    for name, values in VALUES_OF_STEP.items():
        for value in values:
            step = Step(**{"id": "s", "response_ids": [1, 2], name: value})
            assert repr(steps_read_back(step)) == repr([step]), name
    assert {each.name for each in fields(Step)} - VALUES_OF_STEP.keys() == {"id", "model_output"}


def test_each_field_of_a_model_output_comes_back_whether_its_step_has_it_or_not() -> None:
    for name, values in VALUES_OF_OUTPUT.items():
        for value in values:
            for of_step in ({}, {"text": "a", "content": "a"}):
                step = Step(id="s", model_output=ModelOutput(**of_step | {name: value}))
                step.model_response = of_step.get("text", "")
                assert repr(steps_read_back(step)) == repr([step]), name


def test_each_field_of_an_episode_comes_back() -> None:
    for name, value in {
        "id": "x", "task": {"seed": 1}, "task_id": "x", "rollout_idx": 3, "is_correct": True,
        "termination_reason": TerminationReason.ENV_DONE, "outcome": Outcome.TRUNCATED, "session_id": "x",
        "artifacts": {"a": 1}, "metrics": {"duration_s": 1.5}, "info": {"b": 2},
    }.items():  # fmt: skip
        episode = episode_of(Step(id="s"))
        setattr(episode, name, value)
        assert repr(read_back(episode)) == repr(episode), name
    for name, value in {
        "uid": "x", "name": "judge", "task": {"seed": 1}, "reward": -0.5, "signals": {"a": 0.5}, "input": 1,
        "output": 2, "termination_reason": TerminationReason.ERROR,
        "outcome": Outcome.SCORED, "info": {"b": 1},
    }.items():  # fmt: skip
        episode = episode_of(Step(id="s"))
        setattr(episode.trajectories[0], name, value)
        assert repr(read_back(episode)) == repr(episode), name


def test_what_queries_ask_for_is_of_all_trajectories() -> None:
    one, two = [Trajectory(steps=[Step(response_ids=[1] * size)], reward=size) for size in (2, 3)]
    metrics: dict[str, Any] = {"started_at": 7, "duration_s": "long"}
    row, _ = encode_episode(Episode(trajectories=[one, Trajectory(), two], metrics=metrics))
    assert (row.reward, row.num_steps, row.num_sampled_tokens) == (5.0, 2, 5)
    assert (row.started_at, row.duration_s, row.outcome, row.is_correct) == (7.0, None, None, False)


def test_a_task_that_a_trajectory_has_of_its_episode_is_stored_once_and_its_own_beside_it() -> None:
    episode = episode_of(Step(), task={"seed": "seven" * 1000})
    alone = len(encode_episode(episode)[0].payload)
    episode.trajectories.append(Trajectory(task=episode.task))
    assert len(encode_episode(episode)[0].payload) < alone + 300
    episode.trajectories.append(Trajectory(task={"seed": 8}))
    assert [each.task for each in read_back(episode).trajectories] == [None, episode.task, {"seed": 8}]


def test_each_trajectory_begins_anew_and_keeps_what_its_steps_share() -> None:
    said = [{"role": "user", "content": str(number)} for number in range(6)]
    for kept in range(7):  # of 4 tokens of the prompt and 2 of the response
        first = Step(prompt_ids=[1, 2, 3, 4], response_ids=[5, 6], chat_completions=said[:4])
        later = Step(prompt_ids=[*range(1, kept + 1), 9], chat_completions=[*said[:kept], said[0]])
        episode = episode_of(first, later)
        episode.trajectories.append(copy.deepcopy(episode.trajectories[0]))
        row, step_rows = encode_episode(episode)
        assert [each.num_prompt_ids_kept for each in step_rows] == [0, kept, 0, kept]
        assert repr(decode_episode(row, step_rows[::-1])) == repr(episode)


def test_steps_that_go_on_share_their_rows_when_they_are_read(conversation: Conversation) -> None:
    first, second, third = read_back(conversation()).trajectories[0].steps
    for earlier, later in ((first, second), (second, third)):
        for name in ("prompt_ids", "chat_completions"):
            mine = getattr(earlier, name)
            assert isinstance(mine, Prefix)
            assert mine.shares_row_with(getattr(later, name))


def test_views_of_one_row_are_told_apart_by_their_length() -> None:
    for mine, theirs in ((2, 2), (2, 3), (3, 2)):
        row = [5, 6, 7]
        output = ModelOutput(completion_ids=Prefix(row, theirs))  # type: ignore[arg-type]
        step = Step(id="s", response_ids=Prefix(row, mine), model_output=output)  # type: ignore[arg-type]
        row, _ = encode_episode(episode_of(step))
        assert ("completion_ids" in str(payload.unpack_payload(row.payload))) is (mine != theirs)
        (back,) = steps_read_back(step)
        assert back.model_output is not None
        assert (len(back.response_ids), len(back.model_output.completion_ids)) == (mine, theirs)


def test_long_rows_are_compressed_and_short_ones_are_not() -> None:
    for size, mark in ((1023, b"B-"), (1024, b"Bz"), (10, b"B-")):
        _, (row,) = encode_episode(episode_of(Step(response_ids=[7] * size)))
        assert row.response_ids[:2] == mark
        assert len(row.response_ids) < 100 or row.response_ids == mark + b"\x07" * size


def test_numbers_are_the_same_on_a_machine_of_the_other_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    step = Step(id="s", prompt_ids=[1, 70_000], response_ids=[2, 3], logprobs=[-0.5, -1.25])
    assert repr(steps_read_back(step)) == repr([step])


def test_tokens_take_as_few_bytes_as_the_largest_needs() -> None:
    for largest, code in ((255, b"B"), (256, b"H"), (2**16, b"I"), (2**32, b"Q")):
        step = Step(id="s", prompt_ids=[0, largest])
        _, (row,) = encode_episode(episode_of(step))
        assert row.prompt_ids[:1] == code
        assert steps_read_back(step) == [step]


def nested(levels: int, kind: type) -> Any:
    value: Any = kind()
    for _ in range(levels - 1):
        value = {"a": value} if kind is dict else [value]
    return value


def test_values_are_kept_as_deep_as_the_limit_and_refused_one_level_deeper() -> None:
    for kind in (dict, list):
        # Beside a tuple, which plain JSON does not give back.
        step = Step(id="s", observation=(1,), info={"a": nested(100, kind)})
        assert steps_read_back(step) == [step]
        step.info = {"a": nested(101, kind)}
        with pytest.raises(AgentError, match="100 levels"):
            encode_episode(episode_of(step))


def test_no_infinity_is_stored_and_no_key_of_ours_is_taken_for_a_tag() -> None:
    for value in (float("inf"), float("-inf"), float("nan")):
        with pytest.raises(AgentError, match=r"`info\['a'\]` is .*JSON cannot hold"):
            encode_episode(episode_of(Step(info={"a": value})))
    for value in ({"__tuple__": [1]}, {"__tuple__": [1], "b": 1}, {1: "a", "1": "b"}, {"__path__": "x"}):
        step = Step(id="s", observation=(1,), info=value)
        assert steps_read_back(step) == [step]


def test_an_episode_of_more_characters_than_are_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert payload.MAX_PAYLOAD_CHARS == 2**28, "SQLite holds no value of a gigabyte"
    step = Step(info={"a": "x" * 1000})
    size = len(payload.payload_text({"a": "x" * 1000}, ""))
    monkeypatch.setattr(payload, "MAX_PAYLOAD_CHARS", size)
    assert payload.payload_text({"a": "x" * 1000}, "")
    with pytest.raises(AgentError, match="beside its tokens"):
        payload.payload_text({"a": "x" * 1001}, "")
    with pytest.raises(AgentError, match=r"'e': .* files"):
        encode_episode(episode_of(step))


def test_numbers_of_tokens_come_back_column_by_column(tmp_path: Path, conversation: Conversation) -> None:
    import numpy as np

    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 1, [conversation("a", 0), conversation("a", 1)])
        numbers = np.arange(6, dtype="<f4").tobytes()
        store.save_token_numbers("train", 1, [("a", 1, numbers)])
        other, mine = store.row_ids()
        assert store.token_numbers(other) == {}
        assert store.token_numbers(mine) == {
            "advantage": [0.0, 1.0],
            "ratio": [2.0, 3.0],
            "entropy": [4.0, 5.0],
        }
    with EpisodeStore.open(tmp_path / "store.sqlite", read_only=True) as reader:
        assert reader.token_numbers(mine)["entropy"] == [4.0, 5.0]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([Outcome.SCORED, FinishReason.STOP, (1, 2), -(1 << 63), 1 << 63, "\ud800", "😀"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3) | st.just("__tuple__"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_is_taken_for_plain_comes_back_from_json_and_is_no_longer_than_said(value: Any) -> None:
    if most := payload.most_chars({"a": value}):
        text = json.dumps({"a": value}, separators=(",", ":"), allow_nan=False)
        assert repr(json.loads(text)) == re.sub(r"<\w+\.\w+: ('\w+')>", r"\1", repr({"a": value}))
        assert len(text) <= most


def test_texts_and_finite_numbers_are_known_as_deep_as_is_asked() -> None:
    def nested(levels: int) -> Any:
        return [nested(levels - 1)] if levels else [1.5, 2, "text", True, None]

    assert payload.most_chars(nested(9), 10) > 0
    assert payload.most_chars(nested(10), 10) == 0
    assert payload.most_chars([float("nan")]) == payload.most_chars([float("inf")]) == 0


@given(VALUES)
def test_an_episode_is_storable_if_and_only_if_it_can_be_encoded(value: Any) -> None:
    episode = episode_of(Step(info={"a": value}), artifacts={"b": value})
    try:
        encode_episode(episode)
    except AgentError as error:
        with pytest.raises(AgentError, match=re.escape(str(error))):
            require_storable(episode)
    else:
        require_storable(episode)


def test_long_texts_and_deep_values_are_tried_out_before_they_are_called_storable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(payload, "MAX_PAYLOAD_CHARS", 1000)
    require_storable(
        episode_of(Step(info={"a": "x" * 500}))
    )  # 12 times as many, if they were rare characters
    with pytest.raises(AgentError, match="beside its tokens"):
        require_storable(episode_of(Step(info={"a": "x" * 1000})))
    monkeypatch.undo()
    require_storable(episode_of(Step(info={"a": nested(150, list)})))
    with pytest.raises(AgentError, match="100 levels"):
        require_storable(episode_of(Step(info={"a": nested(100_000, list)})))
    with pytest.raises(AgentError, match="has 20,001 bits"):
        require_storable(episode_of(Step(info={"a": 1 << 20_000})))
