"""The log-probabilities of a run's rows under a model that never changes: computed once, kept in the run.

rows ──► RUN/NAME.safetensors there? ──yes──► of these rows? ──► [T] log-probabilities of each
                       └──no──► scorer().score ──► written whole or not at all ──┘
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from rllm.errors import CheckpointError
from rllm.files.atomic import write_atomic
from rllm.trainer.reference import Scorer
from rllm.types.sample import TrainingSample


def kept_scores(
    path: Path, rows: Sequence[TrainingSample], scorer: Callable[[], Scorer]
) -> list[NDArray[np.float32]]:
    """One [T] array per row: log-probability of each trained token in nats, 0 elsewhere.

    `scorer` is asked for only where nothing is kept yet. Raises CheckpointError for a file that cannot be
    read or belongs to other rows.
    """
    if not path.exists():
        scores = scorer().score(rows)
        flat = [score_T[row.trainable_T] for row, score_T in zip(rows, scores, strict=True)]
        write_atomic(path, save({"logprobs": np.concatenate(flat)}, metadata={"rows_sha256": _sha256(rows)}))
    logprobs = _read(path, rows)
    counts = [row.num_trainable for row in rows]
    scores: list[NDArray[np.float32]] = []
    for row, mine in zip(rows, np.split(logprobs, np.cumsum(counts)[:-1]), strict=True):
        score_T = np.zeros(row.num_tokens, dtype=np.float32)
        score_T[row.trainable_T] = mine
        scores.append(score_T)
    return scores


def _read(path: Path, rows: Sequence[TrainingSample]) -> NDArray[np.float32]:
    try:
        with safe_open(path, framework="numpy") as file:
            of_rows, logprobs = file.metadata()["rows_sha256"], file.get_tensor("logprobs")
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; delete it, it is computed again.") from error
    if of_rows != _sha256(rows):
        raise CheckpointError(
            f"{path} belongs to other rows than this run's; delete it, it is computed again."
        )
    return logprobs


def _sha256(rows: Sequence[TrainingSample]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.token_ids_T.tobytes())
        digest.update(row.trainable_T.tobytes())
    return digest.hexdigest()
