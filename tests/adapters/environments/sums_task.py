"""A task of Inspect for tests: sums, asked once or twice, with faults in the second sample."""

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, Target, accuracy, match, scorer
from inspect_ai.solver import Generate, TaskState, generate, solver, system_message

BAD = "2"
"""The target of the sample that has the fault."""


@scorer(metrics=[accuracy()])
def graded(fault: str) -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        if fault == "asks":  # a scorer that asks the model which is judged
            await get_model().generate("Is that right?")
        if fault == "text" and target.text == BAD:
            return Score(value="splendid")
        if fault == "scorer" and target.text == BAD:
            raise ZeroDivisionError("a bug of the scorer")
        return Score(value="C" if state.output.completion == target.text else "I")

    return score


@solver
def twice() -> Any:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        return await generate(await generate(state))

    return solve


@task
def sums(count: int = 40, fault: str = "", message_limit: int | None = None) -> Task:
    return Task(
        dataset=[Sample(input=f"{n} + 1 =", target=str(n + 1)) for n in range(count)],
        solver=[system_message("Give the number alone."), twice() if message_limit else generate()],
        scorer=graded(fault) if fault else match(location="exact"),
        message_limit=message_limit,
    )


@task
def without_scorer() -> Task:
    return Task(dataset=[Sample(input="1 + 1 =")])
