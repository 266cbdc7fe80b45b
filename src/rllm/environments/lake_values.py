"""Values of a lake whose map lies open: ways, best moves, and the value of a policy on it.

    (rows, columns) ──► outcomes_of ──► distances        moves to the goal on firm ice
                                   ├──► best_moves       what the expert does
                                   └──► expected_return  of a policy, or the best that there is: exact

A state is row * num_columns + column, a move is its place in MOVES.
"""

from functools import lru_cache

import numpy as np

MOVES = ("Left", "Down", "Right", "Up")
"""In the order of Gymnasium's actions 0 to 3."""
_UNREACHABLE = 1 << 30
_DISCOUNT = 0.95
_TIE = 1e-9

Outcomes = tuple[tuple[tuple[tuple[float, int], ...], ...], ...]


@lru_cache(maxsize=256)
def outcomes_of(num_rows: int, num_columns: int, is_slippery: bool) -> Outcomes:
    """[state][move] -> (probability, next state) pairs, in the order that Gymnasium draws from.

    Read off Gymnasium's own table for a lake without holes or goal: where the ice leads depends on the edges
    alone, and what the reached cell means is on the map. So one table serves all maps of a shape.
    """
    from gymnasium.envs.toy_text import frozen_lake  # heavy: only who plays waits for it

    ice = ["S" + "F" * (num_columns - 1), *["F" * num_columns] * (num_rows - 1)]
    table = frozen_lake.FrozenLakeEnv(desc=ice, is_slippery=is_slippery).P
    return tuple(
        tuple(
            tuple((float(probability), int(state)) for probability, state, _, _ in table[state_before][move])
            for move in range(len(MOVES))
        )
        for state_before in range(num_rows * num_columns)
    )


def distances(cells: str, outcomes: Outcomes) -> list[int]:
    """Moves on firm ice from each state to the nearest goal: breadth-first from there."""
    lengths = [_UNREACHABLE] * len(cells)
    frontier = [state for state, cell in enumerate(cells) if cell == "G"]
    length = 0
    while frontier:
        for state in frontier:
            lengths[state] = length
        length += 1
        neighbours = {outcome[0][1] for state in frontier for outcome in outcomes[state]}
        frontier = [state for state in neighbours if lengths[state] == _UNREACHABLE and cells[state] != "H"]
    return lengths


@lru_cache(maxsize=16_384)
def best_moves(rows: tuple[str, ...], is_slippery: bool) -> tuple[tuple[str, ...], ...]:
    """The equally good moves of each state; all four where none leads to the goal."""
    cells, outcomes = "".join(rows), outcomes_of(len(rows), len(rows[0]), is_slippery)
    if is_slippery:
        values_S_A = _discounted_values(cells, outcomes)
    else:
        lengths = np.array(distances(cells, outcomes))
        values_S_A = -lengths[np.array([[move[0][1] for move in moves] for moves in outcomes])]
    is_best_S_A = values_S_A >= values_S_A.max(axis=1, keepdims=True) - _TIE
    return tuple(
        tuple(word for word, is_best in zip(MOVES, row, strict=True) if is_best) for row in is_best_S_A
    )


def expected_return(
    rows: tuple[str, ...], is_slippery: bool, num_steps: int, policy: tuple[float, ...] | None = None
) -> float:
    """The chance to arrive from the start within `num_steps` moves, exact.

    `policy`: chance of each move, the same everywhere; without it, of whoever plays best, knows the map and
    counts the moves that are left: V_k(s) = max_a sum_j P_j (r_j + V_{k-1}(next_j)), with V_0 = 0
    (Bellman 1957).
    """
    cells = "".join(rows)
    probabilities_S_A_K, next_S_A_K, paid_S_A_K, goes_on_S = _tables(
        cells, outcomes_of(len(rows), len(rows[0]), is_slippery)
    )
    values_S = np.zeros(len(cells))
    for _ in range(num_steps):
        values_S_A = (probabilities_S_A_K * (paid_S_A_K + values_S[next_S_A_K])).sum(axis=-1)
        chosen_S = values_S_A.max(axis=1) if policy is None else values_S_A @ np.array(policy)
        # In a hole and at the goal an episode is over; the goal was paid with the move into it.
        values_S = chosen_S * goes_on_S
    return float(values_S[cells.index("S")])


def _discounted_values(cells: str, outcomes: Outcomes) -> np.ndarray:
    """[S, A] discounted chance to arrive: Q = sum_k P_k (r_k + gamma max Q(next_k)), by iteration."""
    probabilities_S_A_K, next_S_A_K, paid_S_A_K, goes_on_S = _tables(cells, outcomes)
    values_S = np.zeros(len(cells))
    while True:
        values_S_A = (probabilities_S_A_K * (paid_S_A_K + _DISCOUNT * values_S[next_S_A_K])).sum(axis=-1)
        new_values_S = values_S_A.max(axis=1) * goes_on_S
        change = np.abs(new_values_S - values_S).max()
        values_S = new_values_S
        # All further changes together are a geometric series, and so less than _TIE.
        if change < _TIE * (1 - _DISCOUNT):
            return values_S_A


def _tables(cells: str, outcomes: Outcomes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Chances and next states, [S, A, K]; what is paid there, [S, A, K]; where an episode goes on, [S]."""
    table = np.array(outcomes)
    probabilities_S_A_K, next_S_A_K = table[..., 0], table[..., 1].astype(int)
    kinds = np.array(list(cells))
    return probabilities_S_A_K, next_S_A_K, (kinds == "G")[next_S_A_K], np.isin(kinds, ["S", "F"])
