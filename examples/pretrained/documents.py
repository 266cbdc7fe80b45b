"""A LangGraph program that answers from documents: a search finds a page, and one page leads to another.

    question ──► model ──► "search Ana" ──► page ──► model ──► "search Leo" ──► page ──► … ──► "answer Oslo"

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
LIVES, BOSS = "Where does {} live?", "Where does the boss of {} live?"
PAGE = "{} lives in {}. Boss: {}."
EXAMPLE = (
    *(BOSS.format("Lena"), "search Lena", PAGE.format("Lena", "Moscow", "Ralf")),
    *("search Ralf", PAGE.format("Ralf", "Chicago", "Mia"), "answer Chicago"),
)
MAX_TURNS = 4
CONFIG: dict[str, Any] = {
    "steps": 24,
    "inference": {"max_context": 512},
    "rollout": {"tasks_per_step": 8, "max_tokens_per_turn": 8},
    "evaluation": {"num_tasks": 64},
}


def tasks(split: str) -> list[dict[str, Any]]:
    """No two splits share a person and a boss."""
    draw = random.Random(0)
    pairs = draw.sample(list(itertools.permutations(NAMES.split(), 2)), 380)
    size = {"test": slice(0, 64), "validation": slice(64, 128), "train": slice(128, None)}[split]
    drawn: list[dict[str, Any]] = []
    for person, boss in pairs[size]:
        (home, office), form = draw.sample(CITIES.split(), 2), draw.choice((LIVES, BOSS))
        pages = {person: PAGE.format(person, home, boss), boss: PAGE.format(boss, office, "Max")}
        path, answer = ([person], home) if form == LIVES else ([person, boss], office)
        row = {"id": f"{person} {boss}", "instruction": form.format(person), "answer": answer}
        drawn.append({**row, "pages": pages, "path": path})
    return drawn


@rllm.rollout
def solve(task: Task, config: AgentConfig) -> Trajectory:
    llm = ChatOpenAI(model=config.model, base_url=config.base_url, api_key="any")  # pyright: ignore[reportArgumentType]

    def ask_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [llm.invoke(state["messages"])]}

    def search(state: MessagesState) -> dict[str, Any]:
        name = state["messages"][-1].text.removeprefix("search ")
        return {"messages": [("human", task.metadata["pages"].get(name, "There is no such page."))]}

    def next_node(state: MessagesState) -> str:
        num_turns = (len(state["messages"]) - len(start)) // 2 + 1
        return "search" if state["messages"][-1].text.startswith("search ") and num_turns < MAX_TURNS else END

    texts = (*EXAMPLE, str(task.instruction))
    start = [("system", "Search, then answer."), *zip(("human", "ai") * 4, texts, strict=False)]
    graph = StateGraph(MessagesState).add_node("search", search).add_node("model", ask_model)
    graph.add_edge(START, "model").add_conditional_edges("model", next_node).add_edge("search", "model")
    said = graph.compile().invoke({"messages": start})["messages"][len(start) :]
    return Trajectory(output=[message.text for message in said if message.type == "ai"])


@rllm.evaluator
def score(task: dict[str, Any], episode: Episode) -> tuple[float, bool]:
    """A quarter for each page that leads to the answer, the rest for the answer."""
    said = episode.trajectories[0].output
    num_found = sum(f"search {name}" in said for name in task["path"])
    is_right = num_found == len(task["path"]) and said[-1] == f"answer {task['answer']}"
    return 1.0 if is_right else 0.25 * num_found, is_right


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
    return f"{len(task['path'])} pages"


if __name__ == "__main__":
    model, run = (*sys.argv[1:], "runs/documents")[:2]
    trainer(model, run).train()
