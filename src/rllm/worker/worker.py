"""A worker in Python: `Worker.load("worker.md").run({"run_id": "1", …})`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllm.contracts.contract import Contract
from rllm.contracts.worker_file import read_contract
from rllm.engine.event_loop import run
from rllm.errors import ConfigError
from rllm.files.home import rllm_home
from rllm.worker.host import WorkerHost
from rllm.worker.response import WorkerResponse
from rllm.worker.telemetry import Telemetry


class Worker:
    """One contract, what stands behind it, and where its runs are kept."""

    def __init__(self, contract: Contract, directory: Path, *, telemetry: Telemetry | None = None) -> None:
        """`telemetry` collects the spans of one call of `run` or `arun_all`."""
        self.contract = contract
        self.directory = directory
        self.telemetry = telemetry

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        program: str = "",
        agent: str = "",
        workflow: str = "",
        model: str = "",
        base_url: str = "",
        directory: str | Path | None = None,
        telemetry: Telemetry | None = None,
    ) -> "Worker":
        """Read a worker.md file. What is given wins over its `rllm:` binding.

        Raises ContractError with file and line for what is no contract. Runs are kept in `directory`, by
        default `~/.rllm/workers/ID`.
        """
        names = {"program": program, "agent": agent, "workflow": workflow}
        contract = bound(read_contract(Path(path)), **names, model=model, base_url=base_url)
        directory = default_directory(contract) if directory is None else Path(directory)
        return cls(contract, directory, telemetry=telemetry)

    def run(self, inputs: Mapping[str, Any]) -> WorkerResponse:
        """The answer to one request; see `WorkerRuntime.run`. Opens and closes what is behind the worker: for
        many requests use `arun_all`, or serve it.
        """
        [response] = run(self.arun_all([inputs]))
        return response

    async def arun_all(
        self,
        requests: Sequence[Any],
        *,
        max_parallel: int = 64,
        on_answer: Callable[[WorkerResponse], object] = lambda response: None,
    ) -> list[WorkerResponse]:
        """The answers in the order of the requests, which are inputs or what is to be refused as none;
        `on_answer` hears of each as it comes."""
        async with WorkerHost(
            [self.contract], self.directory, max_parallel=max_parallel, telemetry=self.telemetry
        ) as host:
            runtime = host.workers[self.contract.id]
            return await runtime.run_all(requests, num_callers=max_parallel, on_answer=on_answer)


def bound(contract: Contract, *, model: str = "", base_url: str = "", **actors: str) -> Contract:
    """The contract with another binding where one is given: flags are relative to the current directory.

    `actors`: at most one of `program`, `agent` and `workflow`; it stands in for whichever the contract names.
    """
    own_actors = {name: _from_here(value) for name, value in actors.items() if value}
    if len(own_actors) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in own_actors)} exclude each other; give one.")
    binding = contract.binding
    if own_actors:
        binding = replace(binding, **{"program": "", "agent": "", "workflow": ""} | own_actors)
    if model:
        binding = replace(binding, model=_from_here(model), base_url=base_url)
    elif base_url:
        binding = replace(binding, base_url=base_url)
    return replace(contract, binding=binding)


def default_directory(contract: Contract) -> Path:
    return rllm_home() / "workers" / contract.id


def _from_here(name: str) -> str:
    """A path as it is from the current directory, whatever directory the contract is in."""
    path, colon, attribute = name.rpartition(":")
    if colon and Path(path).is_file():
        return f"{Path(path).resolve()}:{attribute}"
    return str(Path(name).resolve()) if Path(name).exists() else name
