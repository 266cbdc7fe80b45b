"""A LangGraph program that searches documents: one page leads to the next, and the last one is the answer.

    "Where does Ana live?" ──► "search Ana" ──► "Ana lives with Leo" ──► "search Leo" ──► … ──► "search Rome"

python documents.py MODEL [RUN]
"""

import itertools
import random
import sys
from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

import rllm
from rllm import AgentConfig, AgentTrainer, Episode, Task, Trajectory

NAMES = "Ana Ben Clara Dan Eva Frank Grace Hugo Ida Jack Karl Leo Mona Nina Oscar Paul Rosa Sam Tina Will"
CITIES = "Rome Paris Cairo Lima Delhi Tokyo Berlin Boston Dallas London"
LIKED = "fish tea music snow chess cake maps hats"
EXAMPLE = (
    *("Where does Lena live?", "search Lena", "Lena likes soup and lives with Ralf.", "search Ralf"),
    *("Ralf lives in Vienna and likes cats.", "search Vienna"),
)
CONFIG: dict[str, Any] = {
    "steps": 10,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_tokens_per_turn": 8},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share the first two people of a path."""
    draw = random.Random(0)
    pairs = draw.sample(list(itertools.permutations(NAMES.split(), 2)), 380)
    size = {"test": slice(0, 64), "validation": slice(64, 128), "train": slice(128, None)}[split]
    drawn: list[dict[str, Any]] = []
    for first, second in pairs[size]:
        third = draw.choice([name for name in NAMES.split() if name not in (first, second)])
        city, pages = draw.choice(CITIES.split()), dict[str, str]()
        for name, home in ((first, f"with {second}"), (second, f"with {third}"), (third, f"in {city}")):
            facts = draw.sample([f"lives {home}", f"likes {draw.choice(LIKED.split())}"], 2)
            pages[f"search {name}"] = f"{name} {' and '.join(facts)}."
        row = {"instruction": f"Where does {first} live?", "path": [first, second, third, city]}
        drawn.append({**row, "id": f"{first} {second}", "pages": pages, "is_last": f"in {city}" in facts[1]})
    return drawn


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    llm = ChatOpenAI(model=config.model, base_url=config.base_url, api_key="any")  # pyright: ignore[reportArgumentType]

    def ask_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    def search(state: MessagesState) -> dict[str, Any]:
        return {"messages": [("human", pages[state["messages"][-1].text])]}

    def next_node(state: MessagesState) -> str:
        has_turns = len(state["messages"]) < len(start) + 2 * len(pages)
        return "search" if has_turns and state["messages"][-1].text in pages else END

    pages, texts = task.metadata["pages"], (*EXAMPLE, str(task.instruction))
    start = [("system", "Search for the place."), *zip(("human", "ai") * 4, texts, strict=False)]
    graph = StateGraph(MessagesState).add_node("search", search).add_node("model", ask_model)
    graph.add_edge(START, "model").add_conditional_edges("model", next_node).add_edge("search", "model")
    said = graph.compile().invoke({"messages": start})["messages"][len(start) :]
    return Trajectory(output=[message.text for message in said if message.type == "ai"])


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> tuple[float, bool]:
    """A quarter for each search on the path, whose end is the place."""
    said = episode.trajectories[0].output
    wanted = [f"search {page}" for page in task["path"]]
    return sum(text == right for text, right in zip(said, wanted, strict=False)) / len(wanted), said == wanted


def trainer(model: str, run: Any, seed: int = 0, split: str = "test", **settings: Any) -> AgentTrainer:
    return AgentTrainer(
        {**CONFIG, "model": {"path": model}, "seed": seed, **settings},
        agent_flow=solve,
        evaluator=score,
        train_dataset=tasks("train"),
        val_dataset=tasks(split)[: CONFIG["evaluation"]["num_tasks"]],
        output=run,
    )


def kind(task: dict[str, Any]) -> str:
    return "place last" if task["is_last"] else "place first"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/documents")[:2]
    trainer(model, run).train()
