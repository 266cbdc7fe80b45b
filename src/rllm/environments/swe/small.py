"""Software engineering in the small: a file with one function, a bug of the task factory in one of its lines,
and tools that a tiny model can hold.

    (split, index) ──► a recipe of small-programs, commented line by line ──► an operator of the factory
    "1 def f(x):\\n2  x += 3 # add 3\\n3  x += 2 # times 2 …\\nline 3: f(0) is 5, not 6"
                 ──► "set 3 x *= 2" ──► "changed"      "run" ──► "f(0) is 6"      "submit" ──► hidden tests

The program and its tests run in the warm sandbox of the code grader. Unlike in the world of SWEEnv there is
no repository, no shell and no git: the environment keeps the file, its tests are calls of `f`, and the issue
names the line with the bug, as a debugger would. A patch is one line: each `set` begins
with the file as it was, so nobody passes by writing all lines anew. Splits share no function.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from rllm.data.swe_factory.edits import with_edits
from rllm.data.swe_factory.operators import Mutation, changes_meaning, mutations
from rllm.environments.base import BaseEnv, Moved, moved
from rllm.environments.judging import Verdict
from rllm.environments.multi_turn import require_judge
from rllm.environments.small_programs import (
    MAX_NUMBER,
    MIN_NUMBER,
    SIGN_OF,
    TRIED_ON,
    Recipe,
    distinct_recipes,
    recipe_of,
    require_places,
)
from rllm.environments.small_programs import identity as function_of
from rllm.environments.world import OPTIMUM, RANDOM, Turns, World
from rllm.errors import AgentError, ConfigError
from rllm.rewards.extraction import Marked, marked_answer
from rllm.types.episode import Action

MAX_TURNS: Final = 3
RUN, SUBMIT, SET = "run", "submit", "set"
CHANGED, UNKNOWN = "changed", "unknown: set N TEXT, run or submit"
NUM_PARTS: Final = 3
"""Statements of a function."""
FIRST_LINE: Final = 2
"""That of the first statement."""
OPERATORS = ("off_by_one", "wrong_operator")
"""Bugs of the factory that one line mends; what deletes a line takes its comment along, and a lost `return`
has none."""
MISTAKES = ("as_it_is", "first_line", "gives_up", "takes_back")
"""Mistakes of an expert who is not awake: it writes the line with the bug as it is, writes the first
statement anew whichever is wrong, submits at once, or mends the line and then writes it as it was."""


def source_of(recipe: Recipe) -> str:
    """The file as it should be: a comment behind each statement says what it does."""
    lines = [f" {_code(part)} # {part[0]} {part[1]}" for part in recipe.parts]
    return "\n".join(["def f(x):", *lines, " return x", ""])


def _code(part: tuple[str, int]) -> str:
    return f"x {SIGN_OF[part[0]]}= {part[1]}"


def value_of(lines: Sequence[str], x: int) -> Any:
    """The value that `f` of a file that was made here gives; such files neither loop nor raise."""
    scope: dict[str, Any] = {}
    exec(compile("\n".join(lines), "<small>", "exec"), scope)  # no model's: those run in the sandbox
    return scope["f"](x)


def swe_small_tasks(
    split: str, count: int, *, start: int = 0, sandbox: str = "bubblewrap"
) -> list[dict[str, Any]]:
    """Tasks `start` to `start + count - 1` of a split; a function that comes again has another bug.

    `sandbox` runs the programs, one of the backends of `rllm.sandbox`. Raises ConfigError for what cannot be
    drawn.
    """
    require_places(split, start, count)
    recipes = _recipes(split)
    return [
        _task(recipes[index % len(recipes)], f"swe-small-{split}-{index}", index, sandbox)
        for index in range(start, start + count)
    ]


@lru_cache(maxsize=4)
def _recipes(split: str) -> list[Recipe]:
    def draw(rng: np.random.Generator) -> Recipe:
        words = (list(SIGN_OF)[each] for each in rng.integers(len(SIGN_OF), size=NUM_PARTS))
        numbers = (int(each) for each in rng.integers(MIN_NUMBER, MAX_NUMBER + 1, size=NUM_PARTS))
        return Recipe(parts=tuple(zip(words, numbers, strict=True)))

    return distinct_recipes(split, draw)


def _task(recipe: Recipe, task_id: str, index: int, sandbox: str) -> dict[str, Any]:
    bugs = _bugs(recipe)
    lines_with_bugs = sorted({each.line for each in bugs})
    line = lines_with_bugs[index % len(lines_with_bugs)]
    rng = np.random.Generator(np.random.Philox(key=[index, 2]))
    several = [each for each in bugs if each.line == line]
    bug = several[int(rng.integers(len(several)))]
    lines = with_edits(source_of(recipe), [bug.edit]).splitlines()
    x = next(each for each in TRIED_ON if value_of(lines, each) != recipe.value(each))
    numbered_lines = (
        f"{number}{'' if text[0] == ' ' else ' '}{text}" for number, text in enumerate(lines, 1)
    )
    issue = f"line {line}: f({x}) is {value_of(lines, x)}, not {recipe.value(x)}"
    return {
        "task_id": task_id,
        "question": "\n".join([*numbered_lines, issue]),
        "parts": [list(part) for part in recipe.parts],
        "file": lines,
        "line": line,
        "x": x,
        "operator": bug.operator,
        "grader": "code",
        "grader_args": {"sandbox": sandbox},
        "grading": {"function": "f", "tests": recipe.tests(TRIED_ON)},
    }


@lru_cache(maxsize=8192)
def _bugs(recipe: Recipe) -> list[Mutation]:
    """Those that a test notices."""
    text = source_of(recipe)
    bugs: list[Mutation] = []
    for each in mutations(text):
        new_text = with_edits(text, [each.edit])
        if each.operator in OPERATORS and changes_meaning(new_text, text):
            lines = new_text.splitlines()
            if any(value_of(lines, x) != recipe.value(x) for x in TRIED_ON):
                bugs.append(each)
    return bugs


def mending(task: Mapping[str, Any]) -> str:
    """The one change that brings the file back."""
    return f"{SET} {task['line']} {_code(recipe_of(task).parts[task['line'] - FIRST_LINE])}"


# ---- the world ---------------------------------------------------------------------------------------------


class SweSmallEnv(BaseEnv):
    """One file and three commands; the hidden tests pay at `submit`, or after `max_turns`."""

    def __init__(self, task: Mapping[str, Any], max_turns: int = MAX_TURNS) -> None:
        if max_turns < 1:
            raise ConfigError(f"`max_turns` is {max_turns}; it must be at least 1.")
        self.task, self.max_turns = dict(task), max_turns
        require_judge(self.task, None, type(self).__name__)
        self._lines: list[str] | None = None

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """The file and the test that fails. Nothing is drawn, so the seed changes nothing."""
        self._lines, self._turns = list(self.task["file"]), 0
        return self.task["question"], {"max_turns": self.max_turns}

    def step(self, action: Any) -> Moved:
        if self._lines is None:
            raise AgentError("SweSmallEnv.step: the episode is over; call reset first.")
        mark = marked_answer(str(action.action if isinstance(action, Action) else action))
        answer = mark.text.strip() if isinstance(mark, Marked) else ""
        self._turns += 1
        reply = UNKNOWN
        if answer == RUN:
            reply = self._run()
        elif (lines := _with_statement(self.task["file"], answer)) is not None:
            self._lines, reply = lines, CHANGED
        if answer != SUBMIT and self._turns < self.max_turns:
            return reply, 0.0, False, {}
        verdict = self._verdict(self.task["grading"])
        self._lines = None
        info = {**verdict.info, "is_correct": verdict.is_correct}
        is_ended = answer == SUBMIT or verdict.is_correct
        return moved("", verdict.reward, info, terminated=is_ended, truncated=not is_ended)

    def _run(self) -> str:
        x, expected = self.task["x"], recipe_of(self.task).value(self.task["x"])
        verdict = self._verdict({"function": "f", "tests": [{"args": [x], "expected": expected}]})
        failure = verdict.info.get("first_failure") or {}
        return _result(x, expected if verdict.is_correct else failure.get("got", "an error"), expected)

    def _verdict(self, grading: Mapping[str, Any]) -> Verdict:
        assert self._lines is not None, "`step` made sure of it"
        judging = {name: self.task[name] for name in ("grader", "grader_args")} | {"grading": grading}
        return _grade_program("\n".join(["```python", *self._lines, "```"]), json.dumps(judging))

    @staticmethod
    def from_dict(info: dict[str, Any]) -> "SweSmallEnv":
        """A task of `swe_small_tasks`, with `max_turns` where it has one."""
        own = {name: info[name] for name in ("max_turns",) if name in info}
        return SweSmallEnv({name: value for name, value in info.items() if name not in own}, **own)


@lru_cache(maxsize=8192)
def _grade_program(program: str, judging: str) -> Verdict:
    """The verdict of the code grader. Equal files of one task are run once: attempts of a group mostly make
    the same ones. What fails to be judged raises, and is not kept."""
    return require_judge(json.loads(judging), None, "SweSmallEnv")(program)


def _result(x: int, value: Any, expected: Any) -> str:
    return f"f({x}) is {value}" + ("" if value == expected else f", not {expected}")


def _with_statement(lines: Sequence[str], answer: str) -> list[str] | None:
    """The file with one statement set, its comment kept; None for what is no such command."""
    verb, _, rest = answer.partition(" ")
    number, _, text = rest.partition(" ")
    if verb != SET or not (number.isascii() and number.isdigit()) or "\n" in text:
        return None
    place = int(number[:4]) - 1
    if not 0 <= place < len(lines):
        return None
    _, mark, comment = lines[place].partition(" # ")
    return [*lines[:place], f" {text.strip()}{mark}{comment}", *lines[place + 1 :]]


# ---- who knows how -----------------------------------------------------------------------------------------


def demonstration(
    task: Mapping[str, Any], *, noise: float, rng: np.random.Generator, mistakes: Sequence[str] = MISTAKES
) -> Turns:
    """The change, a run of the test that failed, and `submit`; with probability `noise` one of `mistakes`,
    each as likely as it is often in the list. Raises ConfigError for a mistake that there is not."""
    if unknown := [each for each in mistakes if each not in MISTAKES]:
        raise ConfigError(f"`mistakes` has {unknown[0]!r}; experts know {', '.join(MISTAKES)}.")
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    recipe, change = recipe_of(task), mending(task)
    as_it_is = f"{SET} {task['line']} {task['file'][task['line'] - 1].partition(' # ')[0].strip()}"
    mistake = mistakes[int(rng.integers(len(mistakes)))] if mistakes and rng.random() < noise else ""
    if mistake == "gives_up":
        return [(task["question"], SUBMIT)]
    if mistake == "takes_back":
        return [(task["question"], change), (CHANGED, as_it_is), (CHANGED, SUBMIT)]
    if mistake == "as_it_is":
        change = as_it_is
    elif mistake == "first_line":
        change = f"{SET} {FIRST_LINE} {_code(recipe.parts[0])}"
    lines = _with_statement(task["file"], change)
    assert lines is not None, "an expert knows the commands"
    result_text = _result(task["x"], value_of(lines, task["x"]), recipe.value(task["x"]))
    return [(task["question"], change), (CHANGED, RUN), (result_text, SUBMIT)]


def baselines(tasks: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Policies that do not look for the bug. `random` sets one of the statements to any that there is;
    what is counted is that it brings the very text back."""
    mendings = [mending(task) for task in tasks]
    most = Counter(mendings).most_common(1)[0][0] if mendings else ""
    num_statements = NUM_PARTS * len(SIGN_OF) * (MAX_NUMBER - MIN_NUMBER + 1)
    return {
        RANDOM: [1 / num_statements] * len(mendings),
        OPTIMUM: [1.0] * len(mendings),
        "submit at once": [0.0] * len(mendings),
        "one change for all": [float(each == most) for each in mendings],
        "first statement from its comment": [float(task["line"] == FIRST_LINE) for task in tasks],
    }


def _operator(task: Mapping[str, Any]) -> str:
    return task["operator"]


WORLD = World(
    env_class=SweSmallEnv,
    tasks=swe_small_tasks,
    draws=True,
    demonstrate=demonstration,
    expert_args=("mistakes",),
    identity=function_of,
    kind=_operator,
    baselines=baselines,
)
