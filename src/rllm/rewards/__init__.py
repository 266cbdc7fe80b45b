"""Who judges: what an evaluator is. The decorator is `rllm.evaluator`, from `rllm.rewards.evaluator`.

Names are looked up in their files when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.rewards.evaluator import Evaluator as Evaluator
    from rllm.rewards.evaluator import as_evaluator as as_evaluator

_HOME_OF = dict.fromkeys(("Evaluator", "as_evaluator"), "rllm.rewards.evaluator")


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.rewards` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
