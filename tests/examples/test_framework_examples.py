"""Agents of every framework run unchanged against the gateway, and every call is captured with its ids.

    examples/NAME/agent.py ──OPENAI_BASE_URL──► tiny      `rllm serve model` on random weights
                                            └─► scripted  a model that looks into the store, then answers

A framework that is not installed here is skipped. One that lives in an environment of its own is run there:
RLLM_EXAMPLE_PYTHON_LANGGRAPH=path/to/python, and so on.
"""

import asyncio
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllm.gateway.local import LocalPolicy
from rllm.gateway.server import Gateway
from rllm.inference.scripted import ScriptedClient
from rllm.models.builtin import create_model
from rllm.types.messages import Message
from rllm.types.wire import CallRecord, CallStatus, Dialect

CHECKOUT = Path(__file__).resolve().parents[2]
LONGEST_S = 180.0
"""An example takes seconds; one that hangs is stopped."""
MAX_LINES = 100

OTHER_ADDRESSES = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "GOOGLE_", "AWS_")
"""Variables that could lead a program elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Wire:
    """What a framework's example is known to send when it looks once and then answers."""

    dialects: tuple[Dialect, ...] = (Dialect.CHAT,)
    """One per conversation, in the order in which they are held."""
    streams: tuple[bool, ...] = (False,)
    segments: tuple[str, ...] = ("first", "first")
    """Why the segment of each call of one conversation began: `first` twice is one row of tokens."""


EXAMPLES = {
    "openai_sdk": Wire(dialects=(Dialect.CHAT,) * 3, streams=(False, False, True)),
    "anthropic_sdk": Wire(dialects=(Dialect.MESSAGES,) * 2, streams=(False, True)),
    "langgraph": Wire(),
    "openai_agents": Wire(dialects=(Dialect.RESPONSES, Dialect.CHAT), streams=(False, False)),
    "pydantic_ai": Wire(),
    "google_adk": Wire(),
    "strands": Wire(streams=(True,)),
    "smolagents": Wire(segments=("first", "history_rewritten")),
    "litellm": Wire(dialects=(Dialect.CHAT, Dialect.CHAT, Dialect.MESSAGES), streams=(False, True, False)),
    "autogen": Wire(),
    "crewai": Wire(segments=("first", "history_rewritten")),
}


SAID_FIRST = "Let me look."
"""Beside a call: frameworks hand it back, or the history would not be the one that was sampled."""


@dataclass(frozen=True)
class Server:
    """Where a gateway listens, with the token in the path."""

    url: str

    def base_url(self, session: str) -> str:
        return f"{self.url}/sessions/{session}/v1"

    def traces(self, session: str) -> list[CallRecord]:
        with urllib.request.urlopen(f"{self.url}/sessions/{session}/traces") as answer:
            return [CallRecord.from_dict(each) for each in json.load(answer)]


@dataclass(frozen=True)
class Example:
    """A directory of examples/, and the Python that runs it."""

    name: str

    @property
    def file(self) -> Path:
        return CHECKOUT / "examples" / self.name / "agent.py"

    @property
    def requirements(self) -> list[str]:
        """The packages that the index of examples installs beside rLLM."""
        index = (CHECKOUT / "examples" / "README.md").read_text()
        (packages,) = re.findall(rf"^\| \[{self.name}\]\(\S+\) \| `([^`]+)`", index, re.MULTILINE)
        return re.findall(r"'([^']+)'", packages)

    def python(self) -> str:
        """An interpreter that has the framework; the test is skipped where there is none."""
        variable = f"RLLM_EXAMPLE_PYTHON_{self.name.upper()}"
        chosen = os.environ.get(variable)
        if chosen:
            return chosen
        if not all(_is_installed(re.split(r"[\[<>=]", each)[0]) for each in self.requirements):
            wanted = " ".join(f"'{each}'" for each in self.requirements)
            pytest.skip(f"pip install {wanted}, or name a Python that has it in {variable}")
        return sys.executable

    def run(self, base_url: str, *arguments: str) -> str:
        """What it prints, with nothing but the environment to tell it where its model is."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(OTHER_ADDRESSES)
        }
        environment |= {
            "PYTHONPATH": str(CHECKOUT / "src"),
            "PYTHONIOENCODING": "utf-8",
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": "any",
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "any",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch a list of prices
        }
        done = subprocess.run(
            [self.python(), *(arguments or (str(self.file),))],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, f"{self.name} ended with {done.returncode}\n{done.stderr}"
        return done.stdout


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return Example(request.param)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, served as the READMEs say."""
    directory = tmp_path_factory.mktemp("tiny")
    create_model(directory / "tiny-0", "tiny", 0)
    command = ["serve", "model", str(directory / "tiny-0"), "--port", "0", "--threads", "1", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rllm.cli.main", *command, "--ledger", str(directory / "ledger")],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT / "src")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    with process:
        assert process.stdout is not None, "it is a pipe"
        listening = json.loads(process.stdout.readline())
        yield Server(listening["base_url"].removesuffix("/v1"))
        process.terminate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that looks for apples, and says how many there are."""
    policy = LocalPolicy(ScriptedClient(looks_then_answers), "scripted")
    gateway = Gateway(policy, tmp_path_factory.mktemp("ledger"))
    with in_a_thread(gateway):
        yield Server(gateway.base_url.removesuffix("/v1"))


@contextmanager
def in_a_thread(gateway: Gateway) -> Iterator[None]:
    """The gateway in an event loop of its own, while the test waits for programs."""
    listens = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(stopped.set))
        async with gateway:
            listens.set()
            await stopped.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert listens.wait(30.0)
    try:
        yield
    finally:
        stop[0]()
        thread.join()


def looks_then_answers(messages: Sequence[Message]) -> str:
    """What a good storekeeper says, in the words of whichever tools it is offered."""
    prompt = str(messages[0]["content"])
    has_looked = "\ntool:" in prompt or "Observation:" in prompt
    if not has_looked:
        return f"<think>\nApples.\n</think>\n\n{SAID_FIRST}\n{_call('stock', fruit='apples')}"
    if '"final_answer"' in prompt:
        return _call("final_answer", answer="There are 12 apples.")
    for typed in ("final_result", "Count"):
        if f'"name": "{typed}"' in prompt:
            return _call(typed, fruit="apples", pieces=12)
    return "There are 12 apples."


def goes_on_from(record: CallRecord, earlier: CallRecord) -> bool:
    """Whether they are told to be one row of tokens, and it is the later one."""
    same = (record.conversation, record.segment) == (earlier.conversation, earlier.segment)
    return same and len(record.messages) > len(earlier.messages)


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


PAID = [("apples", 1.0), ("pears", 0.0), ("plums", 0.0)]
"""The scripted model knows of apples alone."""


def test_every_example_is_in_these_tests_and_fits_on_a_page() -> None:
    files = {path.parent.name: path for path in (CHECKOUT / "examples").glob("*/agent.py")}
    assert files.keys() == EXAMPLES.keys()
    for name, path in files.items():
        assert len(path.read_text().splitlines()) < MAX_LINES, name


@pytest.mark.slow
def test_an_agent_is_captured_with_nothing_but_its_base_url(example: Example, tiny: Server) -> None:
    """The model has random weights: whatever it says, the program ends and nothing is lost."""
    example.run(tiny.base_url(example.name))
    records = tiny.traces(example.name)
    wire = EXAMPLES[example.name]
    assert {record.dialect for record in records} == set(wire.dialects)
    for record in records:
        assert record.status is CallStatus.OK, record.error
        assert record.prompt_ids
        assert len(record.completion_ids) == len(record.logprobs) == len(record.policy_versions) > 0, (
            record.id
        )


def test_an_agent_reaches_its_tool_and_its_answer(example: Example, scripted: Server) -> None:
    said = example.run(scripted.base_url(example.name))
    wire = EXAMPLES[example.name]
    held = len(wire.dialects)
    assert said.count("12") == held, said
    records = scripted.traces(example.name)
    turns = len(wire.segments)
    assert [record.dialect for record in records] == [each for each in wire.dialects for _ in range(turns)]
    assert [record.stream for record in records] == [each for each in wire.streams for _ in range(turns)]
    assert [record.segment_reason for record in records] == list(wire.segments) * held
    for first, second in zip(records[::turns], records[1::turns], strict=True):
        (call,) = first.response["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "stock",
            {"fruit": "apples"},
        )
        assert (first.response["content"], first.response["reasoning_content"]) == (SAID_FIRST, "Apples.")
        seen = first.prompt_ids + first.completion_ids
        continues = second.prompt_ids[: len(seen)] == seen
        assert continues == (second.segment == first.segment)


def test_the_same_agent_is_evaluated_as_a_rollout(example: Example, scripted: Server) -> None:
    driver = Path(__file__).with_name("evaluate_rollout.py")
    episodes = [
        json.loads(line)
        for line in example.run("http://127.0.0.1:9/v1", str(driver), str(example.file), scripted.url)
        .strip()
        .splitlines()
    ]
    rewards = [(each["task_id"], each["trajectories"][0]["reward"]) for each in episodes]
    assert sorted(rewards) == [(fruit, pay) for fruit, pay in PAID for _ in range(2)]
    for episode in episodes:
        (trajectory,) = episode["trajectories"]
        assert trajectory["name"] == "solve"
        assert all(step["response_ids"] and step["prompt_ids"] for step in trajectory["steps"])
        assert len(trajectory["steps"]) == len(EXAMPLES[example.name].segments)
