"""Programs that cheat are paid nothing, whichever way a task is tested, on every backend that is here."""

from collections.abc import Iterator
from typing import Any

import pytest

from rllm.errors import ConfigError
from rllm.rewards.code import CodeGrader
from rllm.rewards.code_attacks import ATTACKS, EXHAUSTING, program
from rllm.sandbox.backends import require_backend

ADD = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}, {"args": [5, 6], "expected": 11}]}
ASSERTS = {"asserts": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert not add(1, -1)"]}
EXAM = {
    "entry_point": "add",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "test": (
        "import math\ndef check(candidate):\n"
        "    assert abs(candidate(0.1, 0.2) - 0.3) < 1e-6\n"
        "    assert math.isclose(candidate(1, 2), 3)\n"
        "    for n in range(5):\n        assert candidate(n, n) == 2 * n, 'wrong'\n"
        "    assert not candidate(1, -1)\n"
    ),
}
STDIN = {"stdin_tests": [{"input": "1 2\n", "output": "3\n"}]}
RIGHT = "def add(a, b):\n    return a + b\n"


def missing(backend: str) -> str:
    try:
        require_backend(backend)
    except ConfigError as error:
        return str(error)
    return ""


EVERYWHERE = [
    "bubblewrap",
    pytest.param("unshare", marks=pytest.mark.slow),
]
QUICK_ON_EXAMS = (
    "agrees with every operator",
    "patched driver",
    "look for it in the frames",
    "exit before the tests",
    "forged results on every descriptor",
)


@pytest.fixture(scope="module", params=EVERYWHERE)
def grader(request: pytest.FixtureRequest) -> Iterator[CodeGrader]:
    if why := missing(request.param):
        pytest.skip(why)
    made = CodeGrader(sandbox=request.param, timeout_s=1.0, memory_mb=128)
    yield made
    made.close()


def answer(source: str) -> str:
    return f"```python\n{source}\n```"


def test_there_are_many_ways_to_cheat() -> None:
    assert len(ATTACKS) >= 40


@pytest.mark.parametrize("task", [ADD, ASSERTS, EXAM], ids=["calls", "asserts", "exam"])
def test_honest_work_is_paid_in_full(grader: CodeGrader, task: dict[str, Any]) -> None:
    patient = CodeGrader(sandbox=grader.sandbox, timeout_s=10.0, memory_mb=128)
    grade = patient.grade(answer(RIGHT), task)
    patient.close()
    assert (grade.score, grade.metadata["weak"]) == (1.0, False), grade.reason


@pytest.mark.parametrize("name", sorted(set(ATTACKS) - set(EXHAUSTING)))
def test_cheating_is_paid_nothing(grader: CodeGrader, name: str) -> None:
    require_unpaid(grader, name, ADD)


@pytest.mark.parametrize("name", QUICK_ON_EXAMS)
@pytest.mark.parametrize("task", [ASSERTS, EXAM], ids=["asserts", "exam"])
def test_cheating_is_paid_nothing_by_other_kinds_of_tests(
    grader: CodeGrader, name: str, task: dict[str, Any]
) -> None:
    require_unpaid(grader, name, task)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKS))
@pytest.mark.parametrize("task", [ADD, ASSERTS, EXAM], ids=["calls", "asserts", "exam"])
def test_no_attack_is_paid_by_any_kind_of_tests(grader: CodeGrader, name: str, task: dict[str, Any]) -> None:
    require_unpaid(grader, name, task)


@pytest.mark.parametrize("name", ["a memory bomb", "output without end", "a fork bomb", "deaf to signals"])
def test_running_into_a_limit_is_paid_nothing(grader: CodeGrader, name: str) -> None:
    require_unpaid(grader, name, ADD)


def require_unpaid(grader: CodeGrader, name: str, task: dict[str, Any]) -> None:
    grade = grader.grade(answer(program(name, "add")), task)
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert grade.reason


@pytest.mark.parametrize(
    "name", ["exit before the tests", "print all passed", "planted rewards", "another stdout"]
)
def test_a_program_with_input_is_judged_by_what_it_writes(grader: CodeGrader, name: str) -> None:
    assert grader.grade(answer(program(name, "")), STDIN).score == 0.0


def test_after_every_attack_honest_work_is_still_paid(grader: CodeGrader) -> None:
    assert grader.grade(answer(RIGHT), ADD).score == 1.0
