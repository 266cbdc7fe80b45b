"""Programs of other libraries by name: `verifiers:NAME` ──► its TaskProgram, loaded once."""

import importlib
from functools import lru_cache

from rllm.integrations.task_program import TaskProgram

LIBRARIES = {
    "inspect": "rllm.integrations.inspect.task:InspectProgram",
    "verifiers": "rllm.integrations.verifiers.environment:VerifiersProgram",
}
"""Prefix of a name -> the class that its library's programs are of."""


def is_task_program(name: str) -> bool:
    return name.partition(":")[0] in LIBRARIES and ":" in name


@lru_cache(maxsize=8)
def task_program(name: str) -> TaskProgram:
    """Raises ConfigError for one that is not there, MissingExtraError where its library is not."""
    module, _, attribute = LIBRARIES[name.partition(":")[0]].partition(":")
    return getattr(importlib.import_module(module), attribute)(name)
