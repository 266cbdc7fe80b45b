"""The models that ship with rLLM: tiny Llamas with random weights and a tokenizer of their own.

`tiny-vl` reads pictures as well: a LLaVA whose tower is a SegFormer, of overlapping convolutions.
`create_model(directory)` writes a plain Hugging Face directory. The tokenizer is a byte-level BPE, so any
text encodes; its merges are learned, in milliseconds, from the words that the built-in agents and games use,
so that the words of a move are one token each, and from the rows of small lakes, so that four cells are one
token: read cell by cell a lake is twice as long, and two layers do not see as far. Digits never merge.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rllm.config.limits import seed_in_range
from rllm.errors import ConfigError, MissingExtraError, choices_of
from rllm.models.builtin_templates import CHAT_TEMPLATE, IMAGE_MARK, IMAGE_TEMPLATE
from rllm.models.decoder import Decoder, DecoderShape
from rllm.models.directory import write_model, write_one_file
from rllm.models.facts import FROM_SCRATCH

END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = ("<|endoftext|>", END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

ROPE_THETA = 100.0
"""Base of the rotary positions. The usual 10,000 is made for long texts: here it leaves most of each head
turning too slowly to tell a cell from its neighbour, and imitation takes a third longer to begin working."""

WORDS = """
system user assistant tool Up Down Left Right You are an agent on a frozen lake. Reach the goal. Avoid the
holes. Answer with one word. Your move. The answer is yes no not and or of to in is it that for with as on at
by from this number numbers target equation use each once left right up down step steps reward grid player
wall box key door go Question Answer think Think The A I we can find first next last then so if because move
moves moved invalid word words
"""

LAKE_ROWS = tuple(
    "".join(cells)
    for cells in itertools.product("FHPG", repeat=4)
    if cells.count("P") <= 1 and "G" not in cells[:-1]
)
"""Four cells of a frozen lake with the player in one of them or none, and the goal at the end of a row."""

SPLIT = r"[A-Z]{1,4}(?![a-z])|[0-9]| ?[A-Za-z]+|\n| ?[^\sA-Za-z0-9]|\s"
"""Pre-tokens that merges never cross: up to four capitals, digits, words with their leading space, newlines,
and signs. A wider row is read four cells at a time, counted from its left."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TinyModel:
    """Size of a built-in model."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int = 2048
    vocab_size: int = 604
    image_side: int = 0
    """Pixels; pictures are scaled to squares of it. 0 for a model that reads text alone."""


PATCH_SIDE = 16
"""Pixels of a picture that are one token."""


PRESETS = {
    "tiny": TinyModel(hidden_size=96, num_layers=2, num_heads=4, intermediate_size=288),
    "deep": TinyModel(hidden_size=96, num_layers=3, num_heads=4, intermediate_size=288),
    "small": TinyModel(hidden_size=128, num_layers=4, num_heads=4, intermediate_size=384),
    "tiny-8k": TinyModel(
        hidden_size=96, num_layers=2, num_heads=4, intermediate_size=288, max_positions=8192
    ),
    "tiny-32k": TinyModel(
        hidden_size=96, num_layers=2, num_heads=4, intermediate_size=288, max_positions=32_768
    ),
    "tiny-vl": TinyModel(hidden_size=96, num_layers=2, num_heads=4, intermediate_size=288, image_side=48),
    "0.2m": TinyModel(hidden_size=80, num_layers=2, num_heads=4, intermediate_size=216),
    "1m": TinyModel(hidden_size=128, num_layers=4, num_heads=4, intermediate_size=448),
    "5m": TinyModel(hidden_size=256, num_layers=6, num_heads=4, intermediate_size=704),
    "20m": TinyModel(hidden_size=512, num_layers=6, num_heads=8, intermediate_size=1472),
    "100m": TinyModel(hidden_size=768, num_layers=13, num_heads=12, intermediate_size=2304),
}
"""By name: three that the built-in games were learned with, two of `tiny` for long prompts, one that reads
pictures, and one for each order of parameters."""


def create_tokenizer(vocab_size: int = 604) -> Tokenizer:
    """The built-in tokenizer; the same bytes on every machine."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        # The library hands the alphabet out in any order, and the order decides the ids.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = [*WORDS.split(), *(f" {word}" for word in WORDS.split())]
    tokenizer.train_from_iterator([*words, *LAKE_ROWS], trainer)
    return tokenizer


def builtin_preset(path: str) -> str | None:
    """Return NAME of `builtin:NAME`; None for a directory, whose name may have a colon."""
    kind, separator, preset = path.partition(":")
    return preset if separator and kind == "builtin" else None


def create_model(directory: Path, preset: str | TinyModel = "tiny", seed: int = 0) -> None:
    """Write config, weights, tokenizer and chat template to `directory`, which must be absent or empty."""
    if isinstance(preset, str) and preset not in PRESETS:
        raise ConfigError(f"`{preset}` is no built-in model; {choices_of(preset, PRESETS)}.")
    seed_in_range("seed", seed)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise ConfigError(f"{directory} is not an empty directory; choose a new one, nothing was written.")
    size = PRESETS[preset] if isinstance(preset, str) else preset
    tokenizer = create_tokenizer(size.vocab_size)
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, bytes] = {}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": size.max_positions,
    }
    if size.image_side:
        del settings[
            "chat_template"
        ]  # transformers' processor reads a file of its own, and the tokenizer too
        files["chat_template.jinja"] = IMAGE_TEMPLATE.encode()
        tokenizer.add_special_tokens([AddedToken(IMAGE_MARK, special=True, normalized=False)])
        files["processor_config.json"] = json.dumps(_processor_config(size), indent=2).encode()
    config = tiny_config(size, tokenizer)
    shape = DecoderShape.from_config(config)
    if shape is None:
        weights = _vision_weights(config, generator)
    else:
        decoder = Decoder(shape)
        decoder.initialize(generator)
        weights = decoder.state_dict_hf()
    files["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
    files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode()
    write_model(directory, {**config, FROM_SCRATCH: True}, weights, files, write_one_file)


def tiny_config(size: TinyModel, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """config.json of a built-in model; without its tokenizer, without the ids of that."""
    text = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size() if tokenizer else size.vocab_size,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_heads,
        "head_dim": size.hidden_size // size.num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "max_position_embeddings": size.max_positions,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(END_OF_TURN) if tokenizer else None,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>") if tokenizer else None,
        "initializer_range": 0.8 / size.hidden_size**0.5,
        "dtype": "float32",
    }
    if not size.image_side:
        return text
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {
            "model_type": "segformer",
            "image_size": size.image_side,
            "hidden_size": size.hidden_size,
            "num_encoder_blocks": 2,
            "hidden_sizes": [size.hidden_size // 3, size.hidden_size],
            "patch_sizes": [7, 5],
            "strides": [4, 4],
            "depths": [1, 2],
            "sr_ratios": [4, 1],
            "num_attention_heads": [1, size.num_heads],
            "mlp_ratios": [2, 2],
            "reshape_last_stage": False,
            "drop_path_rate": 0.0,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "image_seq_length": (size.image_side // PATCH_SIDE) ** 2,
        "image_token_index": tokenizer.token_to_id(IMAGE_MARK) if tokenizer else size.vocab_size,
        "tie_word_embeddings": True,
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "dtype": "float32",
    }


def _processor_config(size: TinyModel) -> dict[str, Any]:
    side = {"height": size.image_side, "width": size.image_side}
    return {
        "processor_class": "LlavaProcessor",
        "image_processor": {
            "image_processor_type": "LlavaImageProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": side,
            "resample": 2,
            "do_center_crop": False,
            "crop_size": side,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "do_pad": False,
        },
        "image_token": IMAGE_MARK,
        "patch_size": PATCH_SIDE,
        "num_additional_image_tokens": 0,
        "vision_feature_select_strategy": "full",
    }


@torch.no_grad()
def _vision_weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Normal weights: of the language model as `Decoder.initialize` has them, of the rest with
    std = 1 / sqrt(fan in); norms begin as 1, biases as 0."""
    try:
        from transformers import LlavaConfig, LlavaForConditionalGeneration
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    model = LlavaForConditionalGeneration(LlavaConfig(**config))
    weights: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        is_text, is_matrix = "language_model" in name, weight.dim() > 1
        fan_in = config["text_config"]["hidden_size"] if is_text else math.prod(weight.shape[1:])
        if is_matrix:
            weight.normal_(0.0, (0.8 if is_text else 1.0) / math.sqrt(fan_in), generator=generator)
        else:
            weight.fill_(float(name.endswith("weight")))
        weights[name] = weight
    return dict(revert_weight_conversion(model, weights))
