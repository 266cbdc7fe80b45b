"""A model's own processor: from an image to the ids that stand for it and the tensors of its pixels.

ImageFile ──pillow──► pixels ──AutoProcessor──► ids (marks become patch ids), pixel_values, grids, masks
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from rllm.errors import ConfigError, MissingExtraError, ModelDirectoryError
from rllm.models.vision.pillow import pillow_image, require_pillow
from rllm.rendering.images import IMAGES
from rllm.types.images import MAX_PATCHES, ImageFile, patch_ids

MAX_KEPT_BYTES = 512 << 20
"""Limit of the tensors that are kept; those not used for the longest go first."""
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    ids: tuple[int, ...]
    num_patches: int
    tensors: Mapping[str, Tensor]
    """By the names under which the model takes them, such as `pixel_values`."""

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors.values())


class VisionProcessor:
    """An `AutoProcessor`, one image at a time, so that what an image becomes depends on it alone."""

    def __init__(self, directory: Path, *, trust_remote_code: bool = False) -> None:
        require_pillow()
        try:
            from transformers import AutoProcessor
        except ImportError as error:
            raise MissingExtraError("transformers", "train") from error
        try:
            self._processor: Any = AutoProcessor.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except ImportError as error:  # transformers names the package and how to get it
            raise ModelDirectoryError(
                f"{directory} has an image processor of more packages: {error}"
            ) from error
        except Exception as error:  # they divide, index and assert as they please
            raise ModelDirectoryError(
                f"{directory} has no image processor that can be used: {type(error).__name__}: {error}"
            ) from error
        self._mark = getattr(self._processor, "image_token", None)
        mark_id = getattr(self._processor, "image_token_id", None)
        if not isinstance(self._mark, str) or type(mark_id) is not int:
            raise ModelDirectoryError(
                f"{directory}: {type(self._processor).__name__} names no token for images; the built-in "
                "engine cannot place them, so use an external engine."
            )
        self.mark_id: int = mark_id
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, ProcessedImage] = OrderedDict()
        self._num_bytes = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it holds no weights: models that share theirs share it

    def ids(self, image: ImageFile) -> tuple[int, ...]:
        """See `ImageReader`."""
        return self._of_image(image).ids

    def of_number(self, number: int) -> ProcessedImage:
        """Raises ConfigError for an image that is not in memory."""
        with self._lock:
            entry = self._cache.get(number)
            if entry is not None:
                self._cache.move_to_end(number)
                return entry
        return self._of_image(IMAGES.get(number))

    def _of_image(self, image: ImageFile) -> ProcessedImage:
        with self._lock:
            if (entry := self._cache.get(image.number)) is not None:
                return entry
        entry = self._process(image)
        with self._lock:
            if image.number not in self._cache:
                self._cache[image.number] = entry
                self._num_bytes += entry.num_bytes
            while self._num_bytes > MAX_KEPT_BYTES and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
        return entry

    def _process(self, image: ImageFile) -> ProcessedImage:
        pixels = pillow_image(image)
        try:
            output = self._processor(
                text=[self._mark], images=[pixels], return_tensors="pt", add_special_tokens=False
            )
        except (ValueError, RuntimeError, ArithmeticError, LookupError) as error:
            width, height = pixels.size
            raise ConfigError(
                f"An image of {width} x {height} pixels is refused by the model's processor: {error}"
            ) from error
        ids: list[int] = output["input_ids"][0].tolist()
        count = ids.count(self.mark_id)
        if not 0 < count <= MAX_PATCHES:
            raise ConfigError(
                f"An image of {pixels.size[0]} x {pixels.size[1]} pixels is {count} tokens for this model; "
                f"it must be 1 to {MAX_PATCHES}. Scale it."
            )
        patches = iter(patch_ids(image.number, count))
        return ProcessedImage(
            ids=tuple(next(patches) if each == self.mark_id else each for each in ids),
            num_patches=count,
            tensors={name: each for name, each in output.items() if name not in _OF_TEXT},
        )
