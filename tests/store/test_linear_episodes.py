"""What an episode costs to save and load grows with its turns, not with their square."""

from pathlib import Path

from rllm.store.episodes import EpisodeStore
from rllm.types import Episode, ModelOutput, Outcome, Prefix, Step, Trajectory

TURNS = 10_000
"""As lists of their own, the prompts of so many turns would hold a billion ids."""


def long_episode(num_turns: int) -> Episode:
    row: list[int] = []
    messages: list[dict[str, str]] = []
    trajectory = Trajectory(reward=1.0, outcome=Outcome.SCORED)
    for turn in range(num_turns):
        row += [turn % 500, *range(20)]
        messages += [{"role": "user", "content": f"turn {turn}"}, {"role": "assistant", "content": "go"}]
        step = Step(chat_completions=Prefix(messages), model_response="go", action="go")
        output = ModelOutput(
            text="go",
            content="go",
            prompt_ids=Prefix(row),
            completion_ids=[5, 6, 7],
            logprobs=[-1.0] * 3,
            policy_versions=[0] * 3,
        )
        step.record_output(output)
        trajectory.steps.append(step)
        row += output.completion_ids
    return Episode(task_id="t", trajectories=[trajectory], outcome=Outcome.SCORED)


def test_ten_thousand_turns_come_back_as_views_of_one_row(tmp_path: Path) -> None:
    episode = long_episode(TURNS)
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 0, [episode])
        (loaded,) = store.episodes("train", 0)
        again = tmp_path / "again.sqlite"
        with EpisodeStore.open(again) as other:  # what was loaded is saved as cheaply
            other.save_episodes("train", 0, [loaded])
            (twice,) = other.episodes("train", 0)
    for each in (loaded, twice):
        (trajectory,) = each.trajectories
        assert len(trajectory.steps) == TURNS
        first = trajectory.steps[0]
        assert isinstance(first.prompt_ids, Prefix)
        assert isinstance(first.chat_completions, Prefix)
        for place in (1, TURNS // 2, TURNS - 1):
            step, original = trajectory.steps[place], episode.trajectories[0].steps[place]
            assert step == original
            assert first.prompt_ids.shares_row_with(step.prompt_ids)
            assert first.chat_completions.shares_row_with(step.chat_completions)
            assert step.model_output is not None
            assert step.model_output.prompt_ids is step.prompt_ids
