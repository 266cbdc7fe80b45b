"""Experts in a browser, and what simple policies come to there: both play the real pages.

    plan: steps by role and name ──► action_of(step, page) ──► (page, answer) turn by turn, kept by task
    noise ──► the last action is replaced by giving up, or by "done" where giving up is right
    tasks ──► baselines ──► random clicks, the plan that is right most often, the expert

A demonstration goes through every page of its plan, with noise too: only its end differs, so that imitation
has all that rewards can bring out.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rllm.environments.web.browser import BrowserThread, wait_for_browser
from rllm.environments.web.env import WebEnv
from rllm.environments.world import OPTIMUM, RANDOM, Turns, task_content
from rllm.errors import BrowserError, ConfigError

PLAY_LIMIT_S = 300.0
"""Limit of one demonstration, or of one task of a baseline."""
MAX_KEPT = 32_768
"""Tasks whose pages are kept."""
_NUM_AT_A_TIME = 8
"""Episodes that baselines play side by side."""
_NAME_CHARS = 40
_LINE = re.compile(r'\[(\d+)\] (\w+)(?: "((?:[^"\\]|\\.)*)")?(?: fill="([^"]*)")?')
_LAST_CALL = re.compile(r"(\w+)(\(.*\))\Z")

Step = tuple[str, ...]
"""("click", role, name), ("fill", label, text), ("choose", label, option), ("say", text), ("give up", reason)
or ("note", text), a comment that does nothing. An element is meant by its name, by "" where it has none, by
its colour, or by its place among those of its role: "#2"."""
Plan = Sequence[Sequence[Step]]
"""The steps on one page, page after page."""


class PlannedEnv(WebEnv):
    """An environment whose tasks have a known way to solve them."""

    def plan(self) -> Plan:
        """The plan of the episode that `reset` has begun."""
        raise NotImplementedError


def action_of(step: Step, page: str) -> str:
    """A step of a plan as an action on a page as text. Raises KeyError for what the page does not have."""
    ids = _ids_on(page)
    match step:
        case ("click", role, name):
            return f'click("{ids[role, name]}")'
        case ("fill", label, text):
            return f'fill("{ids["textbox", label]}", {json.dumps(text, ensure_ascii=False)})'
        case ("choose", label, option):
            return f'select_option("{ids["combobox", label]}", {json.dumps(option, ensure_ascii=False)})'
        case ("say", text):
            return f"send_msg_to_user({json.dumps(text, ensure_ascii=False)})"
        case ("give up", reason):
            return f"report_infeasible({json.dumps(reason, ensure_ascii=False)})"
        case ("note", text):
            return f"# {text}"
        case _:
            raise ValueError(f"{step!r} is no step of a plan.")


def _ids_on(page: str) -> dict[tuple[str, str], str]:
    """The id of the first element for each role and each way to mean one."""
    ids: dict[tuple[str, str], str] = {}
    places = Counter[str]()
    for number, role, name, colour in _LINE.findall(page):
        places[role] += 1
        for key in (json.loads(f'"{name}"'), colour, f"#{places[role]}"):
            ids.setdefault((role, key), number)
    return ids


def demonstrate(
    env_class: type[PlannedEnv], task: Mapping[str, Any], *, noise: float, rng: np.random.Generator
) -> Turns:
    """The plan of a task on its pages, which are played once. With probability `noise` its last action gives
    up, or says that it is done where to give up is right."""
    if not 0.0 <= noise <= 1.0:
        raise ConfigError(f"`noise` is {noise}; it is a probability, so choose a number from 0 to 1.")
    turns = _played_plan(env_class, task_content(task))
    if rng.random() >= noise:
        return turns
    page, answer = turns[-1]
    return [*turns[:-1], (page, _LAST_CALL.sub(_opposite, answer))]


def _opposite(call: re.Match[str]) -> str:
    name = "send_msg_to_user" if call[1] == "report_infeasible" else "report_infeasible"
    return f"{name}({json.dumps(json.loads(f'[{call[2][1:-1]}]')[-1], ensure_ascii=False)})"


@lru_cache(maxsize=MAX_KEPT)
def _played_plan(env_class: type[PlannedEnv], task: str) -> list[tuple[Any, str]]:
    env = env_class.from_dict(json.loads(task))
    assert isinstance(env, PlannedEnv)
    try:
        return wait_for_browser(lambda thread: _play_plan(env, thread), PLAY_LIMIT_S)
    finally:
        env.close()


async def _play_plan(env: PlannedEnv, thread: BrowserThread) -> list[tuple[Any, str]]:
    turns: list[tuple[Any, str]] = []
    page, _ = await env.reset_in(thread)
    plan = env.plan()
    for place, steps in enumerate(plan):
        try:
            answer = "\n".join(action_of(each, env.page) for each in steps)
        except KeyError as error:
            raise BrowserError(f"A page of {env.start_url} has no {error}, which its plan needs.") from error
        turns.append((page, answer))
        if place < len(plan) - 1:
            page, *_ = await env.step_in(answer)
    return turns


# ---- simple policies ---------------------------------------------------------------------------------


def baselines(
    env_class: type[PlannedEnv], tasks: Sequence[Mapping[str, Any]]
) -> Mapping[str, Sequence[float]]:
    """The returns of simple policies in the browser: clicks on anything until the page or the last turn ends
    it, and the answers that solve the most of these tasks as if they were the answers to all."""
    rows = [task_content(task) for task in tasks]
    with ThreadPoolExecutor(_NUM_AT_A_TIME) as threads:
        plans = list(threads.map(partial(_played_plan, env_class), rows))
    answers = Counter(tuple(_without_notes(answer) for _, answer in each) for each in plans)
    commonest, _ = answers.most_common(1)[0]
    returns = wait_for_browser(
        lambda thread: _play_policies(env_class, rows, commonest, thread), PLAY_LIMIT_S * len(rows)
    )
    text = "; ".join(commonest).replace("\n", "; ")
    name = text if len(text) <= _NAME_CHARS else f"{text[:_NAME_CHARS]}…"
    random, constant = returns[: len(rows)], returns[len(rows) :]
    return {RANDOM: random, f"always {name}": constant, OPTIMUM: [1.0] * len(rows)}


def _without_notes(answer: str) -> str:
    """Alike for all tasks that the same actions solve."""
    return "\n".join(line for line in answer.split("\n") if not line.startswith("# "))


async def _play_policies(
    env_class: type[PlannedEnv], rows: Sequence[str], answers: Sequence[str], thread: BrowserThread
) -> list[float]:
    slots = asyncio.Semaphore(_NUM_AT_A_TIME)

    async def play(row: str, policy: "partial[str]") -> float:
        env = env_class.from_dict(json.loads(row))
        async with slots:
            try:
                await env.reset_in(thread)
                for turn in range(env.max_turns):
                    _, reward, done, _ = await env.step_in(policy(turn, env.page))
                    if done:
                        return reward
                return 0.0
            finally:
                await env.close_in()

    random = [play(row, partial(_random_click, np.random.default_rng(n))) for n, row in enumerate(rows)]
    constant = [play(row, partial(_answer_at, answers)) for row in rows]
    return await asyncio.gather(*random, *constant)


def _random_click(rng: np.random.Generator, turn: int, page: str) -> str:
    # Sorted, because the order of a set of texts differs between processes, and the draw is to be the same.
    ids = sorted(set(_ids_on(page).values()), key=int)
    return f'click("{rng.choice(ids)}")' if ids else "noop(1)"


def _answer_at(answers: Sequence[str], turn: int, page: str) -> str:
    """The last one again and again, where the episode goes on."""
    return answers[min(turn, len(answers) - 1)]
