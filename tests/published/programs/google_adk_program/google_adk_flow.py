"""An agent of Google's development kit, whose model comes through LiteLLM."""

from google.adk.agents import LlmAgent
from google.adk.agents.invocation_context import LlmCallsLimitExceededError
from google.adk.agents.run_config import RunConfig
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

import rllm
from rllm.types import AgentConfig, Episode, Task, Trajectory


def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


@rllm.rollout(name="adk")
async def google_adk_flow(task: Task, config: AgentConfig) -> Episode:
    agent = LlmAgent(
        name="calculator",
        model=LiteLlm(model=f"openai/{config.model}", api_base=config.base_url, api_key="EMPTY"),
        instruction="Use the tool, then answer.",
        tools=[multiply],
    )
    runner = InMemoryRunner(agent=agent, app_name="calculator")
    session = await runner.session_service.create_session(app_name="calculator", user_id="trainer")
    question = types.UserContent(str(task.metadata["question"]))
    answer = ""
    try:
        async for event in runner.run_async(
            user_id="trainer",
            session_id=session.id,
            new_message=question,
            run_config=RunConfig(max_llm_calls=3),
        ):
            if event.is_final_response() and event.content and event.content.parts:
                answer = event.content.parts[0].text or ""
    except LlmCallsLimitExceededError:
        pass
    return Episode(trajectories=[Trajectory(name="adk")], artifacts={"answer": answer})
