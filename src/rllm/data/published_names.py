"""Published names of benchmarks and data sets that are ours under another spelling.

mmlu_pro, MMLU-Pro    ──► mmlu-pro     `_`, `-` and case are the same
hendrycks_math        ──► math         renamed
"""

from collections.abc import Collection

RENAMED = {
    "aime_2024": "aime24",
    "aime_2025": "aime25",
    "aime_2026": "aime26",
    "hendrycks_math": "math",
    "deepscaler_math": "deepscaler",
    "swebench_verified": "swe-bench-verified",
    "swebench_pro": "swe-bench-pro",
}
"""Published name -> ours."""


def own_name(name: str, names: Collection[str]) -> str | None:
    """The one of `names` that a published name means; None where there is none."""
    key = name_key(name)
    if (new_key := RENAMED.get(key)) in names:
        return new_key
    same = [each for each in names if name_key(each) == key]
    return same[0] if len(same) == 1 else None


def name_key(name: str) -> str:
    """A name without what is the same in all its spellings."""
    return name.lower().replace("-", "_")
