"""A graph of a model node and a tool node; the steps are the calls that the gateway saw."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import rllm
from rllm.types import AgentConfig, Episode, Task, Trajectory

SYSTEM = "Use the tool, then answer."


@tool
def multiply(a: int, b: int) -> int:
    """The product."""
    return a * b


def build_graph(config: AgentConfig):
    llm = ChatOpenAI(model=config.model, base_url=config.base_url, api_key="EMPTY")
    llm = llm.bind_tools([multiply])

    async def agent(state: MessagesState):
        return {"messages": [await llm.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


@rllm.rollout(name="langgraph")
async def langgraph_flow(task: Task, config: AgentConfig) -> Episode:
    messages = [("system", SYSTEM), ("user", str(task.metadata["question"]))]
    answer = ""
    try:
        done = await build_graph(config).ainvoke({"messages": messages}, {"recursion_limit": 5})
        answer = str(done["messages"][-1].content)
    except GraphRecursionError:
        pass
    return Episode(trajectories=[Trajectory(name="langgraph", steps=[])], artifacts={"answer": answer})
