"""One question, one answer: an agent flow in the published style."""

from openai import AsyncOpenAI

import rllm
from rllm.types import AgentConfig, Episode, Step, Task, Trajectory


@rllm.rollout(name="math")
async def math_flow(task: Task, config: AgentConfig) -> Episode:
    client = AsyncOpenAI(base_url=config.base_url, api_key=config.api_key)
    messages = [{"role": "user", "content": str(task.data["question"])}]
    answer = await client.chat.completions.create(model=config.model, messages=messages)
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    step = Step(id=answer.id, chat_completions=list(messages), model_response=text, action=text)
    return Episode(trajectories=[Trajectory(name="math", steps=[step])], artifacts={"answer": text})
