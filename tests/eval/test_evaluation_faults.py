"""Evaluations that are killed, refused by the disk, or find a directory that is not as they left it."""

import errno
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rllm.eval.evaluation as evaluation_module
from rllm.agents.conversation import ConversationAgent
from rllm.engine.agent_execution import AgentExecutionEngine
from rllm.environments.countdown import CountdownEnv
from rllm.environments.countdown_tasks import countdown_tasks
from rllm.errors import ConfigError, RunInUseError, StorageError
from rllm.eval.evaluation import Evaluation, results_in
from rllm.eval.plan import EvaluationPlan, hash_of
from rllm.inference.scripted import ScriptedClient
from rllm.store.episodes import EpisodeStore
from rllm.types.messages import Message, SamplingParams

TASKS = countdown_tasks("test", 12, num_numbers=2)
PLAN = EvaluationPlan(
    name="countdown",
    model="scripted",
    agent="conversation",
    evaluator="environment",
    ways={"sampled": SamplingParams(), "greedy": SamplingParams(temperature=0.0)},
    dataset_hash=hash_of(TASKS),
)
NUM_ATTEMPTS = 24


class _Killed(BaseException):
    """The process is gone: nothing that it would have done happens."""


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_module, "_BATCH", 3)


async def _evaluate(directory: Path, asked: list[str] | None = None) -> dict[str, Any]:
    def answer(messages: Sequence[Message]) -> str:
        question = messages[-1]["content"]
        if asked is not None:
            asked.append(question)
        first, second = re.findall(r"\d+", question)[:2]
        return f"{first}+{second}"

    engine = AgentExecutionEngine(
        ConversationAgent,
        CountdownEnv,
        rollout_engine=ScriptedClient(answer),
        max_steps=1,
        n_parallel_agents=2,
    )
    with Evaluation(directory, PLAN) as evaluation:
        await evaluation.run_ways(engine, TASKS)
        report = evaluation.report()
        evaluation.finish(report)
    return report


def _comparable(report: dict[str, Any]) -> str:
    """Without what a clock says."""
    return re.sub(r'"latency_s": \{[^}]*\}', "", json.dumps(report, sort_keys=True))


def _dies_at_write(monkeypatch: pytest.MonkeyPatch, number: int, *, after: bool) -> None:
    """The process dies before or after its write to the store of that number."""
    count = 0

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def wrapped(*args: Any) -> None:
            nonlocal count
            count += 1
            if count > number or (count == number and not after):
                raise _Killed
            write(*args)
            if count == number:
                raise _Killed

        return wrapped

    for name in ("set_value", "save_episodes"):
        monkeypatch.setattr(EpisodeStore, name, dying(getattr(EpisodeStore, name)))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", range(1, 17))
async def test_killed_at_any_write_it_goes_on_and_loses_and_repeats_nothing_that_was_saved(
    number: int, after: bool, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        _dies_at_write(patched, number, after=after)
        with pytest.raises(_Killed):
            await _evaluate(tmp_path / "e")
    with EpisodeStore.open(tmp_path / "e" / "store.sqlite", read_only=True) as store:
        saved = store.count()
    asked: list[str] = []
    report = await _evaluate(tmp_path / "e", asked)
    assert len(asked) == NUM_ATTEMPTS - saved
    with EpisodeStore.open(tmp_path / "e" / "store.sqlite", read_only=True) as store:
        assert store.count() == NUM_ATTEMPTS
    assert {way: len(results) for way, results in results_in(tmp_path / "e").items()} == {
        "sampled": 12,
        "greedy": 12,
    }
    assert _comparable(report) == _comparable(await _evaluate(tmp_path / "whole"))


async def test_a_full_disk_ends_it_with_what_to_do_and_the_same_again_goes_on(tmp_path: Path) -> None:
    saved = EpisodeStore.save_episodes
    count = 0

    def full_from_the_third(*args: Any) -> None:
        nonlocal count
        count += 1
        if count >= 3:
            raise StorageError(f"store.sqlite could not be written ({os.strerror(errno.ENOSPC)}): free space")
        saved(*args)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EpisodeStore, "save_episodes", full_from_the_third)
        with pytest.raises(StorageError, match="No space left"):
            await _evaluate(tmp_path / "e")
    asked: list[str] = []
    report = await _evaluate(tmp_path / "e", asked)
    assert len(asked) == NUM_ATTEMPTS - 6
    assert report["reports"]["greedy"]["attempted"] == 12


async def test_a_disk_that_is_full_at_once_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            await _evaluate(tmp_path / "deep" / "e")
    assert not (tmp_path / "deep").exists()
    assert (await _evaluate(tmp_path / "deep" / "e"))["reports"]["sampled"]["attempted"] == 12


async def test_a_lost_or_half_written_summary_is_made_again_from_the_episodes(tmp_path: Path) -> None:
    whole = await _evaluate(tmp_path / "e")
    (tmp_path / "e" / "summary.json").write_text('{"stamp": {"na')
    asked: list[str] = []
    again = await _evaluate(tmp_path / "e", asked)
    assert asked == []
    assert again == whole
    assert json.loads((tmp_path / "e" / "summary.json").read_text())["reports"] == json.loads(
        json.dumps(whole["reports"])
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").write_text('{"kind": "ev'), "not valid JSON"),
        (lambda path: (path / "config.json").unlink(), "no config.json that says of what"),
        (lambda path: (path / "store.sqlite").write_bytes(b"SQLite, but not really" * 99), "damaged"),
    ],
    ids=["half a config", "no config", "a broken store"],
)
async def test_what_cannot_be_gone_on_with_is_refused_and_kept(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    await _evaluate(tmp_path / "e")
    damage(tmp_path / "e")
    size = (tmp_path / "e" / "store.sqlite").stat().st_size
    with pytest.raises(ConfigError, match=message):
        await _evaluate(tmp_path / "e")
    assert (tmp_path / "e" / "store.sqlite").stat().st_size == size


async def test_an_evaluation_that_another_process_writes_is_left_alone(tmp_path: Path) -> None:
    await _evaluate(tmp_path / "e")
    with Evaluation(tmp_path / "e", PLAN), pytest.raises(RunInUseError, match="process"):
        Evaluation(tmp_path / "e", PLAN)
    assert Evaluation(tmp_path / "e", PLAN).num_done == NUM_ATTEMPTS
