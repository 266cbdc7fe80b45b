"""A real vLLM server that samples a policy which reads images, while all of its weights learn."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from rllm.agents.conversation import ConversationAgent
from rllm.environments.base import BaseEnv
from rllm.models.builtin import create_tokenizer
from rllm.models.directory import load_model
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer import AgentTrainer
from rllm.trainer.replay import replay

pytestmark = pytest.mark.slow
EXACT = 1e-4
"""Nats by which two float32 engines may differ."""


@pytest.fixture
def eyes(tmp_path: Path) -> Path:
    """An Idefics3 whose heads vLLM has kernels for."""
    vocabulary = create_tokenizer()
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<row_1_col_1>"]
    vocabulary.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template="{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )
    side = {"longest_edge": 32}
    pixels = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    Idefics3Processor(pixels, tokenizer, image_seq_len=4).save_pretrained(tmp_path / "eyes")
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    tower = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    config = Idefics3Config(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **sizes, **ids},
        vision_config={"image_size": 32, "patch_size": 8, **tower},
        scale_factor=2,
        image_token_id=image_token_id,
        **ids,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(tmp_path / "eyes")
    return tmp_path / "eyes"


class PictureEnv(BaseEnv):
    """Shows a picture, twice; pays by how long the last answer is."""

    def __init__(self, number: int) -> None:
        pixels = np.random.default_rng(number).integers(0, 255, (48, 64, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        self.messages: list[Any] = [{"role": "user", "content": parts}]
        self.turn = 0

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.turn = 0
        return self.messages, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        self.turn += 1
        return self.messages, len(action) / 10, self.turn == 2, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "PictureEnv":
        return PictureEnv(info["number"])


def test_a_policy_that_reads_images_learns_on_a_server(vllm_python: str, eyes: Path, tmp_path: Path) -> None:
    inference = {"engine": "vllm", "lockstep": False, "replicas": 1, "server_python": vllm_python}

    def trainer() -> AgentTrainer:
        return AgentTrainer(
            config={
                "steps": 4,
                "threads": 1,
                "model": {"path": str(eyes), "vision": "train"},
                "inference": {**inference, "server_seeds": False, "num_slots": 8, "max_context": 256},
                "rollout": {"tasks_per_step": 2, "group_size": 3, "max_turns": 2, "max_tokens_per_turn": 4},
                "warm_start": {"steps": 0},
                "evaluation": {"num_tasks": 1, "every_steps": 0},
                "optimizer": {"learning_rate": 0.01},
            },
            train_dataset=[{"task_id": f"picture-{number}", "number": number} for number in range(4)],
            val_dataset=[{"task_id": "picture-0", "number": 0}],
            agent_class=ConversationAgent,
            env_class=PictureEnv,
            output=tmp_path / "run",
        )

    trainer().train()
    lines = [each for each in read_metrics(tmp_path / "run" / "metrics.jsonl") if each["phase"] == "train"]
    assert [line["episodes"] + line["failed"] for line in lines] == [6] * 4
    assert max(line["canary_gap"] for line in lines) < EXACT
    assert max(line["canary_moved"] for line in lines[1:]) > 0.0
    with EpisodeStore.open(tmp_path / "run" / "store.sqlite", read_only=True) as store:
        first_ids = {
            each.steps[0].prompt_ids[3]
            for episode in store.episodes("train")
            for each in episode.trajectories
        }
    assert max(first_ids) > load_model(eyes).vocab_size, "rows have the images themselves"
    assert replay(trainer().run).is_identical
