"""Several agents, one attempt: what a workflow is, and the ones that ship.

Names are looked up in their files when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllm.workflows.cumulative_workflow import CumulativeWorkflow as CumulativeWorkflow
    from rllm.workflows.multi_turn_workflow import MultiTurnWorkflow as MultiTurnWorkflow
    from rllm.workflows.simple_workflow import SimpleWorkflow as SimpleWorkflow
    from rllm.workflows.single_turn_workflow import SingleTurnWorkflow as SingleTurnWorkflow
    from rllm.workflows.solver_judge import SolverJudgeWorkflow as SolverJudgeWorkflow
    from rllm.workflows.workflow import TerminationEvent as TerminationEvent
    from rllm.workflows.workflow import TerminationReason as TerminationReason
    from rllm.workflows.workflow import Workflow as Workflow

_HOME_OF = {
    "CumulativeWorkflow": "rllm.workflows.cumulative_workflow",
    "MultiTurnWorkflow": "rllm.workflows.multi_turn_workflow",
    "SimpleWorkflow": "rllm.workflows.simple_workflow",
    "SingleTurnWorkflow": "rllm.workflows.single_turn_workflow",
    "SolverJudgeWorkflow": "rllm.workflows.solver_judge",
    "TerminationEvent": "rllm.workflows.workflow",
    "TerminationReason": "rllm.workflows.workflow",
    "Workflow": "rllm.workflows.workflow",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module `rllm.workflows` has no attribute `{name}`")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
