"""The one place that reads a judgement: what an evaluator or a reward function returned, as finite numbers.

    EvalOutput, float, bool, (reward, is_correct) ──judgement──► EvalOutput
    any number ──finite_number──► float

None, NaN, infinity and text are a RewardError that names the source: never taken for a zero.
"""

import math
from numbers import Real
from typing import Any, cast

import numpy as np

from rllm.errors import RewardError
from rllm.types.evaluation import EvalOutput, Signal

_BOOLS: tuple[type, ...] = (bool, np.bool_)
_NUMBERS: tuple[type, ...] = (Real, np.bool_)


def judgement(result: Any, source: str) -> EvalOutput:
    """An evaluator's result as an EvalOutput with finite numbers. Raises RewardError naming `source`."""
    if isinstance(result, EvalOutput):
        return _require_finite(result, source)
    if isinstance(result, _BOOLS):
        return EvalOutput(reward=float(result), is_correct=bool(result))
    if isinstance(result, tuple):
        parts = cast(tuple[Any, ...], result)
        if len(parts) != 2:
            raise RewardError(
                f"{source} returned a tuple of {len(parts)} values; return (reward, is_correct)."
            )
        return _require_finite(EvalOutput(reward=parts[0], is_correct=parts[1]), source)
    reward = finite_number(result, f"{source} returned", "the reward")
    return EvalOutput(reward=reward, is_correct=reward > 0.0)


def finite_number(value: Any, source: str, as_what: str) -> float:
    """`value` as a float. Raises RewardError for what is no finite real number."""
    if type(value) is float and math.isfinite(value):  # of an abstract class, isinstance is slow
        return value
    if isinstance(value, _NUMBERS):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise RewardError(
        f"{source} {value!r:.200} (a {type(value).__name__}) as {as_what}; it must be a finite number."
    )


def _require_finite(output: EvalOutput, source: str) -> EvalOutput:
    if not isinstance(output.is_correct, _BOOLS):
        raise RewardError(
            f"{source} returned {output.is_correct!r:.200} as `is_correct`; it must be True or False."
        )
    for signal in output.signals:
        if not isinstance(signal, Signal):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RewardError(f"{source} returned {signal!r:.200} as a signal; return Signal(name, value).")
    source_text = f"{source} returned"
    return EvalOutput(
        reward=finite_number(output.reward, source_text, "the reward"),
        is_correct=bool(output.is_correct),
        signals=[
            Signal(each.name, finite_number(each.value, source_text, f"signal `{each.name}`"), each.metadata)
            for each in output.signals
        ],
        metadata=output.metadata,
    )
