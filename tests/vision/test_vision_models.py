"""A vision-language directory behind the same door as text models: the numbers are transformers' own."""

import copy
import json
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForImageTextToText

from rllm.algorithms.losses import PolicyLoss
from rllm.cli.main import rllm as front_door
from rllm.config.loader import load_config
from rllm.config.optimizer import OptimizerConfig
from rllm.errors import ConfigError, MissingExtraError, ModelDirectoryError
from rllm.inference.local.client import LocalClient
from rllm.models.batching import micro_batches
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import load_model, save_model
from rllm.models.packing import WeightedRow
from rllm.rendering.images import IMAGES
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.canary import Canary
from rllm.trainer.policies import load_initial_models, require_models
from rllm.trainer.samples import trajectory_rows
from rllm.types import SamplingParams, Step, TrainingSample, Trajectory
from rllm.types.images import PATCH_IDS_FROM

Make = Callable[..., Any]


async def _play(client: LocalClient, turns: list[dict[str, Any]], order: int = 0) -> Trajectory:
    """A conversation of so many turns of the user, each answered with up to six tokens."""
    messages: list[dict[str, Any]] = []
    steps: list[Step] = []
    async with client.session(("task", order)) as session:
        for turn in turns:
            messages.append(turn)
            output = await session.respond(messages, SamplingParams(max_tokens=6, seed=order))
            steps.append(Step.from_model_output(output, messages, reward=1.0))
            messages = list(steps[-1].chat_completions)
    return Trajectory(name="agent", steps=steps)


async def test_sampler_and_trainer_give_the_log_probabilities_of_transformers(
    vision: Any, picture: Make, shows: Make
) -> None:
    model = load_model(vision.directory)
    client = LocalClient(model, num_slots=4, max_context=400)
    first, second = picture(1), picture(2, 40, 70)
    turns = [shows("What is it?", first), {"role": "user", "content": "Yes."}, shows("And this?", second)]
    trajectories = [await _play(client, turns, order) for order in range(2)]
    trajectories.append(await _play(client, [shows("What is it?", second)], 2))
    await client.close()
    samples: list[TrainingSample] = []
    for index, trajectory in enumerate(trajectories):
        samples += trajectory_rows(trajectory, "task", index, 0, 1.0)
    assert [len(each.steps) for each in trajectories] == [3, 3, 1]
    assert len(samples) == 3, "each conversation went on by appending"
    for sample in samples:
        assert not sample.trainable_T[sample.token_ids_T >= PATCH_IDS_FROM].any()
    of_sample = [[first, second], [first, second], [second]]
    for sample, images in zip(samples, of_sample, strict=True):
        assert vision.gap(sample, sample.logprobs_T, images) <= 1e-5
    for share_prefixes in (True, False):
        backend = TorchBackend(
            model.model,
            publish=lambda version: None,
            config=OptimizerConfig(),
            share_prefixes=share_prefixes,
        )
        for sample, scores, images in zip(samples, backend.score(samples), of_sample, strict=True):
            assert vision.gap(sample, scores, images) <= 1e-5


async def test_a_prefix_is_read_again_only_where_the_image_is_the_same(
    vision: Any, picture: Make, shows: Make
) -> None:
    client = LocalClient(load_model(vision.directory), num_slots=4, max_context=400)
    first_prompt = [{"role": "system", "content": "Look."}, shows("What is it?", picture(1))]
    other = [first_prompt[0], shows("What is it?", picture(3))]
    sampling = SamplingParams(max_tokens=4, seed=1)
    outputs = []
    for messages in (first_prompt, first_prompt, other):
        prompt = client.renderer.render(messages)
        outputs.append(await client.generate_ids(prompt, sampling))
    await client.close()
    first, again, differs = outputs
    assert again.usage["cached_tokens"] == len(first.prompt_ids) - 1
    assert again.completion_ids == first.completion_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert differs.usage["cached_tokens"] < differs.prompt_ids.index(
        next(each for each in differs.prompt_ids if each >= PATCH_IDS_FROM)
    )
    ids = [*differs.prompt_ids, *differs.completion_ids]
    theirs = vision.logprobs(ids, [picture(3)])
    for place, logprob in enumerate(differs.logprobs, start=len(differs.prompt_ids)):
        assert float(theirs[place - 1, ids[place]]) == pytest.approx(logprob, abs=1e-5)


async def test_a_prompt_that_is_read_in_pieces_has_the_same_answer(
    vision: Any, picture: Make, shows: Make
) -> None:
    model = load_model(vision.directory)
    whole = LocalClient(model, num_slots=4, max_context=400)
    pieces = LocalClient(model, num_slots=4, max_context=400, max_prefill_tokens=5)
    prompt = whole.renderer.render([shows("Which?", picture(1, 64, 48), picture(2, 24, 90))])
    sampling = SamplingParams(max_tokens=5, seed=3)
    try:
        expected = await whole.generate_ids(prompt, sampling)
        in_pieces = await pieces.generate_ids(prompt, sampling)
        first = next(place for place, each in enumerate(prompt) if each >= PATCH_IDS_FROM)
        scores = await pieces.score([*prompt, *expected.completion_ids], first + 3)
    finally:
        await whole.close()
        await pieces.close()
    assert in_pieces.completion_ids == expected.completion_ids
    assert in_pieces.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert scores[-len(expected.logprobs) :] == pytest.approx(expected.logprobs, abs=1e-5)


async def test_conversations_that_are_open_together_share_a_prefix_wherever_it_ends(
    vision: Any, picture: Make, shows: Make
) -> None:
    """Prefixes are found in blocks of 16 tokens, whose ends lie within images."""
    model = load_model(vision.directory)
    client = LocalClient(model, num_slots=4, max_context=400)
    pictures = [picture(1), picture(2, 40, 70)]
    outputs = []
    async with client.session(("task", 0)) as first, client.session(("task", 1)) as second:
        for session, text in ((first, "What is it?"), (second, "Which?")):
            messages = [shows(text, *pictures)]
            outputs.append(await session.respond(messages, SamplingParams(max_tokens=6, seed=1)))
    await client.close()
    output = outputs[1]
    assert output.usage["cached_tokens"] > 0
    ids = [*output.prompt_ids, *output.completion_ids]
    theirs = vision.logprobs(ids, pictures)
    for place, logprob in enumerate(output.logprobs, start=len(output.prompt_ids)):
        assert float(theirs[place - 1, ids[place]]) == pytest.approx(logprob, abs=1e-5)


async def test_what_was_trained_is_what_transformers_loads_again(
    vision: Any, picture: Make, shows: Make, tmp_path: Path
) -> None:
    model = load_model(vision.directory)
    client = LocalClient(model, num_slots=2, max_context=400)
    trajectory = await _play(client, [shows("What is it?", picture(1))])
    (sample,) = trajectory_rows(trajectory, "task", 0, 0, 1.0)
    before = {name: each.clone() for name, each in model.model.inner.state_dict().items()}
    backend = TorchBackend(model.model, publish=client.publish, config=OptimizerConfig())
    backend.update([sample], PolicyLoss(), 0.01)
    backend.publish_weights()
    (scores,) = backend.score([sample])
    again = await client.score(sample.token_ids_T.tolist(), len(trajectory.steps[0].prompt_ids))
    await client.close()
    np.testing.assert_allclose(scores[sample.trainable_T], again, atol=1e-5)
    changed_names = {
        name for name, each in model.model.inner.state_dict().items() if not torch.equal(each, before[name])
    }
    tower = {name for name, each in model.model.inner.named_parameters() if not each.requires_grad}
    assert changed_names
    assert tower
    assert not changed_names & tower, "the tower is frozen, where nobody says otherwise"
    save_model(model, tmp_path / "saved")
    loader: Any = AutoModelForImageTextToText
    theirs, loading_info = loader.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(loading_info.values())
    vision.processor_of(tmp_path / "saved")
    assert vision.gap(sample, scores, [picture(1)], theirs.eval()) <= 1e-5


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen2.5-vl", "qwen3-vl"])
async def test_gradients_are_those_of_transformers_tower_included(
    vision_model: Make, picture: Make, shows: Make, family: str
) -> None:
    """Two answers to one prompt with two images, packed with the prompt in common."""
    vision = vision_model(family)
    images = [picture(1), picture(2, 24, 70)]
    model = load_model(vision.directory)
    client = LocalClient(model, num_slots=2, max_context=400)
    samples = [
        *trajectory_rows(await _play(client, [shows("Which?", *images)], 0), "task", 0, 0, 1.0),
        *trajectory_rows(await _play(client, [shows("Which?", *images)], 1), "task", 1, 0, 1.0),
    ]
    await client.close()
    rows = [
        WeightedRow(index=index, sample=each, weights_T=each.trainable_T.astype(float))
        for index, each in enumerate(samples)
    ]
    assert len({tuple(each.token_ids_T) for each in samples}) == 2
    model.model.train_vision()
    (batch,) = micro_batches(rows, 10_000, torch.device("cpu"))
    assert len(batch.tokens_N) < 1.5 * len(samples[0].token_ids_T), "the images are there once"
    logprobs_U_V = model.model.logits(batch.states(model.model)).log_softmax(-1)
    batch.of_tokens(logprobs_U_V.gather(1, batch.targets_U[:, None])[:, 0]).sum().backward()
    theirs = copy.deepcopy(vision.model).requires_grad_()
    for sample in samples:
        ids = sample.token_ids_T.tolist()
        places = np.flatnonzero(sample.trainable_T)
        logprobs_T_V = vision.logprobs_with_graph(ids, images, theirs)
        logprobs_T_V[places - 1, sample.token_ids_T[places]].sum().backward()
    expected = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    ours = {name: each.grad for name, each in model.model.inner.named_parameters() if each.grad is not None}
    assert ours.keys() == expected.keys()
    tower = {id(each) for each in model.model.tower()}
    assert any(id(each) in tower and each.grad is not None for each in model.model.inner.parameters())
    for name, grad in ours.items():
        scale = float(expected[name].abs().max())
        assert float((grad - expected[name]).abs().max()) <= 2e-4 * scale + 1e-6, name


async def test_the_prompt_is_the_one_that_the_processor_makes(
    vision: Any, picture: Make, shows: Make
) -> None:
    model = load_model(vision.directory)
    client = LocalClient(model, num_slots=1, max_context=400)
    prompt = client.renderer.render([shows("What is it?", picture(1), picture(2, 30, 90))])
    await client.close()
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is it?"}]
    text = vision.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    images = [[picture(1), picture(2, 30, 90)]]
    expected = vision.processor(text=[text], images=images, add_special_tokens=False)["input_ids"][0]
    mark = vision.patch_mark
    assert [mark if each >= PATCH_IDS_FROM else each for each in prompt] == list(expected)
    token = vision.processor.image_token
    plain, spelt = (client.renderer.render([shows(f"What is {each}?", picture(1))]) for each in ("it", token))
    assert [each for each in spelt if each >= PATCH_IDS_FROM] == [
        each for each in plain if each >= PATCH_IDS_FROM
    ]
    answer = {"role": "assistant", "content": token}
    with pytest.raises(ConfigError, match=r"1 images .* 2 marks"):
        client.renderer.render([shows("What is it?", picture(1)), answer, {"role": "user", "content": "So?"}])


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "qwen3-vl"])
@pytest.mark.parametrize(("kind", "rank"), [("frozen", 0), ("train", 0), ("frozen", 2), ("lora", 2)])
async def test_the_tower_learns_only_where_it_is_to(
    vision_model: Make, picture: Make, shows: Make, tmp_path: Path, family: str, kind: str, rank: int
) -> None:
    vision = vision_model(family)
    config = load_config(
        None, [f"model.path={vision.directory}", f"model.vision={kind}", f"lora.rank={rank}", "threads=1"]
    )
    (model,) = load_initial_models(config, tmp_path).values()
    client = LocalClient(model, num_slots=2, max_context=400)
    trajectory = await _play(client, [shows("What is it?", picture(1))])
    (sample,) = trajectory_rows(trajectory, "task", 0, 0, 1.0)
    assert vision.gap(sample, sample.logprobs_T, [picture(1)]) <= 1e-5
    tower = set(model.model.vision_modules())
    before = {name: each.clone() for name, each in model.model.state_dict_hf().items()}
    backend = TorchBackend(model.model, publish=client.publish, config=OptimizerConfig())
    for _ in range(2):  # an adapter's A learns once its B is not zero
        backend.update([sample], PolicyLoss(), 0.05)
    backend.publish_weights()
    after = model.model.state_dict_hf()
    changed_names = {name for name, each in after.items() if not torch.equal(each, before[name])}
    words = ("vision_tower", "multi_modal_projector", "vision_model", "connector", "visual")
    in_tower = {name for name in changed_names if any(word in name for word in words)}
    assert tower
    assert changed_names - in_tower
    assert bool(in_tower) == (kind != "frozen")
    save_model(model, tmp_path / "saved")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").eval()
    (scores,) = backend.score([sample])
    assert vision.gap(sample, scores, [picture(1)], theirs) <= 1e-5
    again = await client.score(sample.token_ids_T.tolist(), len(trajectory.steps[0].prompt_ids))
    await client.close()
    np.testing.assert_allclose(scores[sample.trainable_T], again, atol=1e-5)


ON_SERVERS = [
    "inference.engine=vllm",
    'inference.servers=["http://127.0.0.1:1/v1"]',
    "inference.lockstep=false",
    "algorithm.old_logprobs=trainer",
]


@pytest.mark.parametrize(
    ("assignments", "reason"),
    [
        (["model.vision=train"], r"'train'.*tiny.*frozen"),
        (["model.path=VISION", "model.vision=train", "lora.rank=2"], "'train' and `lora.rank` 2"),
        (["model.path=VISION", "model.vision=lora"], "'lora', but `lora.rank` is 0"),
        (["model.path=GEMMA", *ON_SERVERS], r"image.*engine"),
        (
            ["model.path=VISION", *ON_SERVERS, "lora.rank=2"],
            r"reads images.*rank 2.*`inference\.engine` is 'vllm'.*`lora\.rank`",
        ),
    ],
)
def test_what_a_tower_cannot_do_is_refused_at_start(
    vision_model: Make, tmp_path: Path, assignments: list[str], reason: str
) -> None:
    paths = {"VISION": vision_model("idefics3").directory, "GEMMA": vision_model("gemma3").directory}
    if len(assignments) == 1:
        create_model(
            tmp_path / "tiny", TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
        )
        assignments = [f"model.path={tmp_path / 'tiny'}", *assignments]
    for name, path in paths.items():
        assignments = [each.replace(name, str(path)) for each in assignments]
    config = load_config(None, assignments)
    with pytest.raises(ConfigError, match=reason):
        require_models(config)  # a dry run comes as far


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            r"Idefics3.* makes no grid .*`mrope_section`",
        ),
    ],
)
def test_a_family_that_would_not_be_exact_is_refused_by_name_at_start(
    vision_model: Make, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(vision_model("idefics3").directory, directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelDirectoryError, match=reason):
        load_model(directory)


async def test_an_image_that_is_seen_whole_is_never_read_in_part(
    vision_model: Make, picture: Make, shows: Make
) -> None:
    vision = vision_model("gemma3")
    client = LocalClient(load_model(vision.directory), num_slots=2, max_context=400)
    prompt = client.renderer.render([shows("What is it?", picture(1))])
    patches = [place for place, each in enumerate(prompt) if each >= PATCH_IDS_FROM]
    swapped = list(prompt)
    swapped[patches[3]], swapped[patches[4]] = prompt[patches[4]], prompt[patches[3]]
    for row in (prompt[: patches[3]], prompt[patches[3] :], swapped):
        with pytest.raises(ValueError, match=r"\b16\b"):
            await client.generate_ids([*row, 3], SamplingParams(max_tokens=2))
    # A row may end with the last token of one.
    whole = await client.generate_ids(prompt[: patches[-1] + 1], SamplingParams(max_tokens=2))
    again = await client.generate_ids(prompt[: patches[-1] + 1], SamplingParams(max_tokens=2))
    assert again.usage["cached_tokens"] == patches[-1], "what is known of an image had seen all of it"
    assert again.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    spelt = client.renderer.render([shows("What is <image_soft_token>?", picture(1))])
    assert vision.patch_mark not in spelt
    await client.close()


def test_gemma_3_with_pan_and_scan_is_refused_by_name(vision_model: Make, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(vision_model("gemma3").directory, directory)
    path = directory / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["do_pan_and_scan"] = True
    path.write_text(json.dumps(config))
    with pytest.raises(ModelDirectoryError, match="`do_pan_and_scan`"):
        load_model(directory)


def test_a_directory_whose_processor_is_missing_or_broken_is_refused(
    vision_model: Make, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(vision_model("idefics3").directory, directory)
    for name in ("processor_config.json", "preprocessor_config.json"):
        (directory / name).unlink(missing_ok=True)
    with pytest.raises(ModelDirectoryError, match="processor"):
        load_model(directory)


async def test_ids_that_are_no_tokens_of_a_known_image_are_refused_before_the_engine_sees_them(
    vision_model: Make, picture: Make, shows: Make
) -> None:
    client = LocalClient(load_model(vision_model("idefics3").directory), num_slots=2, max_context=400)
    prompt = client.renderer.render([shows("What is it?", picture(1))])
    last = max(prompt)
    for token in (last + 1, last + 4096, 2**63 + 7):
        with pytest.raises((ConfigError, ValueError), match=f"id {token}|in memory"):
            await client.generate_ids([*prompt, token], SamplingParams(max_tokens=2))
    output = await client.generate_ids(prompt, SamplingParams(max_tokens=2))
    assert len(output.completion_ids) == 2
    await client.close()


async def test_a_canary_s_images_are_part_of_its_checkpoint(
    vision_model: Make, picture: Make, shows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(vision_model("idefics3").directory)
    client = LocalClient(model, num_slots=2, max_context=400)
    trajectory = await _play(client, [shows("What is it?", picture(1)), shows("And this?", picture(2))])
    (sample,) = trajectory_rows(trajectory, "task", 0, 0, 1.0)
    backend = TorchBackend(model.model, publish=client.publish, config=OptimizerConfig())
    canary = Canary()
    await canary.check(backend, client, [sample])
    state = json.loads(json.dumps(canary.state()))
    monkeypatch.setattr(IMAGES, "_images", OrderedDict())
    with pytest.raises(ConfigError, match="not in memory"):
        await client.score(sample.token_ids_T.tolist(), len(sample.token_ids_T) - 1)
    resumed = Canary()
    resumed.restore(state)
    metrics = await resumed.check(backend, client, [])
    assert metrics["canary_gap"] <= 1e-5
    assert metrics["canary_moved"] == 0.0
    await client.close()


def test_model_info_says_that_a_directory_reads_images(vision_model: Make) -> None:
    directory = str(vision_model("idefics3").directory)
    printed = CliRunner().invoke(front_door, ["model", "info", directory], catch_exceptions=False)
    assert printed.exit_code == 0
    assert "text and images" in printed.output
    as_json = CliRunner().invoke(front_door, ["model", "info", directory, "--json"], catch_exceptions=False)
    facts = json.loads(as_json.stdout)
    assert facts["reads_images"] is True
    assert facts["vocabulary"] == load_model(Path(directory)).vocab_size


def test_without_pillow_a_vision_directory_is_refused_with_the_extra_to_install(
    vision_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = vision_model("idefics3").directory
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"`pillow` is not installed; .*'rllm\[vision\]'"):
        load_model(directory)
