"""Evaluations become rows: which attempts, of which tasks, and without secrets."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.data.registry import DatasetRegistry
from rllm.eval.plan import KIND
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.types.episode import Episode, Outcome, Step, TerminationReason, Trajectory

REWARDS = {"easy": [1.0, 1.0, 1.0, 1.0], "mixed": [0.0, 1.0, 0.0, 0.5], "hard": [0.0, 0.0, 0.0, 0.0]}


def episode(task: str, attempt: int, reward: float, outcome: Outcome = Outcome.SCORED) -> Episode:
    answer = f"{reward} of jane@example.org, try {attempt % 2}"
    messages = [{"role": "user", "content": f"Solve {task}."}, {"role": "assistant", "content": answer}]
    step = Step(chat_completions=messages, model_response=answer, response_ids=[1] * (attempt + 1))
    return Episode(
        task={"task_id": task, "question": f"Solve {task}."},
        task_id=task,
        rollout_idx=attempt,
        trajectories=[Trajectory(name="solver", steps=[step], reward=reward)],
        is_correct=reward == 1.0,
        outcome=outcome,
        termination_reason=TerminationReason.ENV_DONE,
    )


@pytest.fixture
def evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    with RunDirectory.create_or_open(tmp_path / "evaluation") as run:
        run.write_config({"kind": KIND, "name": "made"})
        episodes = [
            episode(task, attempt, reward)
            for task, rewards in REWARDS.items()
            for attempt, reward in enumerate(rewards)
        ]
        with EpisodeStore.open(run.store_path) as store:
            store.save_episodes("sampled", 0, episodes)
            store.save_episodes("sampled", 1, [episode("broken", 0, 0.0, Outcome.INFRASTRUCTURE_FAILURE)])
    return tmp_path / "evaluation"


def from_eval(evaluation: Path, *words: str | Path) -> Result:
    command = ["dataset", "from-eval", str(evaluation), "--json", *map(str, words)]
    return CliRunner().invoke(front_door, command, prog_name="rllm", catch_exceptions=False)


def rows_of(evaluation: Path, *words: str) -> list[dict[str, Any]]:
    path = evaluation.parent / "rows.jsonl"
    path.unlink(missing_ok=True)
    done = from_eval(evaluation, "--out", path, *words)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in path.read_text().splitlines()]


def made_of(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(row["run"]["task_id"], row["run"]["attempt"]) for row in rows]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ((), [("easy", 0), ("easy", 1), ("mixed", 1)]),
        (("--max-per-task", "1"), [("easy", 0), ("mixed", 1)]),
        (("--filter", "0 < avg and avg < 1"), [("mixed", 1)]),
        (("--filter", "pass@2 == 1"), [("easy", 0), ("easy", 1)]),
        (("--filter", "pass@9 > 0"), []),
        (("--filter", "best@1 == 0 and solved"), [("mixed", 1)]),
        (("--metric", "is_correct", "--filter", "avg == 0.25"), [("mixed", 1)]),
        (("--filter", 'task.question == "Solve easy." and attempt > 2'), [("easy", 3)]),
        (("--select", "shortest"), [("easy", 0), ("mixed", 1)]),
        (("--select", "best"), [("easy", 0), ("hard", 0), ("mixed", 1)]),
        (("--select", "all", "--min-reward", "0.5"), [("easy", 0), ("easy", 1), ("mixed", 1), ("mixed", 3)]),
        (("--trajectory", "judge"), []),
    ],
)
def test_a_filter_and_a_selection_say_which_attempts(
    evaluation: Path, words: tuple[str, ...], kept: list[tuple[str, int]]
) -> None:
    """Attempts of one task with the same answer are one row; those that infrastructure failed are none."""
    rows = rows_of(evaluation, *words)
    assert sorted(made_of(rows)) == kept
    assert all("[email]" in row["messages"][-1]["content"] for row in rows)


def test_a_better_answer_stands_before_every_worse_one(evaluation: Path) -> None:
    rows = rows_of(evaluation, "--as", "preferences")
    assert {row["prompt"][0]["content"] for row in rows} == {"Solve mixed."}
    ends = {(row["chosen"][0]["content"][:3], row["rejected"][0]["content"][:3]) for row in rows}
    assert ends == {("1.0", "0.0"), ("1.0", "0.5")}


def test_tasks_are_kept_under_a_name_and_no_task_is_in_both_splits(evaluation: Path) -> None:
    words = ("--as", "tasks", "--name", "seen", "--val-fraction", "0.5", "--seed", "3", "--category", "math")
    counts = json.loads(from_eval(evaluation, *words).stdout)
    assert (counts["attempts"], counts["failed"], counts["rows"]) == (13, 1, 3)
    splits = DatasetRegistry.get_dataset_splits("seen")
    names = [
        row["task_id"]
        for split in splits
        for row in DatasetRegistry.load_dataset("seen", split)  # type: ignore[union-attr]
    ]
    assert (sorted(names), set(splits) <= {"train", "test"}) == (["easy", "hard", "mixed"], True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "give one of --out FILE and --name NAME"),
        (("--out", "rows.jsonl", "--val-fraction", "0.1"), "give --name"),
        (("--name", "x", "--val-fraction", "0.1", "--val-split", "train"), "choose another"),
        (("--name", "x", "--filter", "rewards > 1"), "`rewards`"),
        (("--name", "x", "--no-dedup"), "no counterpart"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_read(
    evaluation: Path, words: tuple[str, ...], text: str
) -> None:
    done = from_eval(evaluation, *words)
    assert done.exit_code == 2
    assert text in " ".join(done.output.split())


def test_a_dry_run_counts_and_writes_nothing(evaluation: Path) -> None:
    counts = json.loads(from_eval(evaluation, "--dry-run", "--name", "nothing").stdout)
    assert (counts["rows"], counts["written"]) == (3, False)
    assert DatasetRegistry.get_dataset_names() == []
