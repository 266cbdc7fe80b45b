"""A supervised run killed with -9, or stopped with Ctrl-C, at any moment, ends as if never stopped."""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllm.algorithms.losses import ImitationLoss
from rllm.config.supervised import EpochsConfig
from rllm.errors import ConfigError, NumericsError
from rllm.files.atomic import verify_manifest
from rllm.models.directory import load_model, parameters_sha256
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.epochs import Epochs
from rllm.trainer.policies import PolicyModel
from rllm.trainer.supervised import Stopping, SupervisedJob, SupervisedTrainer
from rllm.types.sample import NOT_SAMPLED, TrainingSample

Ask = Callable[..., dict[str, Any]]
STEPS = 5
LINES = [("before", 0), *(("train", step) for step in range(STEPS)), ("after", 0)]


@pytest.fixture(scope="module")
def ask(ask: Ask) -> Ask:
    return partial(ask, game="chats")


def _result(run: Path) -> dict[str, Any]:
    """Everything of a finished run that must not depend on its being interrupted."""
    directory = RunDirectory.read(run)
    summary = directory.summary()
    assert summary is not None
    return {
        "parameters": parameters_sha256(load_model(run / "model").model.state_dict_hf()),
        "metrics": [
            {name: value for name, value in line.items() if not name.endswith(("_s", "_share"))}
            for line in read_metrics(directory.metrics_path)
        ],
        "summary": {
            name: value for name, value in summary.items() if name not in ("wall_s", "phase_s", "machines")
        },
        "left over": sorted(path.name for path in run.rglob(".*")),
        "checkpoints": sorted(path.name for path in directory.checkpoints_path.iterdir()),
        "lies in the run": sorted(path.name for path in run.iterdir()),
    }


@pytest.fixture(scope="module")
def uninterrupted(ask: Ask, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[str]]:
    """(result, what was done to its files) of a run that nobody disturbed."""
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    ended = ask(run)
    assert ended["signal"] == 0
    return _result(run), ended["events"]


Uninterrupted = tuple[dict[str, Any], list[str]]


def test_signals_are_held_back_while_a_run_works_and_then_as_before() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGTERM)
        assert stopping.is_asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_undisturbed_run_is_complete_and_learned_something(uninterrupted: Uninterrupted) -> None:
    result, _ = uninterrupted
    assert [(line["phase"], line["step"]) for line in result["metrics"]] == LINES
    between = [line["step"] for line in result["metrics"] if "heldout_loss" in line]
    assert between == [1, 3]
    summary = result["summary"]
    assert summary["after"]["loss"] < summary["before"]["loss"]
    assert summary["parameters_sha256"] == result["parameters"]
    assert summary["trained_tokens"] == sum(line.get("trained_tokens", 0) for line in result["metrics"])
    assert result["lies in the run"] == [
        *(
            "checkpoints",
            "config.json",
            "curve.png",
            "defaults.json",
            "initial_model",
            "lock",
            "machine.json",
        ),
        *("metrics.jsonl", "model", "summary.json"),
    ]
    assert result["left over"] == []
    assert result["checkpoints"] == ["step-000004", "step-000005"]


def test_killed_between_two_steps_it_ends_the_same(
    ask: Ask, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for line in (("train", 0), ("train", 2)):
        assert ask(run, die_at_line=line)["signal"] == 9, line
        assert RunDirectory.read(run).summary() is None
    assert ask(run)["signal"] == 0
    assert _result(run) == uninterrupted[0]


@pytest.mark.parametrize("way", ["interrupt", "terminate"])
@pytest.mark.parametrize("line", [("before", 0), ("train", 2)], ids=lambda line: f"{line[0]} {line[1]}")
def test_ctrl_c_and_sigterm_end_the_step_save_it_and_the_run_ends_the_same(
    ask: Ask, uninterrupted: Uninterrupted, tmp_path: Path, line: tuple[str, int], way: str
) -> None:
    run = tmp_path / "run"
    assert ask(run, **{f"{way}_at_line": line})["signal"] == 2
    newest = max((run / "checkpoints").glob("step-*"))
    verify_manifest(newest)
    assert newest.name == ("step-000000" if line[0] == "before" else "step-000003")
    assert RunDirectory.read(run).writer_pid is None
    assert ask(run)["signal"] == 0
    assert _result(run) == uninterrupted[0]


def test_a_finished_run_is_not_worked_on_again(
    ask: Ask, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert ask(run)["signal"] == 0
    ended = ask(run)
    assert ended["signal"] == 0
    assert not any("checkpoints" in event or "metrics" in event for event in ended["events"])
    assert _result(run) == uninterrupted[0]


@pytest.mark.slow
def test_killed_whenever_it_touches_a_file_it_ends_the_same(
    ask: Ask, uninterrupted: Uninterrupted, tmp_path: Path
) -> None:
    expected, events = uninterrupted
    for number, event in enumerate(events, start=1):
        run = tmp_path / f"run-{number}"
        assert ask(run, die_at_event=number)["signal"] == 9, event
        for checkpoint in (run / "checkpoints").glob("step-*"):
            verify_manifest(checkpoint)
        assert ask(run)["signal"] == 0, event
        assert _result(run) == expected, event


# ---- a job of one's own ------------------------------------------------------------------------------------


class LetterJob(SupervisedJob):
    """Say the letter that was asked."""

    loss = ImitationLoss()

    def __init__(self, policy: PolicyModel, config: EpochsConfig) -> None:
        super().__init__(policy)
        self.rows = [self._row(letter) for letter in "ABCDEFG"]
        self.epochs = Epochs(len(self.rows), config)
        self.steps = self.epochs.num_steps
        self.heard: list[int] = []
        self.closed = False

    def _row(self, letter: str) -> TrainingSample:
        asked = self.policy.renderer.render([{"role": "user", "content": letter}])
        said = [*self.policy.renderer.tokenizer.encode(letter), self.policy.end_token_id]
        versions_T = np.array([NOT_SAMPLED] * len(asked) + [0] * len(said))
        return TrainingSample(
            token_ids_T=np.array(asked + said),
            policy_versions_T=versions_T,
            logprobs_T=np.zeros(len(versions_T), dtype=np.float32),
            advantages_T=(versions_T == 0).astype(np.float32),
            group_key=(letter, "letters"),
            order_key=(letter, 0, 0, 0),
        )

    def samples(self, step: int) -> Sequence[TrainingSample]:
        return [self.rows[index] for index in self.epochs.batch(step)]

    def evaluate(self) -> dict[str, float]:
        scores = np.concatenate(self.backend.score(self.rows))
        return {"loss": float(-scores.sum() / np.count_nonzero(scores))}

    def on_publish(self, policy_version: int) -> None:
        self.heard.append(policy_version)

    def identity(self) -> dict[str, Any]:
        return {"letters": "ABCDEFG"}

    def close(self) -> None:
        self.closed = True


class LetterTrainer(SupervisedTrainer[EpochsConfig]):
    kind = "letters"
    config_class = EpochsConfig
    job: LetterJob

    def make_job(self, policy: PolicyModel) -> LetterJob:
        self.job = LetterJob(policy, self.config)
        return self.job


SETTINGS: dict[str, Any] = {
    "threads": 1,
    "epochs": 3,
    "batch_size": 4,
    "optimizer": {"learning_rate": 3e-3},
}


def test_a_job_is_trained_told_of_every_publish_and_closed(tmp_path: Path) -> None:
    trainer = LetterTrainer(SETTINGS, output=tmp_path / "run")
    result = trainer.train()
    job = trainer.job
    assert job.steps == 6  # 21 examples, four at a time
    assert result.summary["steps"] == 6
    assert result.summary["after"]["loss"] < result.summary["before"]["loss"]
    assert job.heard == list(range(7))
    assert job.closed
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["phase"] == "train"]
    assert [line["rows"] for line in lines] == [4, 4, 4, 4, 4, 1]
    assert [line["learning_rate"] for line in lines] == sorted(
        (line["learning_rate"] for line in lines), reverse=True
    )


def test_a_whole_tracker_hears_each_phase_before_its_numbers(tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []

    class Hearing:
        def begin(self, phase: str) -> None:
            heard.append(("begin", phase))

        def log(self, step: int, phase: str, metrics: dict[str, Any]) -> None:
            heard.append(("log", phase))

        def advance(self, done: int, total: int) -> None:
            pass

        def close(self) -> None:
            pass

    LetterTrainer({**SETTINGS, "epochs": 1}, output=tmp_path / "run", tracker=Hearing()).train()
    phases = ("before", "train", "after")
    assert list(dict.fromkeys(heard)) == [(what, phase) for phase in phases for what in ("begin", "log")]


def test_a_job_that_fails_is_closed_and_goes_on_where_it_stood(tmp_path: Path) -> None:
    class Failing(LetterJob):
        def update(self, step: int, learning_rate: float) -> dict[str, Any]:
            if step == 3:
                raise NumericsError("The gradient's norm is inf.")
            return super().update(step, learning_rate)

    class FailingTrainer(LetterTrainer):
        def make_job(self, policy: PolicyModel) -> LetterJob:
            self.job = Failing(policy, self.config)
            return self.job

    settings = SETTINGS | {"checkpoint": {"every_steps": 2}}
    failing = FailingTrainer(settings, output=tmp_path / "run")
    with pytest.raises(NumericsError):
        failing.train()
    assert failing.job.closed
    LetterTrainer(settings, output=tmp_path / "run").train()
    LetterTrainer(settings, output=tmp_path / "whole").train()
    one, other = (load_model(tmp_path / name / "model").model for name in ("run", "whole"))
    assert parameters_sha256(one.state_dict_hf()) == parameters_sha256(other.state_dict_hf())


def test_ctrl_c_at_the_last_instant_of_a_step_ends_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Stopping):
        """Asked right after the loop has looked, in its first step."""

        def __init__(self) -> None:
            self.looks = 0
            super().__init__()

        @property
        def is_asked(self) -> bool:
            self.looks += 1
            return self.looks > 2  # one is of the report

        @is_asked.setter
        def is_asked(self, value: bool) -> None:
            pass

    monkeypatch.setattr("rllm.trainer.supervised.Stopping", Late)
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        LetterTrainer(SETTINGS, output=run).train()
    trained = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert max(each.name for each in (run / "checkpoints").glob("step-*")) == f"step-{len(trained):06}"


def test_another_configuration_kind_or_identity_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    LetterTrainer(SETTINGS | {"max_steps": 1}, output=run).train()
    with pytest.raises(ConfigError, match=r"\(epochs: 3 there, 4 here\)"):
        LetterTrainer(SETTINGS | {"max_steps": 1, "epochs": 4}, output=run).train()

    class Other(LetterTrainer):
        kind = "words"

    with pytest.raises(ConfigError, match=r"`rllm letters`; .*--output"):
        Other(SETTINGS | {"max_steps": 1}, output=run).train()

    class Grown(LetterJob):
        def identity(self) -> dict[str, Any]:
            return {"letters": "ABCDEFGH"}

    class GrownTrainer(LetterTrainer):
        def make_job(self, policy: PolicyModel) -> LetterJob:
            return Grown(policy, self.config)

    (run / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"letters: 'ABCDEFG' there, 'ABCDEFGH' here"):
        GrownTrainer(SETTINGS | {"max_steps": 1}, output=run).train()


def test_a_plan_writes_nothing_and_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    class Refusing(LetterTrainer):
        def make_job(self, policy: PolicyModel) -> LetterJob:
            raise ConfigError("no such data")

    planned = LetterTrainer(SETTINGS, output=tmp_path / "run")
    assert planned.plan() == {"optimizer_updates": 6}
    assert planned.job.closed
    with pytest.raises(ConfigError, match="no such data"):
        Refusing(SETTINGS, output=tmp_path / "run").train()
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_trained_on_as_often_as_there_are_epochs() -> None:
    epochs = Epochs(7, EpochsConfig(epochs=3, batch_size=4, seed=1))
    drawn = [epochs.batch(step) for step in range(epochs.num_steps)]
    assert [len(batch) for batch in drawn] == [4, 4, 4, 4, 4, 1]
    order = [index for batch in drawn for index in batch]
    passes = [order[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len({tuple(each) for each in passes}) == 3
    assert Epochs(7, EpochsConfig(epochs=3, batch_size=4, seed=1)).batch(3) == drawn[3]
    assert Epochs(7, EpochsConfig(epochs=3, batch_size=4, seed=2)).batch(0) != drawn[0]
    assert Epochs(7, EpochsConfig(epochs=3, batch_size=4, max_steps=2)).num_steps == 2
