"""Token rows ──► packed micro-batches: no padding in the linear layers, what rows begin with computed once.

    row 1   a prompt, an answer                                    tree      prompt ─┬─ answer 1
    row 2   the prompt, another answer                                               ├─ answer 2 ─┬─ turn 2a
    row 3   the prompt, that answer, its second turn               ──►               │            └─ turn 2b
    row 4   the prompt, that answer, another second turn                             └─ …
    tokens_N = run, run, run, …      what each row adds to the tree, in the order of their buckets

Every token of the tree is computed once, at the position that it has in its rows, and the gradients of all
rows that go on from it meet in it: the same gradient as without sharing, at a fraction of the work. A token
that several rows are trained on has its log-probability computed once, too. Which rows go together is decided
in `rllm.models.packing`, how they see each other in `rllm.models.batching_attention`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.models.batching_attention import PackedAttention, repeat_rows
from rllm.models.packing import IntArray, PrefixTree, WeightedRow, bucket_order, packed_trees
from rllm.types.images import later_of_image
from rllm.types.sample import TrainingSample

OPTIONAL_COLUMNS = ("rollout_logprobs", "ref_logprobs", "values", "returns", "chosen")
"""The columns that only some samples have."""


@dataclass(kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch as flat tensors, and its attention.

    M trained tokens of all rows are U different predictions, made of K states: rows that share a trained
    token share its prediction, and rows that part at a token share the state.
    """

    tokens_N: Tensor
    positions_N: Tensor
    """Places of tokens in their rows."""
    runs: list[tuple[IntArray, int]]
    """The runs of N: the token ids of a row up to the run's end, and where in the row the run begins."""
    kept_K: Tensor
    """[K] places in N whose hidden states predict trained tokens; they ascend."""
    state_U: Tensor | None
    """[U] which of the K each prediction is made of; None where it is its own."""
    targets_U: Tensor
    temperature_U: Tensor
    prediction_M: Tensor | None
    """[M] which of the U is that of each trained token; None where it is its own."""
    old_logprobs_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    plain: bool
    """All temperatures are 1."""
    row_M: NDArray[np.int64]
    """[M] index of the sample that each trained token belongs to."""
    place_M: NDArray[np.int64]
    """[M] position of each trained token in its sample."""
    rank_M: Tensor
    """[M] which of the R rows of the micro-batch each trained token belongs to."""
    group_R: Tensor
    """[R] which group each row belongs to."""
    optional: dict[str, Tensor]
    """[M] columns that only some samples have, such as `ref_logprobs`."""
    attention: PackedAttention

    def states(self, model: Any) -> Tensor:
        """[U, D] of each prediction."""
        attend = self._attention_in(model)
        hidden_K_D = model.hidden(self.tokens_N, self._positions_in(model), attend, self.kept_K)
        return hidden_K_D if self.state_U is None else repeat_rows(hidden_K_D, self.state_U)

    def _positions_in(self, model: Any) -> Tensor:
        """[N] See `CausalModel.hidden`."""
        if model.image_grids is None:
            return self.positions_N
        shifts = [model.image_grids.shifts(ids_T)[start:] for ids_T, start in self.runs]
        return self.positions_N + torch.from_numpy(np.concatenate(shifts)).to(self.positions_N.device)

    def _attention_in(self, model: Any) -> PackedAttention:
        if not model.sees_images_whole:
            return self.attention
        later = [later_of_image(ids_T)[start:] for ids_T, start in self.runs]
        return self.attention.seeing_later(np.concatenate(later))

    def of_tokens(self, values_U: Tensor) -> Tensor:
        """[M] of each trained token, of what was computed for each prediction."""
        return values_U if self.prediction_M is None else repeat_rows(values_U, self.prediction_M)


def micro_batches(
    rows: Sequence[WeightedRow],
    max_tokens: int,
    device: torch.device,
    *,
    share_prefixes: bool = True,
    whole_groups: bool = False,
) -> Iterator[PackedBatch]:
    """Micro-batches of at most `max_tokens` tokens; see `packed_trees` for what may be larger. The same rows
    in another order give the same micro-batches."""
    for trees in packed_trees(rows, max_tokens, share_prefixes=share_prefixes, whole_groups=whole_groups):
        yield _pack(trees, device)


def _pack(trees: Sequence[PrefixTree], device: torch.device) -> PackedBatch:
    rows = [row for tree in trees for row in tree.rows]
    shared_R = np.array([num for tree in trees for num in tree.common])
    lengths_R = np.array([row.last for row in rows]) - shared_R
    # A row that ends within the trunk of the row before it adds no tokens to the pass.
    runs_S = np.flatnonzero(lengths_R)
    runs_S = runs_S[bucket_order(shared_R[runs_S], lengths_R[runs_S])]
    lengths_S = lengths_R[runs_S]
    begins_R = np.zeros_like(lengths_R)
    begins_R[runs_S] = np.cumsum(lengths_S) - lengths_S
    paths_R: list[IntArray] = []  # where in the flat row the tokens of each row are
    for begin, length, num_shared in zip(
        begins_R.tolist(), lengths_R.tolist(), shared_R.tolist(), strict=True
    ):
        run = np.arange(begin, begin + length)
        # The tokens that it shares lie where the row before it has them.
        paths_R.append(np.concatenate((paths_R[-1][:num_shared], run)) if num_shared else run)
    order = [*runs_S.tolist(), *np.flatnonzero(lengths_R == 0).tolist()]
    in_order = [rows[index] for index in order]
    # The state of the token before it predicts a token.
    predicted_by_M = np.concatenate([paths_R[index][rows[index].places - 1] for index in order])
    kept_K = np.unique(predicted_by_M)
    begins_S = begins_R[runs_S]
    # No part is empty: a run ends with the state that predicts the last trained token of its row.
    kept_S = np.split(kept_K, np.searchsorted(kept_K, begins_S[1:]))
    runs = [
        (rows[index].sample.token_ids_T[: rows[index].last], int(shared_R[index]))
        for index in runs_S.tolist()
    ]
    tokens_N = np.concatenate([ids_T[start:] for ids_T, start in runs])
    positions_N = np.concatenate([np.arange(start, len(ids_T)) for ids_T, start in runs])
    return PackedBatch(
        tokens_N=torch.from_numpy(tokens_N).to(device),
        positions_N=torch.from_numpy(positions_N).to(device),
        runs=runs,
        attention=PackedAttention(
            [paths_R[index] for index in runs_S.tolist()],
            lengths_S.tolist(),
            [places - begin for places, begin in zip(kept_S, begins_S.tolist(), strict=True)],
            device,
        ),
        kept_K=torch.from_numpy(kept_K).to(device),
        **_predictions(in_order, predicted_by_M, device),
        **trained_columns(in_order, device),
    )


def _predictions(
    rows: Sequence[WeightedRow], predicted_by_M: IntArray, device: torch.device
) -> dict[str, Any]:
    """The fields of a `PackedBatch` about its predictions, by name."""
    counts_R = [len(row.places) for row in rows]
    targets_M = np.concatenate([row.sample.token_ids_T[row.places] for row in rows])
    temperature_M = np.repeat(np.array([row.sample.temperature for row in rows], dtype=np.float32), counts_R)
    temperatures, which_M = np.unique(temperature_M, return_inverse=True)
    # One number for state, target and temperature: attempts that sampled the same are computed once.
    keys_M = (predicted_by_M * (targets_M.max() + 1) + targets_M) * len(temperatures) + which_M
    first_U, prediction_M = _distinct(keys_M)
    _, state_U = _distinct(predicted_by_M[first_U])
    columns = {
        "state_U": state_U,
        "targets_U": targets_M[first_U],
        "temperature_U": temperature_M[first_U],
        "prediction_M": prediction_M,
    }
    return {
        "plain": bool((temperature_M == 1.0).all()),
        **{
            name: None if values is None else torch.from_numpy(values).to(device)
            for name, values in columns.items()
        },
    }


def trained_columns(rows: Sequence[WeightedRow], device: torch.device) -> dict[str, Any]:
    """The fields of a `PackedBatch` about its trained tokens, by name."""
    samples = [row.sample for row in rows]
    counts_R = np.array([len(row.places) for row in rows])
    sizes_R = np.array([sample.num_tokens for sample in samples])
    place_M = np.concatenate([row.places for row in rows])
    among_all_M = place_M + np.repeat(np.cumsum(sizes_R) - sizes_R, counts_R)
    number_of: dict[tuple[str, str], int] = {}

    def of_each(columns: Sequence[NDArray[Any]]) -> Tensor:
        return torch.from_numpy(np.concatenate(columns)[among_all_M]).to(device)

    return {
        "old_logprobs_M": of_each([sample.logprobs_T for sample in samples]),
        "advantages_M": of_each([sample.advantages_T for sample in samples]),
        "weights_M": of_each([row.weights_T for row in rows]),
        "row_M": np.repeat([row.index for row in rows], counts_R),
        "place_M": place_M,
        "rank_M": torch.from_numpy(np.repeat(np.arange(len(rows)), counts_R)).to(device),
        "group_R": torch.tensor(
            [number_of.setdefault(sample.group_key, len(number_of)) for sample in samples], device=device
        ),
        "optional": {
            name: of_each(columns)
            for name in OPTIONAL_COLUMNS
            if (columns := _columns_of_all(samples, f"{name}_T"))
        },
    }


def _distinct(keys: IntArray) -> tuple[IntArray, IntArray | None]:
    """Where each different key is first, in ascending order of the keys; and for each place which of them it
    has, None where all are different and ascend."""
    if (keys[1:] > keys[:-1]).all():
        return np.arange(len(keys)), None
    _, firsts, which = np.unique(keys, return_index=True, return_inverse=True)
    return firsts, which


def _columns_of_all(samples: Sequence[TrainingSample], name: str) -> list[NDArray[Any]]:
    """The optional column of each sample; nothing where none has it."""
    columns = [column for sample in samples if (column := getattr(sample, name)) is not None]
    if columns and len(columns) < len(samples):
        raise ValueError(
            f"{len(columns)} of {len(samples)} samples have {name.removesuffix('_T')}; all must, or none."
        )
    return columns
