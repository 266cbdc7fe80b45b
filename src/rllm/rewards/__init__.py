"""Judges: graders of answers, and evaluators of episodes. The decorator is `rllm.evaluator`.

Names are looked up in their files when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.rewards import countdown_reward as countdown_reward
    from rllm.rewards.evaluator import Evaluator as Evaluator
    from rllm.rewards.evaluator import as_evaluator as as_evaluator
    from rllm.rewards.grade import Grade as Grade
    from rllm.rewards.grade import Grader as Grader
    from rllm.rewards.graders import grader_named as grader_named
    from rllm.rewards.parallel_grading import grade_many as grade_many
    from rllm.rewards.reward_functions import RewardCodeFn as RewardCodeFn
    from rllm.rewards.reward_functions import RewardConfig as RewardConfig
    from rllm.rewards.reward_functions import RewardFunction as RewardFunction
    from rllm.rewards.reward_functions import RewardInput as RewardInput
    from rllm.rewards.reward_functions import RewardMathFn as RewardMathFn
    from rllm.rewards.reward_functions import RewardOutput as RewardOutput
    from rllm.rewards.reward_functions import RewardSearchFn as RewardSearchFn
    from rllm.rewards.reward_functions import code_reward_fn as code_reward_fn
    from rllm.rewards.reward_functions import countdown_reward_fn as countdown_reward_fn
    from rllm.rewards.reward_functions import f1_reward_fn as f1_reward_fn
    from rllm.rewards.reward_functions import math_reward_fn as math_reward_fn
    from rllm.rewards.reward_functions import search_reward_fn as search_reward_fn
    from rllm.rewards.reward_functions import zero_reward as zero_reward

_HOME_OF = {
    **dict.fromkeys(("Evaluator", "as_evaluator"), "rllm.rewards.evaluator"),
    **dict.fromkeys(("Grade", "Grader"), "rllm.rewards.grade"),
    "grader_named": "rllm.rewards.graders",
    "grade_many": "rllm.rewards.parallel_grading",
    **dict.fromkeys(
        (
            *("RewardConfig", "RewardInput", "RewardOutput", "RewardFunction"),
            *("RewardMathFn", "RewardCodeFn", "RewardSearchFn"),
            *("math_reward_fn", "code_reward_fn", "search_reward_fn", "f1_reward_fn", "countdown_reward_fn"),
            "zero_reward",
        ),
        "rllm.rewards.reward_functions",
    ),
}
_MODULES = ("countdown_reward",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"rllm.rewards.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.rewards` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_MODULES})
