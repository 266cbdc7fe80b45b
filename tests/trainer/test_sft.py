"""Supervised fine-tuning: what is trained on, what its loss is, and what it does to a model."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllm.algorithms.losses import ImitationLoss
from rllm.build.asked import Asked
from rllm.build.configs import training_config
from rllm.build.evaluation import evaluated
from rllm.build.providers import resolve_model
from rllm.build.training import build_run
from rllm.config.policies import ONLY_POLICY
from rllm.errors import ConfigError
from rllm.models.builtin import create_model
from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore
from rllm.store.run_directory import RunDirectory
from rllm.trainer import AgentSFTTrainer
from rllm.trainer.backends.torch_measure import measure_rows
from rllm.trainer.policies import make_policies
from rllm.trainer.sft import SftJob
from rllm.types.episode import Episode, Outcome, Step, Trajectory
from rllm.types.sample import TrainingSample


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    """User and assistant in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[place % 2], "content": content} for place, content in enumerate(turns)],
        **more,
    }


CHATS = [chat(f"{a} {b}", a, b, f"{a} {b}") for a in "ABCDE" for b in "FG"]
GO = {
    "type": "function",
    "function": {"name": "go", "parameters": {"type": "object", "properties": {"to": {"type": "string"}}}},
}
WITH_A_CALL = {
    "tools": [GO],
    "messages": [
        {"role": "user", "content": "move"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "function": {"name": "go", "arguments": '{"to": "box"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "moved"},
        {"role": "assistant", "content": "The box."},
    ],
}
SETTINGS: dict[str, Any] = {
    "threads": 1,
    "epochs": 2,
    "batch_size": 4,
    "optimizer": {"learning_rate": 3e-3},
    "data": {"heldout_fraction": 0.2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    create_model(path, "tiny", seed=1)
    return path


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Callable[..., SftJob]:
    """The job of a trainer on the model, as a run makes it."""

    def make(train: Any = None, changes: dict[str, Any] | None = None, **more: Any) -> SftJob:
        settings = {**SETTINGS, "model": {"path": str(model)}, **(changes or {})}
        trainer = AgentSFTTrainer(settings, train, output=tmp_path / "unused", **more)
        config = trainer.config.train_config()
        policies = make_policies(config, {ONLY_POLICY: load_model(model)})
        return trainer.make_job(policies[ONLY_POLICY])

    return make


def labelled_text(job: SftJob, row: TrainingSample) -> list[str]:
    """The stretches of a row that are learned, as text with special tokens."""
    tokenizer = job.policy.renderer.tokenizer
    stretches: list[str] = []
    before = False
    for token, label in zip(row.token_ids_T.tolist(), row.trainable_T.tolist(), strict=True):
        if label and not before:
            stretches.append("")
        if label:
            stretches[-1] += tokenizer.token_text(token)
        before = label
    return stretches


def test_rows_are_conversations_with_their_answers_labelled(job: Callable[..., SftJob]) -> None:
    made = job([chat("Up?", "No", "Down?", "Yes"), WITH_A_CALL], {"data": {"heldout_fraction": 0.0}})
    first, second = (example.rows[0] for example in made.dataset.train)
    assert labelled_text(made, first) == ["No<|end|>", "Yes<|end|>"]
    assert labelled_text(made, second) == [
        '<tool_call>\n{"name": "go", "arguments": {"to": "box"}}\n</tool_call><|end|>',
        "The box.<|end|>",
    ]


def test_the_loss_is_that_of_transformers_on_the_same_rows(job: Callable[..., SftJob], model: Path) -> None:
    from transformers import AutoModelForCausalLM

    made = job([*CHATS, WITH_A_CALL], {"data": {"heldout_fraction": 0.0}})
    rows = made.measured_rows
    theirs: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    total, num_right = 0.0, 0
    for row in rows:
        ids = torch.from_numpy(row.token_ids_T)[None]
        labels = torch.where(torch.from_numpy(row.trainable_T)[None], ids, -100)
        with torch.no_grad():
            out = theirs(input_ids=ids, labels=labels)
        total += float(out.loss) * row.num_trainable
        num_right += int((out.logits[0, :-1].argmax(-1) == labels[0, 1:]).sum())
    num_tokens = sum(row.num_trainable for row in rows)
    measured = made.evaluate()
    assert measured["loss"] == pytest.approx(total / num_tokens, abs=1e-5)
    assert measured["token_accuracy"] == pytest.approx(num_right / num_tokens)
    updated = made.backend.update(rows, ImitationLoss(), 1e-3)
    assert updated["loss"] == pytest.approx(total / num_tokens, abs=1e-5)
    by_row = job([*CHATS, WITH_A_CALL], {"aggregation": "sequence_mean", "data": {"heldout_fraction": 0.0}})
    means = [
        -scores.sum() / row.num_trainable
        for row, scores in zip(rows, by_row.backend.score(rows), strict=True)
    ]
    assert by_row.backend.update(rows, by_row.loss, 1e-3)["loss"] == pytest.approx(np.mean(means), abs=1e-5)


def test_measures_do_not_depend_on_micro_batches_or_chunks(job: Callable[..., SftJob]) -> None:
    made = job(CHATS)
    loaded = made.policy.loaded_model.model
    whole = measure_rows(loaded, made.measured_rows, micro_batch_tokens=100_000, logits_mb=512.0)
    parts = measure_rows(loaded, made.measured_rows, micro_batch_tokens=16, logits_mb=1e-6)
    assert parts.loss == pytest.approx(whole.loss, abs=1e-6)
    assert replace(parts, loss=whole.loss) == whole


def test_a_row_without_a_label_has_nothing_to_measure(job: Callable[..., SftJob]) -> None:
    made = job(CHATS)
    row = made.measured_rows[0]
    silent = replace(row, policy_versions_T=np.full(row.num_tokens, -1))
    with pytest.raises(ValueError, match=r"1 rows .*labelled"):
        measure_rows(made.policy.loaded_model.model, [silent], micro_batch_tokens=64, logits_mb=512.0)


def test_a_model_learns_its_conversations_and_the_end_of_an_answer(tmp_path: Path) -> None:
    settings = {**SETTINGS, "epochs": 40, "batch_size": 10, "evaluation": {"every_steps": 20}}
    pairs = [{"prompt": letter, "completion": f"{letter} {letter}"} for letter in "ABCDEFGHKL"]
    settings["data"] = {"heldout_fraction": 0.0}
    result = AgentSFTTrainer(settings, pairs, output=tmp_path / "run").train()
    assert result.summary["before"]["token_accuracy"] < 0.1
    assert result.summary["after"]["token_accuracy"] > 0.95
    assert result.summary["measured_on"] == "10 examples that were trained on"
    loaded = load_model(result.model_path)
    assert result.summary["after"]["loss"] < 0.2 < result.summary["before"]["loss"]
    ids = loaded.tokenizer.encode("<|user|>C<|end|><|assistant|>")
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(str(result.model_path))
    written = theirs.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    assert loaded.tokenizer.decode(written[0, len(ids) :].tolist()) == "C C"
    assert int(written[0, -1]) == loaded.tokenizer.encode("<|end|>")[0]


def test_an_adapter_is_trained_where_lora_has_a_rank(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = {**SETTINGS, "epochs": 6, "lora": {"rank": 4}, "checkpoint": {"every_steps": 2, "keep": 1}}
    result = AgentSFTTrainer(settings, CHATS, output=tmp_path / "run").train()
    assert result.summary["after"]["loss"] < result.summary["before"]["loss"]
    begun, made = (load_model(tmp_path / "run" / name) for name in ("initial_model", "model"))
    assert made.num_parameters == begun.num_parameters, "the model is whole, the adapter added in"
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    num_bytes = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
    assert num_bytes < begun.num_parameters, "a checkpoint holds the adapter alone"


# ---- what is held out, and what is too long ----------------------------------------------------------------


def wheres(examples: Any) -> set[str]:
    return {example.where for example in examples}


def test_a_share_of_the_examples_is_held_out_and_never_trained_on(job: Callable[..., SftJob]) -> None:
    made = job(CHATS)
    assert len(made.dataset.heldout) == 2
    assert wheres(made.dataset.heldout) | wheres(made.dataset.train) == {f"row {n}" for n in range(10)}
    assert not wheres(made.dataset.heldout) & wheres(made.dataset.train)
    assert wheres(job(CHATS).dataset.heldout) == wheres(made.dataset.heldout)
    assert wheres(job(CHATS, {"seed": 1}).dataset.heldout) != wheres(made.dataset.heldout)


@pytest.mark.parametrize(("num_chats", "fraction"), [(2, 0.75), (3, 0.9)])
def test_the_largest_share_of_few_examples_leaves_one_to_train_on(
    job: Callable[..., SftJob], num_chats: int, fraction: float
) -> None:
    made = job(CHATS[:num_chats], {"data": {"heldout_fraction": fraction}})
    assert (len(made.dataset.train), len(made.dataset.heldout)) == (1, num_chats - 1)


def test_a_conversation_that_is_there_twice_is_on_one_side(job: Callable[..., SftJob]) -> None:
    made = job([*CHATS, *CHATS], {"data": {"heldout_fraction": 0.5}})
    sides = [{example.task for example in side} for side in (made.dataset.train, made.dataset.heldout)]
    assert [len(each) for each in sides] == [5, 5]
    assert not sides[0] & sides[1]
    assert len(made.dataset.train) == len(made.dataset.heldout) == 10


def test_what_is_held_out_may_be_given_as_files(job: Callable[..., SftJob], tmp_path: Path) -> None:
    for name, chats in (("train", CHATS[2:]), ("val", CHATS[:2])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(each) for each in chats))
    data = {"dataset": str(tmp_path / "train.jsonl"), "val_dataset": str(tmp_path / "val.jsonl")}
    made = job(None, {"data": {**data, "heldout_fraction": 0.0}})
    assert wheres(made.dataset.heldout) == {"val.jsonl:1", "val.jsonl:2"}
    assert wheres(made.dataset.train) == {f"train.jsonl:{line}" for line in range(1, 9)}
    with pytest.raises(ConfigError, match=r"fraction to 0"):
        job(None, {"data": data})


LONG = chat("A", " ".join("ABCDEFGHKL" * 4))


def test_longer_rows_are_refused_dropped_or_truncated(job: Callable[..., SftJob]) -> None:
    def with_policy(policy: str) -> SftJob:
        data = {"heldout_fraction": 0.0, "max_length": 30, "max_length_policy": policy}
        return job([*CHATS, LONG], {"data": data})

    with pytest.raises(ConfigError, match=r"1 of 11 .* 30 tokens \(first row 10;"):
        with_policy("refuse")
    dropped = with_policy("drop")
    assert len(dropped.dataset.train) == 10
    assert dropped.facts()["dropped_examples"] == dropped.plan()["dropped_examples"] == 1
    cut = with_policy("truncate")
    assert cut.dataset.train[-1].rows[0].num_tokens == cut.plan()["longest_row"] == 30
    assert cut.facts()["truncated_examples"] == 1
    assert cut.dataset.train[-1].rows[0].trainable_T[-1]


def test_a_limit_beyond_what_the_model_reads_is_refused(job: Callable[..., SftJob]) -> None:
    with pytest.raises(ConfigError, match=r"`data.max_length` is 5000, .* 2048 tokens"):
        job(CHATS, {"data": {"max_length": 5000}})


REFUSED = {
    "nothing": ({}, {}, r"There is nothing to train on"),
    "twice": (
        {"train_dataset": CHATS},
        {"data": {"dataset": "x.jsonl"}},
        r"`data.dataset` is 'x.jsonl'; give",
    ),
    "file and run": ({}, {"data": {"dataset": "x.jsonl", "run": "y"}}, r"train on one of them"),
    "filter of no run": ({"train_dataset": CHATS}, {"data": {"min_reward": 0.5}}, r"does nothing here"),
    "no such file": ({"train_dataset": "nowhere.jsonl"}, {}, r"There is no dataset nowhere.jsonl"),
    "empty": ({"train_dataset": []}, {}, r"The dataset is empty"),
    "typo": ({"train_dataset": CHATS}, {"epoch": 3}, r"no configuration key `epoch`; did you mean `epochs`"),
    "policy": ({"train_dataset": CHATS}, {"data": {"max_length_policy": "cut"}}, r"choose one of refuse, dr"),
    "aggregation": ({"train_dataset": CHATS}, {"aggregation": "sum"}, r"`aggregation` is 'sum'"),
    "fraction": ({"train_dataset": CHATS}, {"data": {"heldout_fraction": 1.0}}, r"0 or more and below 1"),
    "label": ({"train_dataset": [chat("A")]}, {}, r"row 0: it has no label"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_on_is_refused_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    arguments, changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        AgentSFTTrainer({"threads": 1, **changes}, output=tmp_path / "run", **arguments).train()
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_with_the_same_data_alone(tmp_path: Path) -> None:
    settings = {**SETTINGS, "max_steps": 1}
    AgentSFTTrainer(settings, CHATS, output=tmp_path / "run").train()
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"another configuration \(rows_sha256: "):
        AgentSFTTrainer(settings, [*CHATS, chat("A", "B")], output=tmp_path / "run").train()


def test_the_plan_is_what_the_run_does(tmp_path: Path) -> None:
    trainer = AgentSFTTrainer(SETTINGS, CHATS, output=tmp_path / "run")
    plan = trainer.plan()
    assert not (tmp_path / "run").exists()
    summary = trainer.train().summary
    assert plan["optimizer_updates"] == summary["steps"] == 4
    assert plan["examples"] == summary["examples"] == 8
    assert plan["labelled_tokens"] * 2 == summary["trained_tokens"]
    assert summary["measured_on"] == "2 held-out examples"


# ---- a stored run ------------------------------------------------------------------------------------------


@pytest.fixture
def stored(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run whose training episodes are given: (task, attempt, reward, more of the trajectory)."""
    loaded = load_model(model)

    def step(said: str) -> Step:
        ids = loaded.tokenizer.encode(f"{said}<|end|>")
        asked = loaded.tokenizer.encode("<|user|>A<|end|><|assistant|>")
        return Step(
            prompt_ids=asked, response_ids=ids, logprobs=[-0.5] * len(ids), policy_versions=[7] * len(ids)
        )

    def make(*episodes: tuple[str, int, float], name: str = "stored", **more: Any) -> Path:
        run = tmp_path / name
        with RunDirectory.create_or_open(run) as directory:
            directory.write_config({"model": {"path": str(model)}})
        with EpisodeStore.open(run / "store.sqlite") as store:
            made = [
                Episode(
                    task={"task_id": task, "ask": task.partition("@")[0]},
                    task_id=task,
                    rollout_idx=attempt,
                    outcome=more.get("outcome", Outcome.SCORED),
                    trajectories=[
                        Trajectory(name=role, reward=reward, steps=[step(f"{task} {attempt}")])
                        for role in more.get("roles", ("agent",))
                    ],
                )
                for task, attempt, reward in episodes
            ]
            store.save_episodes("train", 0, made)
            store.save_episodes("after", 0, [replace(each, rollout_idx=99) for each in made])
        return run

    return make


def learned(made: SftJob) -> list[str]:
    return [labelled_text(made, row)[0] for example in made.dataset.train for row in example.rows]


NO_SPLIT = {"heldout_fraction": 0.0}


def test_of_a_stored_run_the_successes_are_learned_by_their_own_ids(
    job: Callable[..., SftJob], stored: Callable[..., Path]
) -> None:
    run = stored(("A", 0, 1.0), ("A", 1, 0.0), ("B", 0, 0.5), ("C", 0, 1.0))
    made = job(None, {"data": {"run": str(run), **NO_SPLIT}})
    assert learned(made) == ["A 0<|end|>", "C 0<|end|>"]
    assert all(row.temperature == 1.0 for example in made.dataset.train for row in example.rows)
    half = job(None, {"data": {"run": str(run), "min_reward": 0.5, **NO_SPLIT}})
    assert learned(half) == ["A 0<|end|>", "B 0<|end|>", "C 0<|end|>"]


def test_of_each_task_the_best_and_latest_are_learned_whatever_the_visit(
    job: Callable[..., SftJob], stored: Callable[..., Path]
) -> None:
    run = stored(("A", 0, 1.0), ("A", 1, 2.0), ("A@1", 0, 2.0), ("B", 0, 1.0))
    made = job(None, {"data": {"run": str(run), "max_per_task": 1, **NO_SPLIT}})
    assert learned(made) == ["A@1 0<|end|>", "B 0<|end|>"]
    split = job(None, {"data": {"run": str(run), "heldout_fraction": 0.5}})
    tasks = [{example.task for example in side} for side in (split.dataset.train, split.dataset.heldout)]
    assert len(tasks[0]) == len(tasks[1]) == 1
    assert tasks[0] != tasks[1]


def test_a_run_without_successes_says_how_good_it_was(
    job: Callable[..., SftJob], stored: Callable[..., Path]
) -> None:
    run = stored(("A", 0, 0.25), ("B", 0, 0.75))
    with pytest.raises(ConfigError, match=r"None of the 2 .* 0\.75\)"):
        job(None, {"data": {"run": str(run)}})
    failed = stored(("A", 0, 1.0), name="failed", outcome=Outcome.INFRASTRUCTURE_FAILURE)
    with pytest.raises(ConfigError, match=r"scored"):
        job(None, {"data": {"run": str(failed)}})


def test_of_several_roles_one_is_chosen(job: Callable[..., SftJob], stored: Callable[..., Path]) -> None:
    run = stored(("A", 0, 1.0), roles=("solver", "judge"))
    with pytest.raises(ConfigError, match=r"`data.role` .*judge, solver"):
        job(None, {"data": {"run": str(run), **NO_SPLIT}})
    assert len(job(None, {"data": {"run": str(run), "role": "judge", **NO_SPLIT}}).dataset.train) == 1
    with pytest.raises(ConfigError, match=r"`data.role` is 'critic'; .*judge, solv"):
        job(None, {"data": {"run": str(run), "role": "critic", **NO_SPLIT}})


def test_ids_of_another_tokenizer_are_refused(
    job: Callable[..., SftJob], stored: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    run = stored(("A", 0, 1.0))
    other = tmp_path / "other"
    create_model(other, "tiny", seed=2)
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(tokenizer))
    (run / "config.json").write_text(json.dumps({"model": {"path": str(other)}}))
    with pytest.raises(ConfigError, match=r"Token \d+ of .* is 'B', .*'A' "):
        job(None, {"data": {"run": str(run), **NO_SPLIT}})


def test_a_run_that_has_not_finished_has_no_model_to_go_on_from(stored: Callable[..., Path]) -> None:
    run = stored(("A", 0, 1.0))
    with pytest.raises(ConfigError, match=r"not finished"):
        AgentSFTTrainer({"data": {"run": str(run)}})
    (run / "model").mkdir()
    assert AgentSFTTrainer({"data": {"run": str(run)}}).config.model.path == str(run / "model")


@pytest.mark.slow
def test_learning_from_what_went_well_on_the_lake_makes_a_better_walker(tmp_path: Path) -> None:
    """A model that has hardly seen a lake reaches the goal now and then; imitating just that is a start."""
    assignments = (
        *("threads=1", "steps=1", "optimizer.learning_rate=1e-9", "algorithm.updates_per_step=1"),
        *("warm_start.steps=30", "warm_start.noise=0.5", "evaluation.num_tasks=8"),
        *("rollout.tasks_per_step=48", "rollout.group_size=4", "task.num_train_tasks=400"),
    )
    run = tmp_path / "run"
    build_run(training_config("frozenlake", assignments=assignments), run).train()
    settings = {"threads": 1, "epochs": 4, "optimizer": {"learning_rate": 2e-3}, "data": {"run": str(run)}}
    result = AgentSFTTrainer(settings, output=tmp_path / "sft").train()
    greedy: dict[str, float] = {}
    for name, path in (("before", run / "model"), ("after", result.model_path)):
        asked = Asked(benchmark="frozenlake", place=resolve_model(str(path)), num_tasks=96, threads=1)
        greedy[name] = asyncio.run(evaluated(asked))["reports"]["greedy"]["success"]
    # Measured: 41 successes among 192 attempts on easy lakes; 0 % before and 29 % after six updates on them.
    assert greedy["before"] <= 0.05
    assert greedy["after"] >= 0.15
