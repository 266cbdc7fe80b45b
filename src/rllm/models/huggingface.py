"""Any causal model of transformers behind the interface of `rllm.models.decoder`.

transformers lets a model's attention be replaced by name. Ours forwards to the `attend` of the call in
progress, so the same KV cache and the same packed rows serve every architecture that follows this protocol.
Whether one does is measured when it is loaded: an architecture that would sample from other logits than
transformers' own forward pass is refused.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from rllm.errors import ConfigError, ModelDirectoryError
from rllm.models.attention import NONE, Wishes, attention
from rllm.models.decoder import ONLY_WHAT_ENTERS, Attend, Change, apply_change

ATTENTION_NAME = "rllm_attend"

NOT_SERVED = ("position_bias",)
"""What some architectures ask of their attention and the built-in engine does not do; what it does is in
`rllm.models.attention`."""

NUM_PROBE_TOKENS = 16

_COUNTS = re.compile(r"n(um)?_.*(layers?|experts?|blocks?|heads?|groups?)|n_layer|n_head")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extra: Any
) -> tuple[Tensor, None]:
    """[1, H, N, d] in, [1, N, H, d] out. `rllm_attend` is passed through the model's forward as a keyword."""
    unsupported = [name for name in NOT_SERVED if extra.get(name) is not None]
    if unsupported or "rllm_attend" not in extra:
        reason = f"asks for `{unsupported[0]}`" if unsupported else "keeps keywords from its attention"
        raise ModelDirectoryError(
            f"{type(module).__name__} {reason}, so the built-in engine cannot serve it; "
            "use an external engine."
        )
    attend: Attend = extra["rllm_attend"]
    head_dim = query.shape[-1]
    scaling = extra.get("scaling")
    if scaling is not None:
        query = query * (scaling * head_dim**0.5)
    layer = cast("int", module.layer_idx)
    parts = [part[0].transpose(0, 1) for part in (query, key, value)]
    wishes = [extra.get(name) for name in ("sliding_window", "softcap", "s_aux")]
    if all(each is None for each in wishes):
        seen_N_H_d = attend(layer, *parts)
    else:
        seen_N_H_d = attend(layer, *parts, Wishes(*wishes))
    return seen_N_H_d.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


def _window_of(config: Any) -> int:
    """Keys that a query of some layer sees at most; 0 where all layers see all."""
    if not getattr(config, "use_sliding_window", True):
        return 0
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return 0
    return getattr(config, "sliding_window", None) or 0


def _exact_positions(config: Any) -> int:
    """Positions within which a token's logits do not depend on how long the row is that it is computed in.

    Beyond those that it was first trained with, LongRoPE (Ding et al. 2024, arXiv:2402.13753) rotates all
    positions otherwise, those of cached keys included; and chunked attention forgets what was before.
    """
    limits = [getattr(config, "max_position_embeddings", None) or 2048]
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if each.get("rope_type") == "longrope":
            original = each.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None) or limits[0])
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append(getattr(config, "attention_chunk_size", None) or limits[0])
    return min(limits)


def _require_counts(config: PreTrainedConfig, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Modules are made one by one also where they take no memory, so their numbers are held against the
    weights before that. Raises ModelDirectoryError naming the key."""
    limit = max(len(weights), *(max(each.shape, default=1) for each in weights.values()), 1)
    for name, value in config.get_text_config().to_dict().items():
        if _COUNTS.fullmatch(name) and isinstance(value, int) and value > limit:
            raise ModelDirectoryError(
                f"{directory / 'config.json'}: `{name}` is {value:,}, but there are {len(weights):,} weights."
            )


def _require_size(module: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """What is missing would be filled in before it is reported. Twice: a matrix may be tied in the files."""
    num_made = sum(each.numel() for each in module.parameters())
    num_read = sum(each.numel() for each in weights.values())
    if num_made > 2 * num_read:
        raise ModelDirectoryError(
            f"{directory / 'config.json'} means {num_made:,} parameters, but the weights hold {num_read:,}."
        )


class HuggingFaceDecoder(nn.Module):
    """Wraps `AutoModelForCausalLM`. Slower than the built-in decoder, and as exact."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    changes: Mapping[str, Change] = MappingProxyType({})
    """What an adapter adds, by the name of the weight; its layers stand in place of those they add to."""

    def __init__(
        self,
        directory: Path,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        """`weights` are named as in the files; transformers translates them.

        Raises ModelDirectoryError if they do not fit.
        """
        super().__init__()
        try:
            config = AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # Python of the directory's own, where it may run, raises as it pleases
            raise ModelDirectoryError(
                f"{directory / 'config.json'} cannot be used: {type(error).__name__}: {error}"
            ) from error
        _require_counts(config, weights, directory)
        try:
            with torch.device("meta"):
                empty_model = self.auto_class.from_config(config, trust_remote_code=trust_remote_code)
        except Exception as error:  # architectures divide, index and assert as they please
            raise ModelDirectoryError(
                f"{directory / 'config.json'} cannot be used: {type(error).__name__}: {error}"
            ) from error
        _require_size(empty_model, weights, directory)
        architecture = type(empty_model)
        if not architecture._supports_attention_backend:
            raise ModelDirectoryError(
                f"{directory}: {architecture.__name__} computes attention in a way that the built-in engine "
                "cannot take over; use an external engine."
            )
        with_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            self.inner: Any
            self.inner, loading_info = architecture.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                attn_implementation=self.attention_names(config, ATTENTION_NAME),
                ignore_mismatched_sizes=True,  # reported below, with what is missing and unknown
                output_loading_info=True,
            )
        finally:
            if with_bar:
                logging.enable_progress_bar()
        if any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            missing, unknown, misshapen = (
                sorted(map(str, loading_info[kind]))[:3]
                for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            )
            raise ModelDirectoryError(
                f"{directory}: the weights do not fit config.json: missing {missing}, unknown {unknown}, "
                f"misshapen {misshapen}."
            )
        self.inner.eval()  # dropout would make trainer and sampler disagree

    def attention_names(self, config: PreTrainedConfig, name: str) -> Any:
        """Where transformers is to use the attention of that name, as it takes it."""
        return name

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, keep_M: Tensor | None = None
    ) -> Tensor:
        output = self.inner.base_model(
            input_ids=tokens_N.unsqueeze(0),
            position_ids=positions_N.unsqueeze(0),
            use_cache=False,
            rllm_attend=attend,
        )
        if not hasattr(output, "last_hidden_state"):
            raise ModelDirectoryError(
                f"{type(self.inner).__name__} does not give the states before its logits, so the built-in "
                "engine cannot serve it; use an external engine."
            )
        hidden_N_D = output.last_hidden_state[0]
        return hidden_N_D if keep_M is None else hidden_N_D.index_select(0, keep_M)

    def layers(self) -> list[nn.Module]:
        """Those of the architecture, as transformers marks them; none where it does not."""
        return [each for each in self.inner.modules() if isinstance(each, GradientCheckpointingLayer)]

    def look_up_parameters(self) -> None:
        """See `Decoder.look_up_parameters`: transformers' modules look them up in every pass."""

    def recompute_layers(self) -> None:
        """See `Decoder.recompute_layers`. Raises ConfigError for an architecture that transformers cannot do
        it for, or that would then drop out states."""
        name = type(self.inner).__name__
        layers: list[Any] = self.layers()
        # Modules that drop out stay as they are; a layer that does it by itself would ask whether it trains.
        own = [vars(layer).items() for layer in layers]
        dropout_modules = [
            key
            for items in own
            for key, value in items
            if "drop" in key and isinstance(value, float) and value
        ]
        if dropout_modules or not layers:
            reason = (
                f"has `{dropout_modules[0]}` above 0"
                if dropout_modules
                else "has no layers that can be recomputed"
            )
            raise ConfigError(
                f"`optimizer.gradient_checkpointing` is on but {name} {reason}; set it to false."
            )
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, **ONLY_WHAT_ENTERS)
            layer.training = True  # what it is recomputed for; the modules inside it stay as they are

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        logits_N_V = self.inner.get_output_embeddings()(hidden_N_D)
        config = self.inner.config.get_text_config()
        if factor := getattr(config, "logit_scale", None):  # Cohere's
            logits_N_V = logits_N_V * factor
        if divisor := getattr(config, "logits_scaling", None):  # Granite's
            logits_N_V = logits_N_V / divisor
        cap = getattr(config, "final_logit_softcapping", None)
        return logits_N_V if cap is None else cap * torch.tanh(logits_N_V / cap)

    @property
    def vocab_size(self) -> int:
        return self.inner.get_output_embeddings().weight.shape[0]

    @property
    def max_positions(self) -> int:
        return _exact_positions(self.inner.config.get_text_config())

    @torch.no_grad()
    def attention_sizes(self) -> tuple[int, int, int]:
        """(layers, key-value heads, head size), measured on a short row of tokens.

        Raises ModelDirectoryError where this interface does not give the logits of transformers' own forward
        pass.
        """
        tokens_N = torch.arange(NUM_PROBE_TOKENS, device=next(self.inner.parameters()).device)
        return self._measured_sizes(
            tokens_N, lambda: self.inner(input_ids=tokens_N.unsqueeze(0), use_cache=False)
        )

    def _measured_sizes(self, tokens_N: Tensor, own_pass: Callable[[], Any]) -> tuple[int, int, int]:
        """`own_pass` is transformers' forward pass of the same row."""
        name = type(self.inner).__name__
        sizes: dict[int, tuple[int, int]] = {}
        windows = set[int | None]()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, wishes: Wishes = NONE) -> Tensor:
            if k.shape != v.shape:
                raise ModelDirectoryError(
                    f"{name} has keys of size {k.shape[-1]} and values of size {v.shape[-1]}; the built-in "
                    "engine serves one size for both, so use an external engine."
                )
            if layer in sizes:
                raise ModelDirectoryError(
                    f"{name} attends more than once in a layer, and the built-in engine keeps the keys and "
                    "values of one; use an external engine."
                )
            sizes[layer] = (k.shape[1], k.shape[2])
            windows.add(wishes.window)
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
            distance_N_N = positions_N[:, None] - positions_N
            is_near_N_N = distance_N_N < (wishes.window or len(positions_N))
            visible = ((distance_N_N >= 0) & is_near_N_N)[None, None]
            return attention(q, k, v, visible, wishes, is_causal=False)[0].transpose(0, 1)

        positions_N = torch.arange(len(tokens_N), device=tokens_N.device)
        ours_N_V = self.logits(self.hidden(tokens_N, positions_N, attend)).float()
        self.inner.set_attn_implementation(self.attention_names(self.inner.config, "eager"))
        theirs_N_V = own_pass().logits[0].float()
        self.inner.set_attn_implementation(self.attention_names(self.inner.config, ATTENTION_NAME))
        is_float32 = next(self.inner.parameters()).dtype == torch.float32
        limit = (1e-3 if is_float32 else 5e-2) * float(theirs_N_V.abs().max())
        error = float((ours_N_V - theirs_N_V).abs().max())
        if error <= limit and (len(set(sizes.values())) != 1 or sorted(sizes) != list(range(len(sizes)))):
            heads = ", ".join(f"{heads} of {size}" for heads, size in dict.fromkeys(sizes.values()))
            raise ModelDirectoryError(
                f"{name} attends in {len(sizes)} layers with keys and values of {heads or 'no'} heads; the "
                "built-in engine serves the same in every layer, so use an external engine."
            )
        if not sizes or not error <= limit:
            raise ModelDirectoryError(
                f"{name} computes something that the built-in engine does not (logits differ by {error:.2g} "
                f"where {limit:.2g} is allowed); use an external engine."
            )
        window = _window_of(self.inner.config.get_text_config())
        if window and window not in windows:
            raise ModelDirectoryError(
                f"{name} has a sliding window of {window} that it does not hand to its attention, so the "
                "built-in engine cannot serve it; use an external engine."
            )
        num_kv_heads, head_dim = sizes[0]
        return len(sizes), num_kv_heads, head_dim

    def state_dict_hf(self) -> dict[str, Tensor]:
        weights = dict(self.inner.state_dict())
        for name in self.inner.all_tied_weights_keys:
            weights.pop(name, None)
        weights = {
            name.replace(".base_layer.", "."): each for name, each in weights.items() if ".lora_" not in name
        }
        weights |= {name: apply_change(weights[name], change) for name, change in self.changes.items()}
        return dict(revert_weight_conversion(self.inner, weights))
