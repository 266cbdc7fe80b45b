"""A worker's contract as a value. `worker_file` reads it; nothing here does I/O.

The fields are those of the worker.md files that the registry publishes; see docs/worker.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rllm.contracts.schemas import Schema

MAX_TIMEOUT_S = 86_400.0
MAX_ATTEMPTS = 100


class RunStatus(StrEnum):
    """The end of a worker's run. Each value means one thing."""

    OK = "ok"
    INVALID_REQUEST = "invalid_request"
    """The input breaks its schema, or the key was used with another input: no model was asked."""
    INVALID_OUTPUT = "invalid_output"
    """The result of the last attempt breaks the output schema."""
    RETRYABLE_ERROR = "retryable_error"
    """The infrastructure failed, or time was up. Final only when no attempt is left."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Constraints:
    """Limits of one run."""

    timeout_seconds: float = 60.0
    """For the whole run: waiting, all model calls, and attempts that follow within it."""
    max_attempts: int = 1
    """Attempts for one key, also across crashes of the process."""
    idempotency_key: str = ""
    """The input property whose value names a run; empty where every call is a run of its own."""
    status_enum: tuple[str, ...] = tuple(RunStatus)
    repair: bool = False
    """A model whose answer breaks the output schema gets one more turn, within the same attempt."""
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True, frozen=True, slots=True)
class Binding:
    """The actor behind a contract: at most one of program, agent and workflow. All may be empty: then they
    are named when the worker is run, and in a workflow the policy does the work."""

    program: str = ""
    """`file.py:NAME`, `package.module:NAME` or an entry point; relative to the contract's file. Without one
    the model itself answers."""
    agent: str = ""
    """A built-in agent or a class, named alike: it is shown the inputs and acts once."""
    workflow: str = ""
    """A class, named alike: its workers without a model of their own are played by `model`."""
    model: str = ""
    """A model as `--model` takes it: a run, a directory, `builtin:tiny`, `PROVIDER:MODEL`, a name that was
    set up."""
    base_url: str = ""
    """The address of a server that knows `model`."""
    prompt_price: float = 0.0
    """The price of a million tokens that `model` reads, in any one currency; 0 for a model without prices."""
    completion_price: float = 0.0
    """The price of a million tokens that it writes."""

    @property
    def is_bound(self) -> bool:
        """Whether somebody does the work."""
        return bool(self.actor or self.model)

    @property
    def actor(self) -> str:
        """The program, agent or workflow; empty where the model itself answers."""
        return self.program or self.agent or self.workflow


@dataclass(kw_only=True, frozen=True, slots=True)
class Contract:
    """One worker."""

    id: str
    version: str
    purpose: str
    input_schema: Schema
    output_schema: Schema
    constraints: Constraints = Constraints()
    name: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    usage: str = ""
    binding: Binding = Binding()
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    """Where the contract was derived from, as its author wrote it."""
    source: str = ""
    """Path of its file."""

    @property
    def runtime_properties(self) -> tuple[str, ...]:
        """Output properties that the runtime fills: the agent gives the rest."""
        return tuple(name for name in ("run_id", "status") if name in self.output_schema.properties)

    @property
    def key_type(self) -> str:
        """The type of the idempotency key as the input schema has it; empty where it says none."""
        own = self.input_schema.properties.get(self.constraints.idempotency_key)
        kind = own.get("type") if isinstance(own, Mapping) else ""
        return kind if isinstance(kind, str) else ""

    def filled_run_id(self, run_id: str) -> str | int:
        """`run_id` as the outputs have it: a number where the schema wants one, as its key is then."""
        own = self.output_schema.properties.get("run_id")
        return int(run_id) if isinstance(own, Mapping) and own.get("type") == "integer" else run_id

    def with_key(self, inputs: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The inputs, named where the contract wants a name and the caller gave none."""
        name = self.constraints.idempotency_key
        return {name: key, **inputs} if self.key_type == "string" else dict(inputs)
