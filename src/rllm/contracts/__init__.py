"""Worker contracts: what a worker is for, what it takes, what it gives back, and its limits."""

from rllm.contracts.answering import answer_schema, checked_outputs, messages_for, read_answer
from rllm.contracts.contract import Binding, Constraints, Contract, RunStatus
from rllm.contracts.schemas import Schema, Violation
from rllm.contracts.worker_file import parse_contract, read_contract

__all__ = [
    "Binding",
    "Constraints",
    "Contract",
    "RunStatus",
    "Schema",
    "Violation",
    "answer_schema",
    "checked_outputs",
    "messages_for",
    "parse_contract",
    "read_answer",
    "read_contract",
]
