"""The optimizers of the torch backend, by name, and the precision that they work in.

`adamw` moves every parameter by AdamW (Loshchilov and Hutter 2019). `muon` moves the matrices of the layers
by Muon (Jordan 2024): momentum whose singular values are set to about one, scaled so that a step is as long
as one of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"), so one learning rate serves both;
embeddings, the output layer, norms and biases stay with AdamW: they are no maps between hidden states.
`adafactor` (Shazeer and Stern 2018) moves everything and keeps almost nothing: of a matrix's squared
gradients the means of its rows and columns, and no momentum. A step is at most the learning rate times the
weight's own root mean square, which is small: rates are ten to a hundred times AdamW's. `adamw8bit` is AdamW
whose moments have 8 bits in the matrices of the layers (Dettmers et al. 2021, arXiv:2110.02861).

A model in float32 or float64 is moved itself. Of one in bfloat16 every parameter has a master copy in
float32, which gathers the gradients of all micro-batches and is what the optimizer moves; the model's
parameter is the master rounded. Moments are in float32 too: 16 bytes a parameter in all, 2 of which the
sampler shares.
"""

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from rllm.config.optimizer import OptimizerConfig
from rllm.distributed import RankGroup
from rllm.models.bitsandbytes import adamw_step, moments_in_8_bits
from rllm.trainer.backends.torch_muon import Muon, Spread, muon_dtype

HALF = (torch.bfloat16, torch.float16)
ADAM_EPS = 1e-8
"""Torch's own."""
LEAST_IN_8_BITS = 4096
"""The number of entries of the smallest matrix whose moments have 8 bits, as in bitsandbytes."""


class MasterWeights:
    """The tensors that an optimizer moves, by the names of the parameters that follow them."""

    spread: Spread | None = None
    """Where the rows of matrices are that this process has a part of."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._copies: list[tuple[nn.Parameter, Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        for name, parameter in parameters.items():
            self.by_name[name] = parameter
            if parameter.dtype in HALF:
                master = parameter.detach().float().requires_grad_()
                self.by_name[name] = master
                self._copies.append((parameter, master))
                self._hooks.append(_gather_gradients(parameter, master))

    def zero_grad(self) -> None:
        for each in self.by_name.values():
            each.grad = None

    def join_gradients(self, ranks: RankGroup) -> None:
        """Make each gradient the sum of those of all `ranks`."""
        # A rank whose rows never met a weight has no gradient of it, and all ranks must sum the same list.
        names_here = [name for name, each in self.by_name.items() if each.grad is not None]
        names = {name for theirs in ranks.gather(names_here) for name in theirs}
        ranks.sum_in_place(self.gradients(names))

    def clip(self, max_norm: float) -> float:
        """Scale what `with_gradient` gives down to `max_norm`; returns the norm that it had."""
        return float(nn.utils.clip_grad_norm_(self.with_gradient(), max_norm))

    def whole_shapes(self) -> dict[str, torch.Size]:
        """The shapes of the weights, by name, whatever part of them this process has."""
        return {name: each.shape for name, each in self.by_name.items()}

    def own(self, name: str, tensor: Tensor) -> Tensor:
        """The part that this process has of a tensor that was read for the weight `name`."""
        return tensor

    def empty(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for what `checkpoint_form` gave, of the whole shape `shape`."""
        return torch.empty(shape, dtype=dtype)

    def take(self, name: str, whole: Tensor) -> None:
        """Copy a weight in; `copy_to_parameters` follows once all are there."""
        self.by_name[name].copy_(whole)

    def checkpoint_form(self, name: str, tensor: Tensor) -> Tensor:
        """The form in a checkpoint of a tensor of the weight `name`: itself, or something of its shape."""
        return tensor.detach()

    def with_gradient(self) -> list[Tensor]:
        """Those that an update moves; all of them, by a gradient of 0, where no micro-batch had one."""
        # A weight without a gradient is left alone, by AdamW its decay too: that is what torch does.
        weights = [each for each in self.by_name.values() if each.grad is not None]
        if weights:
            return weights
        for each in self.by_name.values():
            each.grad = torch.zeros_like(each)
        return list(self.by_name.values())

    def gradients(self, names: Collection[str]) -> list[Tensor]:
        """Gradients of the weights of these names, in the order of all; zeros where no micro-batch here had
        one.
        """
        gradients: list[Tensor] = []
        for name, each in self.by_name.items():
            if name in names:
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
                gradients.append(each.grad)
        return gradients

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Round the masters, where there are any, to what the model computes with."""
        for parameter, master in self._copies:
            parameter.copy_(master)


def _gather_gradients(parameter: nn.Parameter, master: Tensor) -> RemovableHandle:
    """Micro-batches add up in float32: in bfloat16 a sum forgets what is 256 times smaller than it."""

    def gather(parameter: Tensor) -> None:
        assert parameter.grad is not None, "the hook runs behind a gradient"
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return parameter.register_post_accumulate_grad_hook(gather)


class MovingPart(Protocol):
    """An optimizer of some of the weights, with its state between two steps."""

    weights: list[Tensor]

    @property
    def kernel(self) -> str:
        """Its name, and how it steps."""
        ...

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Tensor]]: ...

    def step(self, learning_rate: float) -> None: ...


class AdamW:
    """torch.optim.AdamW (fused) bit for bit, its state included, by the same kernel. Torch's own optimizers
    import its compiler as soon as one is made, which takes as much CPU as importing torch."""

    kernel = "fused AdamW"

    def __init__(self, weights: Iterable[Tensor], *, betas: tuple[float, float], weight_decay: float) -> None:
        self.weights = list(weights)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._betas = betas
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        columns_of: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], ...]] = {}
        for weight in self.weights:
            if weight.grad is None:
                continue
            state = self.state.setdefault(weight, {})
            if not state:
                # The fused kernel takes the count as a float32 tensor beside the weight.
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            # The fused kernel takes lists of one device and one precision.
            columns = columns_of.setdefault((weight.device, weight.dtype), ([], [], [], [], []))
            row = (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])
            for column, tensor in zip(columns, row, strict=True):
                column.append(tensor)
        for weights, gradients, means, squares, steps in columns_of.values():
            # Before the kernel, which corrects the bias of the moments by the count of this step.
            torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                weights,
                gradients,
                means,
                squares,
                [],
                steps,
                lr=learning_rate,
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=self._weight_decay,
                eps=ADAM_EPS,
                amsgrad=False,
                maximize=False,
            )


class AdamW8bit(AdamW):
    """AdamW whose moments have 8 bits each, by bitsandbytes' kernel."""

    kernel = "AdamW with moments in 8 bits"

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for weight in self.weights:
            if weight.grad is None:
                continue
            if not self.state.get(weight):
                self.state[weight] = moments_in_8_bits(weight)
            adamw_step(
                weight,
                self.state[weight],
                learning_rate=learning_rate,
                betas=self._betas,
                eps=ADAM_EPS,
                weight_decay=self._weight_decay,
            )


class Adafactor:
    """torch.optim.Adafactor."""

    kernel = "Adafactor, weight by weight"

    def __init__(self, weights: Iterable[Tensor], *, weight_decay: float) -> None:
        self.weights = list(weights)
        self._optimizer = torch.optim.Adafactor(
            self.weights, lr=0.0, weight_decay=weight_decay, foreach=False
        )

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Tensor]]:
        return self._optimizer.state

    def step(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()


class Optimizers:
    """One or two optimizers that step together."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        matrices: frozenset[str],
        config: OptimizerConfig,
        spread: Spread | None = None,
    ) -> None:
        """`weights` are moved; `matrices` are the names of those that Muon may move, or whose moments may
        have 8 bits, and `spread` is where their rows are."""
        self._weights = weights
        betas = (config.beta1, config.beta2)
        of_muon = matrices if config.name == "muon" else frozenset[str]()
        with_muon = [each for key, each in weights.items() if key in of_muon]
        in_8_bits = in_8_bits_of(weights, matrices) if config.name == "adamw8bit" else frozenset[str]()
        self.in_8_bits = in_8_bits
        """Names of the weights whose moments have 8 bits."""
        with_adamw = [each for key, each in weights.items() if key not in of_muon | in_8_bits]
        self._parts: list[MovingPart] = []
        if in_8_bits:
            of_8_bits = [each for key, each in weights.items() if key in in_8_bits]
            self._parts.append(AdamW8bit(of_8_bits, betas=betas, weight_decay=config.weight_decay))
        if config.name == "adafactor":
            self._parts.append(Adafactor(with_adamw, weight_decay=config.weight_decay))
            with_adamw = []
        if with_adamw:
            self._parts.append(AdamW(with_adamw, betas=betas, weight_decay=config.weight_decay))
        if with_muon:
            self._parts.append(
                Muon(
                    with_muon,
                    weight_decay=config.weight_decay,
                    dtype=muon_dtype(config.muon_dtype, with_muon[0].device),
                    spread=spread,
                )
            )

    @property
    def kernel(self) -> str:
        return " and ".join(part.kernel for part in self._parts)

    def step(self, learning_rate: float) -> None:
        for part in self._parts:
            part.step(learning_rate)
        # A fused step is a write that torch does not count, and by its count the engine notices that weights
        # changed without a publish.
        increment_version(tuple(self._weights.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as `parameter.key`."""
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, weight in self._weights.items()
            for part in self._parts
            for key, value in part.state.get(weight, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` of the same kind of optimizers gave."""
        state_of: dict[str, dict[str, Tensor]] = {}
        for full_key, value in tensors.items():
            name, _, key = full_key.rpartition(".")
            state_of.setdefault(name, {})[key] = value
        for part in self._parts:
            # By identity: `in` would compare tensors element by element.
            weight_ids = {id(each) for each in part.weights}
            for name, weight in self._weights.items():
                # A weight that never had a gradient has no moments, here or in the file.
                if id(weight) in weight_ids:
                    part.state[weight] = {
                        key: value.to(weight.device) for key, value in state_of.get(name, {}).items()
                    }


def in_8_bits_of(weights: Mapping[str, Tensor], matrices: Collection[str]) -> frozenset[str]:
    """Names of the weights whose moments have 8 bits: those of embeddings, which the paper found unstable,
    have 32, and so have those of small tensors, where nothing is saved."""
    return frozenset(
        key for key, each in weights.items() if key in matrices and each.numel() >= LEAST_IN_8_BITS
    )


def matrices_of_layers(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> frozenset[str]:
    """Names of the weights of linear layers between hidden states."""
    # An output layer is a linear layer as well. It is told from the others by its size, whatever its name is.
    vocabulary = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    matrices = {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, nn.Linear) and each.out_features not in vocabulary
    }
    return frozenset(name for name, each in parameters.items() if id(each) in matrices)
