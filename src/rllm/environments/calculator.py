"""Arithmetic that is worked out with a calculator, served over MCP.

    (split, index) ──► "472 + 385 = ?" ──► MCPEnvironment, its server in this process or a process of its own
                            └──► demonstration: {"name": "add", "arguments": {"a": 472, "b": 385}} ──► "857"

Too much to be done in the head of a small model, and easy with the tool: what there is to learn is to call
the right one, to copy the numbers into the call, and to copy the result into the answer.

A problem belongs to one split by a hash of its numbers, so that training, validation and test share none. All
signs are asked for equally often.
"""

import hashlib
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from rllm.environments.answers import answer_baselines
from rllm.environments.mcp import MCPEnvironment
from rllm.environments.world import Turns, World
from rllm.errors import ConfigError
from rllm.tools.mcp import MCPServer, mcp_tools
from rllm.tools.mcp_sessions import shared_pool
from rllm.types.messages import Message

SPLITS = ("train", "validation", "test")
TOOL_OF = {"+": "add", "-": "subtract", "*": "multiply"}
"""Sign -> the calculator's tool for it."""
_APPLY: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SERVERS: dict[str, dict[str, Any]] = {
    "in-process": {"target": "rllm.tools.mcp_calculator:calculator_server"},
    "stdio": {"command": [sys.executable, "-m", "rllm.tools.mcp_calculator"]},
}
"""Where the calculator runs."""
MISTAKES = ("no_tool", "wrong_tool", "wrong_call", "wrong_copy", "gives_up", "hedges")
"""The mistakes of an inattentive expert: guesses, calls the next tool in the list, calls with a number that
was not asked, misreads the result, says that it does not know whatever the result is, says "maybe" before the
result."""
_KINDS = {"+": "sums", "-": "differences", "*": "products"}
_FIRST_CALL = "call_0"
"""Id of an answer's first call, as inference clients number them."""
_MAX_DRAWS = 10_000


@dataclass(kw_only=True, slots=True, frozen=True)
class CalculatorProblem:
    """A sum or difference to compute."""

    first: int
    sign: str
    second: int

    @property
    def text(self) -> str:
        """As agents see it."""
        return f"{self.first} {self.sign} {self.second} = ?"

    @property
    def value(self) -> int:
        return _APPLY[self.sign](self.first, self.second)


def calculator_tasks(
    split: str,
    count: int,
    *,
    start: int = 0,
    min_number: int = 100,
    max_number: int = 999,
    operators: str = "+-*",
    server: str = "in-process",
    max_steps: int = 3,
) -> list[dict[str, Any]]:
    """Problems `start` to `start + count - 1` of a split, as tasks of MCPEnvironment.

    `server`: `stdio` for a process of its own that is spoken to in MCP's messages, or `in-process`, where the
    SDK's client calls the server's functions without messages. Raises ConfigError for what cannot be drawn.
    """
    _check_drawing(split, min_number, max_number, operators, server)
    if count < 0 or start < 0:
        raise ConfigError(f"`count` is {count} and `start` is {start}; problems are counted from 0 upwards.")
    servers = {"calculator": _server_for(server, operators)}
    problems = [_problem(split, start + offset, min_number, max_number, operators) for offset in range(count)]
    return [
        {
            "task_id": f"calculator-{split}-{start + offset}",
            "question": problem.text,
            "numbers": [problem.first, problem.second],
            "sign": problem.sign,
            "mcp_servers": servers,
            "max_steps": max_steps,
            "grader": "exact",
            "grading": {"answer": str(problem.value)},
        }
        for offset, problem in enumerate(problems)
    ]


def demonstration(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, mistakes: Sequence[str] = MISTAKES
) -> Turns:
    """An expert at work: the call, then what came of it as the answer.

    With probability `noise` it makes one of `mistakes`, each as likely as it is often in the list. Raises
    ConfigError for a mistake that there is not.
    """
    if unknown := [each for each in mistakes if each not in MISTAKES]:
        raise ConfigError(f"`mistakes` has {unknown[0]!r}; experts know {', '.join(MISTAKES)}.")
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    task_problem = CalculatorProblem(first=task["numbers"][0], sign=task["sign"], second=task["numbers"][1])
    errs = bool(mistakes) and rng.random() < noise
    mistake = mistakes[int(rng.integers(len(mistakes)))] if errs else ""
    question = {"question": task["question"], "tools": tools_of(task["mcp_servers"]["calculator"])}
    if mistake == "no_tool":
        return [(question, str(_misread(task_problem.value, rng)))]
    call = task_problem
    if mistake == "wrong_tool":
        call = CalculatorProblem(
            first=task_problem.first, sign=_next_sign(task, task_problem.sign), second=task_problem.second
        )
    if mistake == "wrong_call":
        call = CalculatorProblem(
            first=_misread(task_problem.first, rng), sign=task_problem.sign, second=task_problem.second
        )
    answer = str(call.value)
    if mistake == "wrong_copy":
        answer = str(_misread(call.value, rng))
    if mistake == "gives_up":
        answer = "unknown"
    if mistake == "hedges":
        answer = f"maybe {call.value}"
    return [(question, _call_of(call)), ({"tool_outputs": {_FIRST_CALL: str(call.value)}}, answer)]


def tools_of(server: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Schemas of a server's tools, asked for once."""
    return _tools_of(json.dumps(server, sort_keys=True))


@lru_cache(maxsize=16)
def _tools_of(server: str) -> list[dict[str, Any]]:
    with shared_pool(MCPServer.from_dict(json.loads(server), "calculator")).lease() as lease:
        return [each.json for each in mcp_tools(lease)]


def identity(task: Mapping[str, Any]) -> str:
    """The numbers in order of size, and the sign: 5 - 3 and 3 - 5 count as one."""
    return f"{sorted(task['numbers'])} {task['sign']}"


def kind(task: Mapping[str, Any]) -> str:
    """`sums`, `differences` or `products`."""
    return _KINDS[task["sign"]]


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[float]]:
    """Answers that look at nothing, and the calls that always take one tool with the numbers as they are."""
    returns = dict(_answers(tasks))
    problems = [
        CalculatorProblem(first=task["numbers"][0], sign=task["sign"], second=task["numbers"][1])
        for task in tasks
    ]
    for sign in sorted({problem.sign for problem in problems}):
        values = [_APPLY[sign](problem.first, problem.second) for problem in problems]
        returns[f"always {TOOL_OF[sign]}"] = [
            float(value == problem.value) for value, problem in zip(values, problems, strict=True)
        ]
    return returns


def split_of(problem: CalculatorProblem) -> str:
    """The one split that a problem is drawn for: half of all train, a quarter validates, a quarter tests."""
    text = identity({"numbers": (problem.first, problem.second), "sign": problem.sign}).encode()
    quarter = hashlib.blake2b(text, digest_size=8, salt=b"calculator").digest()[0] % 4
    return ("test", "validation", "train", "train")[quarter]


def _problem(split: str, index: int, min_number: int, max_number: int, operators: str) -> CalculatorProblem:
    """Counter-based: a function of these arguments alone."""
    rng = np.random.Generator(np.random.Philox(key=[SPLITS.index(split), index]))
    sign = operators[index % len(operators)]
    for _ in range(_MAX_DRAWS):
        first, second = (int(each) for each in rng.integers(min_number, max_number + 1, size=2))
        problem = CalculatorProblem(first=first, sign=sign, second=second)
        if split_of(problem) == split:
            return problem
    raise ConfigError(
        f"{_MAX_DRAWS} draws from {min_number} to {max_number} gave no problem of the {split} split; raise "
        "`max_number`."
    )


def _next_sign(task: Mapping[str, Any], sign: str) -> str:
    """That of the tool which is offered behind the right one; behind the last, of the first."""
    signs = [each for each in TOOL_OF if TOOL_OF[each] in task["mcp_servers"]["calculator"]["only"]]
    if len(signs) < 2:
        raise ConfigError(
            f"`mistakes` has 'wrong_tool', but {TOOL_OF[sign]} is the only tool there is; leave it out, or "
            "set `operators` to two or more."
        )
    return signs[(signs.index(sign) + 1) % len(signs)]


def _misread(number: int, rng: np.random.Generator) -> int:
    """The number with one of its digits read wrong."""
    digits = list(str(abs(number)))
    place = int(rng.integers(len(digits)))
    others = [each for each in "0123456789" if each != digits[place] and (place or each != "0")]
    digits[place] = others[int(rng.integers(len(others)))]
    return int("".join(digits)) * (-1 if number < 0 else 1)


def _call_of(problem: CalculatorProblem) -> Message:
    """The assistant message that makes the call; each chat template writes it in its own way."""
    arguments = {"a": problem.first, "b": problem.second}
    function = {"name": TOOL_OF[problem.sign], "arguments": json.dumps(arguments)}
    call = {"id": _FIRST_CALL, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _server_for(server: str, operators: str) -> dict[str, Any]:
    """It keeps nothing between calls, so one session does for all rollouts."""
    return {**SERVERS[server], "shared": True, "only": [TOOL_OF[sign] for sign in operators]}


def _check_drawing(split: str, min_number: int, max_number: int, operators: str, server: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"`split` is {split!r}; arithmetic has {', '.join(SPLITS)}.")
    if not 0 <= min_number < max_number < 10**9:
        raise ConfigError(
            f"`min_number` is {min_number} and `max_number` {max_number}; numbers are drawn from the one up "
            "to the other, at least 0 and below a billion."
        )
    if not operators or len(set(operators)) != len(operators) or set(operators) - set(TOOL_OF):
        raise ConfigError(f"`operators` is {operators!r}; choose some of {''.join(TOOL_OF)}, each once.")
    if server not in SERVERS:
        raise ConfigError(f"`server` is {server!r}; the calculator runs {' or '.join(SERVERS)}.")


_answers = answer_baselines(lambda task: task["grading"]["answer"])

WORLD = World(
    env_class=MCPEnvironment,
    draws=True,
    tasks=calculator_tasks,
    demonstrate=demonstration,
    expert_args=("mistakes",),
    identity=identity,
    kind=kind,
    baselines=baselines,
)
