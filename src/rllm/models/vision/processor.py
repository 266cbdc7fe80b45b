"""A model's own processor: from an image to the ids that stand for it and the tensors of its pixels.

ImageFile ──pillow──► pixels ──AutoProcessor──► ids (marks become patch ids), pixel_values, grids, masks

A model that places an image's tokens in a grid has as many as its grid, so that its `AutoImageProcessor` is
enough: the whole processor reads films as well, and wants torchvision for those.

Gemma 3's processor writes empty lines around an image, which become one token with line ends beside them. So
they are written into the text before it becomes ids.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from rllm.errors import ConfigError, MissingExtraError, ModelDirectoryError
from rllm.models.vision.pillow import pillow_image, require_pillow
from rllm.rendering.images import IMAGES
from rllm.types.images import MAX_PATCHES, ImageFile, patch_ids

MAX_KEPT_BYTES = 512 << 20
"""Limit of the tensors that are kept; those not used for the longest go first."""
GRID = "image_grid_thw"
"""Times, lines and columns of an image's places."""
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

    _auto_class: ClassVar[str] = "AutoProcessor"
    _lacks: ClassVar[str] = "names no token for images"

    def __init__(
        self, directory: Path, config: Mapping[str, Any], *, trust_remote_code: bool = False
    ) -> None:
        """`config` is that of the model."""
        require_pillow()
        self._processor = _load(self._auto_class, directory, trust_remote_code=trust_remote_code)
        mark_id = self._mark_id(config)
        if type(mark_id) is not int:
            raise ModelDirectoryError(
                f"{directory}: {type(self._processor).__name__} {self._lacks}; the built-in engine cannot "
                "place them, so use an external engine."
            )
        self.mark_id: int = mark_id
        self.patch_mark_id: int = self._patch_mark_id()
        """The id that transformers knows each token of an image by."""
        self._lock = threading.Lock()
        self._cache: OrderedDict[int, ProcessedImage] = OrderedDict()
        self._num_bytes = 0

    def _mark_id(self, config: Mapping[str, Any]) -> Any:
        is_named = isinstance(getattr(self._processor, "image_token", None), str)
        return getattr(self._processor, "image_token_id", None) if is_named else None

    def _patch_mark_id(self) -> int:
        return self.mark_id

    def with_frames(self, text: str) -> str:
        """See `ImageReader`."""
        return text

    def _read(self, pixels: Any) -> tuple[list[int], Mapping[str, Tensor]]:
        """Ids with `patch_mark_id` for each token of the image, and the model's tensors."""
        output = self._processor(
            text=[self._processor.image_token],
            images=[pixels],
            return_tensors="pt",
            add_special_tokens=False,
        )
        tensors = {name: each for name, each in output.items() if name not in _OF_TEXT}
        return output["input_ids"][0].tolist(), tensors

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
        # Outside the lock: two threads may both process an image, and no image waits for another.
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
            ids, tensors = self._read(pixels)
        except (ValueError, RuntimeError, ArithmeticError, LookupError) as error:
            width, height = pixels.size
            raise ConfigError(
                f"An image of {width} x {height} pixels is refused by the model's processor: {error}"
            ) from error
        count = ids.count(self.patch_mark_id)
        if not 0 < count <= MAX_PATCHES:
            raise ConfigError(
                f"An image of {pixels.size[0]} x {pixels.size[1]} pixels is {count} tokens for this model; "
                f"it must be 1 to {MAX_PATCHES}. Scale it."
            )
        patches = iter(patch_ids(image.number, count))
        return ProcessedImage(
            ids=tuple(next(patches) if each == self.patch_mark_id else each for each in ids),
            num_patches=count,
            tensors=tensors,
        )


class FramedProcessor(VisionProcessor):
    """An `AutoProcessor` that writes a mark before and one behind the tokens of an image, and lines around
    those; the chat template prints the first mark alone."""

    _lacks = "writes no marks around an image, where config.json names some (`boi_token_index`)"

    def __init__(
        self, directory: Path, config: Mapping[str, Any], *, trust_remote_code: bool = False
    ) -> None:
        super().__init__(directory, config, trust_remote_code=trust_remote_code)
        if getattr(self._processor.image_processor, "do_pan_and_scan", None):
            raise ModelDirectoryError(
                f"{directory}: its image processor has `do_pan_and_scan`, which puts sentences and parts "
                "of an image around it; set it to false."
            )
        tokenizer, sequence = self._processor.tokenizer, self._processor.full_image_sequence
        self._before = sequence.partition(tokenizer.boi_token)[0]
        self._behind = sequence.rpartition(tokenizer.eoi_token)[2]

    def with_frames(self, text: str) -> str:
        mark = self._processor.image_token
        return text.replace(mark, f"{self._before}{mark}{self._behind}")

    def _mark_id(self, config: Mapping[str, Any]) -> Any:
        return super()._mark_id(config) if hasattr(self._processor, "full_image_sequence") else None

    def _patch_mark_id(self) -> int:
        return self._processor.tokenizer.image_token_id

    def _read(self, pixels: Any) -> tuple[list[int], Mapping[str, Tensor]]:
        ids, tensors = super()._read(pixels)
        end = len(ids) - ids[::-1].index(self._processor.tokenizer.eoi_token_id)
        return ids[ids.index(self.mark_id) : end], {"pixel_values": tensors["pixel_values"]}


class GridProcessor(VisionProcessor):
    """An `AutoImageProcessor` of a model that has as many tokens for an image as the image's grid has places,
    once `merge_size` by `merge_size` of them are one."""

    _auto_class = "AutoImageProcessor"
    _lacks = "makes no grid of an image, where config.json means one (`mrope_section`)"

    def sides(self, number: int) -> tuple[int, int]:
        """Lines and columns of the image's tokens."""
        _, height, width = self.of_number(number).tensors[GRID][0].tolist()
        return height // self._processor.merge_size, width // self._processor.merge_size

    def _mark_id(self, config: Mapping[str, Any]) -> Any:
        return config.get("image_token_id") if hasattr(self._processor, "merge_size") else None

    def _read(self, pixels: Any) -> tuple[list[int], Mapping[str, Tensor]]:
        output = self._processor(images=[pixels], return_tensors="pt")
        count = int(output[GRID].prod()) // self._processor.merge_size**2
        return [self.mark_id] * count, dict(output)


def _load(auto_class: str, directory: Path, *, trust_remote_code: bool) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", "train") from error
    try:
        return getattr(transformers, auto_class).from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except ImportError as error:  # transformers names the package and how to get it
        raise ModelDirectoryError(f"{directory} has an image processor of more packages: {error}") from error
    except Exception as error:  # they divide, index and assert as they please
        raise ModelDirectoryError(
            f"{directory} has no image processor that can be used: {type(error).__name__}: {error}"
        ) from error
