"""Runs made of plain episodes, as a training leaves them on disk, and the page over them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory
from rllm.types.messages import ModelOutput
from rllm.view.pages import answer
from rllm.view.sources import Sources

CONFIG = {
    "seed": 3,
    "steps": 2,
    "task": {"environment": "frozenlake"},
    "model": {"path": "builtin:tiny"},
    "warm_start": {"steps": 0},
}


def conversation(texts: Sequence[str], *, asked: str = "Where to?", reward: float = 1.0) -> Trajectory:
    """A trajectory with an answer of two tokens for each text, every prompt going on from the one before."""
    steps: list[Step] = []
    ids, messages = [1, 2, 3], [{"role": "user", "content": asked}]
    for number, text in enumerate(texts):
        answer_ids = [10 + number, 11 + number]
        output = ModelOutput(
            text=text,
            content=text,
            prompt_ids=list(ids),
            completion_ids=answer_ids,
            logprobs=[-0.5, -2.0],
            policy_versions=[4, 4],
        )
        step = Step.from_model_output(output, list(messages), action=text)
        step.timings = {"model_s": 0.25, "env_s": 0.05}
        step.reward = reward if number == len(texts) - 1 else 0.0
        steps.append(step)
        messages = [*step.chat_completions, {"role": "user", "content": f"Then, after {number}?"}]
        ids = [*ids, *answer_ids, 5]
    return Trajectory(steps=steps, reward=reward, termination_reason=TerminationReason.ENV_DONE)


def episode(
    task_id: str, attempt: int, *trajectories: Trajectory, outcome: Outcome = Outcome.SCORED
) -> Episode:
    return Episode(
        task={"task_id": task_id, "question": "Where to?"},
        task_id=task_id,
        rollout_idx=attempt,
        trajectories=list(trajectories),
        is_correct=sum(each.reward or 0.0 for each in trajectories) >= 1.0,
        outcome=outcome,
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"started_at": 1_700_000_000.0, "duration_s": 1.5},
    )


def write_run(
    path: Path,
    saved: dict[tuple[str, int], list[Episode]],
    *,
    lines: Sequence[dict[str, Any]] = (),
    config: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
) -> Path:
    """A run that nobody works on any more."""
    with RunDirectory.create_or_open(path) as run:
        run.write_config(config or CONFIG)
        with EpisodeStore.open(run.store_path) as store:
            for (phase, step), episodes in saved.items():
                store.save_episodes(phase, step, episodes)
        run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if summary is not None:
            run.write_summary(summary)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def runs(tmp_path: Path, home: Path) -> Path:
    """A directory with one run of two steps: twelve tasks, two attempts each, the second one failing."""
    saved = {
        ("train", step): [
            episode(f"test-{task}", attempt, conversation(["Left", word], reward=float(word == "Down")))
            for task in range(12)
            for attempt, word in enumerate(["Down", "Up"] if task else ["Down", "Down"])
        ]
        for step in range(2)
    }
    lines = [
        {"phase": "train", "step": step, "time_s": 2.0 * step, "success": 0.5 + 0.1 * step, "groups": 12}
        | {"groups_tied": 10, "episodes": 24, "failed": 0, "step_s": 2.0, "rollout_s": 1.0}
        for step in range(2)
    ]
    write_run(tmp_path / "runs" / "lake", saved, lines=lines)
    return tmp_path / "runs"


@pytest.fixture
def ask(runs: Path) -> Callable[[str], dict[str, Any]]:
    """The answer of the page to a request, through JSON as it goes out."""
    sources = Sources([runs])

    def call(request: str) -> dict[str, Any]:
        return json.loads(json.dumps(answer(sources, request), default=str, allow_nan=False))

    return call
