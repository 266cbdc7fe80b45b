"""Positions of tokens in a model that places those of an image by time, line and column.

    row        a   b   [ an image of 2 lines and 3 columns ]   c
    time       0   1     2   2   2   2   2   2                 5
    line       0   1     2   2   2   3   3   3                 5
    column     0   1     2   3   4   2   3   4                 5

An image takes as many positions as its longer side has tokens (Wang et al. 2024, arXiv:2409.12191, section
2.1). A token's position depends on the row before it alone, so rows with a common prefix have it in common.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllm.types.images import MAX_PATCHES, PATCH_IDS_FROM, PLACE_BITS


class ImageGrids:
    """`sides` gives the lines and columns of an image's tokens by its number."""

    def __init__(self, sides: Callable[[int], tuple[int, int]]) -> None:
        self._sides = sides

    def shifts(self, ids_T: NDArray[np.int64]) -> NDArray[np.int64]:
        """[T] the difference between each token's position and its place in the row, which `ids_T` is the
        beginning of; of an image's tokens, between the position of the image's first one and their place."""
        shifts_T = np.zeros(len(ids_T) + 1, dtype=np.int64)
        patches_M = np.flatnonzero(ids_T >= PATCH_IDS_FROM)
        places_M = ids_T[patches_M] % MAX_PATCHES
        for first in patches_M[places_M == 0].tolist():
            lines, columns = self._sides(int(ids_T[first] - PATCH_IDS_FROM) >> PLACE_BITS)
            end = min(first + lines * columns, len(ids_T))
            # What follows the image goes on behind its longer side, not behind its number of tokens.
            shifts_T[end] += max(lines, columns) - lines * columns
        shifts_T = shifts_T.cumsum()[:-1]
        shifts_T[patches_M] -= places_M
        return shifts_T

    def positions(self, tokens_N: Tensor, firsts_N: Tensor) -> Tensor:
        """[3, 1, N] time, line and column; `firsts_N` are places with `shifts` added."""
        positions_3_N = firsts_N.repeat(3, 1)
        patches_M = (tokens_N >= PATCH_IDS_FROM).nonzero()[:, 0]
        if len(patches_M):
            patch_M = tokens_N[patches_M] - PATCH_IDS_FROM
            numbers_I, image_M = torch.unique(patch_M >> PLACE_BITS, return_inverse=True)
            columns_I = torch.tensor([self._sides(each)[1] for each in numbers_I.tolist()])
            columns_M = columns_I.to(tokens_N.device)[image_M]
            place_M = patch_M % MAX_PATCHES
            positions_3_N[1, patches_M] += place_M // columns_M
            positions_3_N[2, patches_M] += place_M % columns_M
        return positions_3_N.unsqueeze(1)
