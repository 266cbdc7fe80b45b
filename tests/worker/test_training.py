"""A workflow of workers is trained and evaluated by the commands, with real sampling."""

import json
import sqlite3
from pathlib import Path

import pytest
import worker_files as files
from click.testing import CliRunner, Result

from rllm.cli.main import rllm as front_door
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Outcome
from rllm.types.sample import NOT_SAMPLED

FLOW = """
from rllm import Episode, Workflow


class Guess(Workflow):
    workers = {"guess": "guess.worker.md", "measure": "measure.worker.md"}

    async def run(self, task, uid, **kwargs):
        measured = await self.worker("measure", {"task": task["text"]})
        guess = await self.worker("guess", {"task": task["text"]})
        guess.trajectory.reward = float(guess.outputs["length"] == measured.outputs["length"])
        return Episode(is_correct=guess.trajectory.reward == 1.0)
"""


JUDGE = """
def score(task, episode):
    return float(episode.is_correct)
"""


def rllm(*words: str | Path) -> Result:
    return CliRunner().invoke(
        front_door, [str(word) for word in words], prog_name="rllm", catch_exceptions=False
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workflow, its contracts, eight rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLLM_HOME", str(tmp_path / "home"))
    text = files.write_worker(tmp_path).read_text()
    unbound = text.replace('rllm: {program: "program.py:solve"}\n', "").replace("id: measure", "id: guess")
    (tmp_path / "guess.worker.md").write_text(unbound.replace('"integer"', '"integer", "enum": [1, 2]'))
    (tmp_path / "flow.py").write_text(FLOW)
    rows = [{"id": f"{number}", "text": "x" * (1 + number % 2)} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_workflow_of_workers_is_evaluated(folder: Path) -> None:
    """Its own worker runs beside it; the model plays the other, under its grammar."""
    (folder / "judge.py").write_text(JUDGE)
    result = rllm(
        *("eval", "flow.py:Guess", "--dataset", "rows.jsonl", "--evaluator", "judge.py:score"),
        *("--model", "builtin:tiny", "--output", "report", "--sampling", "temperature=1", "--json"),
    )
    assert result.exit_code == 0, result.output
    with EpisodeStore.open(folder / "report" / "store.sqlite", read_only=True) as store:
        episodes = list(store.episodes())
    assert len(episodes) == 8
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED
        measure, guess = episode.info["workers"]
        assert (measure["status"], guess["status"], guess["output_schema"]) == ("ok", "ok", "enforced")
    assert (folder / "calls.txt").read_text().count("\n") == 8


@pytest.mark.slow
def test_a_workflow_of_workers_is_trained(folder: Path) -> None:
    """The policy plays one worker, under its grammar; the other has a program and a record of its own."""
    settings = ("steps=2", "threads=1", "rollout.tasks_per_step=4", "rollout.group_size=4")
    result = rllm(
        *("train", "flow.py:Guess", "--dataset", "rows.jsonl", "--output", "run", "--json"),
        *(word for each in settings for word in ("--set", each)),
    )
    assert result.exit_code == 0, result.output
    with EpisodeStore.open(folder / "run" / "store.sqlite", read_only=True) as store:
        episodes = [store.episode(row) for step in range(2) for row in store.row_ids("train", step)]
    assert len(episodes) == 2 * 16
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED
        assert [each.name for each in episode.trajectories] == ["guess"]
        measured, guess = episode.info["workers"]
        assert (measured["status"], guess["status"], guess["output_schema"]) == ("ok", "ok", "enforced")
        assert NOT_SAMPLED in episode.trajectories[0].steps[0].policy_versions, "the grammar chose some"
    assert {each.reward for each in episodes} == {0.0, 1.0}
    log = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, log) if row["phase"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert step["tokens.trained"] > 0
        assert step["tokens.masked.forced"] > 0
        assert step["unclaimed_tokens"] == 0
        assert step["logprob_gap_sampler"] < 1e-4
    with sqlite3.connect(folder / "run" / "workers" / "runs.sqlite") as runs:
        statuses = runs.execute("SELECT worker, status, COUNT(*) FROM runs GROUP BY 1, 2").fetchall()
    runs.close()
    assert [each[:2] for each in statuses] == [("measure", "ok")]
    assert statuses[0][2] >= 32
