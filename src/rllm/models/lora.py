"""An adapter beside the weights of a model: only its small matrices are trained (LoRA, arXiv:2106.09685).

    LoadedModel ──with_adapter──► LoadedModel ──┬─► sampled from and trained, as any other
        │  └── the same weights, not copied ──┘ └─► save_model: merged; save_adapter: peft's own format
        └─► without the adapter: a reference, a frozen policy, the base of the next adapter

Which adapter a forward pass uses is a matter of which model object it is called on, never of a switch: so
samplers and trainers of several policies run at the same time on one copy of the weights. Matrices, their
names, their start and the files are peft's. The built-in decoder, which stores several layers as one matrix,
adds up their parts itself.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rllm.config.lora import LoraConfig
from rllm.errors import ConfigError, MissingExtraError, ModelDirectoryError, choices_of
from rllm.files.atomic import write_directory_atomic
from rllm.models.bitsandbytes import freeze_in_4_bits, quiet_bitsandbytes
from rllm.models.decoder import Decoder
from rllm.models.directory import LoadedModel

NAME = "default"
"""peft's name of the one adapter of a model object."""

STORED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Which layers the four matrices of a decoder's block hold."""


OF_EXPERTS = frozenset(("gate", "gate_proj", "up_proj", "down_proj"))
"""Names that peft takes for parts of experts which are one parameter of three dimensions, also where they are
those of a shared expert's layers: so these have no adapter there."""


def with_adapter(base: LoadedModel, config: LoraConfig, seed: int, *, vision: bool = False) -> LoadedModel:
    """A model that shares the weights of `base`, which never change again, and has an adapter of its own.

    The adapter begins as nothing: B is 0, A is drawn from `seed`. Both are float32, whatever the weights are.
    `vision`: whether it changes as well what makes vectors of images, in a model that reads them.
    Raises ConfigError for a target that the model has no linear layer of.
    """
    peft = _peft()
    base.model.requires_grad_(False)
    model = sharing_tensors(base.model)
    layers: Any = _projections(model) if isinstance(model, Decoder) else model.inner
    excluded_modules = [] if vision or base.tokenizer.images is None else base.model.vision_modules()
    linear = _linear_layers(layers, excluded_modules)
    targets = _targets(config, linear, base)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        exclude_modules=excluded_modules or None,
        # Conv1D of transformers has its weight as inputs by outputs.
        fan_in_fan_out=any(not isinstance(linear[name], nn.Linear) for name in targets),
        base_model_name_or_path=str(base.directory),
        task_type="CAUSAL_LM",
    )
    peft.inject_adapter_in_model(settings, layers, NAME)
    adapter_layers: dict[str, Any] = {
        name: each for name, each in layers.named_modules() if hasattr(each, "lora_A")
    }
    _begin_as_nothing(adapter_layers, seed)
    if isinstance(model, Decoder):
        _hand_over(model, layers, adapter_layers)
    model.changes = {
        f"{name}.weight": partial(layer.get_delta_weight, NAME) for name, layer in adapter_layers.items()
    }
    model.eval()
    return replace(base, model=model, base=base)


def adapt_blocks(model: Decoder, config: LoraConfig) -> None:
    """Give a decoder without contents an adapter of that size, to see what its passes take."""
    model.requires_grad_(False)
    sizes, layers = model.shape.projections, nn.Module()
    for index, block in enumerate(model.blocks):
        groups: list[_Beside] = []
        for names in STORED:
            parts: list[tuple[int, _Factors | None]] = []
            for name in names:
                path, _, leaf = f"model.layers.{index}.{name}".rpartition(".")
                layer = _Factors(*sizes[leaf], config.rank) if leaf in (config.targets or sizes) else None
                if layer is not None:
                    _submodule(layers, path).add_module(leaf, layer)
                parts.append((sizes[leaf][0], layer))
            groups.append(_Beside(parts))
        block.adapts = (groups[0], groups[1], groups[2], groups[3])
    model.adapter = layers


class _Factors(nn.Module):
    """The two matrices of an adapter beside one layer, as peft names them."""

    def __init__(self, outputs: int, inputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({NAME: nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({NAME: nn.Linear(rank, outputs, bias=False)})
        self.scaling = {NAME: 1.0}


def with_base_in_4_bits(base: LoadedModel, *, vision: bool = False) -> None:
    """Keep the matrices that adapters may stand beside, none of them yet, in 4 bits from now on.

    Raises ConfigError for a model whose layers are not all linear ones of torch.
    """
    model = base.model
    base.model.requires_grad_(False)
    if isinstance(model, Decoder):
        for block in model.blocks:
            freeze_in_4_bits((block.qkv, block.out, block.gate_up, block.down))
        model.look_up_parameters()
        return
    of_images = [] if vision or base.tokenizer.images is None else base.model.vision_modules()
    linear = _linear_layers(model.inner, of_images)
    other = next((each for each in linear.values() if not isinstance(each, nn.Linear)), None)
    is_of_experts = _has_experts(model.inner)
    if not linear or other is not None or is_of_experts:
        what = "experts" if is_of_experts else "no linear layers" if other is None else type(other).__name__
        raise ConfigError(
            f'`lora.base_dtype` is "nf4", which is for the linear layers of torch, and {base.directory} has '
            f"{what}; set it to auto."
        )
    freeze_in_4_bits(
        module
        for path, module in model.inner.named_modules()
        if isinstance(module, nn.Linear) and path not in of_images and path.rpartition(".")[2] in linear
    )
    model.look_up_parameters()


def save_adapter(loaded: LoadedModel, directory: Path) -> None:
    """Write the adapter of `loaded` so that `peft.PeftModel.from_pretrained` puts it on the base model."""
    tensors = {name: each.detach().cpu().contiguous() for name, each in _matrices(loaded).items()}
    settings = _layers(loaded).peft_config[NAME].to_dict() | {"inference_mode": True}

    def fill(target: Path) -> None:
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        (target / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")
        save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})

    write_directory_atomic(directory, fill)


def load_adapter(loaded: LoadedModel, directory: Path) -> None:
    """Give the adapter of `loaded` the matrices of one in peft's format.

    Raises ModelDirectoryError where the two have other layers or another rank.
    """
    path = directory / "adapter_model.safetensors"
    try:
        matrices = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelDirectoryError(f"{path} cannot be read: {error}.") from error
    mine = _matrices(loaded)
    shapes, there = ({name: each.shape for name, each in some.items()} for some in (mine, matrices))
    if differing := sorted(
        name for name in shapes.keys() | there.keys() if shapes.get(name) != there.get(name)
    ):
        name = differing[0]
        raise ModelDirectoryError(
            f"{path} does not fit {loaded.directory}: `{name}` is {_shape(there.get(name))} there and "
            f"{_shape(shapes.get(name))} here."
        )
    with torch.no_grad():
        for name, each in mine.items():
            each.copy_(matrices[name])


def _matrices(loaded: LoadedModel) -> dict[str, Tensor]:
    """Those of the adapter, by the names that peft's files have them under."""
    layers, end = _layers(loaded), f".{NAME}.weight"
    return {
        f"base_model.model.{name.removesuffix(end)}.weight": each
        for name, each in layers.named_parameters()
        if name.endswith(end)
    }


def _layers(loaded: LoadedModel) -> Any:
    return loaded.model.adapter if isinstance(loaded.model, Decoder) else loaded.model.inner


def _shape(shape: Sequence[int] | None) -> str:
    return "not" if shape is None else " x ".join(map(str, shape))


def _peft() -> Any:
    quiet_bitsandbytes()  # which peft imports where it is installed
    try:
        import peft
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "peft", "train") from error
    return peft


def sharing_tensors(model: nn.Module) -> Any:
    """A model of the same tensors in modules of its own, so that these alone can be changed: by an adapter,
    or by sharding."""
    tensors = chain(model.parameters(), model.buffers())
    # `deepcopy` takes what its memo names for copied already.
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def twin_of(model: nn.Module) -> Any:
    """A model with the same values, whose trained parameters are its own; what is frozen is shared."""
    frozen = chain((each for each in model.parameters() if not each.requires_grad), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in frozen})


def sampler_twins(models: Mapping[str, LoadedModel], dtype: torch.dtype) -> dict[str, LoadedModel]:
    """The same models with parameters of their own in another data type, to be sampled from.

    An adapter stays in float32 beside a base of any type. Adapters to one base share one cast of it.
    """
    frozen: dict[int, Tensor] = {}
    return {name: _sampler_twin(model, dtype, frozen) for name, model in models.items()}


def _sampler_twin(model: LoadedModel, dtype: torch.dtype, frozen: dict[int, Tensor]) -> LoadedModel:
    """`frozen` has the casts of weights that nothing changes, by the id of the original; it is added to."""
    casts: dict[int, Tensor] = {}
    for tensor in chain(model.model.parameters(), model.model.buffers()):
        is_trained = tensor.requires_grad
        if not tensor.is_floating_point():
            casts[id(tensor)] = tensor
        elif is_trained or id(tensor) not in frozen:
            own_dtype = tensor.dtype if is_trained and model.base is not None else dtype
            own = tensor.detach().to(own_dtype, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            casts[id(tensor)] = nn.Parameter(own, requires_grad=False) if is_parameter else own
            if not is_trained:
                frozen[id(tensor)] = casts[id(tensor)]
        else:
            casts[id(tensor)] = frozen[id(tensor)]
    return replace(model, model=copy.deepcopy(model.model, casts))


def _projections(model: Decoder) -> nn.Module:
    """Linear layers of the sizes of all blocks' by their Hugging Face names. Their weights take no memory:
    the decoder has its own."""
    root, sizes = nn.Module(), model.shape.projections
    one = model.embed.weight.new_zeros(())
    for index, _ in enumerate(model.blocks):
        for name in chain(*STORED):
            path, _, leaf = f"model.layers.{index}.{name}".rpartition(".")
            with torch.device("meta"):
                layer = nn.Linear(*reversed(sizes[leaf]), bias=False)
            layer.weight = nn.Parameter(one.expand(sizes[leaf]), requires_grad=False)
            _submodule(root, path).add_module(leaf, layer)
    return root


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path; made where nothing does."""
    for name in path.split("."):
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    return root


def _linear_layers(layers: Any, excluded: Sequence[str] = ()) -> dict[str, nn.Module]:
    """A linear layer of each name that no module of another kind bears; the output layer is none of them, nor
    are the modules of these full names."""
    from transformers.pytorch_utils import Conv1D  # here, because a run without adapters imports none of it

    outside = frozenset(excluded)
    output = layers.get_output_embeddings() if hasattr(layers, "get_output_embeddings") else None
    linear: dict[str, nn.Module] = {}
    others = set[str]()
    if _has_experts(layers):
        others |= OF_EXPERTS
    for path, module in layers.named_modules():
        if path in outside:
            continue
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear | Conv1D) and module is not output:
            linear[name] = module
        else:
            others.add(name)
    return {name: module for name, module in linear.items() if name not in others}


def _has_experts(layers: nn.Module) -> bool:
    """Whether experts are one parameter of three dimensions."""
    return any(each.ndim == 3 for name, each in layers.named_parameters() if ".experts." in f".{name}")


def _targets(config: LoraConfig, linear: Mapping[str, nn.Module], base: LoadedModel) -> list[str]:
    if not linear:
        raise ConfigError(
            f"`lora.rank` is {config.rank}, but {base.directory} has no linear layer that an adapter can "
            "stand beside; set it to 0 to train the weights themselves."
        )
    if unknown := [name for name in config.targets if name not in linear]:
        raise ConfigError(
            f"`lora.targets` has {unknown[0]!r}, but {base.directory} has no linear layer of that name; "
            f"{choices_of(unknown[0], sorted(linear))}."
        )
    return config.targets or sorted(linear)


def _begin_as_nothing(adapter_layers: Mapping[str, Any], seed: int) -> None:
    """A is uniform within ±1/sqrt(width), as peft has it, but from a seed; B is 0."""
    # On the CPU, so that a seed gives the same matrices on every device.
    generator = torch.Generator().manual_seed(seed)
    for layer in adapter_layers.values():
        a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        a.data, b.data = a.data.float(), torch.zeros_like(b.data, dtype=torch.float32)
        uniform = torch.rand(a.shape, generator=generator)
        a.data.copy_((2.0 * uniform - 1.0) / math.sqrt(a.shape[1]))


def _hand_over(model: Decoder, layers: Any, adapter_layers: Mapping[str, Any]) -> None:
    """Let the blocks of the decoder use an adapter whose layers stand apart from it."""
    for index, block in enumerate(model.blocks):
        paths = [[f"model.layers.{index}.{name}" for name in names] for names in STORED]
        qkv, out, gate_up, down = (
            _Beside([(layers.get_submodule(path).out_features, adapter_layers.get(path)) for path in group])
            for group in paths
        )
        block.adapts = (qkv, out, gate_up, down)
    for path, module in list(layers.named_modules()):
        parent, _, name = path.rpartition(".")
        if isinstance(module, nn.Linear) and not is_of_adapter(path):
            layers.get_submodule(parent).add_module(name, nn.Identity())  # the decoder has its weights
    model.adapter = layers


def is_of_adapter(path: str) -> bool:
    """Whether a module or parameter of this name is an adapter's."""
    return ".lora_" in path


class _Beside:
    """The matrices of an adapter beside those that one matrix of a decoder's block holds."""

    def __init__(self, parts: Sequence[tuple[int, Any]]) -> None:
        """`parts`: rows of each layer in the matrix, and the adapter's layer, if it has one."""
        self._rows = [num_rows for num_rows, _ in parts]
        self._layers = [layer for _, layer in parts]
        self.look_up()

    def look_up(self) -> None:
        """See `Adapt`. Kept, because nn.Module takes long to find parameters by name."""
        self._factors = [
            None
            if layer is None
            else (layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])
            for layer in self._layers
        ]

    def divide(self, num_parts: int) -> None:
        """See `Adapt`."""
        self._rows = [num_rows // num_parts for num_rows in self._rows]

    def __call__(self, x: Tensor, output: Tensor, /) -> Tensor:
        if len(self._factors) == 1:
            return output if self._factors[0] is None else _add_adapter(x, output, *self._factors[0])
        factors = [each for each in self._factors if each is not None]
        if not factors:
            return output
        x = x.to(factors[0][0].dtype)  # once for all of them: the backward pass keeps it
        pieces = [
            piece if each is None else _add_adapter(x, piece, *each)
            for piece, each in zip(output.split(self._rows, dim=-1), self._factors, strict=True)
        ]
        return torch.cat(pieces, dim=-1)


def _add_adapter(x: Tensor, output: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    if output.dtype == a.dtype:
        return torch.addmm(output, F.linear(x, a), b.t(), alpha=scaling)
    return output + (F.linear(F.linear(x.to(a.dtype), a), b) * scaling).to(output.dtype)
