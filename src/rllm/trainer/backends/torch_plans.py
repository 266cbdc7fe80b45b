"""A model on transformers' own code whose layers several ranks compute together, as the architecture's plan
says.

    states ─► colwise (q, k, v, gate, up): some rows ─► rowwise (out, down): Σ over ranks ─► states

The plan is transformers' `base_model_tp_plan`, which names the modules of a layer. What it does not name, and
embeddings and output layer, is on all ranks, as of the built-in decoder (see `torch_splitting`). A short row
shows before any work whether parts compute what the whole model does.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rllm.distributed import RankGroup
from rllm.errors import ConfigError
from rllm.models.decoder import Together
from rllm.models.lora import sharing_tensors
from rllm.trainer.backends.torch_optimizer import HALF
from rllm.trainer.backends.torch_splitting import Part, SplitModel, SumOverRanks

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Kinds of a plan: some rows of a weight, some columns of it, and a whole one that meets some heads alone."""
NUM_PROBE_TOKENS = 12
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1
"""The most that a probe may differ by, relative to its norm."""


def require_plan(path: str, num_parts: int) -> None:
    """Raises ConfigError for a model directory whose layers cannot be split among so many processes."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a directory may ask for Python of its own, or be damaged as it pleases
        raise ConfigError(
            f"{_setting(num_parts)}, and {path} has no plan that can be read ({str(error).splitlines()[0]}); "
            f"{MEND}"
        ) from error
    _plan_of(config, num_parts)


def split_by_plan(model: Any, ranks: RankGroup) -> SplitModel:
    """A twin of `model`, a `HuggingFaceDecoder` without an adapter, of whose layers this rank computes its
    part; all of `ranks` have to be here.

    Raises ConfigError for one without a plan, and where the parts would compute something else.
    """
    if model.by_row:
        raise ConfigError(
            f"{_setting(ranks.size)}, and rows are computed one by one ({model.by_row}); {MEND}"
        )
    plan = _plan_of(model.inner.config, ranks.size)
    twin, parts = sharing_tensors(model), dict[str, Part]()
    together = SumOverRanks(ranks)
    for name, module, kind in _modules_of_plan(twin, plan):
        if kind == SUMMED:
            _sum_gradients(module, together)
            continue
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"{_setting(ranks.size)}, and {name} is no linear layer but {type(module).__name__}; {MEND}"
            )
        for leaf in ("weight", "bias") if kind == COLUMNS else ("weight",):
            whole = getattr(module, leaf)
            if whole is None:
                continue
            part = _part(0 if kind == COLUMNS else 1, whole, ranks.size, name)
            own = nn.Parameter(part.own(whole.detach(), ranks.rank), requires_grad=whole.requires_grad)
            setattr(module, leaf, own)
            parts[f"{name}.{leaf}"] = part
        if kind == COLUMNS:
            module.register_forward_pre_hook(partial(_enter, together))
        else:
            module.forward = partial(_sum_of_columns, module, together)  # pyright: ignore[reportAttributeAccessIssue]
    twin.is_split = True
    _require_same(model, twin, ranks, parts)
    return SplitModel(twin=twin, parts=parts)


def _plan_of(config: Any, num_parts: int) -> Mapping[str, str]:
    """The kind of each module of a layer, by its name, with a star for the layer's number."""
    text, name = config.get_text_config(), config.model_type
    plan: Mapping[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan or text is not config:
        why = "has no plan for it" if text is config else "reads more than text"
        raise ConfigError(f"{_setting(num_parts)}, and {name} {why} in transformers; {MEND}")
    of_layers = {module: kind for module, kind in plan.items() if "*" in module}
    if unknown := sorted(set(of_layers.values()) - {COLUMNS, ROWS, SUMMED}):
        raise ConfigError(
            f"{_setting(num_parts)}, and transformers' plan of {name} has modules of the kind "
            f"{', '.join(unknown)}, which are not split here; {MEND}"
        )
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % num_parts or kv_heads % num_parts:
        raise ConfigError(
            f"{_setting(num_parts)}, and a layer of the model has {heads} heads and {kv_heads} of keys and "
            f"values; choose a divisor of both."
        )
    return of_layers


def _modules_of_plan(model: Any, plan: Mapping[str, str]) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, kind) of each that the plan names."""
    body = model._body
    # The plan names modules as the body has them, and parameters are named as the model has them.
    prefix = next(name for name, module in model.named_modules() if module is body)
    patterns = {re.compile(re.escape(each).replace(r"\*", r"\d+")): kind for each, kind in plan.items()}
    for name, module in list(body.named_modules()):
        kind = next((kind for pattern, kind in patterns.items() if pattern.fullmatch(name)), None)
        if kind is not None:
            yield f"{prefix}.{name}", module, kind


def _part(dim: int, whole: Tensor, num_parts: int, name: str) -> Part:
    size = whole.shape[dim]
    if size % num_parts:
        raise ConfigError(
            f"{_setting(num_parts)}, and {name} has {size} {('rows', 'columns')[dim]}; choose a "
            "divisor of it."
        )
    return Part(dim=dim, places=list(torch.arange(size, device=whole.device).chunk(num_parts)))


def _enter(together: Together, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return together.enter(inputs[0]), *inputs[1:]


def _sum_of_columns(module: nn.Linear, together: Together, x: Tensor) -> Tensor:
    # The bias comes behind the sum: inside it every rank would add it once more.
    sums = together.leave(F.linear(x, module.weight))
    return sums if module.bias is None else sums + module.bias


def _sum_gradients(module: nn.Module, together: SumOverRanks) -> None:
    """Add up the gradients of weights that all ranks have, and each uses with its own heads."""
    for name, whole in list(module.named_parameters(recurse=False)):
        own = nn.Parameter(whole.detach(), requires_grad=whole.requires_grad)  # the hook is the twin's alone
        if own.requires_grad:
            own.register_hook(together.total)
        setattr(module, name, own)


def _require_same(model: Any, twin: Any, ranks: RankGroup, parts: Mapping[str, Part]) -> None:
    """Raises ConfigError where states, or gradients of what is whole in the layers, are not those of the
    whole model: a plan may leave out a weight that each rank uses with its own columns."""
    probes = [_probe(each, parts) for each in (model, twin)]
    half = next(model.parameters()).dtype in HALF
    for name, mine in probes[0].items():
        theirs = probes[1][name]
        difference = float((mine - theirs).norm() / mine.norm().clamp_min(1e-12))
        # Those of all ranks, so that all of them refuse together and none waits for one that has left. Not
        # the largest of them: `max` passes over a NaN.
        tolerance = HALF_TOLERANCE if half else TOLERANCE
        if not all(each < tolerance for each in ranks.gather(difference)):
            raise ConfigError(
                f"{_setting(ranks.size)}, and parts that transformers' plan of "
                f"{model.inner.config.model_type} makes do not compute what the whole model does ({name} is "
                f"off by {difference:.2g} of its norm); {MEND}"
            )


def _probe(model: Any, parts: Mapping[str, Part]) -> dict[str, Tensor]:
    """States of a short row, and the gradients that whole weights of layers have there, by name."""
    weight = next(model.parameters())
    tokens_N = torch.arange(NUM_PROBE_TOKENS, device=weight.device) % model.vocab_size
    layers = {id(each) for layer in model.layers() for each in layer.parameters()}
    # A split weight has another shape on each rank, so its gradient cannot be compared.
    checked_weights = {
        name: each
        for name, each in model.named_parameters()
        if each.requires_grad and id(each) in layers and name not in parts
    }
    with torch.enable_grad():
        states_N_D = model.hidden(tokens_N, torch.arange(NUM_PROBE_TOKENS, device=weight.device), _causal)
        measurements = {"its states": states_N_D.detach().float()}
        if checked_weights:
            direction_N_D = torch.linspace(-1.0, 1.0, states_N_D.numel(), device=weight.device)
            total = (states_N_D.float() * direction_N_D.view_as(states_N_D)).sum()
            gradients = torch.autograd.grad(total, list(checked_weights.values()), allow_unused=True)
            for name, gradient in zip(checked_weights, gradients, strict=True):
                if gradient is not None:
                    measurements[f"the gradient of {name}"] = gradient.float()
    return measurements


def _causal(layer: int, q_N_H_d: Tensor, k_N_H_d: Tensor, v_N_H_d: Tensor, *wishes: Any) -> Tensor:
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (q_N_H_d, k_N_H_d, v_N_H_d))
    attention_output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attention_output[0].transpose(0, 1)


def _setting(num_parts: int) -> str:
    return f"`distributed.tensor_parallel` is {num_parts}"


MEND = "leave it out, or set `distributed.strategy` to shard instead, which spreads every model."
