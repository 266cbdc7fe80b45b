"""One file, one bug of the task factory, three commands: played in the real sandbox of the code grader."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rllm.environments.small_programs import SIGN_OF
from rllm.environments.swe.small import (
    CHANGED,
    MISTAKES,
    RUN,
    SUBMIT,
    UNKNOWN,
    WORLD,
    SweSmallEnv,
    demonstration,
    mending,
    swe_small_tasks,
)
from rllm.environments.world import OPTIMUM
from rllm.errors import ConfigError


def paid(task: dict[str, Any], *answers: str) -> float:
    env = SweSmallEnv.from_dict(task)
    env.reset()
    return [env.step(answer) for answer in answers][-1][1]


def values(lines: list[str]) -> list[Any]:
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    return [scope["f"](x) for x in range(-60, 60)]


def test_the_bug_is_in_the_line_that_the_issue_names_and_what_is_hidden_is_not_shown() -> None:
    tasks = swe_small_tasks("validation", 60)
    for task in tasks:
        body = "; ".join(f"x {SIGN_OF[word]}= {number}" for word, number in task["parts"])
        plain = ["def f(x):", f" {body}", " return x"]
        assert values(task["file"]) != values(plain)
        mended = list(task["file"])
        _, number, text = mending(task).split(" ", 2)
        mended[int(number) - 1] = f" {text}"
        assert values(mended) == values(plain)
        lines = task["question"].splitlines()
        assert [line[len(str(number)) :].strip() for number, line in enumerate(lines[:-1], 1)] == [
            line.strip() for line in task["file"]
        ]
        x = task["x"]
        expected = f"line {number}: f({x}) is {values(task['file'])[x + 60]}, not {values(plain)[x + 60]}"
        assert lines[-1] == expected
    assert set(Counter(task["line"] for task in tasks).values()) == {20}
    assert {task["operator"] for task in tasks} == {"off_by_one", "wrong_operator"}


def test_the_expert_sees_what_the_world_shows_and_its_mistakes_earn_nothing(backend: str) -> None:
    (task,) = swe_small_tasks("test", 1, start=1, sandbox=backend)
    assert task["line"] == 3
    for mistakes, noise in (((), 0.0), *(((each,), 1.0) for each in MISTAKES)):
        env = SweSmallEnv.from_dict(task)
        shown, reward, done, info = env.reset()[0], 0.0, False, dict[str, Any]()
        for observation, answer in demonstration(
            task, noise=noise, rng=np.random.default_rng(0), mistakes=mistakes
        ):
            assert shown == observation
            shown, reward, done, info = env.step(answer)
        assert (done, reward, info["is_correct"]) == (True, 1.0 - noise, not noise)


def test_a_patch_is_one_line_and_what_is_no_command_changes_nothing(backend: str) -> None:
    (task,) = swe_small_tasks("test", 1, start=1, sandbox=backend)
    right = mending(task)
    assert paid(task, right, SUBMIT) == 1.0
    assert paid(task, "set 2 x += 1", right, "what now") == 1.0, "the last turn is judged as it is"
    assert paid(task, right, "set 2 x += 1", SUBMIT) == 0.0, "a second change begins with the file as it was"
    env = SweSmallEnv.from_dict({**task, "max_turns": 9})
    env.reset()
    for nothing in ("set 9 x += 1", "set x y", "put 2 x", "set 0 x", "set 2 x += 1\nx = 0", "Submit"):
        assert env.step(nothing)[0] == UNKNOWN
    assert env.step("set 2 import os; os._exit(0)")[:2] == (CHANGED, 0.0)
    assert " is an error, not " in env.step(RUN)[0]
    assert env.step(SUBMIT)[1] == 0.0


def test_simple_policies_are_paid_what_playing_them_pays(backend: str) -> None:
    tasks = swe_small_tasks("validation", 12, sandbox=backend)
    returns = WORLD.baselines(tasks) if WORLD.baselines else {}
    first = [
        paid(task, f"set 2 x {SIGN_OF[task['parts'][0][0]]}= {task['parts'][0][1]}", SUBMIT) for task in tasks
    ]
    assert returns["first statement from its comment"] == first
    assert returns["submit at once"] == [paid(task, SUBMIT) for task in tasks]
    assert returns[OPTIMUM] == [paid(task, mending(task), SUBMIT) for task in tasks]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise": 2.0}, "it is a probability"),
        ({"noise": 0.5, "mistakes": ["sleeps"]}, "experts know as_it_is"),
    ],
)
def test_an_expert_that_there_is_not_is_refused(arguments: dict[str, Any], message: str) -> None:
    (task,) = swe_small_tasks("train", 1)
    with pytest.raises(ConfigError, match=message):
        demonstration(task, rng=np.random.default_rng(0), **arguments)
    with pytest.raises(ConfigError, match="`max_turns` is 0"):
        SweSmallEnv(task, max_turns=0)
