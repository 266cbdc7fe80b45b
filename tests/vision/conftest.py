import base64
import inspect
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging

from rllm.environments.base import BaseEnv
from rllm.models.builtin import create_model, create_tokenizer
from rllm.types import TrainingSample
from rllm.types.images import PATCH_IDS_FROM

logging.disable_progress_bar()
sys.path.insert(0, str(Path(__file__).parent))

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ '<image>' }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PARTS_ALONE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}{{ '<image>' }}"
    "{% endif %}{% endfor %}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As SmolVLM and LLaVA-Next have it: content that is text prints nothing."""


QWEN_TEMPLATE = TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
GEMMA_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""A line end stands before the mark, as Gemma has it: with the processor's own it is one token."""


def _processor_of(directory: Path) -> Any:
    """transformers' own; of a Qwen it reads films too, with torchvision, so it is put together without."""
    if "qwen" not in json.loads((directory / "config.json").read_text())["model_type"]:
        return AutoProcessor.from_pretrained(str(directory), local_files_only=True)
    processor: Any = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    processor.image_processor = AutoImageProcessor.from_pretrained(str(directory), local_files_only=True)
    processor.tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    processor.video_processor = None
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    for name in ("image_token", "video_token"):
        token_id = processor.tokenizer.convert_tokens_to_ids(getattr(processor, name))
        setattr(processor, f"{name}_id", token_id)
    processor.chat_template = processor.tokenizer.chat_template
    return processor


class VisionModel:
    """A directory with random weights, and transformers' own model and processor of it."""

    def __init__(self, directory: Path, model: Any) -> None:
        self.directory, self.model = directory, model
        self.processor = self.processor_of(directory)
        (self.patch_mark,) = self.processor.image_token_ids
        """The id of each token of an image."""

    processor_of = staticmethod(_processor_of)

    @torch.no_grad()
    def logprobs(self, ids: list[int], images: list[Image.Image], model: Any = None) -> Tensor:
        """See `logprobs_with_graph`."""
        return self.logprobs_with_graph(ids, images, model)

    def logprobs_with_graph(self, ids: list[int], images: list[Image.Image], model: Any = None) -> Tensor:
        """[T - 1, V] log-probabilities that transformers gives for the tokens from the second on."""
        mark = self.patch_mark
        words = torch.tensor([[mark if each >= PATCH_IDS_FROM else each for each in ids]])
        inputs = self.processor(
            text=[self.processor.image_token * len(images)], images=[images], return_tensors="pt"
        )
        tensors = {
            name: each
            for name, each in inputs.items()
            if name not in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
        }
        model = model or self.model
        # Gemma 3 has it under its old name, without which it sees images as it sees words.
        takes = inspect.signature(model.forward).parameters
        tensors["token_type_ids" if "token_type_ids" in takes else "mm_token_type_ids"] = (
            words == mark
        ).int()
        logits = model(input_ids=words, **tensors).logits
        return logits[0, :-1].log_softmax(-1)

    def gap(
        self, sample: TrainingSample, logprobs_T: Any, images: list[Image.Image], model: Any = None
    ) -> float:
        """How far log-probabilities of a row's sampled tokens are from transformers' at most."""
        ids = sample.token_ids_T.tolist()
        theirs = self.logprobs(ids, images, model)
        places = np.flatnonzero(sample.trainable_T)
        assert len(places)
        return max(abs(float(theirs[place - 1, ids[place]]) - float(logprobs_T[place])) for place in places)


def _tokenizer(extra: list[str], template: str) -> PreTrainedTokenizerFast:
    tokenizer = create_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in extra])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def _idefics3(directory: Path, template: str) -> Any:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    extra = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    tokenizer = _tokenizer(extra, template)
    pictures = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    Idefics3Processor(pictures, tokenizer, image_seq_len=4).save_pretrained(directory)
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<image>")
    config = Idefics3Config(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT, **ids},
        vision_config=TOWER,
        scale_factor=2,
        image_token_id=image_token_id,
        **ids,
    )
    return Idefics3ForConditionalGeneration(config)


def _llava_next(directory: Path) -> Any:
    tokenizer = _tokenizer(["<image>"], PARTS_ALONE)
    grid = [[32, 64], [64, 32], [64, 64]]
    size = {"height": 32, "width": 32}
    pictures = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=size, image_grid_pinpoints=grid
    )
    LlavaNextProcessor(
        pictures,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(directory)
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    image_token_id: Any = tokenizer.convert_tokens_to_ids("<image>")
    vision_config = {**TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 16}
    config = LlavaNextConfig(
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **TEXT, **ids},
        vision_config=vision_config,
        image_token_id=image_token_id,
        image_grid_pinpoints=grid,
        image_seq_length=16,
        **ids,
    )
    return LlavaNextForConditionalGeneration(config)


def _qwen(directory: Path, config_class: Any, model_class: Any, tower: dict[str, Any]) -> Any:
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(marks, QWEN_TEMPLATE)
    Qwen2VLImageProcessorPil(patch_size=8, min_pixels=16**2, max_pixels=64**2).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    ids: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    numbers = map(tokenizer.convert_tokens_to_ids, marks)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = config_class(
        text_config={**TEXT, "head_dim": 8, "vocab_size": len(tokenizer), "rope_parameters": rope, **ids},
        vision_config={"patch_size": 8, "num_heads": 2, "depth": 2, **tower},
        **dict(zip(names, numbers, strict=True)),
        **ids,
    )
    return model_class(config)


def _qwen2_vl(directory: Path) -> Any:
    tower = {"embed_dim": 16, "hidden_size": 32}
    return _qwen(directory, Qwen2VLConfig, Qwen2VLForConditionalGeneration, tower)


def _qwen2_5_vl(directory: Path) -> Any:
    tower = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(directory, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, tower)


def _qwen3_vl(directory: Path) -> Any:
    tower = {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24}
    tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return _qwen(directory, Qwen3VLConfig, Qwen3VLForConditionalGeneration, tower)


def _gemma3(directory: Path) -> Any:
    marks = ["<image_soft_token>", "<start_of_image>", "<end_of_image>"]
    tokenizer = create_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in marks])
    tokenizer.add_tokens([AddedToken("\n" * count, normalized=False) for count in (2, 3, 4)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        chat_template=GEMMA_TEMPLATE,
        extra_special_tokens=dict(zip(("image_token", "boi_token", "eoi_token"), marks, strict=True)),
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 64, "width": 64})
    Gemma3Processor(pictures, fast, image_seq_length=16).save_pretrained(directory)
    ids: dict[str, Any] = {"pad_token_id": fast.pad_token_id, "eos_token_id": fast.eos_token_id}
    numbers = map(fast.convert_tokens_to_ids, marks)
    names = ("image_token_index", "boi_token_index", "eoi_token_index")
    layers = ["sliding_attention", "full_attention"]  # with a window that is shorter than an image
    text = {**TEXT, "head_dim": 8, "vocab_size": len(fast), "sliding_window": 9, "layer_types": layers}
    config = Gemma3Config(
        text_config={**text, "query_pre_attn_scalar": 8, **ids},
        vision_config={
            **TOWER,
            "model_type": "siglip_vision_model",
            "image_size": 64,
            "vision_use_head": False,
        },
        mm_tokens_per_image=16,
        **dict(zip(names, numbers, strict=True)),
        **ids,
    )
    return Gemma3ForConditionalGeneration(config)


def _tiny_vl(directory: Path) -> Any:
    create_model(directory, "tiny-vl")
    return AutoModelForImageTextToText.from_pretrained(directory)


FAMILIES = {
    "gemma3": _gemma3,
    "tiny-vl": _tiny_vl,
    "llava-next": _llava_next,
    "idefics3": lambda directory: _idefics3(directory, TEMPLATE),
    "idefics3, content in parts": lambda directory: _idefics3(directory, PARTS_ALONE),
    "qwen2-vl": _qwen2_vl,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl": _qwen3_vl,
}


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VisionModel]:
    models: dict[str, VisionModel] = {}

    def make(name: str) -> VisionModel:
        if name not in models:
            directory = tmp_path_factory.mktemp("vision")
            torch.manual_seed(8)
            model = FAMILIES[name](directory).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
                # Or it samples the mark of an image now and then, which transformers takes for one.
                model.get_output_embeddings().weight[model.config.image_token_id] = 0.0
            model.save_pretrained(directory)
            models[name] = VisionModel(directory, model)
        return models[name]

    return make


@pytest.fixture(params=FAMILIES)
def vision(request: pytest.FixtureRequest, vision_model: Callable[[str], VisionModel]) -> VisionModel:
    return vision_model(request.param)


@pytest.fixture(scope="session")
def picture() -> Callable[..., Image.Image]:
    def make(seed: int, width: int = 64, height: int = 48) -> Image.Image:
        rng = np.random.default_rng(seed)
        return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))

    return make


@pytest.fixture(scope="session")
def data_url() -> Callable[..., str]:
    def make(image: Image.Image, kind: str = "PNG") -> str:
        buffer = io.BytesIO()
        image.save(buffer, kind)
        return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"

    return make


@pytest.fixture(scope="session")
def shows(data_url: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """A message of the user with images and then a text."""

    def make(text: str, *images: Image.Image) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}

    return make


class PictureEnv(BaseEnv):
    """Shows a picture, and the same one again; pays by how long the last answer is."""

    messages: dict[int, dict[str, Any]]

    def __init__(self, number: int) -> None:
        self.number, self.turn = number, 0

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.turn = 0
        return [self.messages[self.number]], {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        self.turn += 1
        return [self.messages[self.number]], len(action) / 10, self.turn == 2, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "PictureEnv":
        return PictureEnv(info["number"])


@pytest.fixture
def picture_env(
    picture: Callable[..., Image.Image],
    shows: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> type[PictureEnv]:
    """With four pictures."""
    messages = {number: shows("What is it?", picture(number)) for number in range(4)}
    monkeypatch.setattr(PictureEnv, "messages", messages, raising=False)
    return PictureEnv
