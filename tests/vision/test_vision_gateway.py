"""Images through the gateway: three protocols, one prompt; refused by value and limit; kept, trained on."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rllm.config.optimizer import OptimizerConfig
from rllm.engine.captured import step_of
from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.local.client import LocalClient
from rllm.models.builtin import TinyModel, create_model
from rllm.models.directory import load_model
from rllm.rendering.images import MAX_PER_MESSAGE
from rllm.store.episodes import EpisodeStore
from rllm.trainer.backends.torch import TorchBackend
from rllm.trainer.samples import trajectory_rows
from rllm.types import Episode, Trajectory
from rllm.types.images import image_numbers

Make = Callable[..., Any]
ASK = {"model": "m", "max_tokens": 5}


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Callable[[Path], Any]]:
    """Starts gateways on models of this machine."""
    gateways: list[tuple[Gateway, LocalClient]] = []

    async def start(directory: Path) -> Gateway:
        client = LocalClient(load_model(directory), num_slots=4, max_context=400)
        gateway = Gateway(LocalPolicy(client, "m"), tmp_path / f"ledger-{len(gateways)}", grace_s=1.0)
        await gateway.start()
        gateways.append((gateway, client))
        return gateway

    yield start
    for gateway, client in gateways:
        await gateway.close()
        await client.close()


async def _post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as reply:
        return reply.status, await reply.json()


async def test_images_of_three_protocols_are_one_prompt_and_end_in_rows_that_transformers_scores_alike(
    serve: Any, vision_model: Make, picture: Make, data_url: Make, tmp_path: Path
) -> None:
    vision = vision_model("idefics3")
    gateway: Gateway = await serve(vision.directory)
    url, other = data_url(picture(1)), data_url(picture(2, 40, 70))
    text = {"type": "text", "text": "What is it?"}
    chat = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = {"role": "user", "content": [{"type": "image", "source": source}, text]}
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": text["text"]}]
    ids = []
    for name, route, body in (
        ("chat", "chat/completions", {"messages": [chat]}),
        ("messages", "messages", {"messages": [messages]}),
        ("responses", "responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 5}),
    ):
        session = gateway.open_session(name)
        status, reply = await _post(f"{session.base_url}/{route}", {**ASK, **body})
        assert status == 200, reply
        ids.append(session.traces()[0].prompt_ids)
    assert ids[0] == ids[1] == ids[2]
    assert image_numbers(ids[0])

    session = gateway.open_session("turns")
    conversation: list[dict[str, Any]] = []
    for address in (url, other):
        conversation.append(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}, text]}
        )
        status, reply = await _post(f"{session.base_url}/chat/completions", {**ASK, "messages": conversation})
        assert status == 200, reply
        conversation.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    first, second = session.traces()
    kept = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(kept)] == kept
    assert second.messages == conversation[:-1]

    trajectory = Trajectory(steps=[step_of(each) for each in (first, second)])
    with EpisodeStore.open(tmp_path / "store.sqlite") as store:
        store.save_episodes("train", 1, [Episode(task_id="a", trajectories=[trajectory])])
        (episode,) = store.episodes()
    assert episode.trajectories[0].steps[1].chat_completions[:-1] == second.messages
    (sample,) = trajectory_rows(episode.trajectories[0], "task", 0, 0, 1.0)
    images = [picture(1), picture(2, 40, 70)]
    assert vision.gap(sample, sample.logprobs_T, images) <= 1e-5
    backend = TorchBackend(
        load_model(vision.directory).model, publish=lambda version: None, config=OptimizerConfig()
    )
    (scores,) = backend.score([sample])
    assert vision.gap(sample, scores, images) <= 1e-5


async def test_what_is_no_image_within_the_limits_is_answered_with_400_and_the_limit(
    serve: Any, vision_model: Make, picture: Make, data_url: Make, tmp_path: Path
) -> None:
    gateway: Gateway = await serve(vision_model("idefics3").directory)
    url = data_url(picture(1))
    jpeg = "data:image/jpeg;base64," + url.partition(",")[2]
    head, _, body = url.partition(",")
    broken = f"{head},{body[: len(body) // 8 * 4]}"
    for parts, reason in (
        ([_image("http://169.254.169.254/latest")], "http://169.254.169.254/latest, and addresses are not"),
        ([_image("file:///etc/passwd")], "file:///etc/passwd, and addresses are not fetched"),
        ([_image(jpeg)], "says that it is image/jpeg, but its bytes are image/png"),
        ([_image(broken)], "cannot be decoded"),
        ([_image(url)] * (MAX_PER_MESSAGE + 1), f"has {MAX_PER_MESSAGE + 1} images; at most"),
        (
            [{"type": "video_url", "video_url": {"url": "x"}}],
            "parts of type video_url; this model reads text and images",
        ),
    ):
        request = {**ASK, "messages": [{"role": "user", "content": parts}]}
        status, reply = await _post(f"{gateway.base_url}/chat/completions", request)
        assert (status, reason in reply["error"]["message"]) == (400, True), reply
        assert len(reply["error"]["message"]) < 500, "an error does not repeat the image"
    create_model(
        tmp_path / "tiny", TinyModel(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
    )
    text_gateway: Gateway = await serve(tmp_path / "tiny")
    request = {**ASK, "messages": [{"role": "user", "content": [_image(url)]}]}
    status, reply = await _post(f"{text_gateway.base_url}/chat/completions", request)
    assert status == 400
    assert "type image_url" in reply["error"]["message"]


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
