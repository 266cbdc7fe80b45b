"""Python that a model writes: what it sees of its program, and what stays for the next call."""

import asyncio
from collections.abc import Callable

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import Limits, PythonRunner
from rllm.tools import MultiTool, tool_named
from rllm.tools.python import MAX_CODE_CHARS, PythonInterpreter, without_fence

Made = Callable[..., PythonInterpreter]


@pytest.fixture(scope="module")
def python(backend: str) -> Made:
    def make(**options: object) -> PythonInterpreter:
        return PythonInterpreter(backend, **options)  # pyright: ignore[reportArgumentType]

    return make


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(1)\n2 + 2", "1\n4"),
        ("x = 3", "(no output)"),
        ("None", "(no output)"),
        ("'é\\ud800'", "'é\\ud800'"),
        ("```python\n6 * 7\n```", "42"),
        ("import sys; print('a', file=sys.stderr); print('b')", "b\na"),
        ("if __name__ == '__main__': print('main')", "main"),
        (
            "import pickle\nclass C: pass\ntype(pickle.loads(pickle.dumps(C()))).__name__",
            "'C'",
        ),
    ],
)
def test_the_output_and_the_last_value_are_shown(python: Made, code: str, text: str) -> None:
    output = python()(code=code)
    assert (output.text, output.error) == (text, None)


def test_a_traceback_shows_the_models_lines_and_no_others(python: Made) -> None:
    output = python()(code="print('so far')\ndef f(x):\n    return 1 / x\nf(0)")
    assert output.text.startswith(
        'so far\nError: Traceback (most recent call last):\n  File "<cell 1>", line 4'
    )
    assert "return 1 / x" in output.text
    assert output.text.endswith("ZeroDivisionError: division by zero")
    assert "_rllm" not in output.text
    assert "SyntaxError" in str(python()(code="def f(:").error)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("while True: pass", "timeout", "Stopped: it ran longer than 1 s"),
        ("x = bytearray(10**9)", "out_of_memory", "more than 64 MiB of memory"),
        ("while True: print('x' * 1000)", "output_limit", "Stopped: it wrote more than 64 KiB"),
        ("import os; os.abort()", "crashed", "It died: exit code -6"),
        ("import sys; sys.exit(3)", "error", "It ended with exit code 3"),
        ("raise SystemExit('bye')", "error", "bye"),
    ],
)
def test_a_program_that_is_stopped_says_why(python: Made, code: str, status: str, words: str) -> None:
    tool = python(limits=Limits(wall_s=1.0 if status == "timeout" else 20.0, memory_mb=64, output_kb=64))
    output = tool(code=code)
    assert words in str(output.error)
    assert output.metadata["status"] == status


def test_nothing_stays_without_a_session(python: Made) -> None:
    tool = python()
    tool(code="x = 1\nopen('f', 'w').write('x')")
    assert "NameError" in str(tool(code="x").error)
    assert "FileNotFoundError" in str(tool(code="open('f')").error)


def test_in_a_session_definitions_values_files_and_random_numbers_stay(python: Made) -> None:
    tool = python(session=True)
    first = tool(code="import random\nx = random.random()\nprint(x)").text
    tool(code="from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int = 1")
    tool(code="open('f', 'w').write('kept')")
    assert tool(code="def up(n):\n    return n + 1").text == "(no output)"
    assert tool(code="print(x)\nup(3), P(), open('f').read()").text == f"{first}\n(4, P(a=1), 'kept')"
    assert "NameError" in str(python(session=True)(code="x").error)


def test_in_a_session_what_came_before_an_exception_stays_and_a_program_that_was_stopped_does_not(
    python: Made,
) -> None:
    tool = python(session=True, limits=Limits(wall_s=3.0))
    tool(code="x = 1\nraise ValueError('no')")
    tool(code="x = 2\nwhile True: pass")
    tool(code="x = 3\nimport os; os._exit(0)")
    tool(code="import sys; y = 4; sys.exit(0)")
    assert tool(code="x, y").text == "(1, 4)"


async def test_calls_of_one_session_take_turns(python: Made) -> None:
    tools = MultiTool([python(session=True)])
    calls = [{"name": "python", "arguments": {"code": f"x{n} = {n}"}} for n in range(4)]
    await tools.async_call_many(calls)
    output = await tools.async_call({"name": "python", "arguments": {"code": "x0 + x1 + x2 + x3"}})
    assert output.text == "6"


async def test_many_calls_without_a_session_run_apart(python: Made) -> None:
    tool = python()
    outputs = await asyncio.gather(*(tool.async_forward(code=f"x = {n}\nx * x") for n in range(8)))
    assert [output.text for output in outputs] == [str(n * n) for n in range(8)]


def test_code_that_is_empty_or_too_long_is_refused(python: Made) -> None:
    assert "empty" in str(python()(code=" \n").error)
    assert "100,000" in str(python()(code="x" * (MAX_CODE_CHARS + 1)).error)
    tool = python(session=True)
    tool(code=f"x = '{'a' * 60_000}'")
    assert "calls have together" in str(tool(code=f"y = '{'a' * 60_000}'").error)
    assert tool(code="len(x)").text == "60000"


@pytest.mark.parametrize("code", ["```\nx\n```", "```py\nx\n```\n", " ```python\nx\n```"])
def test_a_fence_is_no_part_of_the_code(code: str) -> None:
    assert without_fence(code) == "x"
    assert without_fence("print('```')") == "print('```')"


def test_a_backend_that_is_not_there_is_refused_and_a_runner_of_ones_own_is_used(backend: str) -> None:
    with pytest.raises(ConfigError, match="no-such-backend"):
        tool_named("python", backend="no-such-backend")
    with PythonRunner(backend, workers=1) as runner:
        assert PythonInterpreter(runner=runner)(code="1 + 1").text == "2"
