import gc
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from rllm.agents.base import BaseAgent
from rllm.build.configs import training_config
from rllm.build.training import build_run
from rllm.distributed import RankGroup
from rllm.environments.base import BaseEnv
from rllm.errors import CheckpointError, ConfigError, ModelDirectoryError, RewardError, RunInUseError
from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.console import LiveView
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.samples import trajectory_rows
from rllm.types.episode import Outcome


def test_a_run_leaves_everything_where_it_belongs(letters: ModuleType, finished: Path) -> None:
    assert {path.name for path in finished.iterdir()} >= {
        "config.json",
        "store.sqlite",
        "metrics.jsonl",
        "checkpoints",
        "initial_model",
        "model",
        "summary.json",
        "curve.png",
    }
    summary = json.loads((finished / "summary.json").read_text())
    for name in ("untrained", "before", "after"):
        assert summary[name].keys() >= {"success", "success_interval", "greedy", "greedy_interval"}
    assert summary["wall_s"] == pytest.approx(sum(summary["phase_s"].values()))
    assert summary["phase_s"].keys() >= {"warm_start", "train", "report_after"}


def test_a_heap_that_was_frozen_before_a_run_is_frozen_after_it(finished: Path) -> None:
    assert gc.get_freeze_count() > 0, "tests/conftest.py froze it"


def test_training_again_in_a_finished_run_gives_its_result(letters: ModuleType, finished: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    result = letters.make_trainer(finished).train()
    assert result.summary == json.loads((finished / "summary.json").read_text())
    assert result.model_path == finished / "model"
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_every_sampled_token_of_a_run_was_written_by_the_policy_of_its_step(finished: Path) -> None:
    lines = {
        line["step"]: line for line in read_metrics(finished / "metrics.jsonl") if line["phase"] == "train"
    }
    assert list(lines) == [0, 1, 2, 3]
    version = 4  # updates of the warm start
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        for step, line in lines.items():
            versions = {
                each
                for episode in store.episodes("train", step)
                for turn in episode.trajectories[0].steps
                for each in turn.policy_versions
            }
            assert versions == {version}
            version = line["policy_version"]
            assert line["logprob_gap_first"] < 1e-4
            assert line["canary_gap"] < 1e-4


def test_the_stored_episodes_are_the_tokens_that_were_counted(finished: Path) -> None:
    with EpisodeStore.open(finished / "store.sqlite", read_only=True) as store:
        for line in read_metrics(finished / "metrics.jsonl"):
            if line["phase"] != "train":
                continue
            episodes = list(store.episodes("train", line["step"]))
            assert len(episodes) == line["episodes"] == 6
            assert {episode.outcome for episode in episodes} == {Outcome.SCORED}
            sampled = sum(len(turn.response_ids) for each in episodes for turn in each.trajectories[0].steps)
            assert sampled == line["tokens.sampled"]
            assert (
                sampled
                == line["tokens.trained"] + line["tokens.dropped.failed"] + line["tokens.dropped.tied"]
            )
            rows = [row for each in episodes for row in trajectory_rows(each.trajectories[0], "t", 0, 0, 1.0)]
            assert sum(row.num_trainable for row in rows) == sampled


def test_another_configuration_in_the_same_directory_is_refused_by_its_keys(
    letters: ModuleType, finished: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        letters.make_trainer(finished, {"seed": 6, "optimizer": {"learning_rate": 0.5}}).train()
    for named in ("optimizer.learning_rate: 0.001 there, 0.5 here", "seed: 5 there, 6 here"):
        assert named in str(caught.value)


def test_a_run_that_another_process_writes_is_refused(letters: ModuleType, tmp_path: Path) -> None:
    with RunDirectory.create_or_open(tmp_path / "run"), pytest.raises(RunInUseError):
        letters.make_trainer(tmp_path / "run").train()


def test_a_damaged_checkpoint_is_refused_with_the_way_out(
    letters: ModuleType, finished: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "summary.json").unlink()
    weights = run / "checkpoints" / "step-000008" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"step-000008: `weights.safetensors` has \d+ bytes"):
        letters.make_trainer(run).train()
    shutil.rmtree(weights.parent)
    summary = letters.make_trainer(run).train().summary
    assert (
        summary["after"]["success"] == json.loads((finished / "summary.json").read_text())["after"]["success"]
    )


def test_what_was_refused_can_be_mended_in_the_same_directory(letters: ModuleType, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"`inference.max_context` is 4, .*prompt"):
        letters.make_trainer(run, {"seed": 8, "inference": {"max_context": 4}}).train()
    with pytest.raises(ConfigError, match="has 2048 positions"):
        letters.make_trainer(run, {"seed": 8, "inference": {"max_context": 4096}}).train()
    assert not (run / "config.json").exists()
    small = {"steps": 0, "warm_start": {"steps": 0}}
    letters.make_trainer(run, small).train()
    other = tmp_path / "other"
    letters.make_trainer(other, small).train()
    # The weights are those of the seed that ran, not of the one that was refused.
    first, second = (load_model(each / "model").model.state_dict_hf() for each in (run, other))
    assert all((first[name] == second[name]).all() for name in first)


def test_a_context_that_holds_one_turn_of_two_is_said_and_one_that_holds_both_is_not(
    letters: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = {"steps": 0, "warm_start": {"steps": 0}}
    with pytest.raises(ConfigError) as refused:
        letters.make_trainer(tmp_path / "none", small | {"inference": {"max_context": 4}}).train()
    (needed,) = (int(found) for found in re.findall(r"take (\d+) tokens", str(refused.value)))
    letters.make_trainer(tmp_path / "one", small | {"inference": {"max_context": needed}}).train()
    assert "4 of 4 episodes" in caplog.text
    assert f"raise `inference.max_context`, which is {needed}" in caplog.text
    caplog.clear()
    letters.make_trainer(tmp_path / "both", small).train()
    assert not caplog.records


def test_a_run_that_does_not_fit_is_refused_and_says_so_once_where_it_is_forced(
    letters: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = {"inference": {"num_slots": 100_000_000, "cache_tokens": 10**12}}
    for changes, rank, num_warnings in (({}, 0, 0), (many, 0, 1), (many, 1, 0)):
        trainer = letters.make_trainer(tmp_path / "run", changes)
        trainer.run.ranks = RankGroup()
        trainer.run.ranks.rank = rank
        caplog.clear()
        if changes:
            with pytest.raises(ConfigError, match=r"`inference.num_slots`.*--force"):
                trainer.run.require_memory()
        trainer.run.force = True
        trainer.run.require_memory()
        assert [("`inference.num_slots`" in each.message) for each in caplog.records] == [True] * num_warnings


def test_a_model_that_cannot_be_loaded_is_refused_before_the_run_begins(
    letters: ModuleType, tiny_directory: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for missing in ("config.json", "tokenizer.json", "model.safetensors"):
        broken = shutil.copytree(tiny_directory, tmp_path / f"without-{missing}")
        (broken / missing).unlink()
        with pytest.raises(ModelDirectoryError):
            letters.make_trainer(run, {"model": {"path": str(broken)}}).train()
    with pytest.raises(ConfigError, match="builtin:tiny"):
        letters.make_trainer(run, {"model": {"path": "builtout:tiny"}}).train()
    with pytest.raises(ConfigError, match=r"`model.path` is 'builtin:huge'"):
        letters.make_trainer(run, {"model": {"path": "builtin:huge"}}).train()
    assert not (run / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "more", "named"),
    [
        ({"rollout": {"group_size": 1}}, {}, "`rollout.group_size` is 1"),
        ({"rollout": {"groupsize": 4}}, {}, "did you mean `rollout.group_size`"),
        ({}, {"backend": "tinkr"}, "no training backend `tinkr`"),
        ({}, {"demonstrate": None}, "no expert to imitate"),
        ({}, {"train_dataset": []}, "`train_dataset` is empty"),
        ({"algorithm": {"updates_per_step": 3}}, {}, "only 2 groups"),
    ],
)
def test_what_cannot_be_honoured_is_refused_before_anything_is_written(
    letters: ModuleType, tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        letters.make_trainer(tmp_path / "run", changes, **more)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_environment_ends_the_run_with_its_error(letters: ModuleType, tmp_path: Path) -> None:
    class Unpaid(letters.LetterEnv):  # type: ignore[name-defined, misc]
        def step(self, action: Any) -> Any:
            return "", None, True, {}

        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            return Unpaid(info["letter"])

    with pytest.raises(RewardError, match=r"Unpaid.step returned None"):
        letters.make_trainer(tmp_path / "run", env_class=Unpaid).train()


@pytest.mark.parametrize("bad", [10, 38, 60], ids=["sampled", "greedy", "training"])
def test_one_bad_answer_of_an_environment_costs_one_episode(
    letters: ModuleType, tmp_path: Path, bad: int
) -> None:
    """Not the run: it is counted, with its cause on record. Strict runs end with it."""
    answers: list[int] = []

    class Moody(letters.LetterEnv):  # type: ignore[name-defined, misc]
        def step(self, action: Any) -> Any:
            answers.append(1)
            moved = super().step(action)
            return ("", float("nan"), True, {}) if len(answers) == bad else moved

        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            return Moody(info["letter"])

    run = tmp_path / "run"
    letters.make_trainer(run, env_class=Moody).train()
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        failed = [
            each
            for phase in store.phases()
            for each in store.episodes(phase)
            if each.outcome is Outcome.INFRASTRUCTURE_FAILURE
        ]
    (episode,) = failed
    error = episode.trajectories[0].info["error"]
    assert (error["type"], error["place"]) == ("RewardError", "environment")
    assert "Moody.step returned nan" in error["message"]
    lines = read_metrics(run / "metrics.jsonl")
    counted = [line.get("failed.infrastructure_failure", line.get("failed", 0)) for line in lines]
    assert sum(counted) == 1
    answers.clear()
    strict = letters.make_trainer(
        tmp_path / "strict", {"rollout": {"max_failed_fraction": 0.0}}, env_class=Moody
    )
    with pytest.raises(RewardError, match=r"Moody\.step returned nan"):
        strict.train()


def test_what_no_store_can_hold_costs_one_episode(letters: ModuleType, tmp_path: Path) -> None:
    num_answers = itertools.count()

    class Careless(letters.LetterAgent):  # type: ignore[name-defined, misc]
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            action = super().update_from_model(response, **kwargs)
            if next(num_answers) == 9:
                self.trajectory.steps[-1].info["socket"] = object()
            return action

    settings = {"steps": 1, "warm_start": {"steps": 0}, "evaluation": {"every_steps": 0}}
    letters.make_trainer(tmp_path / "run", settings, agent_class=Careless).train()
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        outcomes = [each.outcome for phase in store.phases() for each in store.episodes(phase)]
    assert sum(each is not Outcome.SCORED for each in outcomes) == 1


def test_a_checkpoint_has_the_row_that_the_next_publish_is_compared_by(finished: Path) -> None:
    last = max((finished / "checkpoints").glob("step-*"))
    ((policy, canary),) = json.loads((last / "state.json").read_text())["canaries"].items()
    assert policy == "policy"
    assert len(canary["sampler_logprobs"]) == len(canary["trainer_logprobs"]) > 0


def test_the_reference_is_the_policy_that_the_warm_start_ended_with(
    letters: ModuleType, tmp_path: Path
) -> None:
    settings = {"steps": 1, "warm_start": {"steps": 3}, "algorithm": {"kl_coef": 0.1}}
    letters.make_trainer(tmp_path / "run", settings).train()
    (line,) = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert line["divergence"] == pytest.approx(0.0, abs=1e-6)


def test_groups_that_all_tie_leave_the_weights_and_are_counted(letters: ModuleType, tmp_path: Path) -> None:
    class Equal(letters.LetterEnv):  # type: ignore[name-defined, misc]
        def step(self, action: Any) -> Any:
            return "", 1.0, True, {}

        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            return Equal(info["letter"])

    run = tmp_path / "run"
    letters.make_trainer(run, {"warm_start": {"steps": 0}}, env_class=Equal).train()
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]
    assert [(line["groups_tied"], line["grad_norm"], line["tokens.dropped.tied"]) for line in lines] == [
        (2, 0.0, 0)
    ] * 4
    assert [line["policy_version"] for line in lines] == [2, 4, 6, 8]  # steps along a gradient of 0
    first, second = (load_model(run / name).model.state_dict_hf() for name in ("initial_model", "model"))
    assert all((first[name] == second[name]).all() for name in first)


def test_agents_and_environments_get_their_arguments(letters: ModuleType, tmp_path: Path) -> None:
    class Signed(letters.LetterAgent):  # type: ignore[name-defined, misc]
        def __init__(self, signature: str) -> None:
            super().__init__()
            self.signature = signature

        def update_from_env(self, observation: Any, *rest: Any, **more: Any) -> None:
            super().update_from_env(f"{observation} {self.signature}", *rest, **more)

    agent: type[BaseAgent] = Signed
    run = tmp_path / "run"
    letters.make_trainer(
        run,
        {"warm_start": {"steps": 1}, "steps": 1},
        agent_class=agent,
        agent_args={"signature": "yours"},
        env_args={"letter": "Z"},
    ).train()
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        asked = [
            episode.trajectories[0].steps[0].chat_completions[0]["content"]
            for episode in store.episodes("train", 0)
        ]
    assert asked == ["Z 1 yours"] * 6


def test_an_environment_may_be_async(letters: ModuleType, tmp_path: Path) -> None:
    class AsyncEnv(letters.LetterEnv):  # type: ignore[name-defined, misc]
        async def reset(self, seed: int | None = None) -> Any:
            return super().reset(seed)

        async def step(self, action: Any) -> Any:
            return super().step(action)

        @staticmethod
        def from_dict(info: dict[str, Any]) -> BaseEnv:
            return AsyncEnv(info["letter"])

    environment: type[BaseEnv] = AsyncEnv
    settings = {"warm_start": {"steps": 1}, "steps": 1}
    summary = letters.make_trainer(tmp_path / "run", settings, env_class=environment).train().summary
    assert summary["after"]["sampled_report"]["failed"] == 0


def test_training_tasks_differ_from_the_others_as_the_configuration_says(tmp_path: Path) -> None:
    small = ("rollout.tasks_per_step=2", "rollout.group_size=2", "evaluation.num_tasks=2")
    short = ("steps=1", "warm_start.steps=0", "task.num_train_tasks=4", "evaluation.every_steps=0")
    sizes = ("task.environment_args.size=4", "task.train_args.size=5")
    build_run(training_config("frozenlake", None, (*small, *short, *sizes)), tmp_path / "run").train()
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        rows = {
            phase: {
                str(episode.trajectories[0].steps[0].observation).count("\n") + 1
                for episode in store.episodes(phase)
            }
            for phase in ("train", "before")
        }
    assert rows == {"train": {5}, "before": {4}}


def test_training_from_python_shows_the_progress_that_the_command_shows(
    letters: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counting:
        """A tracker of the user's, which is heard as well."""

        def __init__(self) -> None:
            self.steps = 0

        def begin(self, phase: str) -> None: ...
        def advance(self, done: int, total: int) -> None: ...
        def close(self) -> None: ...
        def log(self, step: int, phase: str, metrics: Mapping[str, Any]) -> None:
            self.steps += phase == "train"

    short = {"steps": 2, "warm_start": {"steps": 1}, "evaluation": {"every_steps": 0}}
    tracker = Counting()
    letters.make_trainer(tmp_path / "run", short, tracker=tracker).train()
    shown = capsys.readouterr()
    assert "train  step 2/2  success" in shown.err
    assert "warm_start  step 1/1" in shown.err
    assert (shown.out, tracker.steps) == ("", 2)
    view = LiveView(2, console=Console(quiet=True))
    letters.make_trainer(tmp_path / "quiet", short, tracker=view).train()
    assert capsys.readouterr().err == ""
    later = Counting()
    trainer = letters.make_trainer(tmp_path / "later", short)
    trainer.tracker = later
    trainer.train()
    assert later.steps == 2, "it may be set until the run begins"


def test_a_budget_of_calls_is_for_programs(letters: ModuleType, tmp_path: Path) -> None:
    changes = {"rollout": {"budget": {"max_calls": 3}}}
    for make in (letters.make_trainer, letters.make_pair_trainer):
        with pytest.raises(ConfigError, match=r"rollout\.budget\.max_calls"):
            make(tmp_path / "run", changes)
