"""Runs on preferences: what they learn, keep and refuse, and that kill -9 changes nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rllm.build.asked import Asked
from rllm.build.configs import training_config
from rllm.build.evaluation import evaluated
from rllm.build.providers import resolve_model
from rllm.build.training import build_run
from rllm.config.preference import DpoConfig
from rllm.errors import CheckpointError, ConfigError
from rllm.models.directory import load_model, parameters_sha256
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.tracking.jsonl import read_metrics
from rllm.trainer.dpo import AgentDPOTrainer
from rllm.trainer.examples import Example

Ask = Callable[..., dict[str, Any]]
MEASURES = {"margin", "accuracy", "chosen_logprob", "rejected_logprob", "ranking_accuracy", "kl"}


@pytest.fixture(scope="session")
def finished(preferences: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on pairs; to be read only."""
    run = tmp_path_factory.mktemp("dpo") / "run"
    preferences.make_trainer(run).train()
    return run


@pytest.fixture(scope="session")
def played_run(letters: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the letter game, with groups of attempts that were paid differently; to be read only."""
    run = tmp_path_factory.mktemp("played") / "run"
    letters.make_trainer(run, {"rollout": {"group_size": 6}, "warm_start": {"steps": 12}}).train()
    return run


def train_lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(run / "metrics.jsonl") if line["phase"] == "train"]


# ---- what a run does and leaves ----------------------------------------------------------------------------


def test_a_run_on_pairs_raises_the_margin_and_leaves_what_every_run_leaves(finished: Path) -> None:
    directory = RunDirectory.read(finished)
    summary = directory.summary()
    assert summary is not None
    before, after = summary["before"], summary["after"]
    assert before["loss"] == pytest.approx(np.log(2.0), abs=1e-6)  # the policy is its reference
    assert before["margin"] == pytest.approx(0.0, abs=1e-6)
    assert after["margin"] > 0.1
    assert after["loss"] < before["loss"]
    assert after["accuracy"] == 1.0
    assert summary["measured_on"] == "3 held-out examples"
    assert summary["parameters_sha256"] == parameters_sha256(
        load_model(directory.model_path).model.state_dict_hf()
    )
    assert directory.curve_path.is_file()
    assert (finished / "reference.safetensors").is_file()
    for line in train_lines(finished):
        assert {*MEASURES, "loss", "learning_rate", "grad_norm", "trained_tokens"} <= line.keys()
    assert {f"heldout_{name}" for name in MEASURES} <= train_lines(finished)[1].keys()


def test_the_first_update_measures_what_the_untrained_model_is(finished: Path) -> None:
    first = train_lines(finished)[0]
    assert first["loss"] == pytest.approx(np.log(2.0), abs=1e-6)
    assert first["margin"] == pytest.approx(0.0, abs=1e-6)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("loss", ["ipo", "hinge", "simpo", "orpo", "kto"])
def test_every_other_loss_moves_the_policy_the_same_way(
    preferences: ModuleType, tmp_path: Path, loss: str
) -> None:
    summary = preferences.make_trainer(tmp_path / "run", loss, {"epochs": 4}).train().summary
    assert summary["after"]["margin"] > summary["before"]["margin"]
    assert summary["after"]["loss"] < summary["before"]["loss"]
    assert (tmp_path / "run" / "reference.safetensors").is_file() is (loss not in ("simpo", "orpo"))
    if loss == "kto":
        assert all(line["reference_point"] >= 0.0 for line in train_lines(tmp_path / "run"))


def test_an_adapter_is_held_against_the_model_without_it(preferences: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    changes = {"lora": {"rank": 4}, "optimizer": {"learning_rate": 1e-2}}
    summary = preferences.make_trainer(tmp_path / "run", changes=changes).train().summary
    assert summary["before"]["loss"] == pytest.approx(np.log(2.0), abs=1e-9)
    assert summary["after"]["margin"] > 0.1


def test_the_run_does_not_depend_on_the_size_of_micro_batches(
    preferences: ModuleType, finished: Path, tmp_path: Path
) -> None:
    preferences.make_trainer(tmp_path / "run", changes={"optimizer": {"micro_batch_tokens": 1}}).train()
    for whole, split in zip(train_lines(finished), train_lines(tmp_path / "run"), strict=True):
        for name in ("loss", "grad_norm", *MEASURES - {"accuracy", "ranking_accuracy"}):
            assert split[name] == pytest.approx(whole[name], rel=1e-4, abs=1e-5), name


def test_the_plan_says_what_would_be_done_and_does_nothing(preferences: ModuleType, tmp_path: Path) -> None:
    plan = preferences.make_trainer(tmp_path / "run").plan()
    assert plan["examples"] == 9
    assert plan["heldout_examples"] == 3
    assert plan["rows"] == 18
    assert plan["optimizer_updates"] == 4
    assert plan["beta"] == 0.1
    assert not (tmp_path / "run").exists()


def test_other_rows_do_not_go_on_with_a_run(preferences: ModuleType, tmp_path: Path) -> None:
    preferences.make_trainer(tmp_path / "run").train()
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"another configuration \(rows_sha256"):
        preferences.make_trainer(tmp_path / "run", train_dataset=preferences.PAIRS[:-1]).train()


def test_a_reference_that_was_damaged_is_named(preferences: ModuleType, tmp_path: Path) -> None:
    preferences.make_trainer(tmp_path / "run").train()
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "reference.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"reference.safetensors .*delete it"):
        preferences.make_trainer(tmp_path / "run").train()


# ---- attempts of a stored run ------------------------------------------------------------------------------

FROM_RUN: dict[str, Any] = {"min_reward": 0.5, "heldout_fraction": 0.25}


def from_run(run: Path, output: Path, loss: str = "dpo", **data: Any) -> AgentDPOTrainer:
    config = {
        "threads": 1,
        "epochs": 2,
        "batch_size": 4,
        "optimizer": {"learning_rate": 3e-4},
        "preference": {"loss": loss},
        "data": {"run": str(run), **FROM_RUN, **data},
    }
    return AgentDPOTrainer(config, output=output)


def examples_of(trainer: AgentDPOTrainer) -> list[Example]:
    """What the trainer would train on and measure by."""
    found: list[Example] = []
    make_job = trainer.make_job

    def watch(policy: Any) -> Any:
        job = make_job(policy)
        found.extend(job.dataset.all())
        return job

    trainer.make_job = watch
    trainer.plan()
    return found


def test_attempts_of_a_run_are_compared_by_the_ids_that_were_sampled(
    played_run: Path, tmp_path: Path
) -> None:
    examples = examples_of(from_run(played_run, tmp_path))
    with EpisodeStore.open(played_run / "store.sqlite", read_only=True) as store:
        sampled = {
            tuple(trajectory.steps[-1].prompt_ids + trajectory.steps[-1].response_ids): trajectory.reward
            or 0.0
            for episode in store.episodes("train")
            for trajectory in episode.trajectories
        }
    assert examples
    for example in examples:
        rewards = {
            row.advantages_T.sum() > 0: sampled[tuple(row.token_ids_T.tolist())] for row in example.rows
        }
        assert rewards[True] >= 0.5 > rewards[False]
        signs = [set(row.advantages_T[row.trainable_T].tolist()) for row in example.rows]
        assert signs == [{1.0}, {-1.0}]


def test_a_run_on_a_run_begins_with_its_model_and_reports_what_became_of_its_attempts(
    played_run: Path, tmp_path: Path
) -> None:
    result = from_run(played_run, tmp_path / "dpo", heldout_fraction=0.0).train()
    assert result.summary["after"]["margin"] > result.summary["before"]["margin"]
    assert RunDirectory.read(tmp_path / "dpo").config()["model"]["path"] == str(played_run / "model")
    counts = dict(result.summary["run_counts"])
    tasks, with_both = counts.pop("tasks"), counts.pop("tasks_with_both")
    assert 0 < with_both <= tasks
    assert result.summary["measured_on"].endswith("examples that were trained on")
    assert counts.pop("trajectories") == sum(counts.values()) == 4 * 2 * 6


def test_kto_learns_from_attempts_without_a_partner(played_run: Path, tmp_path: Path) -> None:
    plan = from_run(played_run, tmp_path, "kto").plan()
    assert plan["examples"] + plan["heldout_examples"] == plan["run.successes"] + plan["run.failures"]
    pairs = from_run(played_run, tmp_path).plan()
    assert plan["run.tasks_with_both"] == pairs["run.tasks_with_both"] > 0


def test_the_segments_of_a_rewritten_history_are_one_answer(played_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "rewritten"
    run.mkdir()
    for path in played_run.iterdir():
        if not path.name.startswith("store.sqlite"):
            (run / path.name).symlink_to(path)
    with (
        EpisodeStore.open(played_run / "store.sqlite", read_only=True) as source,
        EpisodeStore.open(run / "store.sqlite") as store,
    ):
        episodes = list(source.episodes("train", 0))
        for episode in episodes:
            for trajectory in episode.trajectories:
                first, second = trajectory.steps
                trajectory.steps[1] = replace(
                    second, prompt_ids=first.prompt_ids[:1] + second.prompt_ids[-4:]
                )
        store.save_episodes("train", 0, episodes)
    examples = examples_of(from_run(run, tmp_path / "out"))
    assert {len(example.rows) for example in examples} == {4}
    assert {len({row.group_key for row in example.rows}) for example in examples} == {1}
    result = from_run(run, tmp_path / "out", heldout_fraction=0.0).train()
    assert result.summary["after"]["margin"] > result.summary["before"]["margin"]


def test_a_run_without_both_is_refused_with_what_it_has(played_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compared: 0 successes .*`data.min_reward`"):
        from_run(played_run, tmp_path, min_reward=7.0).plan()


# ---- what is refused ---------------------------------------------------------------------------------------

IN_PARTS = {"role": "assistant", "content": [{"type": "text", "text": "b"}]}


@pytest.mark.parametrize(
    ("config", "rows", "message"),
    [
        ({}, None, "There is nothing to train on"),
        ({"data": {"run": "r"}}, [{}], "`train_dataset` is given, and `data.run` is 'r'"),
        ({"data": {"dataset": "a"}}, [{}], "`train_dataset` is given, and `data.dataset` is 'a'"),
        ({"preference": {"loss": "ppo"}}, [{}], "one of dpo, robust_dpo"),
        ({"preference": {"loss": "ipo", "label_smoothing": 0.1}}, [{}], "0.1, which ipo does not know"),
        ({"preference": {"loss": "robust_dpo"}}, [{}], "robust_dpo is dpo; say how many labels"),
        ({"preference": {"loss": "orpo", "sft_coef": 0.5}}, [{}], "which orpo does not know"),
        ({"preference": {"loss": "kto"}, "batch_size": 1}, [{}], "`batch_size` is 1; kto"),
        ({"preference": {"label_smoothing": 0.5}}, [{}], "must be 0 or more and below 0.5"),
        ({"preference": {"betta": 1.0}}, [{}], "did you mean `preference.beta`"),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_before_any_work(
    tmp_path: Path, config: dict[str, Any], rows: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentDPOTrainer(config, rows, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("loss", "changes", "rows", "message"),
    [
        ("dpo", {}, [{"prompt": "a", "chosen": "b <|end|>", "rejected": "c"}], "row 0: .*holds the text"),
        ("dpo", {"data": {"max_length": 9}}, None, r"12.*12 examples.*9 tokens"),
        ("dpo", {"data": {"max_length": 9_999_999}}, None, "the model reads .* tokens; set it to"),
        (
            "dpo",
            {},
            [{"prompt": "a", "chosen": "b", "rejected": IN_PARTS}] * 2,
            "row 0: both answers are the same",
        ),
        ("kto", {}, [{"prompt": "a", "completion": "b", "label": True}] * 4, "examples have one prompt"),
    ],
    ids=["control token", "too long", "longer than the model", "same tokens", "kto of one prompt"],
)
def test_rows_that_cannot_be_learned_leave_no_run_behind(
    preferences: ModuleType, tmp_path: Path, loss: str, changes: dict[str, Any], rows: Any, message: str
) -> None:
    given = {} if rows is None else {"train_dataset": rows}
    with pytest.raises(ConfigError, match=message):
        preferences.make_trainer(tmp_path / "run", loss, changes, **given).train()
    assert not (tmp_path / "run").exists()


def test_pairs_of_one_prompt_are_held_out_together(preferences: ModuleType, tmp_path: Path) -> None:
    rows = [
        {**pair, "rejected": f"{pair['rejected']}{end}"}
        for pair in preferences.PAIRS
        for end in ("", " A", " B")
    ]
    found: list[Any] = []
    trainer = preferences.make_trainer(tmp_path, train_dataset=rows)
    make_job = trainer.make_job
    trainer.make_job = lambda policy: found.append(make_job(policy)) or found[0]
    trainer.plan()
    dataset = found[0].dataset
    assert len(dataset.heldout) == 9
    assert not {each.task for each in dataset.train} & {each.task for each in dataset.heldout}


def test_longer_examples_are_dropped_whole_and_counted(preferences: ModuleType, tmp_path: Path) -> None:
    long = {"prompt": "A", "chosen": "B", "rejected": "C " * 40}
    changes = {"data": {"max_length": 40, "max_length_policy": "drop"}}
    plan = preferences.make_trainer(
        tmp_path, changes=changes, train_dataset=[*preferences.PAIRS, long]
    ).plan()
    assert plan["dropped_examples"] == 1
    assert plan["examples"] + plan["heldout_examples"] == 12


def test_a_dataset_of_ones_own_is_held_out_whole_but_for_what_is_too_long(
    preferences: ModuleType, tmp_path: Path
) -> None:
    long = {"prompt": "A", "chosen": "B", "rejected": "C " * 40}
    changes = {
        "batch_size": 3,
        "data": {"heldout_fraction": None, "max_length": 40, "max_length_policy": "drop"},
    }
    train, val = [*preferences.PAIRS, long], [*preferences.PAIRS[:2], long]
    trainer = preferences.make_trainer(tmp_path, changes=changes, train_dataset=train, val_dataset=val)
    plan = trainer.plan()
    assert (plan["examples"], plan["heldout_examples"], plan["dropped_examples"]) == (12, 2, 2)
    assert trainer.config.data.heldout_fraction == 0.0, "as the run's configuration says"
    alone = preferences.make_trainer(tmp_path, changes=changes, train_dataset=train)
    assert alone.config.data.heldout_fraction == DpoConfig().data.heldout_fraction > 0.0
    assert plan["tokens_per_update"] == round(plan["tokens"] / 4)  # 3 of 12
    assert plan["compared_tokens_per_update"] == round(plan["compared_tokens"] / 4)


# ---- an agent ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pairs_of_a_lake_run_make_the_agent_succeed_more_often(tmp_path: Path) -> None:
    """Success on held-out lakes, sampled, of the model that the run made and of that model after DPO."""
    settings = ("warm_start.steps=60", "steps=4", "evaluation.num_tasks=64", "threads=2")
    build_run(training_config("frozenlake", None, settings), tmp_path / "lake").train()
    config: dict[str, Any] = {
        "threads": 2,
        "epochs": 2,
        "optimizer": {"learning_rate": 1e-3},
        "data": {"run": str(tmp_path / "lake")},
    }
    result = AgentDPOTrainer(config, output=tmp_path / "dpo").train()
    assert result.summary["after"]["accuracy"] > 0.8
    before, after = (
        asyncio.run(
            evaluated(
                Asked(
                    benchmark="frozenlake",
                    place=resolve_model(str(tmp_path / run / "model")),
                    num_tasks=256,
                    threads=2,
                )
            )
        )["reports"]
        for run in ("lake", "dpo")
    )
    gained = after["sampled"]["success"] - before["sampled"]["success"]
    assert gained > 0.1, f"{before} before, {after} after"


# ---- kill -9 -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask(ask: Ask) -> Ask:
    return partial(ask, game="preferences")


def result_of(run: Path) -> dict[str, Any]:
    """Everything that must not depend on the run's being interrupted."""
    summary = RunDirectory.read(run).summary()
    assert summary is not None
    return {
        "parameters": parameters_sha256(load_model(run / "model").model.state_dict_hf()),
        "metrics": [
            {name: value for name, value in line.items() if not name.endswith(("_s", "_share"))}
            for line in read_metrics(run / "metrics.jsonl")
        ],
        "reports": (summary["before"], summary["after"]),
        "files": sorted(path.name for path in run.iterdir()),
    }


def test_a_run_that_was_killed_at_a_line_ends_as_if_it_had_not_been(ask: Ask, tmp_path: Path) -> None:
    """KTO; killed at any line and anywhere else: test_kills.py, DPO."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ask(whole, loss="kto")["signal"] == 0
    assert ask(run, loss="kto", die_at_line=("train", 1))["signal"] == 9
    assert ask(run, loss="kto")["signal"] == 0
    assert result_of(run) == result_of(whole)
