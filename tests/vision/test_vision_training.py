"""Rows with images learn: by GRPO from a world that shows pictures, by SFT and by DPO from files."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForImageTextToText

from rllm.agents.conversation import ConversationAgent
from rllm.errors import ConfigError
from rllm.models.builtin import TinyModel, create_model
from rllm.store.episodes import EpisodeStore
from rllm.trainer import AgentDPOTrainer, AgentSFTTrainer, AgentTrainer
from rllm.trainer.samples import trajectory_rows

Make = Callable[..., Any]
TASKS = [{"task_id": f"picture-{number}", "number": number} for number in range(4)]
SETTINGS: dict[str, Any] = {
    "seed": 5,
    "steps": 1,
    "threads": 1,
    "inference": {"num_slots": 8, "max_context": 400},
    "rollout": {"tasks_per_step": 2, "group_size": 3, "max_turns": 2, "max_tokens_per_turn": 4},
    "warm_start": {"steps": 0},
    "evaluation": {"num_tasks": 1, "every_steps": 0},
    "optimizer": {"learning_rate": 0.01},
}


def _changed(before: Any, after: Path) -> set[str]:
    theirs = AutoModelForImageTextToText.from_pretrained(after).state_dict()
    return {name for name, each in before.state_dict().items() if not np.array_equal(each, theirs[name])}


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_grpo_on_pictures_learns_from_rows_that_transformers_scores_alike(
    vision_model: Make, picture: Make, picture_env: Any, tmp_path: Path, family: str
) -> None:
    vision = vision_model(family)
    run = tmp_path / "run"
    AgentTrainer(
        config={**SETTINGS, "model": {"path": str(vision.directory)}},
        train_dataset=TASKS,
        val_dataset=TASKS[:1],
        agent_class=ConversationAgent,
        env_class=picture_env,
        output=run,
    ).train()
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        episodes = list(store.episodes("train"))
    assert len(episodes) == 6
    for episode in episodes:
        trajectory = episode.trajectories[0]
        assert trajectory.steps[0].chat_completions[0] == picture_env.messages[episode.task["number"]]
        (sample,) = trajectory_rows(trajectory, "task", 0, 0, 1.0)
        assert vision.gap(sample, sample.logprobs_T, [picture(episode.task["number"])] * 2) <= 1e-5
    connection = sqlite3.connect(run / "store.sqlite")
    (num_images,) = connection.execute("SELECT count(*) FROM images").fetchone()
    connection.close()
    assert num_images <= 4, "each picture is kept once"
    assert _changed(vision.model, run / "model")


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_files_with_images_teach_what_stands_in_their_rows(
    vision_model: Make, picture: Make, shows: Make, tmp_path: Path, kind: str, family: str
) -> None:
    vision = vision_model(family)
    rows: list[dict[str, Any]] = []
    for number in range(4):
        question = shows("What is it?", picture(number))
        answer, other = [{"role": "assistant", "content": text} for text in "AB"]
        if kind == "sft":
            rows.append({"messages": [question, answer]})
        else:
            rows.append({"prompt": [question], "chosen": [answer], "rejected": [other]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer_class = AgentSFTTrainer if kind == "sft" else AgentDPOTrainer
    config = {
        "threads": 1,
        "epochs": 3,
        "batch_size": 2,
        "model": {"path": str(vision.directory), "vision": "train"},
        "optimizer": {"learning_rate": 0.01},
        "data": {"heldout_fraction": 0.25},
    }
    trainer_class(config, train_dataset=path, output=tmp_path / "run").train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("phase") == "train"]
    assert losses[-1] < losses[0]
    names = _changed(vision.model, tmp_path / "run" / "model")
    assert any("vision_model" in name or "vision_tower" in name for name in names)


def test_a_model_of_text_refuses_rows_with_images_before_anything_is_trained(
    shows: Make, picture: Make, tmp_path: Path
) -> None:
    create_model(
        tmp_path / "tiny", TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
    )
    rows = [{"messages": [shows("What is it?", picture(1)), {"role": "assistant", "content": "A"}]}]
    config = {"model": {"path": str(tmp_path / "tiny")}, "data": {"heldout_fraction": 0.0}}
    with pytest.raises(ConfigError, match=r"row 0.*`image_url`; .*text alone"):
        AgentSFTTrainer(config, train_dataset=rows, output=tmp_path / "run").train()
    answer = [{"role": "user", "content": "x"}, {**shows("It is", picture(1)), "role": "assistant"}]
    with pytest.raises(ConfigError, match=r"row 0.*answer .*image"):
        AgentSFTTrainer(config, train_dataset=[{"messages": answer}], output=tmp_path / "other").train()
