"""A vision-language model of transformers behind the interface of `rllm.models.decoder`.

    tokens_N: words, and patch ids ──► the word's vector, or the tower's for that patch of that image
                                       └──► the model's own decoder, with the attention that was handed in

While the tower stands still each image goes through it by itself, so that its vectors depend on nothing
else in the batch, and they are kept. Where it learns, images of one shape go through it together.
"""

import inspect
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from rllm.errors import ArchitectureError, ModelDirectoryError
from rllm.models.decoder import Attend
from rllm.models.huggingface import HuggingFaceDecoder
from rllm.models.vision.grids import ImageGrids
from rllm.models.vision.pillow import probe_image
from rllm.models.vision.processor import GridProcessor, VisionProcessor
from rllm.rendering.images import IMAGES
from rllm.types.images import MAX_PATCHES, PATCH_IDS_FROM, PLACE_BITS

MAX_KEPT_BYTES = 512 << 20
"""Limit of the vectors of images that are kept."""
MAX_IMAGES_TOGETHER = 64
"""Images that a tower which learns computes at once."""


class VisionLanguageDecoder(HuggingFaceDecoder):
    """Wraps `AutoModelForImageTextToText`."""

    auto_class = AutoModelForImageTextToText

    def __init__(
        self,
        directory: Path,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        *,
        images: VisionProcessor,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(directory, weights, dtype, trust_remote_code=trust_remote_code)
        self.images = images
        if isinstance(images, GridProcessor):
            self.image_grids = ImageGrids(images.sides)
        self._cache = _KeptFeatures()
        for parameter in self.tower():
            parameter.requires_grad_(False)

    def attention_names(self, config: PreTrainedConfig, name: str) -> Any:
        """Only the decoder's attention is taken over: the tower sees each image as a whole."""
        text = config.get_text_config()
        return {key: name for key in config.sub_configs if getattr(config, key) is text}

    def train_vision(self) -> None:
        """Have the tower learn, which stands still otherwise."""
        for parameter in self.tower():
            parameter.requires_grad_(True)

    def vision_modules(self) -> list[str]:
        """Full names of the layers of the tower."""
        tower = {id(each) for each in self.tower()}
        return [
            name
            for name, module in self.inner.named_modules()
            if any(id(each) in tower for each in module.parameters(recurse=False))
        ]

    def tower(self) -> list[nn.Parameter]:
        """All parameters that make vectors of pixels."""
        own = {id(each) for each in self._text_model().parameters()}
        own |= {id(each) for each in self.inner.get_output_embeddings().parameters()}
        return [each for each in self.inner.parameters() if id(each) not in own]

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, keep_M: Tensor | None = None
    ) -> Tensor:
        grids = self.image_grids
        vectors_N_D, extra = self._vectors(tokens_N)
        output = self._text_model()(
            inputs_embeds=vectors_N_D.unsqueeze(0),
            position_ids=grids.positions(tokens_N, positions_N) if grids else positions_N.unsqueeze(0),
            use_cache=False,
            rllm_attend=attend,
            **extra,
        )
        hidden_N_D = output.last_hidden_state[0]
        return hidden_N_D if keep_M is None else hidden_N_D.index_select(0, keep_M)

    @torch.no_grad()
    def attention_sizes(self) -> tuple[int, int, int]:
        """See `HuggingFaceDecoder`; measured with an image in the row as well."""
        super().attention_sizes()
        if self.by_row:  # images are read on their way to attention that is handed in
            raise ArchitectureError(self.by_row)
        image = probe_image()
        IMAGES.add(image)
        pixels = self.images.of_number(image.number)
        row = [1, 2, 3, *pixels.ids, 4, 5, 6]
        device = next(self.inner.parameters()).device
        ids_N = torch.tensor(row, device=device)
        is_patch_1_N = (ids_N >= PATCH_IDS_FROM).unsqueeze(0)
        words_1_N = ids_N.unsqueeze(0).masked_fill(is_patch_1_N, self.images.patch_mark_id)
        tensors = {name: each.to(device) for name, each in pixels.tensors.items()}
        kinds_1_N = is_patch_1_N.int()

        def own_pass(**kinds: Tensor) -> Any:
            return self.inner(
                input_ids=words_1_N, use_cache=False, mm_token_type_ids=kinds_1_N, **kinds, **tensors
            )

        if "token_type_ids" not in inspect.signature(self.inner.forward).parameters:
            return self._measured_sizes(ids_N, own_pass)
        # Where it is given which tokens are of an image, such a model lets them see each other.
        with_kinds = self._without_us(partial(own_pass, token_type_ids=kinds_1_N))
        self.sees_images_whole = not torch.equal(with_kinds.logits, self._without_us(own_pass).logits)
        return self._measured_sizes(ids_N, lambda: with_kinds)

    def _text_model(self) -> Any:
        return self.inner.get_decoder()

    def _vectors(self, tokens_N: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """[N, D] what the decoder reads, and what some of its first layers are to add to that."""
        embed = self.inner.get_input_embeddings()
        is_patch_N = tokens_N >= PATCH_IDS_FROM
        places_M = is_patch_N.nonzero()[:, 0]
        if not len(places_M):
            return embed(tokens_N), {}
        patches_M = tokens_N[places_M] - PATCH_IDS_FROM
        numbers_I, image_M = torch.unique(patches_M >> PLACE_BITS, return_inverse=True)
        features = self._features(numbers_I.tolist())
        firsts_I = np.cumsum([0, *map(len, features[:-1])])
        rows_M = torch.from_numpy(firsts_I).to(tokens_N.device)[image_M] + patches_M % MAX_PATCHES
        # Ids of patches lie beyond the table of embeddings.
        words_N_D = embed(tokens_N.masked_fill(is_patch_N, 0))
        first_M_D, *deeper = torch.cat(features).to(words_N_D.dtype)[rows_M].split(words_N_D.shape[1], dim=1)
        vectors_N_D = words_N_D.index_copy(0, places_M, first_M_D)
        if not deeper:
            return vectors_N_D, {}
        return vectors_N_D, {
            "visual_pos_masks": is_patch_N.unsqueeze(0),
            "deepstack_visual_embeds": deeper,
        }

    def _features(self, numbers: Sequence[int]) -> list[Tensor]:
        """[tokens of the image, D] of each image; of a model that has more for its first layers, those behind
        it."""
        tower = self.tower()
        if torch.is_grad_enabled() and any(each.requires_grad for each in tower):
            return self._learning_features(numbers)
        state = sum(each._version for each in tower)
        return [self._kept_features(number, state) for number in numbers]

    def _kept_features(self, number: int, state: int) -> Tensor:
        features = self._cache.get(number, state)
        if features is None:
            # The trainer reads kept vectors, too, and a backward pass takes no tensor of inference mode.
            with torch.inference_mode(mode=False), torch.no_grad():
                (features,) = self._compute_features([number])
            self._cache.put(number, state, features)
        return features

    def _learning_features(self, numbers: Sequence[int]) -> list[Tensor]:
        """Images of one shape go through the tower together: nothing of them is kept."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number in numbers:
            tensors = self.images.of_number(number).tensors
            key = tuple((name, tuple(each.shape)) for name, each in tensors.items())
            groups.setdefault(key, []).append(number)
        features: dict[int, Tensor] = {}
        for group in groups.values():
            for first in range(0, len(group), MAX_IMAGES_TOGETHER):
                part = group[first : first + MAX_IMAGES_TOGETHER]
                features.update(zip(part, self._compute_features(part), strict=True))
        return [features[number] for number in numbers]

    def _compute_features(self, numbers: Sequence[int]) -> tuple[Tensor, ...]:
        """Vectors of images whose tensors have one shape; every processor stacks along the first axis."""
        images = [self.images.of_number(number) for number in numbers]
        device = next(self.inner.parameters()).device
        tensors = {
            name: torch.cat([each.tensors[name] for each in images]).to(device) for name in images[0].tensors
        }
        output = self.inner.get_image_features(**tensors)
        # DeepStack (Meng et al. 2024, arXiv:2406.04334) has vectors for several layers of the decoder.
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        features = torch.cat([_in_one(each) for each in levels], dim=1)
        if len(features) != sum(each.num_patches for each in images):
            raise ModelDirectoryError(
                f"{type(self.inner).__name__} makes {len(features)} vectors of {len(images)} images, where "
                f"its processor has {images[0].num_patches} tokens for each; take both from where the model "
                "was published."
            )
        return features.split([each.num_patches for each in images])


def _in_one(parts: Tensor | Sequence[Tensor]) -> Tensor:
    """[tokens of all images, D]"""
    return parts.flatten(0, -2) if isinstance(parts, Tensor) else torch.cat(tuple(parts))


class _KeptFeatures:
    """Vectors of images, as long as the weights that made them are as they were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = -1
        self._features: OrderedDict[int, Tensor] = OrderedDict()
        self._num_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()  # of a model with weights of its own, or with an adapter

    def get(self, number: int, state: int) -> Tensor | None:
        with self._lock:
            if state != self._state:
                self._features.clear()
                self._state, self._num_bytes = state, 0
            features = self._features.get(number)
            if features is not None:
                self._features.move_to_end(number)
            return features

    def put(self, number: int, state: int, features: Tensor) -> None:
        with self._lock:
            # Weights may have changed, or another thread may have put the image, since `get`.
            if state != self._state or number in self._features:
                return
            self._features[number] = features
            self._num_bytes += features.nbytes
            while self._num_bytes > MAX_KEPT_BYTES and len(self._features) > 1:
                _, oldest = self._features.popitem(last=False)
                self._num_bytes -= oldest.nbytes
