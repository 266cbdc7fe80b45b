import base64
import hashlib
import io

import pytest
from rich.console import Console

from rllm.cli.episode_view import episode_view, observation_text, token_color, visible
from rllm.types.episode import Action, Episode, Outcome, Step, TerminationReason, Trajectory

TOKENS = {7: "Right", 8: " Down", 9: "<|im_end|>", 10: "\n"}


def shown(episode: Episode, *, colored: bool = False) -> str:
    file = io.StringIO()
    console = Console(
        file=file,
        width=100,
        force_terminal=colored,
        color_system="truecolor" if colored else None,
        highlight=False,
    )
    console.print(episode_view(episode, TOKENS.__getitem__, "Episode 4"))
    return file.getvalue()


@pytest.fixture
def episode() -> Episode:
    steps = [
        Step(
            observation="PF\nHG",
            response_ids=[7, 9],
            logprobs=[-0.001, -3.5],
            action=Action("Right"),
            info={"effective": True},
        ),
        Step(
            observation="FP\nHG",
            response_ids=[8, 10],
            logprobs=[-1.0, -0.5],
            action=Action(" Down"),
            reward=1.0,
        ),
    ]
    trajectory = Trajectory(
        steps=steps, reward=1.0, outcome=Outcome.SCORED, termination_reason=TerminationReason.ENV_DONE
    )
    return Episode(
        task_id="lake-1", rollout_idx=2, trajectories=[trajectory], is_correct=True, outcome=Outcome.SCORED
    )


def test_an_episode_reads_turn_by_turn(episode: Episode) -> None:
    text = shown(episode)
    for line in (
        "Episode 4",
        "task lake-1, attempt 2: success, reward 1",
        "Turn 1",
        "Turn 2",
        "effective True",
    ):
        assert line in text
    assert "PF    tokens  Right 0.00   <|im_end|> -3.50" in text
    assert "HG    action  Right" in text
    assert "␣Down -1.00   ⏎ -0.50" in text
    assert "(env_done); scored, reward 1" in text


def test_tokens_are_coloured_by_log_probability_and_cells_by_what_they_are(episode: Episode) -> None:
    text = shown(episode, colored=True)
    assert "\x1b[38;2;60;180;75mRight" in text
    assert "\x1b[38;2;220;60;50m<|im_end|>" in text
    assert "\x1b[1mP" in text
    assert "\x1b[34mH" in text
    assert "\x1b[32mG" in text


def test_the_scale_goes_from_green_through_yellow_to_red() -> None:
    assert token_color(0.0) == "rgb(60,180,75)"
    assert token_color(-1.5) == "rgb(225,190,40)"
    assert token_color(-3.0) == token_color(-50.0) == "rgb(220,60,50)"


def test_only_a_grid_is_coloured_as_one() -> None:
    assert observation_text("PF\nHG").spans
    assert not observation_text("PHG").spans
    assert observation_text({"board": 1}).plain == "{'board': 1}"


def test_a_rollout_that_failed_shows_why(episode: Episode) -> None:
    trajectory = episode.trajectories[0]
    trajectory.info["error"] = {"type": "OSError", "message": "the lake is closed"}
    trajectory.reward, trajectory.outcome = None, Outcome.INFRASTRUCTURE_FAILURE
    trajectory.termination_reason = TerminationReason.ERROR
    text = shown(episode)
    assert "(error); infrastructure_failure" in text
    assert "OSError: the lake is closed" in text


def test_tokens_without_log_probabilities_and_steps_without_observation_are_shown() -> None:
    messages = [{"role": "user", "content": "Which way?"}, {"role": "assistant", "content": "Right"}]
    step = Step(chat_completions=messages, response_ids=[7], action="Right")
    text = shown(
        Episode(task_id="x", trajectories=[Trajectory(steps=[step], name="solver"), Trajectory(name="judge")])
    )
    for word in ("Which way?", "Right", "solver", "judge"):
        assert word in text


def test_the_system_message_is_shown_and_no_reward_of_a_turn_where_the_whole_was_paid() -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Which way?"},
        {"role": "assistant", "content": "Right"},
    ]
    step = Step(chat_completions=messages, response_ids=[7], action="Right")
    trajectory = Trajectory(steps=[step], reward=1.0, outcome=Outcome.SCORED)
    text = shown(Episode(task_id="x", trajectories=[trajectory], outcome=Outcome.SCORED, is_correct=True))
    assert "Answer briefly." in text
    assert "scored, reward 1" in text
    assert "reward  0" not in text
    step.reward = 1.0
    assert "reward  1" in shown(Episode(task_id="x", trajectories=[trajectory]))


def test_invisible_characters_are_made_visible() -> None:
    assert visible(" a\tb\n") == "␣a⇥b⏎"
    assert visible("") == "∅"


def test_an_image_is_shown_by_its_type_size_and_hash_and_never_by_its_bytes(episode: Episode) -> None:
    data = bytes(range(256)) * 8
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    caption = f"[image/png, 2,048 bytes, sha256 {hashlib.sha256(data).hexdigest()[:12]}]"
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    step = episode.trajectories[0].steps[0]
    step.observation = None
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "source": source},
    ):
        message = {"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}
        step.chat_completions = [message]
        text = "".join(shown(episode).split())
        assert "".join(caption.split()) in text
        assert "Whatisit?" in text
        assert url[30:60] not in text
    step.observation = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    assert "".join(caption.split()) in "".join(shown(episode).split())
