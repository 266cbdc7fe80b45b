"""A model directory in Hugging Face format ⇄ a model in memory.

`load_model` reads config, weights and tokenizer of any causal language model. Dense Llama-like families run
on the built-in decoder; every other architecture runs on transformers' own code through the same interface.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rllm.errors import ArchitectureError, ConfigError, ModelDirectoryError
from rllm.files.atomic import MANIFEST, write_directory_atomic
from rllm.models.decoder import Attend, Decoder, DecoderShape
from rllm.models.devices import require_device
from rllm.models.foreign import json_object, read_config, require_no_code
from rllm.models.tokenizer import HuggingFaceTokenizer
from rllm.models.unused_rows import mask_unused_rows
from rllm.models.vision.grids import ImageGrids
from rllm.rendering.chat import ChatRenderer
from rllm.types.chat_forms import OWN_FORM, ChatForm

if TYPE_CHECKING:
    from rllm.models.vision.processor import VisionProcessor

INDEX = "model.safetensors.index.json"


class CausalModel(Protocol):
    """A causal language model whose attention is handed in; see `rllm.models.decoder`."""

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, keep_M: Tensor | None = None
    ) -> Tensor:
        """`positions_N` are places of tokens in their rows, with the shifts of `image_grids` where it has
        some."""
        ...

    def logits(self, hidden_N_D: Tensor) -> Tensor: ...
    @property
    def output_weight(self) -> Tensor | None:
        """[V, D] the matrix that `logits` multiplies states with, where it does nothing else."""
        ...

    def layers(self) -> list[torch.nn.Module]: ...
    def look_up_parameters(self) -> None: ...
    def recompute_layers(self) -> None: ...
    def state_dict_hf(self) -> dict[str, Tensor]: ...
    def attention_sizes(self) -> tuple[int, int, int]: ...
    @property
    def by_row(self) -> str:
        """The reason why it computes row by row and keeps states itself; else empty."""
        ...

    @property
    def has_plain_attention(self) -> bool:
        """Whether a kernel that knows softmax(q·k)·v alone, in a window or not, computes its attention."""
        ...

    @property
    def is_split(self) -> bool:
        """Whether other processes have the rest of each layer."""
        ...

    @property
    def image_grids(self) -> ImageGrids | None:
        """The grids of images, for a model that places the tokens of one by line and column."""
        ...

    @property
    def sees_images_whole(self) -> bool:
        """Whether each token of an image sees all others of it, so that no pass may divide one."""
        ...

    @property
    def max_positions(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Logits of a token."""
        ...


@dataclass(kw_only=True, slots=True)
class LoadedModel:
    """Everything that sampling and training need of a model directory."""

    model: Any
    """A `CausalModel` that is also a `torch.nn.Module`."""
    tokenizer: HuggingFaceTokenizer
    config: dict[str, Any]
    directory: Path
    end_token_ids: tuple[int, ...]
    max_positions: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    base: "LoadedModel | None" = None
    """The model without its adapter, of one that has an adapter; the two share all other weights."""
    max_thinking_tokens: int = 0
    """Tokens after which the built-in engine closes a thought; 0 lets it go on."""
    trust_remote_code: bool = False
    """Whether Python of the directory was allowed to run; whoever loads it again asks for the same."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows; those of an image are beyond."""
        size = self.config.get("vocab_size")
        return size if isinstance(size, int) else self.model.vocab_size

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def template_is_incremental(self) -> bool:
        """Whether its chat template only appends, so that a conversation is one token row."""
        return ChatRenderer(self.tokenizer).incremental


def load_model(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    form: ChatForm = OWN_FORM,
) -> LoadedModel:
    """`trust_remote_code`: whether Python that the directory brings along may run, where transformers has
    none of its own for the model. `form`: of conversations, see `HuggingFaceTokenizer`.

    Raises ModelDirectoryError naming the missing or broken file, ConfigError for a device that is not there.
    """
    require_device(device)
    config = read_config(directory)
    try:
        shape = DecoderShape.from_config(config)
    except ModelDirectoryError as error:
        raise ModelDirectoryError(f"{directory / 'config.json'} {error}") from error
    if shape is None and not trust_remote_code:
        require_no_code(directory, config)
    tokenizer = HuggingFaceTokenizer(directory, trust_remote_code=trust_remote_code, form=form)
    weights = _read_weights(directory)
    end_token_ids = _end_token_ids(directory, config, tokenizer)
    if shape is not None:
        model = _decoder(shape, weights, directory, dtype)
    elif reads_images(config):
        from rllm.models.vision.language import VisionLanguageDecoder

        images = image_processor(directory, config, trust_remote_code=trust_remote_code)
        tokenizer.read_images(images)
        model = VisionLanguageDecoder(
            directory, weights, dtype, images=images, trust_remote_code=trust_remote_code
        )
    else:
        from rllm.models.huggingface import HuggingFaceDecoder

        model = HuggingFaceDecoder(directory, weights, dtype, trust_remote_code=trust_remote_code)
    model.to(device=device, dtype=dtype)
    num_layers, num_kv_heads, head_dim = _attention_sizes(model, directory)
    mask_unused_rows(model, tokenizer.vocabulary())
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        directory=directory,
        end_token_ids=end_token_ids,
        max_positions=model.max_positions,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_thinking_tokens=form.max_thinking_tokens,
        trust_remote_code=trust_remote_code,
    )


def describe_model(directory: Path, *, model: Any) -> LoadedModel:
    """The description of a model that is computed elsewhere, by `model`: its weights are not read, and need
    not be there.

    Raises ModelDirectoryError naming the missing or broken file.
    """
    config = read_config(directory)
    tokenizer = HuggingFaceTokenizer(directory)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        directory=directory,
        end_token_ids=_end_token_ids(directory, config, tokenizer),
        max_positions=int(config.get("max_position_embeddings") or 0),
        num_layers=0,
        num_kv_heads=0,
        head_dim=0,
    )


def reads_images(config: dict[str, Any]) -> bool:
    """Whether a config.json is of a model that reads images as well as text."""
    return isinstance(config.get("vision_config"), dict)


def image_processor(
    directory: Path, config: dict[str, Any], *, trust_remote_code: bool = False
) -> "VisionProcessor":
    """Load the processor of a model that reads images."""
    from rllm.models.vision.processor import FramedProcessor, GridProcessor, VisionProcessor

    processor_class = GridProcessor if _places_in_grids(config) else VisionProcessor
    if frames_images(config):
        processor_class = FramedProcessor
    return processor_class(directory, config, trust_remote_code=trust_remote_code)


def frames_images(config: dict[str, Any]) -> bool:
    """Whether the tokens of an image stand between two marks that config.json names, as Gemma 3's do."""
    return reads_images(config) and "boi_token_index" in config and "eoi_token_index" in config


def require_servers_read_images(path: Path | str, config: dict[str, Any]) -> None:
    """Raises ConfigError for a model that reads images of which servers would make other tokens."""
    if frames_images(config):
        raise ConfigError(
            f"{path} has lines of text around each image that become one token with those beside them, and "
            "servers that take prompts as ids would write them twice; sample it with the built-in engine."
        )


def _places_in_grids(config: dict[str, Any]) -> bool:
    """Whether tokens of images have positions in three dimensions."""
    text_config = config.get("text_config")
    fields: dict[str, Any] = text_config if isinstance(text_config, dict) else config
    ropes = (fields.get(key) for key in ("rope_parameters", "rope_scaling"))
    return any(isinstance(each, dict) and "mrope_section" in each for each in ropes)


def _decoder(shape: DecoderShape, weights: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> Any:
    """Numbers of config.json that the weights do not bear out take no memory: they are compared first."""
    try:
        if shape.num_layers > len(weights):
            raise ModelDirectoryError(
                f"config.json means {shape.num_layers:,} layers, but there are {len(weights):,} weights."
            )
        try:
            with torch.device("meta"):
                Decoder(shape).load_hf(weights)
        except RuntimeError as error:  # a product that no integer holds
            raise ModelDirectoryError(f"config.json means impossible sizes: {error}") from error
        model = Decoder(shape).to(dtype)  # before there is anything in it, or both would be in memory
        model.load_hf(weights)
    except ModelDirectoryError as error:
        raise ModelDirectoryError(f"{directory}: {error}") from error
    return model


def _attention_sizes(model: CausalModel, directory: Path) -> tuple[int, int, int]:
    try:
        return model.attention_sizes()
    except ArchitectureError as error:
        raise ArchitectureError(f"{directory}: {error}; use an external engine.") from error
    except ModelDirectoryError as error:
        raise ModelDirectoryError(f"{directory}: {error}") from error
    except (RuntimeError, ValueError, LookupError, ArithmeticError, TypeError) as error:
        raise ModelDirectoryError(
            f"{directory}: config.json describes a model that does not compute: {error}"
        ) from error


WriteWeights = Callable[[Path, dict[str, Tensor]], None]
"""Writes tensors by Hugging Face names into a directory."""


def save_model(
    model: LoadedModel,
    directory: Path,
    write_weights: WriteWeights | None = None,
    *,
    with_output_layer: bool = False,
) -> None:
    """Write `model` as a Hugging Face directory, replacing what was there in one step; its weights in one
    file, where nobody says otherwise.

    `with_output_layer`: with one of its own also where that is the embedding; raises ConfigError for an
    architecture whose embedding has another name than most.
    """
    # Python of the directory goes along only where it was allowed to run.
    suffixes = {".jinja", ".py"} if model.trust_remote_code else {".jinja"}
    files = {
        path.name: path.read_bytes()
        for path in sorted(model.directory.iterdir())
        if path.name in KEPT_FILES or path.suffix in suffixes
    }
    if model.tokenizer.chosen_template:
        files["chat_template.jinja"] = model.tokenizer.chosen_template.encode()
    weights = weights_with_output_layer(model) if with_output_layer else model.model.state_dict_hf()
    dtype = next(iter(weights.values())).dtype  # of the weights as they are now, whatever they were read from
    # An earlier name of `dtype`, which would then contradict it.
    config = {name: value for name, value in model.config.items() if name != "torch_dtype"}
    config["dtype"] = str(dtype).removeprefix("torch.")
    if with_output_layer and config.get("tie_word_embeddings"):
        config["tie_word_embeddings"] = False
    write_model(directory, config, weights, files, write_weights or write_one_file)


def weights_with_output_layer(model: LoadedModel) -> dict[str, Tensor]:
    """Views of the weights by Hugging Face names, with an output layer also where that is the embedding.

    Raises ConfigError for an architecture whose embedding has another name than most.
    """
    weights = model.model.state_dict_hf()
    if not model.config.get("tie_word_embeddings"):
        return weights
    if EMBEDDING not in weights:
        raise ConfigError(f"{model.directory} shares its output layer with a layer that is not {EMBEDDING}.")
    return {**weights, OUTPUT_LAYER: weights[EMBEDDING]}


EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"
KEPT_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "generation_config.json",
        "chat_template.json",
        "processor_config.json",
        "preprocessor_config.json",
        "video_preprocessor_config.json",
    }
)


def write_model(
    directory: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    files: dict[str, bytes],
    write_weights: WriteWeights,
) -> None:
    """Write a whole model directory or nothing; `files` are its others by name, such as the tokenizer's."""

    def fill(target: Path) -> None:
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for name, content in files.items():
            (target / name).write_bytes(content)
        write_weights(target, weights)

    write_directory_atomic(directory, fill)


def write_one_file(directory: Path, weights: dict[str, Tensor]) -> None:
    write_weights_file(directory / "model.safetensors", weights)


def write_part(directory: Path, weights: dict[str, Tensor], number: int, num_parts: int) -> None:
    """Write the `number`-th, from 0, of `num_parts` files that hold all of `weights`."""
    names = _names_of_parts(weights, num_parts)[number]
    write_weights_file(directory / _part_name(number, num_parts), {name: weights[name] for name in names})


def write_index(directory: Path, weights: dict[str, Tensor], num_parts: int) -> None:
    """Write where transformers, and `load_model`, find each tensor of what `write_part` wrote."""
    files = {
        name: _part_name(number, num_parts)
        for number, names in enumerate(_names_of_parts(weights, num_parts))
        for name in names
    }
    index = {"metadata": {"total_size": sum(each.nbytes for each in weights.values())}, "weight_map": files}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_weights_file(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write tensors into one safetensors file."""
    # Cloned, because safetensors refuses tensors that share memory, as the parts of one stored matrix do.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _part_name(number: int, num_parts: int) -> str:
    return f"model-{number + 1:05d}-of-{num_parts:05d}.safetensors"


def _names_of_parts(weights: dict[str, Tensor], num_parts: int) -> list[list[str]]:
    """In their order, about as many bytes in each."""
    total = sum(each.nbytes for each in weights.values())
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    before = 0
    for name, each in weights.items():
        parts[min(num_parts - 1, before * num_parts // total)].append(name)
        before += each.nbytes
    return parts


def copy_model_directory(source: Path, target: Path) -> None:
    """Copy config, tokenizer and weights, so that a run does not depend on where its model came from."""

    def fill(directory: Path) -> None:
        for path in sorted(source.iterdir()):
            if path.is_file() and path.name != MANIFEST:  # the copy gets its own
                shutil.copyfile(path, directory / path.name)

    write_directory_atomic(target, fill)


def parameters_sha256(parameters: Mapping[str, Tensor]) -> str:
    """sha256 over name, type, shape and bytes of every tensor, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        tensor = parameters[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # As bytes, because numpy has no bfloat16.
        digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_weights(directory: Path) -> dict[str, Tensor]:
    files = weight_files(directory)
    if not files:
        raise ModelDirectoryError(
            f"{directory} has no weights (*.safetensors); weights in another format can be converted by "
            "loading the model with transformers and calling save_pretrained."
        )
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            weights.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise ModelDirectoryError(f"{path} cannot be read: {error}; copy the file again.") from error
    return weights


def weight_files(directory: Path) -> list[Path]:
    """Return those that transformers would read, although some directories hold the same weights in a second
    form."""
    index = directory / INDEX
    if index.is_file():
        names = _file_names(index)
        absent = [name for name in names if not (directory / name).is_file()]
        if absent:
            raise ModelDirectoryError(
                f"{directory} lacks {absent[0]}, which {index.name} names; copy it again."
            )
        return [directory / name for name in names]
    whole = directory / "model.safetensors"
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _file_names(index: Path) -> list[str]:
    """Raises ModelDirectoryError for what names no file beside the index."""
    weight_map = json_object(index).get("weight_map", {})
    names: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [weight_map]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelDirectoryError(f"{index} names {name!r}; it must name *.safetensors files beside it.")
    return sorted(set(names))


def _end_token_ids(
    directory: Path, config: dict[str, Any], tokenizer: HuggingFaceTokenizer
) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    end_ids = json_object(generation).get("eos_token_id") if generation.is_file() else None
    ids: list[int] = []
    # The four may name different tokens, and an answer may end with any of them.
    for value in (end_ids, config.get("eos_token_id"), tokenizer.end_token_id, tokenizer.end_of_turn_id):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ModelDirectoryError(
            f"{directory}: `eos_token_id` is {ids}; it must be a token id or a list of them."
        )
    if not ids:
        raise ModelDirectoryError(
            f"{directory} names no end token, so no answer would ever end; set `eos_token_id` in config.json."
        )
    return tuple(sorted(set(ids)))
