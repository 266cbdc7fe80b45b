"""Row formats, what is taken for the program, and what a grade says; on one small sandbox for all of them."""

import ast
import base64
import json
import pickle
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from rllm.errors import ConfigError, RewardError
from rllm.rewards.code import CodeGrader
from rllm.rewards.code_tasks import problem_of

sys.path.insert(0, str(Path(__file__).parent))
from code_answers import ADD, SUBTRACT, fenced, open_grader


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    with open_grader() as grader:
        yield grader


SUM_STDIN = "print(sum(map(int, input().split())))"
WRONG_STDIN = "print(4)"
TWO_SUM = (
    "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
    "        seen = {}\n        for i, n in enumerate(nums):\n            if target - n in seen:\n"
    "                return [seen[target - n], i]\n            seen[n] = i"
)
WRONG_TWO_SUM = TWO_SUM.replace("[seen[target - n], i]", "[i, i]")
PAIR = "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b"
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 20\n", "output": "30"}]
LEET = {"inputs": [[[2, 7, 11, 15], 9], [[3, 3], 6]], "outputs": [[0, 1], [0, 1]], "fn_name": "twoSum"}
PRIVATE = [{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": (
        {
            "function": "add",
            "tests": [{"args": [1, 2], "expected": 3}, {"args": [1], "kwargs": {"b": 4}, "expected": 5}],
        },
        ADD,
        SUBTRACT,
    ),
    "plain stdin": ({"stdin_tests": CASES}, SUM_STDIN, WRONG_STDIN),
    "plain asserts": ({"asserts": ["assert add(1, 2) == 3", "assert 5 == add(2, 3)"]}, ADD, SUBTRACT),
    "asserts with setup": (
        {"asserts": ["for n in numbers:\n    assert add(n, n) == 2 * n"], "setup": "numbers = [1, 2]"},
        ADD,
        SUBTRACT,
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/X",
            "prompt": 'def add(a, b):\n    """Add."""\n',
            "entry_point": "add",
            "canonical_solution": "    return a + b\n",
            "test": "META = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert True\n",
        },
        ADD,
        SUBTRACT,
    ),
    "mbpp": (
        {
            "task_id": 1,
            "text": "Add.",
            "code": "def sum(a, b):\n    return a + b",
            "test_list": ["assert sum(10, 15) == 25", "assert sum(5, 10) == 15"],
            "test_setup_code": "",
            "challenge_test_list": ["assert sum(-1, 1) == 0"],
        },
        "def sum(a, b):\n    return a + b",
        "def sum(a, b):\n    return a or b",
    ),
    "mbpp without its code": (
        {"test_list": ["assert sum(10, 15) == 25", "assert sum(5, 10) == 15"]},
        "def sum(a, b):\n    return a + b",
        "def sum(a, b):\n    return a or b",
    ),
    "mbpp sanitized": (
        {
            "prompt": "Add.",
            "code": "def add(a, b):\n    return a + b",
            "test_imports": ["import math"],
            "test_list": ["assert math.isclose(add(0.1, 0.2), 0.3)"],
        },
        ADD,
        SUBTRACT,
    ),
    "humaneval plus": (
        {
            "entry_point": "half",
            "prompt": 'def half(a):\n    """Half of it."""\n',
            "test": (
                "import numpy as np\n\n"
                "def is_floats(x):\n    return isinstance(x, float) or isinstance(x, np.ndarray)\n\n"
                "def assertion(out, exp, atol):\n    exact = out == exp\n"
                "    if atol == 0 and is_floats(exp):\n        atol = 1e-6\n"
                "    if not exact and atol != 0:\n"
                "        assert np.allclose(out, exp, rtol=1e-7, atol=atol)\n"
                "    else:\n        assert exact\n\n"
                "def check(candidate):\n    inputs = [[1], [2], [0.3]]\n    results = [0.5, 1.0, 0.15]\n"
                "    for inp, exp in zip(inputs, results):\n        assertion(candidate(*inp), exp, 0)\n"
            ),
        },
        "def half(a): return a * 0.5 + 1e-12",
        "def half(a): return a * 0.51",
    ),
    "mbpp plus": (
        {
            "code": "def add(a, b): ...",
            "test_list": ["assert add(1, 2) == 3"],
            "test": "inputs = [(1, 2), (5, 5)]\nfor pair in inputs:\n    assert add(*pair) == sum(pair)",
        },
        ADD,
        "def add(a, b): return 3",
    ),
    "mbpp with a class of the program": (
        {
            "code": "class Pair: ...\ndef chain(pairs, n): ...",
            "test_list": ["assert chain([Pair(5, 24), Pair(15, 25)], 2) == 20"],
        },
        f"{PAIR}\ndef chain(pairs, n): return sum(p.a for p in pairs)",
        f"{PAIR}\ndef chain(pairs, n): return n",
    ),
    "mbpp with a tree": (
        {
            "code": "class Node: ...\ndef height(node): ...",
            "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
            "test_list": ["assert height(root) == 2", "assert height(root.left) == 1"],
        },
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
        "def height(n): return 0 if n is None else 1 + height(n.left)",
        "class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef height(n): return 2",
    ),
    "apps stdin": (
        {"input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", "7"]})},
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        WRONG_STDIN,
    ),
    "apps call": ({"input_output": json.dumps(LEET)}, TWO_SUM, WRONG_TWO_SUM),
    "apps call with boxed outputs": (
        {"input_output": {"inputs": [[[1, 2]]], "outputs": [[3]], "fn_name": "total"}},
        "def total(xs): return sum(xs)",
        "def total(xs): return [3, 3]",
    ),
    "taco": ({"tests": LEET}, TWO_SUM, WRONG_TWO_SUM),
    "livecodebench stdin": (
        {
            "question_content": "Add.",
            "public_test_cases": json.dumps([{**each, "testtype": "stdin"} for each in CASES]),
            "private_test_cases": packed(json.dumps(PRIVATE)),
            "metadata": "{}",
        },
        SUM_STDIN,
        "a, b = map(int, input().split())\nprint(3 if a == 1 else 30)",
    ),
    "livecodebench functional": (
        {
            "starter_code": "class Solution:",
            "public_test_cases": json.dumps(
                [{"input": "[2, 7, 11, 15]\n9", "output": "[0, 1]", "testtype": "functional"}]
            ),
            "metadata": json.dumps({"func_name": "twoSum"}),
        },
        TWO_SUM,
        WRONG_TWO_SUM,
    ),
    "codeforces": (
        {"id": "1/A", "official_tests": CASES, "input_mode": "stdio", "time_limit": 1.0},
        SUM_STDIN,
        WRONG_STDIN,
    ),
    "codeforces with a checker": (
        {
            "official_tests": [{"input": "10\n", "output": "3 7\n"}],
            "generated_checker": (
                "import sys\n"
                "n = int(open(sys.argv[1]).read())\n"
                "words = open(sys.argv[3]).read().split()\n"
                "print(int(len(words) == 2 and sum(map(int, words)) == n))\n"
            ),
        },
        "n = int(input())\nprint(1, n - 1)",
        "n = int(input())\nprint(1, n)",
    ),
    "code contests": (
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": ["2 2\n"], "output": ["4\n"]},
            "generated_tests": None,
        },
        SUM_STDIN,
        "print(3)",
    ),
    "deepcoder": ({"tests": json.dumps(CASES)}, SUM_STDIN, WRONG_STDIN),
    "function calls": (
        {
            "tests": [
                {"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]},
                {"type": "function_call", "fn_name": "add", "input": [2, 2], "output": 4},
            ]
        },
        ADD,
        SUBTRACT,
    ),
    "ground truth": (
        {"data_source": "codeforces", "ground_truth": json.dumps(CASES)},
        SUM_STDIN,
        WRONG_STDIN,
    ),
    "ground truth of assertions": ({"ground_truth": "assert add(1, 2) == 3"}, ADD, SUBTRACT),
    "leetcode": (
        {
            "entry_point": "Solution().twoSum",
            "prompt": "from typing import *\n",
            "test": "def check(candidate):\n    assert candidate(nums=[3, 3], target=6) == [0, 1]\n",
        },
        TWO_SUM,
        WRONG_TWO_SUM,
    ),
    "kodcode": (
        {
            "test": "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n\n"
            "def test_more():\n    assert add(2, 2) == 4"
        },
        ADD,
        SUBTRACT,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_recognised_by_its_fields(grader: CodeGrader, name: str) -> None:
    row, good, bad = ROWS[name]
    grade = grader.grade(fenced(good), row)
    assert (grade.score, grade.is_correct, grade.metadata["weak"]) == (1.0, True, False), grade.reason
    grade = grader.grade(fenced(bad), row)
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert grader.grade("I do not know.", row).score == 0.0
    assert grader.grade(f"<think>{fenced(good)}", row).reason == "unfinished thinking"


POWER = "def power(n):\n    return 10 ** n + 7"
LONG, LONG_DIGITS = 10**5000 + 7, f"1{'0' * 4999}7"
"""An integer of more digits than Python reads or writes unless told otherwise."""
FUNCTIONAL = {
    "public_test_cases": json.dumps([{"input": "5000", "output": LONG_DIGITS, "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "power"}),
}


@pytest.mark.parametrize(
    ("row", "good"),
    [
        ({"stdin_tests": [{"input": "5000", "output": LONG_DIGITS}]}, "print(10 ** int(input()) + 7)"),
        ({"stdin_tests": [{"input": LONG_DIGITS, "output": "7"}]}, "print(int(input()) % 10)"),
        (
            {"input_output": json.dumps({"inputs": ["5000"], "outputs": [LONG_DIGITS]})},
            "print(10 ** 5000 + 7)",
        ),
        ({"function": "power", "tests": [{"args": [5000], "expected": LONG}]}, POWER),
        ({"function": "last", "tests": [{"args": [LONG], "expected": 7}]}, "def last(n): return n % 10"),
        (
            FUNCTIONAL,
            f"class Solution:\n    {POWER.replace('power(n)', 'power(self, n)')}".replace(
                "\n    ret", "\n        ret"
            ),
        ),
        (
            {
                "private_test_cases": packed(FUNCTIONAL["public_test_cases"]),
                "metadata": FUNCTIONAL["metadata"],
            },
            POWER,
        ),
        ({"asserts": [f"assert power(5000) == {LONG_DIGITS}"]}, POWER),
        ({"asserts": [f"assert last({LONG_DIGITS}) == 7"]}, "def last(n): return int(str(n)[-1])"),
        ({"asserts": ["assert power(5000) == 10 ** 5000 + 7"]}, f"def power(n):\n    return {LONG_DIGITS}"),
        ({"asserts": ["assert digits(5000) == 5001"]}, "def digits(n): return len(str(10 ** n))"),
    ],
)
def test_integers_may_have_more_digits_than_python_reads(
    grader: CodeGrader, row: dict[str, Any], good: str
) -> None:
    assert grader.grade(fenced(good), row).reason.startswith("passed")
    bad = good.replace("7", "8").replace("% 10", "% 9").replace("[-1]", "[-2]").replace("(str", "(2 * str")
    assert grader.grade(fenced(bad), row).score == 0.0


PLAIN = ROWS["plain"][0]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (ADD, 1.0),
        (f"```\n{ADD}\n```", 1.0),
        (f"```py\n{ADD}\n```\nRun it:\n```bash\npython add.py\n```", 1.0),
        (f"{fenced(SUBTRACT)} No, better so:\n{fenced(ADD)}", 1.0),
        (f"{fenced(ADD)} No, better so:\n{fenced(SUBTRACT)}", 0.0),
        (f"{fenced(ADD)} For example:\n{fenced('print(add(1, 2))')}", 1.0),
        (f"<think>{fenced(SUBTRACT)}</think>{fenced(ADD)}", 1.0),
        (f"```python\n{ADD}", 1.0),
        (f"```python\n{ADD}\n```python", 0.0),
        (f"{fenced(ADD)} No, better so:\n```python\ndef add(a, b):\n    return a + ", 0.0),
        (f"{fenced(ADD)} No, better so:\n```python\n{SUBTRACT}", 0.0),
        (f"- First:\n\n  ```python\n{indent(ADD, '  ')}\n  ```\n- Then run it.", 1.0),
        (f"1. ```python\n{indent(ADD, '   ')}\n   ```", 1.0),
        (f"1. ~~~ python\n{indent(ADD, '   ')}\n   ~~~", 1.0),
        (f"  ```python\n{ADD}\n  ```", 1.0),
        (f"~~~python\n{ADD}\n~~~", 1.0),
        (f"~~~~\n{ADD}\n~~~~\nIt adds.", 1.0),
        (f"~~~python\n{ADD}\ntext = '''\n```\n'''\n~~~", 1.0),
        (f"Here it is: ```python\n{ADD}\n``` It adds.", 1.0),
        (f"~~~js\n{ADD}\n~~~", 0.0),
        ("```cpp\nint add(int a, int b);\n```", 0.0),
        ("", 0.0),
        ("The function adds both.", 0.0),
    ],
)
def test_one_program_is_taken_out_of_an_answer(grader: CodeGrader, answer: str, score: float) -> None:
    grade = grader.grade(answer, PLAIN)
    assert grade.score == score, grade.reason


def test_a_completion_goes_on_from_the_prompt(grader: CodeGrader) -> None:
    row = ROWS["humaneval"][0]
    for answer in (
        "    return a + b",
        "    return a + b\n",
        "<think>so</think>\n    return a + b",
        fenced("    return a + b"),
    ):
        assert grader.grade(answer, row).score == 1.0
    assert grader.grade("    return a - b", row).score == 0.0


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("def add(a, b=0):\n    return a - b", "add(1, 2): gave -1"),
        ("def add(a, b=0):\n    raise ValueError('no')", "raised ValueError: no"),
        ("def add(a, b=0):\n    return object()", "gave no plain value (of class object)"),
        ("import os\ndef add(a, b=0):\n    os._exit(0)", "the program ended by itself"),
        ("def add(a, b=0) return", "does not load: SyntaxError"),
        ("def other(a, b=0):\n    return a", "NameError"),
        ("def add(a, b=0):\n    while True: pass", "took longer than 1 s"),
        ("def add(a, b=0):\n    return b'x' * 10**9", "raised MemoryError"),
        ("def add(a, b=0):\n    while True: print('x' * 10**6)", "wrote more than"),
        ("def add(a, b=0):\n    if b == 4:\n        import os; os._exit(3)\n    return a + b", "test 2 of 2"),
    ],
)
def test_a_zero_says_why(grader: CodeGrader, program: str, said: str) -> None:
    timeout_s = 1.0 if said.startswith("took longer") else 10.0
    made = CodeGrader(sandbox=grader.sandbox, timeout_s=timeout_s, memory_mb=256)
    grade = made.grade(fenced(program), PLAIN)
    assert (grade.score, grade.is_correct) == (0.0, False)
    assert said in grade.reason


def test_a_share_is_paid_where_that_is_asked(grader: CodeGrader) -> None:
    half = fenced("def add(a, b=0):\n    return 3")
    assert grader.grade(half, PLAIN).score == 0.0
    sharing = CodeGrader(sandbox=grader.sandbox, score="share")
    grade = sharing.grade(half, PLAIN)
    assert (grade.score, grade.is_correct, grade.metadata["passed"]) == (0.5, False, 1)
    assert sharing.grade(fenced("print(30)"), {"stdin_tests": CASES}).score == 0.5


def test_programs_of_ours_also_run_on_another_python_than_this_one(
    grader: CodeGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(grader._runner.python), "version", "3.99.0")
    for name in ("plain", "kodcode"):
        row, good, bad = ROWS[name]
        assert grader.grade(fenced(good), row).score == 1.0
        assert grader.grade(fenced(bad), row).score == 0.0


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "finds no tests"),
        ({"question": "?"}, "finds no tests"),
        ({"function": "f", "tests": []}, "holds no test"),
        ({"function": "f", "tests": [{"args": [1]}]}, "'expected'"),
        ({"function": "f", "tests": [{"args": 1, "expected": 1}]}, "write a name and a list"),
        ({"asserts": ["assert f(1) =="]}, "no Python"),
        ({"asserts": ["assert True"]}, "call no function"),
        ({"stdin_tests": [{"input": 1, "output": "1"}]}, "must be text"),
        ({"input_output": "{"}, "no JSON"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"public_tests": {"input": ["1"], "output": []}}, "cannot be read: ValueError"),
        ({"official_tests": CASES, "input_mode": "file"}, "from a file"),
        ({"public_test_cases": "[]", "private_test_cases": "junk!"}, "cannot be read"),
        ({"test": "def test_nothing():\n    assert 1 == 1"}, "calls nothing"),
        ({"test": "import numpy as np\ndef test_it():\n    assert np.array([f(1)])"}, "numpy.array"),
        (
            {
                "entry_point": "f",
                "test": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
                "        import pandas\n        self.assertEqual(f(1), 1)\n"
                "def check(candidate):\n    f(0)\n    result = unittest.TestResult()\n"
                "    unittest.defaultTestLoader.loadTestsFromTestCase(T).run(result)\n"
                "    assert result.wasSuccessful()",
            },
            "pandas",
        ),
        ({"asserts": ["import nowhere_at_all\nassert nowhere_at_all.g(f(1))"]}, "do not run"),
    ],
)
def test_a_mistake_in_the_data_is_an_error_and_no_zero(
    grader: CodeGrader, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(RewardError, match=said):
        grader.grade(fenced(f"{ADD}\ndef f(n): return n"), row)


class Evil:
    def __reduce__(self) -> Any:
        return (eval, ("1 + 1",))


@pytest.mark.parametrize("value", [Evil(), [{"input": Evil()}], ast.Module, {1, 2}])
def test_a_pickle_that_asks_for_more_than_plain_values_is_refused(value: Any) -> None:
    with pytest.raises(RewardError, match="private_test_cases"):
        problem_of({"private_test_cases": packed(value)})


def test_published_names_grade_by_what_published_rows_hold(grader: CodeGrader) -> None:
    from rllm.rewards.code_reward import RewardCodeFn

    reward = RewardCodeFn(sandbox=grader.sandbox)
    row = {"data_source": "livecodebench", "ground_truth": json.dumps(CASES)}
    said = reward(row, fenced(SUM_STDIN))
    assert (said.reward, said.is_correct, said.metadata["format"]) == (1.0, True, "deepcoder")
    assert reward(row, fenced(WRONG_STDIN)).reward == 0.0


def test_options_that_cannot_be_honoured_are_refused() -> None:
    for options in ({"score": "most"}, {"weak": "perhaps"}, {"sandbox": "chroot"}, {"timeout_s": 0.0}):
        with pytest.raises(ConfigError):
            CodeGrader(**options)


@pytest.mark.parametrize("name", ["1st", "def", "two words", "f(", "None", "", 3, "f; import os", "\0"])
def test_a_name_that_no_function_can_have_is_the_row_s_mistake(grader: CodeGrader, name: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"function": name, "tests": [{"args": [1], "expected": 1}]},
        {"entry_point": name, "test": "def check(f):\n    assert f(1) == 1\n"},
        {
            "private_test_cases": [{"testtype": "functional", "input": "1", "output": "1"}],
            "metadata": {"func_name": name},
        },
    ]
    if name:  # with none, a row of APPS is one with programs to run
        rows.append({"input_output": {"inputs": [[1]], "outputs": [1], "fn_name": name}})
    for row in rows:
        with pytest.raises(RewardError, match=r"name that|`func_name`"):
            grader.grade(fenced("def f(x): return x"), row)
