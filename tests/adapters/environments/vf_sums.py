"""An environment of verifiers for tests: sums, asked twice unless the first answer is right."""

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset

BAD = "1002"
"""The answer of the row that has the fault."""


def rows(first: int, count: int) -> Dataset:
    numbers = range(first, first + count)
    return Dataset.from_list([{"question": f"{n} + 1 =", "answer": str(n + 1)} for n in numbers])


class Sums(vf.MultiTurnEnv):
    def __init__(self, fault: str, **kwargs: Any) -> None:
        self.fault = fault
        super().__init__(**kwargs)

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        fault = self.fault if state["answer"] == BAD else ""
        if fault == "environment":
            raise KeyError("a bug of the environment")
        if fault == "sandbox":
            raise vf.SandboxError("the sandbox is gone")
        if fault == "slow":
            await asyncio.sleep(60)
        return [{"role": "user", "content": "Again."}]


def load_environment(
    num_train: int = 30,
    num_test: int = 4,
    fault: str = "",
    max_turns: int = 2,
    timeout_seconds: float | None = None,
) -> vf.Environment:
    async def right(completion: Any, answer: str) -> float:
        if fault == "scorer" and answer == BAD:
            raise ZeroDivisionError("a bug of the scorer")
        if fault == "none" and answer == BAD:
            return None  # type: ignore[return-value]
        return float(completion[-1]["content"] == answer)

    def length(completion: Any) -> float:
        return float(len(completion[-1]["content"]))

    def best_of(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    rubric = vf.Rubric(funcs=[best_of if fault == "group" else right, length], weights=[1.0, 0.0])
    return Sums(
        fault,
        dataset=rows(0, num_train) if num_train else None,
        eval_dataset=rows(0 if fault == "same" else 1000, num_test) if num_test else None,
        system_prompt="Give the number alone.",
        rubric=rubric,
        max_turns=max_turns,
        timeout_seconds=timeout_seconds,
    )
