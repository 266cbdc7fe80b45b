"""A storekeeper written with LangGraph: a model node and a ToolNode that take turns.

    question ──► model ⇄ tools (stock) ──► answer

Only the last lines know of rLLM: `OPENAI_BASE_URL=… OPENAI_API_KEY=… python agent.py` is captured.
"""

from typing import Any, Literal

from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import rllm
from rllm import AgentConfig, Episode, Task, Trajectory

STOCK = {"apples": 12, "pears": 7, "plums": 30}
MAX_NODES = 8


@tool
def stock(fruit: Literal["apples", "pears", "plums"]) -> int:
    """How many pieces of a fruit are in the store."""
    return STOCK[fruit]


def storekeeper(model: str, **connection: Any) -> Any:
    """The graph. `connection` is empty where the environment says which server to use."""
    llm = ChatOpenAI(model=model, max_completion_tokens=200, **connection)
    looks = llm.bind_tools([stock], tool_choice="required", strict=True, parallel_tool_calls=False)
    goes_on = llm.bind_tools([stock], strict=True, parallel_tool_calls=False)

    def ask_model(state: MessagesState) -> dict[str, Any]:
        has_looked = any(isinstance(message, ToolMessage) for message in state["messages"])
        return {"messages": [(goes_on if has_looked else looks).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask_model)
    graph.add_node("tools", ToolNode([stock]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile()


def ask(question: str, model: str = "gpt-4.1-mini", **connection: Any) -> str | None:
    messages = [("system", "Look into the store, then answer."), ("user", question)]
    try:
        done = storekeeper(model, **connection).invoke({"messages": messages}, {"recursion_limit": MAX_NODES})
    except GraphRecursionError:  # it called tools until the last turn
        return None
    return done["messages"][-1].text


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    answer = ask(str(task.instruction), config.model, base_url=config.base_url, api_key="any")
    return Trajectory(output=answer)


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> bool:
    return str(task["answer"]) in str(episode.trajectories[0].output)


if __name__ == "__main__":
    print(ask("How many apples are in the store?"))
