"""Any causal model of transformers behind the interface of `rllm.models.decoder`.

transformers lets a model's attention be replaced by name. Ours forwards to the `attend` of the call in
progress, so the same KV cache and the same packed rows serve every architecture that follows this protocol.
Whether one does is measured when it is loaded. One that does not (state-space layers, linear attention, keys
and values of another size in every layer) is computed row by row on transformers' own cache: slower, and as
exact. That is measured as well: an architecture that would sample from other logits than transformers' own
forward pass is refused.
"""

import inspect
import re
import threading
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

from rllm.errors import ArchitectureError, ConfigError, ModelDirectoryError
from rllm.models.attention import NONE, Wishes, attention
from rllm.models.batching_attention import PackedAttention
from rllm.models.decoder import ONLY_WHAT_ENTERS, Attend, Change, apply_change
from rllm.models.unused_rows import with_unused_rows_masked
from rllm.models.vision.grids import ImageGrids
from rllm.types.images import later_of_image

ATTENTION_NAME = "rllm_attend"
FACTORS, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
"""Keys of a config that scale its logits: Cohere's and Falcon-H1's; Granite's."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys that cap them: Gemma's, RecurrentGemma's."""

NOT_SERVED = ("position_bias",)
"""Demands of some architectures on their attention that the built-in engine does not meet; those that it
meets are in `rllm.models.attention`."""

NUM_PROBE_TOKENS, NUM_PROBE_STEPS = 16, 3
"""The length of the row that is measured, and the number of its tokens that are read one by one where rows
are."""

_COUNTS = re.compile(r"n(um)?_.*(layers?|experts?|blocks?|heads?|groups?)|n_layer|n_head")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extra: Any
) -> tuple[Tensor, None]:
    """[1, H, N, d] in, [1, N, H, d] out. `rllm_attend` is passed through the model's forward as a keyword."""
    unsupported_keys = [name for name in NOT_SERVED if extra.get(name) is not None]
    if unsupported_keys or "rllm_attend" not in extra:
        reason = (
            f"asks for `{unsupported_keys[0]}`" if unsupported_keys else "keeps keywords from its attention"
        )
        raise ArchitectureError(f"{type(module).__name__} {reason}")
    attend: Attend = extra["rllm_attend"]
    head_dim = query.shape[-1]
    scaling = extra.get("scaling")
    # `attend` scales by 1/sqrt(d) itself, so the query takes what this architecture wants beyond that.
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
    """Require every weight in its size: a missing one would be filled in before it is reported. Checked
    twice, since a matrix may be tied in the files."""
    num_made = sum(each.numel() for each in module.parameters())
    num_read = sum(each.numel() for each in weights.values())
    if num_made > 2 * num_read:
        raise ModelDirectoryError(
            f"{directory / 'config.json'} means {num_made:,} parameters, but the weights hold {num_read:,}."
        )


_ONE_AT_A_TIME = threading.Lock()
"""transformers replaces methods of its classes while it loads a model, and two threads that do so leave them
replaced: later models would have weights that are not tied, without an error."""


class HuggingFaceDecoder(nn.Module):
    """Wraps `AutoModelForCausalLM`. Slower than the built-in decoder, and as exact."""

    auto_class: ClassVar[Any] = AutoModelForCausalLM
    changes: Mapping[str, Change] = MappingProxyType({})
    """The changes of an adapter, by the name of the weight; its layers stand in place of those they add
    to."""
    is_split = False
    """Whether other processes have the rest of each layer."""
    by_row: str = ""
    """The reason why rows are computed one by one on transformers' own cache; else empty."""
    has_plain_attention = True
    """Whether no layer caps its scores or has sinks."""
    image_grids: ImageGrids | None = None
    """See `rllm.models.directory.CausalModel`."""
    sees_images_whole = False
    """See `rllm.models.directory.CausalModel`."""
    unused_ids: Tensor | None
    num_used_rows: int | None = None
    """Ids that no token has, or the first of them where they are the last rows; see
    `rllm.models.unused_rows`."""
    _has_cache = True
    """One for each row. RecurrentGemma has one in its layers for all, so each token has its row read anew."""

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
        self.register_buffer("unused_ids", None, persistent=False)
        try:
            config = AutoConfig.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # Python of the directory's own, where it may run, raises as it pleases
            raise ModelDirectoryError(
                f"{directory / 'config.json'} cannot be used: {type(error).__name__}: {error}"
            ) from error
        _require_counts(config, weights, directory)
        with _ONE_AT_A_TIME:
            self._load(directory, config, weights, dtype, trust_remote_code=trust_remote_code)
        self.inner.eval()  # dropout would make trainer and sampler disagree

    def _load(
        self,
        directory: Path,
        config: PreTrainedConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        *,
        trust_remote_code: bool,
    ) -> None:
        try:
            # Without memory, because the sizes are held against the weights before anything is allocated.
            with torch.device("meta"):
                empty_model = self.auto_class.from_config(config, trust_remote_code=trust_remote_code)
        except Exception as error:  # architectures divide, index and assert as they please
            raise ModelDirectoryError(
                f"{directory / 'config.json'} cannot be used: {type(error).__name__}: {error}"
            ) from error
        _require_size(empty_model, weights, directory)
        architecture = type(empty_model)
        if not architecture._supports_attention_backend:
            self.by_row = f"{architecture.__name__} does not take attention from outside"
        with_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            self.inner: Any
            self.inner, loading_info = architecture.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                attn_implementation=self.attention_names(config, "eager" if self.by_row else ATTENTION_NAME),
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

    def attention_names(self, config: PreTrainedConfig, name: str) -> Any:
        """Where transformers is to use the attention of that name, as it takes it."""
        return name

    def hidden(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, keep_M: Tensor | None = None
    ) -> Tensor:
        if self.by_row:
            hidden_N_D = self._hidden_by_row(tokens_N, attend)
        else:
            output = self._body(
                input_ids=tokens_N.unsqueeze(0),
                position_ids=positions_N.unsqueeze(0),
                use_cache=False,
                rllm_attend=attend,
            )
            hidden_N_D = output.last_hidden_state[0]
        return hidden_N_D if keep_M is None else hidden_N_D.index_select(0, keep_M)

    def _hidden_by_row(self, tokens_N: Tensor, attend: Attend) -> Tensor:
        """States of each row as a whole, its shared prefix included: there are no keys to be shared."""
        if not isinstance(attend, PackedAttention):
            return self.read_row(tokens_N, None, keeps=False)[0]
        rows = attend.rows()
        states = [self.read_row(tokens_N[row], None, keeps=False)[0] for row in rows]
        # A prefix was computed with each of its rows; one of them gives its states, so that its gradient is
        # counted once.
        place_N = torch.empty_like(tokens_N)
        place_N[torch.cat(rows)] = torch.arange(sum(map(len, rows)), device=tokens_N.device)
        return torch.cat(states).index_select(0, place_N)

    def read_row(self, tokens_N: Tensor, past: Any, *, keeps: bool = True) -> tuple[Tensor, Any]:
        """[N, D] states of the tokens behind those that `past` stands for (None: of a row's first ones), and
        what transformers keeps of the row then; None of an architecture that has no cache for each row.

        `past` is used up. Where it is not None, N is 1: not every architecture goes on with several tokens.
        """
        name = self._past_name
        extra = {} if past is None else {name: past}
        if "use_cache" in inspect.signature(self._body.forward).parameters:
            extra["use_cache"] = keeps and self._has_cache
        output = self._body(input_ids=tokens_N.unsqueeze(0), **extra)
        return output.last_hidden_state[0], getattr(output, name, None) if keeps and self._has_cache else None

    @property
    def _past_name(self) -> str:
        """The architecture's name of its cache."""
        names = inspect.signature(self._body.forward).parameters
        return next((each for each in ("cache_params", "state") if each in names), "past_key_values")

    @property
    def _body(self) -> Any:
        """The module that makes the states before the logits."""
        base = self.inner.base_model
        return base if base is not self.inner else getattr(self.inner, "model", base)

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

    @property
    def output_weight(self) -> Tensor | None:
        """See `rllm.models.directory.CausalModel`."""
        layer, config = self.inner.get_output_embeddings(), self.inner.config.get_text_config()
        is_more = any(getattr(config, name, None) for name in (*FACTORS, *DIVISORS, *CAPS))
        return None if is_more or type(layer) is not nn.Linear or layer.bias is not None else layer.weight

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        logits_N_V = self.inner.get_output_embeddings()(hidden_N_D)
        config = self.inner.config.get_text_config()
        for name in FACTORS:
            if factor := getattr(config, name, None):
                logits_N_V = logits_N_V * factor
        for name in DIVISORS:
            if divisor := getattr(config, name, None):
                logits_N_V = logits_N_V / divisor
        for name in CAPS:
            if cap := getattr(config, name, None):
                logits_N_V = cap * torch.tanh(logits_N_V / cap)
        return with_unused_rows_masked(logits_N_V, self.num_used_rows, self.unused_ids)

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
        if not self.by_row:
            try:
                return self._measured_sizes(tokens_N, lambda: self._own_pass(tokens_N))
            except ArchitectureError as error:
                self.by_row = str(error)
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
                self.by_row = f"{type(self.inner).__name__} does not take attention from outside ({error})"
            self.inner.set_attn_implementation("eager")
        self._measure_rows(tokens_N)
        # Without layers, the engine's cache holds states of rows in place of keys and values.
        return 0, 1, 1

    def _without_us(self, own_pass: Callable[[], Any]) -> Any:
        """The outcome of a pass with transformers' own attention."""
        self.inner.set_attn_implementation(self.attention_names(self.inner.config, "eager"))
        output = own_pass()
        self.inner.set_attn_implementation(self.attention_names(self.inner.config, ATTENTION_NAME))
        return output

    def _own_pass(self, tokens_N: Tensor) -> Any:
        """transformers' forward pass of a row."""
        takes_it = "use_cache" in inspect.signature(self.inner.forward).parameters
        return self.inner(input_ids=tokens_N.unsqueeze(0), **({"use_cache": False} if takes_it else {}))

    def _measure_rows(self, tokens_N: Tensor) -> None:
        """Find out whether the architecture has a cache for each row that computes what a pass without it
        does; else each token has its row read anew.

        Raises ArchitectureError where a row does not have the logits of transformers' own forward pass.
        """
        num_first = len(tokens_N) - NUM_PROBE_STEPS
        theirs_N_V = self._own_pass(tokens_N).logits[0].float()
        # Tokens that look ahead have other logits where fewer follow.
        first_M_V = self._own_pass(tokens_N[:num_first]).logits[0].float()
        self._require_equal(first_M_V, theirs_N_V, "looks at later tokens, so it does not predict them")
        states_N_D, _ = self.read_row(tokens_N, None, keeps=False)
        self._require_equal(self.logits(states_N_D), theirs_N_V, "makes its logits in a way of its own")
        states, past = self.read_row(tokens_N[:num_first], None)
        parts = [states]
        for token_1 in tokens_N[num_first:].split(1) if past is not None else ():
            states, past = self.read_row(token_1, past)
            parts.append(states)
        try:
            self._require_equal(self.logits(torch.cat(parts)), theirs_N_V, "has another cache")
            self._has_cache = past is not None
        except ArchitectureError:
            self._has_cache = False
        if not self._has_cache:
            self.by_row += "; its cache is none of each row, or computes something else"

    def _require_equal(self, ours_M_V: Tensor, theirs_N_V: Tensor, reason: str) -> None:
        gap = float((ours_M_V.float() - theirs_N_V[: len(ours_M_V)]).abs().max())
        limit = self._allowed_gap(theirs_N_V)
        # Written so that a gap that is not a number is refused, too.
        if not gap <= limit:
            raise ArchitectureError(
                f"{type(self.inner).__name__} {reason} (logits differ by {gap:.2g}, where {limit:.2g} is "
                "allowed)"
            )

    def _allowed_gap(self, logits_N_V: Tensor) -> float:
        is_float32 = next(self.inner.parameters()).dtype == torch.float32
        return (1e-3 if is_float32 else 5e-2) * float(logits_N_V.abs().max())

    def _measured_sizes(self, tokens_N: Tensor, own_pass: Callable[[], Any]) -> tuple[int, int, int]:
        """`own_pass` is transformers' forward pass of the same row."""
        name = type(self.inner).__name__
        sizes: dict[int, tuple[int, int]] = {}
        windows = set[int | None]()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, wishes: Wishes = NONE) -> Tensor:
            if k.shape != v.shape:
                sizes_of_both = f"{k.shape[-1]} and values of size {v.shape[-1]}"
                raise ArchitectureError(f"{name} has keys of size {sizes_of_both}")
            if layer in sizes:
                raise ArchitectureError(f"{name} attends more than once in a layer")
            sizes[layer] = (k.shape[1], k.shape[2])
            windows.add(wishes.window)
            self.has_plain_attention &= wishes.softcap is None and wishes.sinks is None
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
            distance_N_N = positions_N[:, None] - positions_N
            is_near_N_N = distance_N_N < (wishes.window or len(positions_N))
            visible = ((distance_N_N >= -later_N[:, None]) & is_near_N_N & is_same_row_N_N)[None, None]
            return attention(q, k, v, visible, wishes, is_causal=False)[0].transpose(0, 1)

        # The row twice, one behind the other: layers that carry something on from token to token, such as
        # those with states, would tell by the second that the first stands before it.
        length = len(tokens_N)
        positions_N = torch.arange(length, device=tokens_N.device).repeat(2)
        row_N = torch.arange(2 * length, device=tokens_N.device) // length
        is_same_row_N_N = row_N[:, None] == row_N
        later_N = torch.zeros_like(positions_N)
        if self.sees_images_whole:
            later_N = torch.from_numpy(later_of_image(tokens_N.tolist())).to(later_N.device).repeat(2)
        given_N = positions_N
        if self.image_grids is not None:
            given_N = given_N + torch.from_numpy(self.image_grids.shifts(tokens_N.cpu().numpy())).repeat(2)
        ours_N_V = self.logits(self.hidden(tokens_N.repeat(2), given_N, attend)).float()
        theirs_N_V = self._without_us(own_pass).logits[0].float().repeat(2, 1)
        limit = self._allowed_gap(theirs_N_V)
        error = float((ours_N_V - theirs_N_V).abs().max())
        if error <= limit and (len(set(sizes.values())) != 1 or sorted(sizes) != list(range(len(sizes)))):
            heads = ", ".join(f"{heads} of {size}" for heads, size in dict.fromkeys(sizes.values()))
            raise ArchitectureError(
                f"{name} attends in {len(sizes)} layers with keys and values of {heads or 'no'} heads"
            )
        # As above, NaN is an error beyond the limit.
        if not sizes or not error <= limit:
            raise ArchitectureError(
                f"{name} computes more than attention between plain layers (logits differ by {error:.2g}, "
                f"where {limit:.2g} is allowed)"
            )
        window = _window_of(self.inner.config.get_text_config())
        # A row as short as the probe cannot tell a window that is kept from one that is left out.
        if window and window not in windows:
            raise ArchitectureError(
                f"{name} has a sliding window of {window} that it does not hand to its attention"
            )
        num_kv_heads, head_dim = sizes[0]
        return len(sizes), num_kv_heads, head_dim

    def state_dict_hf(self) -> dict[str, Tensor]:
        weights = dict(self.inner.state_dict())
        for name in self.inner.all_tied_weights_keys:
            weights.pop(name, None)
        # peft puts the layer that an adapter stands beside one level down.
        weights = {
            name.replace(".base_layer.", "."): each for name, each in weights.items() if ".lora_" not in name
        }
        weights |= {name: apply_change(weights[name], change) for name, change in self.changes.items()}
        return dict(revert_weight_conversion(self.inner, weights))
