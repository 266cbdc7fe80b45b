"""The examples for pretrained models: who does as the task says is paid in full, and who talks is not."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rllm.config.policies import ONLY_POLICY
from rllm.errors import ConfigError
from rllm.inference.scripted import ScriptedClient
from rllm.sandbox.backends import require_backend
from rllm.types.episode import Episode, Outcome
from rllm.types.messages import SamplingParams

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pretrained"
NEEDS = {"documents": ("langgraph", "langchain_openai"), "word_problems": ("agents",)}
MAX_LINES = 100

Messages = list[dict[str, Any]]
Player = Callable[[ModuleType, Messages], str]


def load(name: str) -> ModuleType:
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(f"pretrained_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def moves(example: ModuleType, messages: Messages) -> str:
    light = last(messages).split()[-1]
    rules = next(text for text in texts(messages)[::-1] if "\n" in text)
    return next(rule for rule in rules.splitlines() if rule.startswith(f"{light} is "))


def sentence(example: ModuleType, messages: Messages) -> str:
    word, case, mark = re.findall(r"about the (\w+) in (\w+).* with (an|a) ", last(messages))[0]
    text = f"the {word} is here {'!' if mark == 'an' else '?'}"
    return text.upper() if case == "CAPITAL" else text


def commands(example: ModuleType, messages: Messages) -> str:
    number, words = last(messages).split(". ", 1)
    if words == "The end.":
        return f"answer {number}"
    verb, second = words.rstrip(".").split()
    sign = next(sign for sign, forms in example.WORDS.items() if f"{verb} {{}}." in forms)
    return f"{number} {sign} {second}"


def expected(example: ModuleType, messages: Messages) -> str:
    (row,) = (row for row in example.tasks("test") if row["instruction"] == last(messages))
    if example.__name__.endswith("extract"):
        return json.dumps(row["answer"])
    return f"{row['answer']} + 0"


def note(example: ModuleType, messages: Messages) -> str:
    if found := re.search(r"Note: (\d+)", last(messages)):
        return found[1]
    fruit = last(messages).rstrip(".").split()[-1]
    return re.findall(rf"\d+ {fruit}", last(messages))[0]


def searches(example: ModuleType, messages: Messages) -> str:
    place = re.search(r"Where does (\w+) live|lives (?:with|in) (\w+)", last(messages))
    assert place is not None
    return f"search {place[1] or place[2]}"


def queries(example: ModuleType, messages: Messages) -> str:
    if last(messages).startswith("Result: "):
        return last(messages).replace("Result:", "answer")
    *_, what = re.findall(r"\w+", last(messages))
    if what.isdigit():
        return f"SELECT COUNT(*) FROM stock WHERE price {'>' if '>' in last(messages) else '<'} {what}"
    return f"SELECT price FROM stock WHERE name = '{what}'"


PLAYERS: dict[str, Player] = {
    "calculator": commands,
    "constraints": sentence,
    "documents": searches,
    "extract": expected,
    "lights": moves,
    "relay": note,
    "sql": queries,
    "word_problems": expected,
}


def conversation(messages: Sequence[Any]) -> Messages:
    """The messages behind a prompt of token ids, which the scripted model reads as one text."""
    messages = list(messages)
    if len(messages) > 1 or not last(messages).endswith("\nassistant:"):
        return messages
    parts = re.split(r"^(system|user|assistant):", last(messages).removesuffix("\nassistant:"), flags=re.M)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": role, "content": text.strip("\n")} for role, text in pairs]


def texts(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def last(messages: Messages) -> str:
    return messages[-1]["content"]


async def play(example: ModuleType, player: Player, folder: Path, count: int = 4) -> list[Episode]:
    """Episodes of the first test tasks."""
    trainer = example.trainer("builtin:tiny", folder / "run")
    client = ScriptedClient(lambda messages: player(example, conversation(messages)))
    episodes: list[Episode] = []
    async with trainer.run.player.open_engine(trainer.config, {ONLY_POLICY: client}, folder) as engine:
        tasks = trainer.tasks.heldout[:count]
        async for episode in engine.run(tasks, sampling=SamplingParams(max_tokens=200)):
            episodes.append(episode)
    return episodes


def test_every_example_is_played() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PLAYERS)


@pytest.mark.parametrize("name", sorted(PLAYERS))
async def test_who_does_as_told_is_right(name: str, tmp_path: Path) -> None:
    example = load(name)
    require_walls(name)
    episodes = await play(example, PLAYERS[name], tmp_path)
    assert [episode.is_correct for episode in episodes] == [True] * 4
    for episode in episodes:
        assert [trajectory.reward for trajectory in episode.trajectories] == pytest.approx(
            [1.0] * len(episode.trajectories)
        )


@pytest.mark.parametrize("name", sorted(PLAYERS))
async def test_who_talks_is_wrong_and_has_not_failed(name: str, tmp_path: Path) -> None:
    example = load(name)
    require_walls(name)
    episodes = await play(example, lambda example, messages: "I do not know.", tmp_path)
    for episode in episodes:
        assert episode.outcome in (Outcome.SCORED, Outcome.TRUNCATED)
        assert not episode.is_correct


@pytest.mark.parametrize("name", sorted(PLAYERS))
def test_splits_share_no_task_and_a_file_is_short(name: str) -> None:
    example = load(name)
    splits = [
        {task.get("task_id", task.get("id")) for task in example.tasks(split)}
        for split in ("train", "validation", "test")
    ]
    assert sum(map(len, splits)) == len(set.union(*splits))
    assert len(splits[2]) >= 48
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MAX_LINES


def require_walls(name: str) -> None:
    """Skip where the example's sandbox cannot be made on this machine."""
    if name != "sql":
        return
    try:
        require_backend("bubblewrap")
    except ConfigError as error:
        pytest.skip(str(error))


def test_the_demo_trains_an_adapter_of_the_workflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    demo = importlib.import_module("demo")
    config = demo.trainer("builtin:tiny", tmp_path / "run", **demo.SETTINGS).config
    assert (config.steps, config.lora.rank, config.evaluation.num_tasks) == (24, 16, 32)
