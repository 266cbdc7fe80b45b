"""Two steps of training through a harness, from the command to the record of every token."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_harness import block

from rllm.cli.main import rllm
from rllm.environments.harness.spec import shipped_names
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Episode
from rllm.types.task import Task

pytestmark = pytest.mark.slow
SETTINGS = (
    "steps=2",
    "rollout.group_size=2",
    "rollout.tasks_per_step=1",
    "rollout.max_tokens_per_turn=16",
    "rollout.truncation.max_turns=mask",
    "evaluation.num_tasks=1",
    "evaluation.every_steps=0",
)


def trained(
    agent: str, task: Task, *settings: str, model: str = "tiny"
) -> tuple[list[dict[str, int]], list[Episode]]:
    """The token counts of the two steps, and the episodes that they were made of."""
    Path("rows.jsonl").write_text(json.dumps(task.metadata["entry"]) + "\n")
    words = (
        f"train rows.jsonl --agent harness:{agent} --model builtin:{model} --output run --json --threads 1"
    )
    words += "".join(f" --set {each}" for each in (*SETTINGS, *settings))
    ended = CliRunner().invoke(rllm, shlex.split(words), catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "train"]
    with EpisodeStore.open(Path("run/store.sqlite"), read_only=True) as store:
        episodes = [store.episode(row_id) for row_id in store.row_ids("train")]
    counts = [{name: step[name] for name in step if name.startswith("tokens.")} for step in steps]
    return counts, episodes


def require_conserved(counts: list[dict[str, int]], episodes: list[Episode]) -> None:
    """sampled = trained + masked by reason, which is all that the episodes hold, with each step's version."""
    assert len(counts) == 2
    assert len(episodes) == 4
    for each in counts:
        assert 2 * each["tokens.sampled"] == sum(each.values()), each
    steps = [step for each in episodes for trajectory in each.trajectories for step in trajectory.steps]
    sampled = sum(len(step.response_ids) for step in steps)
    assert 0 < sampled == sum(each["tokens.sampled"] for each in counts)
    versions = [
        {version for step in each.trajectories[0].steps for version in step.policy_versions}
        for each in episodes
    ]
    assert sorted(map(sorted, versions)) == [[0], [0], [1], [1]]


def test_two_steps_through_the_agent_of_the_page(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_agent.py").write_text(block("python"))
    Path("my_agent.toml").write_text(block("toml"))
    counts, episodes = trained("my_agent.toml", task, "inference.max_context=2048")
    require_conserved(counts, episodes)
    assert all(each["tokens.trained"] == each["tokens.sampled"] for each in counts)


SHIPPED = {
    "mini-swe-agent": ("rollout.budget.turns=2", "rollout.truncation.max_turns=keep"),
    "claude-code": ("rollout.budget.turns=2", "rollout.truncation.max_turns=keep"),
    "codex": ("rollout.max_tokens_per_turn=3000",),
    "opencode": ("rollout.budget.turns=2", "rollout.truncation.max_turns=keep"),
    "openhands": ("rollout.budget.turns=2", "rollout.truncation.max_turns=keep"),
    "terminus-2": ("rollout.budget.turns=2", "rollout.truncation.max_turns=keep"),
}
"""A model that calls no tool is asked again without end; an answer that is cut off is an error to Codex."""


def test_every_harness_that_ships_is_trained_through() -> None:
    assert sorted(SHIPPED) == shipped_names()


@pytest.mark.parametrize("name", SHIPPED)
def test_two_steps_through_each_harness_that_ships(
    name: str, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("inference.max_context=32768", "inference.num_slots=1", *SHIPPED[name])
    require_conserved(*trained(name, task, *settings, model="tiny-32k"))


def test_a_short_prompt_leaves_room_in_a_small_context(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example, with the built-in model of 2,048 positions."""
    monkeypatch.chdir(tmp_path)
    agent = Path(__file__).parents[2] / "examples" / "short_harness" / "mini-swe-agent.toml"
    settings = ("inference.max_context=2048", "inference.num_slots=1", *SHIPPED["mini-swe-agent"])
    counts, episodes = trained(str(agent), task, *settings)
    require_conserved(counts, episodes)
    lengths = [len(each.trajectories[0].steps[0].prompt_ids) for each in episodes]
    assert max(lengths) < 256, lengths
    assert sum(each["tokens.trained"] for each in counts) > 0
