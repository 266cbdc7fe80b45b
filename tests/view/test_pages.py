"""The answers behind the pages: runs, steps, groups, attempts, episodes and the search in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.view.conftest import conversation, episode, note_token_numbers, write_run

from rllm.errors import ConfigError
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import JsonlTracker
from rllm.types.episode import Outcome
from rllm.view.pages import answer
from rllm.view.sources import Sources

Ask = Callable[[str], dict[str, Any]]


def test_runs_are_listed_with_their_curve_and_a_damaged_one_hides_none(ask: Ask, runs: Path) -> None:
    (runs / "broken").mkdir()
    (runs / "broken" / "config.json").write_text("{")
    page = ask("runs")
    assert [(run["key"], run["seed"], run["spark"]) for run in page["runs"]] == [("lake", 3, [0.5, 0.6])]
    assert "not valid JSON" in page["unreadable"][0]["error"]


def test_runs_of_two_roots_have_keys_that_tell_them_apart(runs: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other" / "runs" / "lake", {})
    sources = Sources([runs, tmp_path / "other" / "runs"])
    keys = list(sources.runs())
    assert len(keys) == 2
    assert sorted(sources.run(key).path for key in keys) == sorted(
        [runs / "lake", tmp_path / "other" / "runs" / "lake"]
    )


def test_a_run_below_several_directories_is_found_and_a_run_itself_is_a_root(
    runs: Path, tmp_path: Path
) -> None:
    assert list(Sources([tmp_path]).runs()) == ["runs/lake"]
    assert list(Sources([runs / "lake"]).runs()) == ["lake"]


@pytest.mark.parametrize("key", ["../lake", "/etc", "nothing", "lake/../lake", ""])
def test_a_name_that_is_no_run_opens_nothing(ask: Ask, key: str) -> None:
    with pytest.raises(ConfigError, match="no run"):
        ask(f"run?run={key}")


def test_a_page_that_reads_on_gets_only_new_lines(ask: Ask, runs: Path) -> None:
    first = ask("run?run=lake")
    assert first["series"]["train"]["success"] == [0.5, 0.6]
    tracker = JsonlTracker(runs / "lake" / "metrics.jsonl")
    tracker.log(2, "train", {"success": 0.75, "entropy": 1.5})
    tracker.close()
    second = ask(f"run?run=lake&after={first['offset']}")
    assert second["series"]["train"]["success"] == [0.75]
    assert second["after"] == first["offset"]
    assert second["offset"] > first["offset"]


def test_a_file_that_a_resumed_run_cut_is_read_from_its_beginning(ask: Ask) -> None:
    page = ask("run?run=lake&after=100000")
    assert page["after"] == 0
    assert page["series"]["train"]["step"] == [0, 1]


def test_alarms_say_what_is_wrong_and_what_to_do(ask: Ask) -> None:
    (alarm,) = (each for each in ask("run?run=lake")["alarms"] if each["name"] == "ties")
    assert alarm["sentence"].startswith("83% of groups tie")
    assert "filters.dynamic" in alarm["mend"]


def test_a_distribution_counts_every_episode_of_a_step(ask: Ask) -> None:
    page = ask("distribution?run=lake")
    assert [step["step"] for step in page["steps"]] == [0, 1]
    for step in page["steps"]:
        assert sum(step["rewards"]) == step["episodes"] == 24
        assert (step["rewards"][0], step["rewards"][-1]) == (11, 13)
        assert step["outcomes"] == {"scored": 24}
        assert step["turns"] == [2, 2, 2, 2, 2]


def test_groups_stand_in_the_order_of_their_numbers_and_ties_are_named(ask: Ask) -> None:
    page = ask("groups?run=lake&step=1")
    assert [group["task_id"] for group in page["groups"]] == [f"test-{number}" for number in range(12)]
    assert [group["tied"] for group in page["groups"]] == [True, *[False] * 11]
    assert [each["surprise"] for each in page["groups"][1]["attempts"]] == [1.0, 1.0]
    assert page["steps"] == [0, 1]


def test_groups_sorted_by_surprise_begin_with_the_most_surprising(ask: Ask) -> None:
    assert ask("groups?run=lake&order=surprise")["groups"][-1]["task_id"] == "test-0"


def test_an_attempt_without_a_reward_surprises_nobody(ask: Ask, runs: Path) -> None:
    rewards = [5.0, 6.0, None]
    attempts = [episode("far", number, conversation(["Left"])) for number in range(len(rewards))]
    for attempt, reward in zip(attempts, rewards, strict=True):
        attempt.trajectories[0].reward = reward
    write_run(runs / "far", {("train", 0): attempts})
    (group,) = ask("groups?run=far")["groups"]
    assert [each["surprise"] for each in group["attempts"]] == [1.0, 1.0, 0.0]


def test_an_episode_names_every_attempt_at_its_task(ask: Ask, runs: Path) -> None:
    attempts = [episode("hard", attempt, conversation(["Left"])) for attempt in range(130)]
    write_run(runs / "many", {("train", 0): attempts})
    named = ask("episode?run=many&id=1")["attempts"]
    assert [each["attempt"] for each in named] == list(range(130))


def test_attempts_part_where_best_and_worst_first_differ(ask: Ask) -> None:
    page = ask("attempts?run=lake&phase=train&step=0&task=test-3")
    assert [each["attempt"] for each in page["attempts"]] == [0, 1]
    assert page["parting"] | {"best": 0, "worst": 0} == {"best": 0, "worst": 0, "trajectory": 0, "turn": 1}
    assert ask("attempts?run=lake&phase=train&step=0&task=test-0")["parting"] is None


def test_episodes_are_filtered_sorted_and_counted(ask: Ask) -> None:
    wrong = ask("episodes?run=lake&phase=train&step=0&correct=0")
    assert wrong["total"] == len(wrong["episodes"]) == 11
    assert [each["task_id"] for each in wrong["episodes"]][:3] == ["test-1", "test-2", "test-3"]
    best = ask("episodes?run=lake&order=reward&descending=1&limit=1")
    assert best["episodes"][0]["reward"] == 1.0
    assert best["total"] == 48
    assert ask("episodes?run=lake&outcome=truncated")["episodes"] == []
    with pytest.raises(ConfigError, match="`order` is 'id; drop'"):
        ask("episodes?run=lake&order=id;%20drop")


def test_words_are_searched_in_all_text_also_of_steps_that_come_later(ask: Ask, runs: Path) -> None:
    while (page := ask("episodes?run=lake&q=up"))["progress"]["steps"] < 2:
        pass
    assert page["total"] == 22
    assert "\x02Up\x03" in page["episodes"][0]["hit"]
    assert ask('episodes?run=lake&q="then after 0"')["total"] == 48
    assert ask("episodes?run=lake&q=Do")["total"] == 26  # the beginning of a word
    with EpisodeStore.open(runs / "lake" / "store.sqlite") as store:
        store.save_episodes("train", 2, [episode("test-7", 0, conversation(["sideways"]))])
        store.save_episodes("train", 0, [episode("test-8", 0, conversation(["backwards"]))])
    while ask("episodes?run=lake&q=sideways")["total"] < 1:
        pass
    while ask("episodes?run=lake&q=backwards")["total"] < 1:
        pass
    assert {each["step"] for each in ask("episodes?run=lake&q=up")["episodes"]} == {1}


@pytest.mark.parametrize("words", ["'; -- x", "NEAR(x", "a AND", "col:x", "(x", "^up", '"x', "x* *", "-x"])
def test_no_character_of_a_search_has_a_meaning_of_its_own(ask: Ask, words: str) -> None:
    assert ask(f"episodes?run=lake&q={quote(words)}")["total"] >= 0


@pytest.mark.parametrize("words", ['"', "* *", "--"])
def test_a_search_without_a_word_is_refused(ask: Ask, words: str) -> None:
    with pytest.raises(ConfigError, match="holds no word"):
        ask(f"episodes?run=lake&q={quote(words)}")


def test_an_episode_has_what_is_new_in_each_turn_and_every_number_of_its_tokens(ask: Ask) -> None:
    page = ask("episode?run=lake&id=1")
    (agent,) = page["trajectories"]
    first, second = agent["turns"]
    assert [message["text"] for message in first["messages"]] == ["Where to?"]
    assert [message["text"] for message in second["messages"]] == ["Then, after 0?"]
    assert second["answer"]["text"] == "Down"
    assert first["tokens"] == {
        "id": [10, 11],
        "text": ["#10", "#11"],
        "logprob": [-0.5, -2.0],
        "version": [4, 4],
    }
    assert agent["segments"] == [{"turn": 0, "reason": "the conversation begins"}]
    assert agent["overview"]["model_s"] == [0.25, 0.25]
    assert [each["attempt"] for each in page["attempts"]] == [0, 1]
    assert page["next"] == 2
    prompt = ask("prompt?run=lake&id=1&turn=1")
    assert prompt["ids"] == [1, 2, 3, 10, 11, 5]
    assert prompt["messages"][-1]["content"] == "Then, after 0?"


def test_the_times_of_a_turn_add_up(tmp_path: Path, home: Path) -> None:
    trajectory = conversation(["Left", "Down"])
    trajectory.steps[0].timings = {"model_s": 2.0, "env_s": 1.0, "queue_s": 1.5, "grader_s": 0.25}
    trajectory.steps[1].timings = {"model_s": 1.0, "grader_s": 3.0}
    write_run(tmp_path / "r", {("train", 0): [episode("t", 0, trajectory)]})
    (shown,) = answer(Sources([tmp_path / "r"]), "episode?run=r&id=1")["trajectories"]
    assert {name: shown["overview"][name] for name in ("queue_s", "model_s", "env_s", "grader_s")} == {
        "queue_s": [1.5, None],
        "model_s": [0.5, 1.0],
        "env_s": [0.75, None],
        "grader_s": [0.25, 3.0],
    }
    assert list(shown["turns"][0]["timings"]) == ["queue_s", "model_s", "env_s", "grader_s"]


def test_a_state_is_shown_as_text_or_as_a_picture(tmp_path: Path, home: Path) -> None:
    picture = "data:image/png;base64," + "QUJD" * 20
    trajectory = conversation(["a", "b", "c"])
    part = {"type": "image_url", "image_url": {"url": picture}}
    observations = ["two rows", [part, {"type": "text", "text": "look"}], picture]
    for step, observation in zip(trajectory.steps, observations, strict=True):
        step.observation, step.info = observation, {"board": picture, "moves": 3}
    write_run(tmp_path / "r", {("train", 0): [episode("t", 0, trajectory)]})
    (shown,) = answer(Sources([tmp_path / "r"]), "episode?run=r&id=1")["trajectories"]
    assert [each["observation"] for each in shown["turns"]] == [
        {"role": "observation", "text": "two rows"},
        {"role": "observation", "text": "look", "images": [picture]},
        {"role": "observation", "text": "", "images": [picture]},
    ]
    assert [(each["pictures"], each["info"]) for each in shown["turns"]] == [([picture], '{"moves": 3}')] * 3


def test_tokens_have_what_the_trainer_computed_of_them(ask: Ask, runs: Path) -> None:
    nan = float("nan")
    numbers = [[0.5, nan, 0.25, 0.25], [1.0, nan, nan, nan], [0.1, nan, nan, 2.0]]
    note_token_numbers(runs / "lake", "test-0", numbers)
    (agent,) = ask("episode?run=lake&id=1")["trajectories"]
    first, second = (turn["tokens"] for turn in agent["turns"])
    assert (first["advantage"], first["ratio"], first["entropy"]) == ([0.5, None], [1.0, None], [0.1, None])
    assert (second["advantage"], second["entropy"]) == ([0.25, 0.25], [None, 2.0])
    assert "ratio" not in second, "nobody computed one"
    windowed = ask("episode?run=lake&id=1&from=1")["trajectories"][0]["turns"]
    assert windowed[0]["tokens"] == second
    attempts = ask("attempts?run=lake&step=0&task=test-0")["attempts"]
    assert [each["advantage"] for each in attempts] == [pytest.approx(1 / 3, abs=1e-3), None]


def test_a_rewritten_history_begins_a_segment_with_its_reason(tmp_path: Path, home: Path) -> None:
    trajectory = conversation(["one", "two", "three"])
    trajectory.steps[1].prompt_ids = [1, 9, 9]
    trajectory.steps[1].chat_completions = [
        {"role": "user", "content": "a summary"},
        {"role": "assistant", "content": "two"},
    ]
    write_run(tmp_path / "run", {("train", 0): [episode("t", 0, trajectory)]})
    page = answer(Sources([tmp_path / "run"]), "episode?run=run&id=1")
    segments = page["trajectories"][0]["segments"]
    assert [each["turn"] for each in segments] == [0, 1, 2]
    assert segments[1]["reason"] == "the prompt repeats 1 of the 5 tokens before it, and message 1 is another"


def test_a_long_episode_is_sent_a_window_at_a_time(tmp_path: Path, home: Path) -> None:
    texts = [f"move {number}" for number in range(120)]
    write_run(tmp_path / "run", {("train", 0): [episode("t", 0, conversation(texts))]})
    sources = Sources([tmp_path / "run"])
    (agent,) = answer(sources, "episode?run=run&id=1&from=100")["trajectories"]
    assert [turn["turn"] for turn in agent["turns"]] == list(range(100, 120))
    assert agent["turns"][0]["answer"]["text"] == "move 100"
    assert len(agent["overview"]["reward"]) == agent["num_turns"] == 120


def test_runs_are_compared_by_settings_curves_and_pairs_of_tasks(tmp_path: Path, home: Path) -> None:
    for name, good in (("a", 3), ("b", 9)):
        episodes = [
            episode(f"test-{task}", 0, conversation(["x"], reward=float(task < good))) for task in range(12)
        ]
        config = {"seed": good, "steps": 0, "task": {"environment": "frozenlake"}}
        write_run(tmp_path / "runs" / name, {("after", 0): episodes}, config=config)
    page = answer(Sources([tmp_path / "runs"]), "compare?run=a&run=b")
    assert page["differences"] == {"seed": {"a": 3, "b": 9}}
    (pair,) = page["pairs"]
    assert pair["comparison"]["difference"] == pytest.approx(0.5)
    low, high = pair["comparison"]["difference_interval"]
    assert low < 0.5 < high
    assert [change["task_id"] for change in pair["comparison"]["better"]] == [
        f"test-{task}" for task in range(3, 9)
    ]
    with pytest.raises(ConfigError, match="1 runs"):
        answer(Sources([tmp_path / "runs"]), "compare?run=a")


def test_failures_keep_their_cause(tmp_path: Path, home: Path) -> None:
    trajectory = conversation(["x"])
    trajectory.info["error"] = {"type": "SandboxError", "message": "<b>no disk</b>"}
    trajectory.reward = None
    failed = episode("t", 0, trajectory, outcome=Outcome.INFRASTRUCTURE_FAILURE)
    write_run(tmp_path / "run", {("train", 0): [failed]})
    page = answer(Sources([tmp_path / "run"]), "episode?run=run&id=1")
    assert page["trajectories"][0]["error"] == "SandboxError: <b>no disk</b>"
    assert page["reward"] is None


def test_a_run_that_has_saved_nothing_yet_has_a_page(tmp_path: Path, home: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"seed": 0, "task": {"environment": "x"}}))
    sources = Sources([run])
    assert answer(sources, "run?run=run")["phases"] == []
    assert answer(sources, "episodes?run=run") == {"phases": [], "episodes": [], "total": 0}
    with pytest.raises(ConfigError, match="no episodes"):
        answer(sources, "groups?run=run")
