"""Prompts that show images, to a vLLM server that takes them as ids.

    row with an id for each token of an image ──► one mark for each image, and the images beside
                                                     └─POST /inference/v1/generate─► ids, log-probabilities
    chunk, as /v1/completions has it  ◄── the ids that the server read have to be those of the row ──┘

The server is sent the pixels that the trainer sees, makes its own tensors of them, and puts as many marks in
the place of an image as it has tokens. That these are those of the trainer's processor is checked with every
answer; that it sees the same in them is the canary's to say.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rllm.errors import InferenceError
from rllm.inference.vllm_http import VLLMHttp
from rllm.models.vision.pillow import opaque_image
from rllm.rendering.images import IMAGES, ImageReader, as_data_url
from rllm.types.images import PATCH_IDS_FROM, ImageFile, image_numbers

NEEDS = "vLLM 0.32 or newer, and `--enable-scale-out`"
_SAMPLING = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens"),
    *("prompt_logprobs", "structured_outputs"),
)
"""Fields of a completion that are fields of `sampling_params` here."""


@dataclass(frozen=True, slots=True)
class MarkedPrompt:
    """A row as a server takes it."""

    sent_ids: list[int]
    """With one mark for each image."""
    read_ids: list[int]
    """With a mark for each token of an image: what the server makes of them."""
    images: list[ImageFile]


def shows_images(ids: Sequence[int]) -> bool:
    return max(ids) >= PATCH_IDS_FROM


def marked_prompt(row: Sequence[int], reader: ImageReader) -> MarkedPrompt:
    """Raises ValueError for a row that the server would read otherwise: with a part of an image, or with a
    mark that stands for none, as a policy may sample it."""
    sent_ids: list[int] = []
    images: list[ImageFile] = []
    end = 0
    for place, token in enumerate(row):
        if token < PATCH_IDS_FROM or place < end:
            continue
        image = IMAGES.get(image_numbers([token])[0])
        ids = list(reader.ids(image))  # with what the processor puts around the tokens of the picture
        begin = place - next(index for index, each in enumerate(ids) if each >= PATCH_IDS_FROM)
        if begin < end or list(row[begin : begin + len(ids)]) != ids:
            raise ValueError(f"The prompt has a part of an image at token {place}; servers take whole ones.")
        sent_ids += [*row[end:begin], reader.mark_id]
        images.append(image)
        end = begin + len(ids)
    sent_ids += row[end:]
    num_marks = sent_ids.count(reader.mark_id)
    if num_marks != len(images):
        raise ValueError(
            f"The prompt has {len(images)} images and {num_marks} marks that stand for one (token "
            f"{reader.mark_id}); a server would look for an image at each of them."
        )
    read_ids = [reader.mark_id if each >= PATCH_IDS_FROM else each for each in row]
    return MarkedPrompt(sent_ids=sent_ids, read_ids=read_ids, images=images)


async def complete_with_images(
    http: VLLMHttp, body: Mapping[str, Any], reader: ImageReader
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of the completion that `body` asks for, whose prompt shows images.

    Raises ConfigError for a server that takes no images with ids, and InferenceError for one that makes other
    tokens of them.
    """
    prompt = marked_prompt(body["prompt"], reader)
    request = {
        "model": body["model"],
        "token_ids": prompt.sent_ids,
        "content_parts": [
            {"type": "image_url", "url": as_data_url(opaque_image(each))} for each in prompt.images
        ],
        "sampling_params": {name: body[name] for name in _SAMPLING if name in body},
        "return_token_ids": True,
        "stream": body.get("stream", False),
    }
    if "stream_options" in body:
        request["stream_options"] = body["stream_options"]
    async with aclosing(http.complete(request, f"{http.root}/inference/v1/generate", NEEDS)) as chunks:
        async for chunk in chunks:
            their_ids = chunk.get("prompt_token_ids")
            if their_ids is not None and their_ids != prompt.read_ids:
                raise InferenceError(
                    f"The server at {http.base_url} read a prompt of {len(their_ids)} ids where the model's "
                    f"own processor makes {len(prompt.read_ids)} others: it makes other tokens of an image. "
                    "Let it serve the model that is trained, with the processor of its directory."
                )
            yield _as_completion(chunk, body["prompt"], prompt)


def _as_completion(chunk: Mapping[str, Any], row: Sequence[int], prompt: MarkedPrompt) -> dict[str, Any]:
    choices = [dict(each) for each in chunk.get("choices") or ()]
    for choice in choices:
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        choice["logprobs"] = {
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [
                {f"token_id:{top['token_id']}": top["logprob"] for top in each["top_logprobs"]}
                for each in tokens
            ],
        }
        if chunk.get("prompt_token_ids") is not None:  # which are those that the row stands for
            choice["prompt_token_ids"] = list(row)
        if (scores := chunk.get("prompt_logprobs")) is not None:
            choice["prompt_logprobs"] = [
                each and {str(mine): each[str(theirs)]}
                for each, mine, theirs in zip(scores, row, prompt.read_ids, strict=True)
            ]
    name = {"id": chunk["request_id"]} if "request_id" in chunk else {}
    return {**chunk, **name, "choices": choices}
