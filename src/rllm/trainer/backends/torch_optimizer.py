"""The optimizers of the torch backend, by name.

`adamw` moves every parameter by AdamW (Loshchilov and Hutter 2019). `muon` moves the matrices of the layers
by Muon (Jordan 2024): momentum whose singular values are set to about one, scaled so that a step is as long
as one of AdamW's (Liu et al. 2025, "Muon is scalable for LLM training"), so one learning rate serves both;
embeddings, the output layer, norms and biases stay with AdamW: they are no maps between hidden states.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

MUON_MOMENTUM = 0.95


class Optimizers:
    """One or two optimizers that step together."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        name: str,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        self._parameters = parameters
        matrices = _matrices(model) if name == "muon" else set[int]()
        with_adamw = [each for each in parameters.values() if id(each) not in matrices]
        with_muon = [each for each in parameters.values() if id(each) in matrices]
        self._parts: list[torch.optim.Optimizer] = []
        if with_adamw:
            self._parts.append(
                torch.optim.AdamW(with_adamw, lr=0.0, betas=betas, weight_decay=weight_decay, fused=True)
            )
        if with_muon:
            self._parts.append(
                torch.optim.Muon(
                    with_muon,
                    lr=0.0,
                    momentum=MUON_MOMENTUM,
                    weight_decay=weight_decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self, learning_rate: float) -> None:
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()

    def tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as `parameter.key`."""
        return {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in self._parameters.items()
            for part in self._parts
            for key, value in part.state.get(parameter, {}).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` of the same kind of optimizers gave."""
        for part in self._parts:
            for group in part.param_groups:
                for parameter in group["params"]:
                    name = next(name for name, each in self._parameters.items() if each is parameter)
                    part.state[parameter] = {
                        key.rpartition(".")[2]: value.to("cpu" if key.endswith(".step") else parameter.device)
                        for key, value in tensors.items()
                        if key.rpartition(".")[0] == name
                    }


def _matrices(model: nn.Module) -> set[int]:
    """The weights of linear layers between hidden states, by identity."""
    vocabulary = {each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)}
    return {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, nn.Linear) and each.out_features not in vocabulary
    }
