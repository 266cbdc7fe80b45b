"""Which rows attention computes as one block: by their sizes, by their slots, and nothing else."""

import numpy as np
import pytest

from rllm.inference.local.forward import _alike, _near


@pytest.mark.parametrize(
    ("lengths", "spans", "overhead", "groups"),
    [
        pytest.param([5], [5], 0, [[0]], id="one row"),
        pytest.param([4, 4, 2], [4, 4, 4], 3, [[0, 1, 2]], id="8 padded pairs cost no more than 3 + 40 // 8"),
        pytest.param([4, 4, 2], [4, 4, 4], 2, [[0, 1], [2]], id="and more than 2 + 40 // 8"),
        pytest.param([2, 4, 4], [4, 4, 4], 2, [[1, 2], [0]], id="the largest first"),
        pytest.param([4, 4, 2, 1], [4, 4, 4, 1], 3, [[0, 1, 2], [3]], id="a row that is too small for all"),
        pytest.param([4, 4, 2, 1], [4, 4, 4, 1], 2, [[0, 1], [2], [3]], id="none of the small ones"),
        pytest.param([1, 10], [100, 10], 0, [[0], [1]], id="equal areas of different shapes"),
        pytest.param([1, 10], [100, 10], 1800 - 25, [[0, 1]], id="padded to the longest by the widest"),
        pytest.param([9, 1, 9], [9, 90, 9], 100, [[1], [0, 2]], id="a wide row beside two long ones"),
        pytest.param([9, 8, 1, 1], [9, 9, 1, 1], 5, [[0, 1], [2, 3]], id="a group pays for its own rows"),
    ],
)
def test_rows_are_padded_together_while_that_costs_less_than_another_block(
    lengths: list[int], spans: list[int], overhead: int, groups: list[list[int]]
) -> None:
    assert [group.tolist() for group in _alike(np.array(lengths), np.array(spans), overhead)] == groups


@pytest.mark.parametrize(
    ("rows", "max_unused", "pieces"),
    [
        pytest.param([7], 0, [[0]], id="one slot"),
        pytest.param([3, 4, 5], 0, [[0, 1, 2]], id="a run of slots"),
        pytest.param([3, 5, 6], 1, [[0, 1, 2]], id="a gap that is small enough"),
        pytest.param([3, 5, 6], 0, [[0], [1, 2]], id="a gap that is not"),
        pytest.param([0, 2, 4, 6], 2, [[0, 1, 2], [3]], id="gaps add up"),
        pytest.param([0, 4, 6, 8], 2, [[0], [1, 2, 3]], id="and count anew behind a cut"),
        pytest.param([0, 1, 5, 6, 20], 2, [[0, 1], [2, 3], [4]], id="several cuts"),
    ],
)
def test_slots_of_others_are_read_along_only_where_they_are_few(
    rows: list[int], max_unused: int, pieces: list[list[int]]
) -> None:
    rows_B = np.array(rows)
    assert [each.tolist() for each in _near(np.arange(len(rows)), rows_B, max_unused)] == pieces
    # The same rows as some of more that are decoded.
    places = np.arange(1, 2 * len(rows), 2)
    every = np.zeros(2 * len(rows), dtype=np.int64)
    every[places] = rows_B
    chosen = [[int(places[each]) for each in piece] for piece in pieces]
    assert [each.tolist() for each in _near(places, every, max_unused)] == chosen
