"""A workflow of workers is trained and evaluated by the commands, with real sampling."""

import json
import pickle
import sqlite3
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import worker_files as files
from click.testing import CliRunner, Result

from rllm.build.workflow_player import WorkflowPlayer, contracts_of
from rllm.cli.main import rllm as front_door
from rllm.config.loader import load_config
from rllm.inference import ScriptedClient
from rllm.integrations.ray.user_files import user_files
from rllm.store.episodes import EpisodeStore
from rllm.types.episode import Outcome
from rllm.types.names import object_named
from rllm.types.sample import NOT_SAMPLED
from rllm.worker.step_host import open_workers

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


ELSEWHERE = """
import asyncio, json, pickle, sys
from pathlib import Path
from rllm.config.loader import load_config
from rllm.inference import ScriptedClient
from rllm.integrations.ray.user_files import UserFile, import_user_files

async def play():
    parcel = pickle.load(sys.stdin.buffer)
    import_user_files([UserFile(**each) for each in parcel["files"]])
    player = pickle.loads(parcel["player"])
    clients = {"policy": ScriptedClient(['{"length": 1}'])}
    config = load_config(["threads=1", "inference.lockstep=false"])
    async with player.open_engine(config, clients, Path(sys.argv[1])) as engine:
        (episode,) = await engine.execute_tasks([{"id": "a", "text": "x"}])
    print(json.dumps([episode.is_correct, [each["status"] for each in episode.info["workers"]]]))

asyncio.run(play())
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


async def test_each_rank_has_runs_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    player, config = player_of(folder), load_config(["threads=1"])
    clients = {"policy": ScriptedClient([])}
    async with player.open_engine(config, clients, folder / "run"):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
        async with player.open_engine(config, clients, folder / "run"):
            stores = sorted(path.parent.name for path in (folder / "run").glob("*/runs.sqlite"))
    assert stores == ["workers", "workers-1"]


def test_contracts_and_programs_travel_to_machines_without_their_files(folder: Path) -> None:
    """Another process plays the workflow when all its files have gone."""
    player = player_of(folder)
    parcel = {"files": [asdict(each) for each in user_files()], "player": pickle.dumps(player)}
    for path in folder.glob("*.md"):
        path.unlink()
    for path in folder.glob("*.py"):
        path.unlink()
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder / "run")],
        input=pickle.dumps(parcel),
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert json.loads(ended.stdout) == [True, ["ok", "ok"]]


def player_of(folder: Path) -> WorkflowPlayer:
    workflow = object_named(str(folder / "flow.py:Guess"), group="", what="workflow")
    return WorkflowPlayer(
        workflow_class=workflow,
        workflow_args={},
        open_workers=open_workers,
        contracts=contracts_of(workflow),
    )


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


@pytest.mark.slow
def test_two_processes_train_one_workflow_and_each_runs_the_workers_of_its_episodes(folder: Path) -> None:
    words = ("train", "flow.py:Guess", "--dataset", "rows.jsonl", "--output", "run", "--nproc", "2")
    settings = ("steps=2", "threads=1", "rollout.tasks_per_step=4", "rollout.group_size=4")
    ended = subprocess.run(
        [sys.executable, "-m", "rllm", *words, *(word for each in settings for word in ("--set", each))],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    with EpisodeStore.open(folder / "run" / "store.sqlite", read_only=True) as store:
        episodes = [store.episode(row) for step in range(2) for row in store.row_ids("train", step)]
    assert len(episodes) == 2 * 16
    for episode in episodes:
        assert episode.outcome is Outcome.SCORED
        assert [each.name for each in episode.trajectories] == ["guess"], "the bound worker is not trained on"
        measured, guess = episode.info["workers"]
        assert (measured["status"], guess["status"], guess["output_schema"]) == ("ok", "ok", "enforced")
    traces = [episode.info["workers"][0]["trace_id"] for episode in episodes]
    assert len(set(traces)) == len(episodes), "each attempt has a run of its own"
    num_runs: dict[str, int] = {}
    for name in ("workers", "workers-1"):
        with sqlite3.connect(folder / "run" / name / "runs.sqlite") as runs:
            statuses = runs.execute("SELECT worker, status, COUNT(*) FROM runs GROUP BY 1, 2").fetchall()
        runs.close()
        assert [each[:2] for each in statuses] == [("measure", "ok")]
        num_runs[name] = statuses[0][2]
    assert min(num_runs.values()) >= 16, "each rank plays half of every step"
    assert (folder / "calls.txt").read_text().count("\n") == sum(num_runs.values())
