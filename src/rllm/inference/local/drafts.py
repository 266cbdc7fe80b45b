"""Guesses at what comes next, by looking up what came before.

Where an answer repeats its prompt (code that is edited, a tool's result that is quoted), the tokens behind
the last place where the same few tokens stood are a good guess at the next ones. One pass of the model then
reads them all, and those that it would have sampled itself are kept: Leviathan et al. 2023
(arXiv:2211.17192), with the lookup of Saxena 2023 ("Prompt lookup decoding") as the draft model. A draw
depends on nothing but the request's seed and the token's place, so the answer is the same
one, token by token.
"""

from collections.abc import Sequence

import numpy as np

from rllm.types.images import PATCH_IDS_FROM

NGRAM = 3
"""Tokens that have to agree. With two, chance agreements cost a small model more than they bring."""


def lookup_drafts(context_ids: Sequence[int], num_drafts: int) -> list[int]:
    """Up to `num_drafts` tokens that followed when the last `NGRAM` tokens stood in the context before, the
    latest time, and once more from there where the context ends; none where they never did. Tokens of images,
    which nobody samples, end it."""
    ids_T = np.asarray(context_ids)
    num_places = len(ids_T) - NGRAM
    if num_places <= 0 or num_drafts <= 0:
        return []
    is_same = np.ones(num_places, dtype=np.bool_)
    for offset in range(NGRAM):
        is_same &= ids_T[offset : offset + num_places] == ids_T[num_places + offset]
    places = np.flatnonzero(is_same)
    if not len(places):
        return []
    first = int(places[-1]) + NGRAM
    followers_T = ids_T[first + np.arange(num_drafts) % (len(ids_T) - first)]
    is_text = (followers_T < PATCH_IDS_FROM).tolist()
    return followers_T[: is_text.index(False) if False in is_text else num_drafts].tolist()
