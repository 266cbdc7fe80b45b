"""Vision directories as they were published, by older versions of transformers and by newer ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rllm.inference.local.client import LocalClient
from rllm.models.directory import load_model
from rllm.types import SamplingParams

Make = Callable[..., Any]


def _qwen_2025(config: dict[str, Any]) -> None:
    """The text model's keys among the others."""
    text_config = config.pop("text_config")
    rope = text_config.pop("rope_parameters")
    text_config["rope_theta"] = rope["rope_theta"]
    text_config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    del text_config["model_type"]
    for name, value in text_config.items():
        config.setdefault(name, value)


def _gemma_2025(config: dict[str, Any]) -> None:
    """Few keys of the text model, and its rotation under older names."""
    text_config = config["text_config"]
    rope = text_config.pop("rope_parameters")
    text_config["rope_theta"] = rope["full_attention"]["rope_theta"]
    text_config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    del text_config["layer_types"], text_config["_sliding_window_pattern"]
    text_config["sliding_window_pattern"] = 2


FORMS: list[tuple[str, Callable[[dict[str, Any]], None], dict[str, str]]] = [
    (
        "qwen2.5-vl",
        _qwen_2025,
        {"model.": "model.language_model.", "visual.": "model.visual."},
    ),
    (
        "gemma3",
        _gemma_2025,
        {"vision_tower.": "vision_tower.vision_model."},
    ),
    (
        "gemma3",
        lambda config: None,
        {
            "language_model.model.": "model.language_model.",
            "vision_tower.": "model.vision_tower.vision_model.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        },
    ),
]


@pytest.mark.parametrize(("family", "rewrite", "prefixes"), FORMS)
async def test_a_directory_in_another_form_is_the_same_model(
    vision_model: Make,
    picture: Make,
    shows: Make,
    tmp_path: Path,
    family: str,
    rewrite: Callable[[dict[str, Any]], None],
    prefixes: dict[str, str],
) -> None:
    vision = vision_model(family)
    directory = tmp_path / "published"
    shutil.copytree(vision.directory, directory)
    config = json.loads((directory / "config.json").read_text())
    rewrite(config)
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    for old, new in prefixes.items():
        assert any(name.startswith(old) for name in weights)
        weights = {
            new + name.removeprefix(old) if name.startswith(old) else name: each
            for name, each in weights.items()
        }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    outputs = []
    for each in (vision.directory, directory):
        client = LocalClient(load_model(each), num_slots=1, max_context=400)
        prompt = client.renderer.render([shows("What is it?", picture(1))])
        outputs.append(await client.generate_ids(prompt, SamplingParams(max_tokens=4, seed=1)))
        await client.close()
    assert outputs[0].completion_ids == outputs[1].completion_ids
    assert outputs[0].logprobs == pytest.approx(outputs[1].logprobs, abs=1e-5)
