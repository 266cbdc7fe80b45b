"""Rows of preferences are read or refused by their number; attempts of a run are counted and paired."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.config.preference import PreferenceDataConfig
from rllm.errors import ConfigError
from rllm.trainer.preference_rows import comparisons_of, read_comparisons
from rllm.trainer.stored_attempts import at_most, pairs_of, plays_of
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory

USER = {"role": "user", "content": "2 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}


def said(chat: Any) -> list[tuple[str, str, int]]:
    """(role, content, whether it is learned) of each message."""
    return [
        (each["role"], each["content"], int(each["role"] == "assistant" and each.get("weight") != 0))
        for each in chat.messages
    ]


EXPECTED = [
    (1, [("user", "2 + 2?", 0), ("assistant", "4", 1)]),
    (-1, [("user", "2 + 2?", 0), ("assistant", "5", 1)]),
]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"},
        {"prompt": [USER], "chosen": GOOD, "rejected": [BAD]},
        {"messages": [USER], "chosen": [GOOD], "rejected": "5"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
    ids=["text", "messages", "under messages", "whole conversations"],
)
def test_a_pair_may_be_written_in_several_ways(row: dict[str, Any]) -> None:
    (comparison,) = comparisons_of([row], is_paired=True)
    assert [(sign, said(chat)) for sign, chat in comparison.answers] == EXPECTED


def test_answers_in_the_prompt_are_read_and_those_that_are_compared_are_learned() -> None:
    again = {"role": "user", "content": "sure?"}
    yes = {"role": "assistant", "content": "yes"}
    row = {"prompt": [USER, BAD, again], "chosen": [GOOD, again, yes], "rejected": [BAD]}
    (comparison,) = comparisons_of([row], is_paired=True)
    (_, chosen), (_, rejected) = comparison.answers
    assert [learned for *_, learned in said(chosen)] == [0, 0, 0, 1, 0, 1]
    assert [learned for *_, learned in said(rejected)] == [0, 0, 0, 1]


def test_tools_are_those_of_both_answers() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    row = {
        "prompt": "2 + 2?",
        "tools": [tool],
        "chosen": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "rejected": "5",
    }
    (comparison,) = comparisons_of([row], is_paired=True)
    assert [chat.tools for _, chat in comparison.answers] == [[tool], [tool]]


@pytest.mark.parametrize(("label", "sign"), [(True, 1), (False, -1)])
def test_an_answer_with_a_label_stands_alone(label: bool, sign: int) -> None:
    row = {"prompt": "2 + 2?", "completion": "4", "label": label}
    (comparison,) = comparisons_of([row], is_paired=False)
    assert [(sign, said(chat)) for sign, chat in comparison.answers] == [(sign, EXPECTED[0][1])]


def test_a_row_that_is_no_preference_is_refused_by_its_number(subtests: pytest.Subtests) -> None:
    for row, paired, message in [
        ({"prompt": "a", "chosen": "b"}, True, "it has no `rejected`, but prompt, chosen; give `prompt`"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, True, "are the same, so nothing is preferred"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, True, "chosen: .*the answer is empty"),
        ({"prompt": [USER, GOOD], "chosen": "b", "rejected": "c"}, True, "`prompt` ends with an answer"),
        ({"prompt": "a", "chosen": [USER], "rejected": "c"}, True, "begins with the role 'user'"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, True, r"`prompt`.*3"),
        ({"prompt": "a", "chosen": [{"content": "b"}], "rejected": "c"}, True, "an object with a `role`"),
        ({"chosen": [USER, GOOD], "rejected": [GOOD, USER]}, True, "begin differently; give the prompt"),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, True, r"rejected: `completion` is \[\]"),
        ({"prompt": "a", "completion": "b", "label": 1}, False, r"`label`.*1"),
        ({"prompt": "a", "completion": "b"}, False, r"`label` is None; it must be true"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, False, "no `completion`, but prompt, chosen"),
        ("text", True, "it is a str; give an object"),
    ]:
        with (
            subtests.test(row=row, paired=paired, message=message),
            pytest.raises(ConfigError, match=f"row 0: .*{message}"),
        ):
            comparisons_of([row], is_paired=paired)


def test_a_file_is_refused_by_its_lines_all_at_once(tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "\n".join(json.dumps(row) for row in [good, {**good, "chosen": "c"}, good, {"prompt": 1}])
    )
    with pytest.raises(ConfigError, match=r"(?s)pairs.jsonl:2: .*same.*pairs.jsonl:4: .*`chosen`"):
        read_comparisons(file, is_paired=True)


# ---- a stored run ------------------------------------------------------------------------------------------


def attempt(
    task: str,
    reward: float | None,
    answer: int,
    *,
    role: str = "agent",
    prompt: int = 7,
    outcome: Outcome = Outcome.SCORED,
    reason: TerminationReason = TerminationReason.ENV_DONE,
) -> Episode:
    step = Step(prompt_ids=[prompt], response_ids=[answer], logprobs=[-1.0], policy_versions=[0])
    trajectory = Trajectory(name=role, steps=[step], reward=reward)
    return Episode(task_id=task, trajectories=[trajectory], outcome=outcome, termination_reason=reason)


def task_of(episode: Episode) -> str:
    return episode.task_id


def answers(pairs: list[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [tuple(each.ids[0][-1] for each in pair) for pair in pairs]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [("each", [(1, 3), (2, 4)]), ("all", [(1, 3), (1, 4), (1, 5), (2, 3), (2, 4), (2, 5)])],
)
def test_successes_are_paired_with_failures_at_the_same_task(
    pairing: str, expected: list[tuple[int, int]]
) -> None:
    data = PreferenceDataConfig(run="r", pairing=pairing)
    episodes = [attempt("t", 1.0, 1), attempt("t", 1.0, 2), *(attempt("t", 0.0, n) for n in (3, 4, 5))]
    found, counts = plays_of([*episodes, attempt("only good", 1.0, 9)], task_of, data)
    assert answers(pairs_of(found, data, counts)) == expected
    assert (counts.successes, counts.failures, counts.tasks, counts.tasks_with_both) == (3, 3, 2, 1)


def test_nobody_is_compared_with_an_answer_to_another_prompt() -> None:
    data = PreferenceDataConfig(run="r")
    found, counts = plays_of([attempt("t", 1.0, 1, prompt=7), attempt("t", 0.0, 2, prompt=8)], task_of, data)
    assert pairs_of(found, data, counts) == []
    assert counts.tasks_with_both == 0


def test_what_says_nothing_about_the_answer_is_left_out_and_counted() -> None:
    data = PreferenceDataConfig(run="r", min_reward=0.5)
    episodes = [
        attempt("t", 0.6, 1),
        attempt("t", 0.6, 1),
        attempt("t", 0.2, 2),
        attempt("t", 0.9, 3),
        attempt("t", 0.1, 3),
        attempt("t", None, 4),
        attempt("t", 0.0, 5, outcome=Outcome.INFRASTRUCTURE_FAILURE),
        attempt("t", 0.0, 6, outcome=Outcome.TRUNCATED, reason=TerminationReason.TIMEOUT),
        attempt("t", 0.0, 7, outcome=Outcome.TRUNCATED, reason=TerminationReason.MAX_TURNS_EXCEEDED),
    ]
    found, counts = plays_of(episodes, task_of, data)
    assert [each.success for each in found] == [True, False, False]
    assert asdict(counts) == {
        "trajectories": 9,
        "other_role": 0,
        "failed": 1,
        "timed_out": 1,
        "unscored": 1,
        "repeated": 1,
        "contradictory": 2,
        "successes": 1,
        "failures": 2,
        "tasks": 0,
        "tasks_with_both": 0,
    }


def test_a_role_must_be_named_where_there_are_several() -> None:
    episodes = [attempt("t", 1.0, 1), attempt("t", 0.0, 2, role="judge")]
    with pytest.raises(ConfigError, match=r"`data.role` .*agent, judge"):
        plays_of(episodes, task_of, PreferenceDataConfig(run="r"))
    with pytest.raises(ConfigError, match=r"`data.role` is 'solver'; .*agent, judge"):
        plays_of(episodes, task_of, PreferenceDataConfig(run="r", role="solver"))
    found, counts = plays_of(episodes, task_of, PreferenceDataConfig(run="r", role="judge"))
    assert len(found) == 1
    assert counts.other_role == 1


one_attempt = st.builds(
    attempt,
    task=st.sampled_from("ab"),
    reward=st.sampled_from([0.0, 0.5, 1.0, None]),
    answer=st.integers(0, 3),
    prompt=st.integers(0, 1),
    outcome=st.sampled_from(list(Outcome)),
    reason=st.sampled_from(list(TerminationReason)),
)


@given(st.lists(one_attempt, max_size=20), st.sampled_from(["each", "all"]), st.integers(0, 3))
def test_counts_conserve_and_pairs_are_what_they_say(
    episodes: list[Episode], pairing: str, limit: int
) -> None:
    data = PreferenceDataConfig(run="r", pairing=pairing, max_per_task=limit)
    found, counts = plays_of(episodes, task_of, data)
    parts = asdict(counts)
    assert parts.pop("trajectories") == sum(parts.values()) == len(episodes)
    pairs = pairs_of(found, data, counts)
    for better, worse in pairs:
        assert better.success
        assert not worse.success
        assert (better.task, better.prompt_ids) == (worse.task, worse.prompt_ids)
        assert better.ids != worse.ids
    per_task = [sum(better.task == task for better, _ in pairs) for task in "ab"]
    assert not limit or max(per_task) <= limit
    if pairing == "each":
        used = [id(each) for pair in pairs for each in pair]
        assert len(used) == len(set(used))
    alone = at_most(found, limit, counts)
    assert len(alone) == len({(each.task, each.ids) for each in alone})
    assert limit or len(alone) == len(found)


def test_a_key_that_cannot_be_honoured_is_refused(subtests: pytest.Subtests) -> None:
    for make, message in [
        (lambda: PreferenceDataConfig(dataset="a", run="b"), "train on one of them"),
        (
            lambda: PreferenceDataConfig(dataset="a", pairing="all"),
            r"`data.pairing`.*'all'.*nothing",
        ),
        (lambda: PreferenceDataConfig(run="a", pairing="best"), "choose one of each, all"),
        (lambda: PreferenceDataConfig(dataset="a", min_reward=0.5), "`data.min_reward` is 0.5"),
        (lambda: PreferenceDataConfig(max_length_policy="truncate"), "choose one of refuse, drop"),
        (lambda: PreferenceDataConfig(heldout_fraction=1.0), "0 or more and below 1"),
    ]:
        with subtests.test(make=make, message=message), pytest.raises(ConfigError, match=message):
            make().validate()


def test_half_a_character_and_a_missing_answer_in_a_row_from_python_are_refused_by_their_rows() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ConfigError, match=r"row 0: chosen: it has \\udc00"):
        comparisons_of([{**pair, "chosen": "\udc00"}], is_paired=True)
    with pytest.raises(ConfigError, match="row 1: its `rejected` is None"):
        comparisons_of([pair, {**pair, "rejected": None}], is_paired=True)
