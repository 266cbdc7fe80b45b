"""Any causal model of transformers behind the interface of `rllm.models.decoder`.

transformers lets a model's attention be replaced by name. Ours forwards to the `attend` of the call in progress, so the
same KV cache and the same packed rows serve every architecture that follows this protocol.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rllm.errors import ModelDirectoryError
from rllm.models.decoder import Attend

ATTENTION_NAME = "rllm_attend"


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extra: Any
) -> tuple[Tensor, None]:
    """[1, H, N, d] in, [1, N, H, d] out. `rllm_attend` is passed through the model's forward as a keyword."""
    attend: Attend = extra["rllm_attend"]
    head_dim = query.shape[-1]
    scaling = extra.get("scaling")
    if scaling is not None:
        query = query * (scaling * head_dim**0.5)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    seen_N_H_d = attend(layer, *(part[0].transpose(0, 1) for part in (query, key, value)))
    return seen_N_H_d.unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)


class HuggingFaceDecoder(nn.Module):
    """Wraps `AutoModelForCausalLM`. Slower than the built-in decoder, and as exact."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True)
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise ModelDirectoryError(
                f"{directory}: sliding-window attention ({config.sliding_window}) is not served by the built-in engine; "
                "use full attention (`use_sliding_window: false`) or an external engine."
            )
        self.inner: Any = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
        self.inner.eval()  # dropout would make trainer and sampler disagree

    def hidden(self, tokens_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        output = self.inner.base_model(
            input_ids=tokens_N.unsqueeze(0),
            position_ids=positions_N.unsqueeze(0),
            use_cache=False,
            rllm_attend=attend,
        )
        return output.last_hidden_state[0]

    def logits(self, hidden_N_D: Tensor) -> Tensor:
        return self.inner.get_output_embeddings()(hidden_N_D)

    def load_hf(self, weights: dict[str, Tensor]) -> None:
        result = self.inner.load_state_dict(weights, strict=False)
        tied = {
            name
            for name in result.missing_keys
            if name == "lm_head.weight" and self.inner.config.tie_word_embeddings
        }
        missing = sorted(set(result.missing_keys) - tied)
        if missing or result.unexpected_keys:
            raise ModelDirectoryError(
                f"Weights do not fit the config: missing {missing[:3]}, unknown {list(result.unexpected_keys)[:3]}."
            )
        self.inner.tie_weights()

    def state_dict_hf(self) -> dict[str, Tensor]:
        named = dict(self.inner.state_dict())
        if self.inner.config.tie_word_embeddings:
            named.pop("lm_head.weight", None)
        return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}
