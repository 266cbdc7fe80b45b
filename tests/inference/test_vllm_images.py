"""Prompts that show images, as a server is sent them: one mark for each image, and its answer read back."""

import io
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from rllm.errors import ConfigError, InferenceError
from rllm.inference import vllm_images
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_http import VLLMServerFacts
from rllm.inference.vllm_images import NEEDS, complete_with_images, marked_prompt, shows_images
from rllm.rendering.images import IMAGES
from rllm.types.images import ImageFile, patch_ids
from rllm.types.messages import SamplingParams

MARK, BEGIN, END = 88, 90, 91


def _picture(color: str) -> ImageFile:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), color).save(file, "PNG")
    image = ImageFile(file.getvalue(), "image/png")
    IMAGES.add(image)
    return image


RED, BLUE = _picture("red"), _picture("blue")


class Reader:
    """Two tokens of an image, between two of words."""

    mark_id = patch_mark_id = MARK

    def ids(self, image: ImageFile) -> Sequence[int]:
        return [BEGIN, *patch_ids(image.number, 2), END]

    def with_frames(self, text: str) -> str:
        return text


READER = Reader()
FIRST, SECOND = list(READER.ids(RED)), list(READER.ids(BLUE))


@pytest.mark.parametrize(
    ("row", "sent", "images"),
    [
        ([5, 6], [5, 6], []),
        (FIRST, [MARK], [RED]),
        ([5, *FIRST, 6], [5, MARK, 6], [RED]),
        ([*FIRST, *SECOND, 7, *FIRST], [MARK, MARK, 7, MARK], [RED, BLUE, RED]),
    ],
)
def test_a_server_is_sent_a_mark_for_each_image(
    row: list[int], sent: list[int], images: list[ImageFile]
) -> None:
    prompt = marked_prompt(row, READER)
    assert (prompt.sent_ids, prompt.images) == (sent, images)
    assert prompt.read_ids == [each if each < 100 else MARK for each in row]
    assert shows_images(row) is bool(images)


@pytest.mark.parametrize(
    "row",
    [
        [5, MARK],
        [*FIRST, MARK],
        FIRST[1:],
        [6, *FIRST[1:]],
        FIRST[:2],
        [*FIRST[:2], 6, *FIRST[2:]],
        [BEGIN, *FIRST[1:3], *SECOND[1:]],
        [*FIRST, *SECOND[1:]],
    ],
)
def test_a_row_that_the_server_would_read_otherwise_is_refused(row: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        marked_prompt(row, READER)


def test_any_image_may_stand_behind_another_without_words_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its number may be the first that there is."""
    reader, tokens = Reader(), patch_ids(0, 2)
    monkeypatch.setattr(reader, "ids", lambda image: tokens)
    monkeypatch.setattr(vllm_images, "IMAGES", SimpleNamespace(get=lambda number: (RED, BLUE)[number]))
    prompt = marked_prompt(tokens * 2, reader)
    assert (prompt.sent_ids, prompt.read_ids, prompt.images) == ([MARK] * 2, [MARK] * 4, [RED] * 2)
    assert shows_images(tokens[:1])


class Http:
    """A server that answers with `chunks`."""

    base_url, root = "http://s/v1", "http://s"

    def __init__(self, *chunks: dict[str, Any]) -> None:
        self.chunks = chunks
        self.request: Mapping[str, Any] = {}

    async def complete(self, body: Mapping[str, Any], path: str, needs: str) -> AsyncIterator[dict[str, Any]]:
        assert (path, needs) == ("http://s/inference/v1/generate", NEEDS)
        self.request = body
        for chunk in self.chunks:
            yield chunk

    async def facts(self, model: str) -> VLLMServerFacts:
        return VLLMServerFacts(model="policy", max_context=64)

    async def close(self) -> None: ...


ROW = [5, *FIRST, 6]
READ = [5, BEGIN, MARK, MARK, END, 6]
BODY = {"model": "policy", "prompt": ROW, "temperature": 0.5, "seed": 3, "return_tokens_as_token_ids": True}


async def _completions(http: Http, **fields: Any) -> list[dict[str, Any]]:
    return [each async for each in complete_with_images(http, BODY | fields, READER)]  # type: ignore[arg-type]


async def test_the_answer_is_a_completion_of_the_row_that_the_caller_has() -> None:
    tops = [{"token_id": 7, "logprob": -0.5}, {"token_id": 8, "logprob": -2.0}]
    content = [{"logprob": -0.5, "top_logprobs": tops}, {"logprob": -1.0, "top_logprobs": []}]
    scores = [None, *({str(each): {"logprob": -float(place)}} for place, each in enumerate(READ[1:], 1))]
    http = Http(
        {
            "request_id": "r",
            "prompt_token_ids": READ,
            "prompt_logprobs": scores,
            "choices": [{"token_ids": [7, 9], "logprobs": {"content": content}, "finish_reason": "length"}],
        },
        {"choices": [{"token_ids": []}], "usage": {"prompt_tokens": 6}},
        {"id": "own"},
    )
    first, second, third = await _completions(http)
    (choice,) = first["choices"]
    assert first["id"] == "r"
    assert choice["prompt_token_ids"] == ROW
    assert (choice["token_ids"], choice["finish_reason"]) == ([7, 9], "length")
    assert choice["logprobs"] == {
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -2.0}, {}],
    }
    assert choice["prompt_logprobs"] == [
        None,
        *({str(each): {"logprob": -float(place)}} for place, each in enumerate(ROW[1:], 1)),
    ]
    assert second["choices"] == [{"token_ids": [], "logprobs": {"token_logprobs": [], "top_logprobs": []}}]
    assert second["usage"] == {"prompt_tokens": 6}
    assert third == {"id": "own", "choices": []}


async def test_a_server_is_asked_for_ids_with_the_fields_of_a_completion() -> None:
    http = Http()
    assert await _completions(http) == []
    (part,) = http.request["content_parts"]
    assert part["type"] == "image_url"
    assert part["url"].startswith("data:image/png;base64,")
    assert {**http.request, "content_parts": ()} == {
        "model": "policy",
        "token_ids": [5, MARK, 6],
        "content_parts": (),
        "sampling_params": {"temperature": 0.5, "seed": 3},
        "return_token_ids": True,
        "stream": False,
    }
    options = {"include_usage": True}
    await _completions(http, stream=True, stream_options=options)
    assert (http.request["stream"], http.request["stream_options"]) == (True, options)


async def test_a_server_that_makes_other_tokens_of_an_image_is_refused() -> None:
    with pytest.raises(InferenceError, match="7 ids"):
        await _completions(Http({"prompt_token_ids": [*READ, 6], "choices": []}))


async def test_a_client_sends_what_shows_images_where_images_are_taken(model_dir: Path) -> None:
    logprobs = {"content": [{"logprob": -0.5, "top_logprobs": []}]}
    choice = {"token_ids": [65], "logprobs": logprobs, "finish_reason": "length"}
    http: Any = Http({"prompt_token_ids": READ, "choices": [choice]})
    client = VLLMClient("http://s/v1", model_dir)
    client.tokenizer.images = READER
    client._http = client._checks = http
    one = SamplingParams(max_tokens=1)
    output = await client.generate_ids(ROW, one)
    assert (output.prompt_ids, output.completion_ids, output.logprobs) == (ROW, [65], [-0.5])
    assert http.request["token_ids"] == [5, MARK, 6]
    client.facts.engine = "sglang"
    with pytest.raises(ConfigError, match="vLLM"):
        await client.generate_ids(ROW, one)
