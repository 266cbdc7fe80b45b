"""Errors of an expert of questions: the answer keeps its form and says another number."""

import re

import numpy as np


def stray(answer: str, noise: float, rng: np.random.Generator) -> str:
    """`answer`; with probability `noise` every digit of it is drawn anew. Text without digits stays."""
    if rng.random() >= noise:
        return answer
    return re.sub(r"\d", lambda match: str(rng.integers(10)), answer)
