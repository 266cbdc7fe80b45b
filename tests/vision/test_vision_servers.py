"""Policies that read images, sampled by model servers: the same tokens, of the same pictures."""

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image, ImageOps

from rllm.agents.conversation import ConversationAgent
from rllm.build.gateways import Address, FleetSettings, fleet_gateway
from rllm.errors import CanaryError, ConfigError
from rllm.inference.local.client import LocalClient
from rllm.inference.vllm_images import marked_prompt
from rllm.models.directory import load_model
from rllm.rendering.chat import ChatRenderer
from rllm.store.episodes import EpisodeStore
from rllm.tracking.jsonl import read_metrics
from rllm.trainer import AgentTrainer
from rllm.trainer.replay import replay
from rllm.types.images import PATCH_IDS_FROM, ImageFile
from rllm.types.messages import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from policy_server import PolicyServer

Make = Callable[..., Any]
TASKS = [{"task_id": f"picture-{number}", "number": number} for number in range(4)]


@pytest.fixture
def eyes(vision_model: Make) -> Path:
    return vision_model("idefics3").directory


@pytest.fixture
def servers(eyes: Path) -> Iterator[list[PolicyServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(PolicyServer(eyes)) for _ in range(2)]


@pytest.fixture
def train(eyes: Path, picture_env: Any, tmp_path: Path) -> Callable[..., AgentTrainer]:
    def make(name: str, servers: list[PolicyServer], **changes: Any) -> AgentTrainer:
        on_servers = {"engine": "vllm", "servers": [each.url for each in servers]} if servers else {}
        config: dict[str, Any] = {
            "seed": 5,
            "steps": 3,
            "threads": 1,
            "model": {"path": str(eyes)},
            "inference": {"num_slots": 8, "max_context": 400, "lockstep": False, **on_servers},
            "rollout": {"tasks_per_step": 2, "group_size": 3, "max_turns": 2, "max_tokens_per_turn": 4},
            "warm_start": {"steps": 0},
            "evaluation": {"num_tasks": 1, "every_steps": 0},
            "algorithm": {"old_logprobs": "trainer"},
            **changes,
        }
        return AgentTrainer(
            config=config,
            train_dataset=TASKS,
            val_dataset=TASKS[:1],
            agent_class=ConversationAgent,
            env_class=picture_env,
            output=tmp_path / name,
        )

    return make


def _rows(run: Path) -> list[Any]:
    with EpisodeStore.open(run / "store.sqlite", read_only=True) as store:
        return sorted(
            (step, episode.task_id, episode.rollout_idx, list(each.prompt_ids), each.response_ids)
            for step in range(3)
            for episode in store.episodes("train", step)
            for each in episode.trajectories[0].steps
        )


def test_servers_get_one_mark_for_each_image_and_read_what_the_row_has(
    vision: Any, picture: Make, shows: Make
) -> None:
    tokenizer = load_model(vision.directory).tokenizer
    reader = tokenizer.images
    assert reader is not None
    row = ChatRenderer(tokenizer).render([shows("Same?", picture(1), picture(2), picture(1)), shows("Yes?")])
    prompt = marked_prompt(row, reader)
    assert prompt.sent_ids.count(reader.mark_id) == len(prompt.images) == 3
    left = iter(prompt.images)
    expanded = [
        each
        for token in prompt.sent_ids
        for each in (reader.ids(next(left)) if token == reader.mark_id else [token])
    ]
    assert expanded == row
    assert prompt.read_ids == [reader.mark_id if token >= PATCH_IDS_FROM else token for token in row]
    last_patch = max(place for place, token in enumerate(row) if token >= PATCH_IDS_FROM)
    for other in ([*row, reader.mark_id], row[last_patch:], row[:last_patch]):
        with pytest.raises(ValueError, match=r"token"):
            marked_prompt(other, reader)


def test_servers_sample_what_the_built_in_engine_samples_of_a_policy_that_reads_images(
    train: Callable[..., AgentTrainer], servers: list[PolicyServer], tmp_path: Path
) -> None:
    train("local", []).train()
    train("servers", servers).train()
    assert _rows(tmp_path / "servers") == _rows(tmp_path / "local")
    assert all("/inference/v1/generate" in each.paths for each in servers)
    assert all(each.paths.count("/reset_encoder_cache") == len(each.versions) for each in servers)
    lines = [
        each for each in read_metrics(tmp_path / "servers" / "metrics.jsonl") if each["phase"] == "train"
    ]
    assert all(line["canary_gap"] < 1e-4 for line in lines)
    assert replay(train("servers", servers).run).is_identical


def test_answers_to_images_go_on_across_new_weights(
    train: Callable[..., AgentTrainer], servers: list[PolicyServer], tmp_path: Path
) -> None:
    changes = {"schedule": {"kind": "async", "max_staleness": 1}, "algorithm": {}}
    train("run", servers, **changes).train()
    assert len(_rows(tmp_path / "run")) == 3 * 6 * 2
    assert replay(train("run", servers, **changes).run).is_identical


@pytest.mark.parametrize("is_transparent", [False, True])
async def test_a_fleet_behind_one_address_answers_questions_about_images(
    is_transparent: bool,
    eyes: Path,
    servers: list[PolicyServer],
    picture: Make,
    shows: Make,
    tmp_path: Path,
) -> None:
    model = load_model(eyes)
    image = picture(1)
    if is_transparent:
        image.putalpha(Image.linear_gradient("L").resize(image.size).point(lambda alpha: alpha // 4))
        for server in servers:
            server.sees = _laid_on_white
    message = shows("What is it?", image)
    local = LocalClient(model, num_slots=4, max_context=400)
    ids = ChatRenderer(model.tokenizer).render([message])
    expected = await local.generate_ids(ids, SamplingParams(temperature=0.0, max_tokens=8))
    await local.close()
    settings = FleetSettings(servers=[each.url for each in servers], processed_logprobs=True)
    address = Address(token="token", ledger=tmp_path / "ledger")
    async with (
        fleet_gateway(address, eyes, settings) as gateway,
        gateway,
        aiohttp.ClientSession() as http,
    ):
        url = f"{gateway.url}/k/{gateway.token}/sessions/one/v1/chat/completions"
        body = {"messages": [message], "max_tokens": 8, "temperature": 0.0, "return_token_ids": True}
        async with http.post(url, json=body) as reply:
            assert reply.status == 200, await reply.text()
            (choice,) = (await reply.json())["choices"]
    assert choice["token_ids"] == expected.completion_ids


def _laid_on_white(image: ImageFile) -> ImageFile:
    """An image as vLLM opens it (`vllm.multimodal.image.convert_image_mode`)."""
    picture = Image.open(io.BytesIO(image.data)).convert("RGBA")
    picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG")
    return ImageFile(file.getvalue(), "image/png")


def _mirrored(image: ImageFile) -> ImageFile:
    file = io.BytesIO()
    ImageOps.mirror(Image.open(io.BytesIO(image.data))).save(file, "PNG")
    return ImageFile(file.getvalue(), image.media_type)


def _halved(image: ImageFile) -> ImageFile:
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(image.data))
    picture.crop((0, 0, picture.width // 4, picture.height)).save(file, "PNG")
    return ImageFile(file.getvalue(), image.media_type)


@pytest.mark.parametrize(
    ("change", "error", "mend"),
    [
        (lambda server: setattr(server, "takes_images", False), ConfigError, "--enable-scale-out"),
        (lambda server: setattr(server, "sees", _mirrored), CanaryError, "published weights"),
        (lambda server: setattr(server, "sees", _halved), ConfigError, "tokens of an image"),
    ],
    ids=["takes none", "sees another", "has other tokens for it"],
)
def test_a_server_that_does_not_see_what_the_trainer_sees_is_refused_before_the_first_episode(
    train: Callable[..., AgentTrainer],
    servers: list[PolicyServer],
    tmp_path: Path,
    change: Callable[[PolicyServer], None],
    error: type[Exception],
    mend: str,
) -> None:
    change(servers[1])
    with pytest.raises(error, match=rf"inference\.servers.*{servers[1].url} .*{mend}"):
        train("run", servers).train()
    assert not (tmp_path / "run" / "store.sqlite").exists()
