"""Transforms by name, as the catalogue says it. Their files are imported when they are asked for."""

import difflib
import importlib

from rllm.data.questions import Transform
from rllm.errors import ConfigError

_HERE = "rllm.data.transforms"
TRANSFORMS = {
    "apps": f"{_HERE}.code:apps",
    "bfcl": f"{_HERE}.calls:bfcl",
    "bigcodebench": f"{_HERE}.code:bigcodebench",
    "browsecomp": f"{_HERE}.reading:browsecomp",
    "choice": f"{_HERE}.choice:choice",
    "codeforces": f"{_HERE}.code:codeforces",
    "correct_and_wrong": f"{_HERE}.choice:correct_and_wrong",
    "countdown": f"{_HERE}.mathematics:countdown",
    "deepcoder": f"{_HERE}.code:deepcoder",
    "drop": f"{_HERE}.reading:drop",
    "finqa": f"{_HERE}.tables:finqa",
    "hle": f"{_HERE}.pictures:hle",
    "humaneval": f"{_HERE}.code:humaneval",
    "instructions": f"{_HERE}.instructions:instructions",
    "livecodebench": f"{_HERE}.code:livecodebench",
    "math": f"{_HERE}.mathematics:mathematics",
    "mbpp": f"{_HERE}.code:mbpp",
    "multi_if": f"{_HERE}.instructions:multi_if",
    "multichallenge": f"{_HERE}.reading:multichallenge",
    "needles": f"{_HERE}.reading:needles",
    "own": f"{_HERE}.own:own",
    "pictures": f"{_HERE}.pictures:pictures",
    "qa": f"{_HERE}.reading:qa",
    "rubric": f"{_HERE}.reading:rubric",
    "scored_choices": f"{_HERE}.choice:scored_choices",
    "swebench": f"{_HERE}.software:swebench",
    "tatqa": f"{_HERE}.tables:tatqa",
    "translation": f"{_HERE}.translation:translation",
    "two_options": f"{_HERE}.choice:two_options",
    "yes_no": f"{_HERE}.choice:yes_no",
}
"""Name -> where its function is."""


def transform_named(name: str) -> Transform:
    """Raises ConfigError with the nearest name for one that is not there."""
    if name not in TRANSFORMS:
        nearest = difflib.get_close_matches(name, TRANSFORMS, n=1)
        hint = f"did you mean `{nearest[0]}`?" if nearest else f"there are: {', '.join(TRANSFORMS)}."
        raise ConfigError(f"There is no transform `{name}`; {hint}")
    module, _, attribute = TRANSFORMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
