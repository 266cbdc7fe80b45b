"""The FrozenLake agent shows the grid and nothing else, and reads one word and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.agents import BaseAgent, FrozenLakeAgent, check_agent
from rllm.agents.frozenlake import neighbours, parse_move
from rllm.environments import FrozenLakeEnv
from rllm.errors import ConfigError
from rllm.types import Action, Step

WORDS = ("Left", "Down", "Right", "Up")


def test_only_one_whole_word_is_a_move(subtests: pytest.Subtests) -> None:
    for response, action in [
        ("Up", "Up"),
        ("Down", "Down"),
        ("Left", "Left"),
        ("Right", "Right"),
        ("  Right\n", "Right"),
        ("right", "Right"),
        ("UP", "Up"),
        ("Right.", "Right."),
        ("Go Right", "Go Right"),
        ("Right Right", "Right Right"),
        ("Up Down Left Right", "Up Down Left Right"),
        ("UpUp", "UpUp"),
        ("Upward", "Upward"),
        ("<think>hm</think>Right", "Right"),
        ("Left is a hole. <answer>Right</answer>", "Right"),
        ("<answer>Right</answer> or Down", "<answer>Right</answer> or Down"),
        ("```Right```", "```Right```"),
        ("2", "2"),
        ("", ""),
        (" \n", ""),
    ]:
        with subtests.test(response=response, action=action):
            assert parse_move(response) == Action(action)
            env = FrozenLakeEnv()
            env.reset()
            *_, info = env.step(parse_move(response))
            assert info["valid"] == (action in WORDS)


@given(st.text())
def test_an_answer_is_a_move_exactly_when_it_is_one_of_the_words(response: str) -> None:
    is_move = response.strip().lower() in {word.lower() for word in WORDS}
    assert (parse_move(response).action in WORDS) == is_move


def play(agent: BaseAgent, env: FrozenLakeEnv, answers: list[str]) -> list[dict[str, Any]]:
    """What an engine does; the infos of the environment."""
    agent.reset()
    observation, info = env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    infos: list[dict[str, Any]] = []
    for answer in answers:
        observation, reward, done, info = env.step(agent.update_from_model(answer))
        agent.update_from_env(observation, reward, done, info)
        infos.append(info)
    return infos


def test_every_observation_is_one_message_with_the_grid_alone() -> None:
    agent = FrozenLakeAgent()
    play(agent, FrozenLakeEnv(["SF", "HG"]), ["hm", "Right"])
    assert agent.chat_completions == [
        {"role": "system", "content": "Reach G. Avoid H. Answer with one word: Up, Down, Left or Right."},
        {"role": "user", "content": "PF\nHG"},
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": "PF\nHG"},
        {"role": "assistant", "content": "Right"},
        {"role": "user", "content": "FP\nHG"},
    ]


def test_each_answer_is_one_step_that_knows_what_it_earned() -> None:
    agent = FrozenLakeAgent()
    infos = play(agent, FrozenLakeEnv(["SF", "HG"]), ["Right", "Down"])
    first, second = agent.trajectory.steps
    assert (first.observation, first.model_response, first.action) == ("PF\nHG", "Right", Action("Right"))
    assert (second.observation, second.model_response, second.action) == ("FP\nHG", "Down", Action("Down"))
    assert [(step.reward, step.done) for step in (first, second)] == [(0.0, False), (1.0, True)]
    assert [step.info for step in (first, second)] == infos
    assert (first.thought, agent.get_current_state()) == ("", second)


def test_nobody_is_asked_about_the_last_observation() -> None:
    agent = FrozenLakeAgent()
    play(agent, FrozenLakeEnv(["SF", "HG"]), ["Right", "Down"])
    assert agent.chat_completions[-1] == {"role": "assistant", "content": "Down"}
    assert agent.trajectory.is_cumulative()


def test_steps_share_the_messages_and_own_their_lists() -> None:
    agent = FrozenLakeAgent()
    play(agent, FrozenLakeEnv(["SF", "HG"], max_steps=9), ["Up", "Up", "Up"])
    first, second, third = agent.trajectory.steps
    assert [len(step.chat_completions) for step in (first, second, third)] == [3, 5, 7]
    assert all(
        ours is live for ours, live in zip(third.chat_completions, agent.chat_completions, strict=False)
    )
    assert agent.chat_completions is agent.chat_completions


def test_the_raw_answer_stays_in_the_conversation() -> None:
    agent = FrozenLakeAgent()
    play(agent, FrozenLakeEnv(["SF", "HG"]), ["  right\n"])
    assert agent.trajectory.steps[0].chat_completions[-1]["content"] == "  right\n"
    assert agent.trajectory.steps[0].action == Action("Right")


def test_an_invalid_answer_is_the_environments_to_count() -> None:
    agent = FrozenLakeAgent()
    (info,) = play(agent, FrozenLakeEnv(["SF", "HG"]), ["I would go Right"])
    assert info == {"effective": False, "valid": False}
    assert agent.trajectory.steps[0].info["valid"] is False


def test_a_reset_forgets_the_episode_and_leaves_its_trajectory_alone() -> None:
    agent = FrozenLakeAgent()
    play(agent, FrozenLakeEnv(["SF", "HG"]), ["Right", "Down"])
    before = agent.trajectory
    agent.reset()
    assert (agent.trajectory.steps, agent.get_current_state(), len(agent.chat_completions)) == ([], None, 1)
    assert len(before.steps) == 2
    agent.update_from_env("PF\nHG", 0.5, False, {})
    assert [step.reward for step in before.steps] == [0.0, 1.0]


def test_a_step_survives_json() -> None:
    agent = FrozenLakeAgent()
    play(agent, FrozenLakeEnv(["SF", "HG"]), ["Right"])
    (step,) = agent.trajectory.steps
    assert Step.from_dict(json.loads(json.dumps(step.to_dict()))) == step


def test_moves_left_are_counted_down_when_asked_for() -> None:
    agent = FrozenLakeAgent(max_steps=2)
    play(agent, FrozenLakeEnv(["SF", "HG"], max_steps=2), ["Up"])
    assert [message["content"] for message in agent.chat_completions if message["role"] == "user"] == [
        "PF\nHG\nMoves left: 2",
        "PF\nHG\nMoves left: 1",
    ]


def test_neighbours_are_shown_when_asked_for() -> None:
    agent = FrozenLakeAgent(show_neighbours=True)
    play(agent, FrozenLakeEnv(["SF", "HG"]), ["Right"])
    assert agent.chat_completions[1]["content"] == "PF\nHG\n#HF#"
    assert agent.chat_completions[-1]["content"] == "FP\nHG\nFG##"


def test_a_player_who_left_the_ice_has_no_neighbours() -> None:
    assert neighbours("FF\nXG") == ""


def test_the_prompt_is_short_because_every_token_costs() -> None:
    prompt = FrozenLakeAgent().chat_completions[0]["content"]
    assert len(prompt) < 80
    assert prompt == prompt.strip()


@pytest.mark.parametrize("agent", [FrozenLakeAgent(), FrozenLakeAgent(max_steps=8, show_neighbours=True)])
def test_the_agent_keeps_the_contract(agent: FrozenLakeAgent) -> None:
    check_agent(agent, observation="PF\nHG", answer="Right")
    check_agent(agent, observation="PF\nHG", answer="nonsense")


@pytest.mark.parametrize(
    ("grid", "shown"),
    [
        ("PFH\nHFF\nFFG", "PF\nHF"),
        ("FFH\nHPF\nFFG", "PF\nFG"),
        ("FFH\nHFP\nFFG", "P\nG"),
        ("FFH\nHFF\nFPG", "PG"),
        ("no lake at all", "no lake at all"),
    ],
)
def test_an_agent_with_a_view_sees_the_grid_from_where_it_stands(grid: str, shown: str) -> None:
    agent = FrozenLakeAgent(view=2)
    agent.update_from_env(grid, 0.0, False, {})
    assert agent.chat_completions[-1] == {"role": "user", "content": shown}


def test_a_view_of_a_small_lake_is_all_of_it_and_the_neighbours_stand_below() -> None:
    agent = FrozenLakeAgent(view=4, show_neighbours=True)
    agent.update_from_env("PFH\nHFF\nFFG", 0.0, False, {})
    assert agent.chat_completions[-1]["content"] == "PFH\nHFF\nFFG\n#HF#"


@pytest.mark.parametrize("view", [0, -1, 2.5, True, "4"])
def test_a_view_that_is_no_number_of_cells_is_refused(view: Any) -> None:
    with pytest.raises(ConfigError, match="`view` is"):
        FrozenLakeAgent(view=view)
