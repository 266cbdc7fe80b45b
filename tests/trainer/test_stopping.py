"""A run in which nothing moves any more saves what is whole and says who holds it up."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.config import load_config
from rllm.engine.attempts import EpisodeCounts
from rllm.errors import StallError
from rllm.models.directory import load_model, parameters_sha256
from rllm.trainer import loop
from rllm.trainer.stopping import saved_when_stopped, stall_limit_s


class _Engine:
    """One episode that never ends."""

    def __init__(self) -> None:
        self.counts = EpisodeCounts(submitted=1, in_flight=1)


async def test_a_stall_saves_once_and_leaves_the_stacks_in_a_file(tmp_path: Path) -> None:
    saved: list[int] = []
    guard = saved_when_stopped(
        _Engine(), lambda: saved.append(1), limit_s=0.05, report_path=tmp_path / "stall.txt"
    )
    with pytest.raises(StallError, match="moved"):
        async with guard:
            await asyncio.Event().wait()
    assert saved == [1]
    assert "Thread MainThread" in (tmp_path / "stall.txt").read_text()


async def test_who_is_cancelled_saves_and_who_fails_otherwise_does_not(tmp_path: Path) -> None:
    saved: list[int] = []

    async def guarded(error: BaseException) -> None:
        async with saved_when_stopped(
            _Engine(), lambda: saved.append(1), limit_s=600.0, report_path=tmp_path / "stall.txt"
        ):
            raise error

    with pytest.raises(OSError, match="disk"):
        await guarded(OSError("disk"))
    assert saved == []
    with pytest.raises(asyncio.CancelledError):
        await guarded(asyncio.CancelledError())
    assert saved == [1]


def test_the_limit_is_longer_than_any_episode_may_take() -> None:
    assert stall_limit_s(load_config(["rollout.episode_timeout_s=10"])) == 600.0
    assert stall_limit_s(load_config(["rollout.episode_timeout_s=3600"])) == 7200.0
    assert stall_limit_s(load_config(["rollout.stall_timeout_s=5"])) == 5.0


@pytest.fixture
def until_done() -> Iterator[threading.Event]:
    """What hanging environments wait for; set when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_an_environment_that_sleeps_for_ever_ends_the_run_and_once_mended_it_ends_the_same(
    letters: ModuleType, tmp_path: Path, until_done: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"steps": 3, "warm_start": {"steps": 1}, "checkpoint": {"every_steps": 3}}
    small["evaluation"] = {"num_tasks": 2, "every_steps": 0}
    healthy = tmp_path / "healthy"
    letters.make_trainer(healthy, small).train()

    class Sleepy(letters.LetterEnv):  # type: ignore[name-defined, misc]
        num_steps = 0

        def step(self, action: Any) -> Any:
            Sleepy.num_steps += 1
            if Sleepy.num_steps > 2 * 2 * 2 * 2 + 12 + 4:  # in the second step of training
                until_done.wait()
            return super().step(action)

        @staticmethod
        def from_dict(info: dict[str, Any]) -> "Sleepy":
            return Sleepy(info["letter"])

    run = tmp_path / "run"
    trainer = letters.make_trainer(run, small, env_class=Sleepy)
    with monkeypatch.context() as impatient:
        impatient.setattr(loop, "stall_limit_s", lambda config: 3.0)
        with pytest.raises(StallError, match=r"test_stopping\.py:\d+ in step"):
            trainer.train()
    newest = max((run / "checkpoints").glob("step-*"))
    assert newest.name == "step-000002", "the step that was done, though no checkpoint was due"
    letters.make_trainer(run, small).train()
    first, second = (
        parameters_sha256(load_model(each / "model").model.state_dict_hf()) for each in (healthy, run)
    )
    assert first == second
