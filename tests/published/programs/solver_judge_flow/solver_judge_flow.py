"""Two solvers at once, then a judge who picks: an agent flow that names no calls."""

import asyncio
import re

from openai import AsyncOpenAI

import rllm
from rllm.types import AgentConfig, Episode, Step, Task, Trajectory

N_SOLUTIONS = 2


async def solve(client: AsyncOpenAI, model: str, problem: str) -> Trajectory:
    messages = [{"role": "user", "content": problem}]
    response = await client.chat.completions.create(model=model, messages=messages)
    content = response.choices[0].message.content or ""
    step = Step(
        chat_completions=[*messages, {"role": "assistant", "content": content}],
        model_response=content,
        action=content,
    )
    return Trajectory(name="solver", steps=[step])


async def judge(client: AsyncOpenAI, model: str, problem: str, solutions: list[str]) -> Trajectory:
    lines = [f"{number}: {solution[:12]}" for number, solution in enumerate(solutions, 1)]
    messages = [{"role": "user", "content": "\n".join([problem, *lines])}]
    response = await client.chat.completions.create(model=model, messages=messages)
    content = response.choices[0].message.content or ""
    step = Step(
        chat_completions=[*messages, {"role": "assistant", "content": content}],
        model_response=content,
        action=pick(content, solutions),
    )
    return Trajectory(name="judge", steps=[step])


def pick(content: str, solutions: list[str]) -> str:
    number = re.search(r"<select>\s*(\d+)\s*</select>", content)
    place = int(number.group(1)) - 1 if number else -1
    return solutions[place] if 0 <= place < len(solutions) else ""


@rllm.rollout(name="solver-judge")
async def solver_judge_flow(task: Task, config: AgentConfig) -> Episode:
    async with AsyncOpenAI(base_url=config.base_url, api_key="EMPTY") as client:
        problem = str(task.metadata["question"])
        solvers = await asyncio.gather(*(solve(client, config.model, problem) for _ in range(N_SOLUTIONS)))
        solutions = [each.steps[-1].action for each in solvers]
        picked = await judge(client, config.model, problem, solutions)
    return Episode(trajectories=[*solvers, picked], artifacts={"answer": picked.steps[-1].action})
