"""A row of a data set ──► what its program must do, whichever format the row is in.

    function + tests {args, expected}       plain calls             prompt + entry_point + test   HumanEval, +
    stdin_tests {input, output}             plain runs              test_list (+ code)            MBPP
    asserts                                 plain assertions        input_output                  APPS, TACO
    public_test_cases, private_test_cases   LiveCodeBench           official_tests                Codeforces
    public_tests, private_tests             CodeContests            tests {input, output}         DeepCoder
    ground_truth                            any of these, as published programs pass it
    packages, beside any of these           what programs may import beyond the standard library

A format is recognised by its fields. What cannot be read is a mistake in the data: a RewardError, never a 0.
"""

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllm.errors import ConfigError, RewardError
from rllm.rewards.code_asserts import (
    PROGRAM,
    AssertExam,
    AssertRun,
    CallCheck,
    CodeTests,
    called_first,
    calls_of,
    closed,
    defined_names,
    parse_python,
    unknown_names,
)
from rllm.rewards.code_private_tests import private_tests
from rllm.rewards.code_values import as_node, display_text
from rllm.rewards.long_integers import json_value
from rllm.rewards.programs.wire import NoPlainValueError
from rllm.sandbox.packages import package_names

_NO_ROW = (LookupError, TypeError, AttributeError, ValueError, RecursionError, NoPlainValueError)
"""The exceptions for a row that is not of its format, or holds what Python cannot write or walk through."""
FLOAT_TOLERANCE = 1e-9
"""The tolerance for floats that a row writes as JSON: 0.1 + 0.2 is 0.3 there, and not in an assertion."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CodeProblem:
    """The problem that a row poses."""

    format: str
    tests: CodeTests
    functions: tuple[str, ...] = ()
    """Names that the program is called by; with none it is run."""
    prompt: str = ""
    """The beginning that the program goes on from, where the model is shown one."""
    has_prelude: bool = False
    """Whether the format's own harness imports the usual modules first."""
    packages: tuple[str, ...] = ()
    """Installed distributions that programs and tests of this row may import: its `packages`."""


def problem_of(task: Mapping[str, Any]) -> CodeProblem:
    """Raises RewardError that names the fields, for a row of no known format or with a mistake in it."""
    if not isinstance(task, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RewardError(f"The code grader was given {task!r:.200} as the task; it must be a mapping.")
    for fields, read in _FORMATS:
        if all(task.get(name) is not None for name in fields):
            try:
                return replace(read(task), packages=_packages(task))
            except _NO_ROW as error:
                raise RewardError(
                    f"The task's {' and '.join(f'`{name}`' for name in fields)} cannot be read: "
                    f"{type(error).__name__}: {error}"
                ) from error
    raise RewardError(
        f"The code grader finds no tests in the task's fields {', '.join(map(str, task)) or '(none)'}; it "
        f"reads {'; '.join(' and '.join(fields) for fields, _ in _FORMATS)}."
    )


def _function(name: Any, field_name: str) -> str:
    """A name that a program can be called by: a function's, or an expression such as `Solution().f`.

    Raises RewardError for any other, which no program could ever have.
    """
    try:
        node = ast.parse(name, mode="eval").body if isinstance(name, str) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        node = None
    if not isinstance(node, ast.Name | ast.Attribute):
        raise RewardError(
            f"The task's `{field_name}` is {name!r:.80}, which is no name that a Python function can have."
        )
    return name


def _packages(task: Mapping[str, Any]) -> tuple[str, ...]:
    try:
        return package_names(task.get("packages") or ())
    except ConfigError as error:
        raise RewardError(f"The task's {error}") from error


def _plain(task: Mapping[str, Any]) -> CodeProblem:
    name = _function(task["function"], "function")
    calls = [
        _call(name, each.get("args", []), each["expected"], each.get("kwargs", {}))
        for each in _as_list(task["tests"], "tests")
    ]
    return CodeProblem(format="plain", tests=CodeTests(calls=_some(calls, "tests")), functions=(name,))


def _stdin(task: Mapping[str, Any]) -> CodeProblem:
    runs = [_run(each["input"], each["output"]) for each in _as_list(task["stdin_tests"], "stdin_tests")]
    return CodeProblem(format="stdin", tests=CodeTests(runs=_some(runs, "stdin_tests")))


def _asserts(task: Mapping[str, Any]) -> CodeProblem:
    functions = [_function(task["function"], "function")] if task.get("function") else []
    return _by_assertions("asserts", _as_list(task["asserts"], "asserts"), task.get("setup") or "", functions)


def _mbpp(task: Mapping[str, Any]) -> CodeProblem:
    setup = "\n".join([*(task.get("test_imports") or []), task.get("test_setup_code") or ""])
    if task.get("test"):  # EvalPlus: many more, in one text
        tests = [task["test"]]
    else:
        tests = [*_as_list(task["test_list"], "test_list"), *(task.get("challenge_test_list") or [])]
    return _by_assertions("mbpp", tests, setup, defined_names(task.get("code") or ""))


def _by_assertions(form: str, tests: Sequence[str], setup: str, functions: Sequence[str]) -> CodeProblem:
    source = "\n".join(_some(tests, form))
    tree, before = parse_python(source, "assertions"), parse_python(setup, "setup")
    # A function may be called like a builtin, `sum`: then nothing that the tests call is unknown.
    own = _once([*functions, *unknown_names(before, tree)] or called_first(tree.body))
    if not own:
        raise RewardError(f"The task's assertions call no function of the program: {source!r:.200}")
    first_calls = [name for name in called_first(tree.body) if name in own] or own
    calls = None if setup.strip() else calls_of(tree.body, own)
    if calls is not None:
        return CodeProblem(
            format=form, tests=CodeTests(calls=_some(calls, form)), functions=tuple(first_calls)
        )
    exam = AssertExam(setup="", test=f"{setup}\n{source}", names=own, entry=first_calls[0])
    return CodeProblem(format=form, tests=CodeTests(exam=exam), functions=tuple(first_calls))


def _humaneval(task: Mapping[str, Any]) -> CodeProblem:
    """Also of LeetCodeDataset, whose entry point is an expression such as `Solution().twoSum`."""
    entry = _function(task["entry_point"], "entry_point")
    prompt, test = task.get("prompt") or "", task["test"]
    setup = closed(prompt) if entry.isidentifier() else ""
    tree, before = parse_python(test, "`test`"), parse_python(setup, "`prompt`")
    check = next((each for each in tree.body if isinstance(each, ast.FunctionDef) and _is_check(each)), None)
    calls = None if check is None else _calls_in(check, entry)
    if calls is not None:
        tests = CodeTests(calls=_some(calls, "test"))
    else:
        own = [entry] if entry.isidentifier() else []
        names = _once([*own, *unknown_names(before, tree)])
        exam = AssertExam(setup=setup, test=test, names=names, entry=entry, has_check=check is not None)
        tests = CodeTests(exam=exam)
    return CodeProblem(
        format="humaneval",
        tests=tests,
        functions=(entry if entry.isidentifier() else "Solution",),
        prompt=prompt,
        has_prelude=not setup,
    )


def _is_check(function: ast.FunctionDef) -> bool:
    return function.name == "check" and bool(function.args.args)


def _calls_in(check: ast.FunctionDef, entry: str) -> list[CallCheck] | None:
    """The assertions of `check(candidate)` as calls of the entry point, where they are no more than that."""
    candidate = check.args.args[0].arg
    calls = calls_of(check.body, {candidate})
    return None if calls is None else [_with_entry(each, candidate, entry) for each in calls]


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class _Rename(ast.NodeTransformer):
    def __init__(self, name: str, entry: str) -> None:
        self.name, self.entry = name, ast.parse(entry, mode="eval").body

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.entry if node.id == self.name else node


def _with_entry(call: CallCheck, name: str, entry: str) -> CallCheck:
    tree = _Rename(name, entry).visit(ast.parse(call.call["source"], mode="eval"))
    return CallCheck(
        call={"do": "eval", "source": ast.unparse(tree)},
        expected=call.expected,
        truth=call.truth,
        is_identity=call.is_identity,
        display_text=call.display_text,
    )


def _apps(task: Mapping[str, Any]) -> CodeProblem:
    return _inputs_outputs("apps", _json(task["input_output"], "input_output"))


def _inputs_outputs(form: str, tests: Mapping[str, Any]) -> CodeProblem:
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs):
        raise RewardError(f"The task has {len(inputs)} inputs and {len(outputs)} outputs; one for each.")
    name = tests.get("fn_name")
    if not name:
        runs = [_run(stdin, stdout) for stdin, stdout in zip(inputs, outputs, strict=True)]
        return CodeProblem(format=form, tests=CodeTests(runs=_some(runs, "inputs")), has_prelude=True)
    _function(name, "fn_name")
    calls = [
        _call(name, arguments if isinstance(arguments, list) else [arguments], output, is_boxed=True)
        for arguments, output in zip(inputs, outputs, strict=True)
    ]
    return CodeProblem(
        format=form, tests=CodeTests(calls=_some(calls, "inputs")), functions=(name,), has_prelude=True
    )


def _livecodebench(task: Mapping[str, Any]) -> CodeProblem:
    metadata = _json(task.get("metadata") or {}, "metadata")
    tests = [
        *_json(task.get("public_test_cases") or [], "public_test_cases"),
        *private_tests(task.get("private_test_cases")),
    ]
    return _cases("livecodebench", tests, metadata.get("func_name"))


def _deepcoder(task: Mapping[str, Any]) -> CodeProblem:
    tests = _json(task["tests"], "tests")
    if isinstance(tests, Mapping):
        return _inputs_outputs("taco", tests)
    return _cases("deepcoder", tests, task.get("fn_name"))


def _cases(form: str, tests: Sequence[Mapping[str, Any]], function: str | None) -> CodeProblem:
    """Cases with `testtype` (`stdin` or `functional`): a functional one has its arguments as JSON, one a
    line."""
    calls: list[CallCheck] = []
    runs: list[AssertRun] = []
    name = function
    for each in tests:
        kind = each.get("testtype") or each.get("type") or ("functional" if function else "stdin")
        if kind in ("functional", "function_call"):
            metadata = _json(each.get("metadata") or {}, "metadata")
            name = metadata.get("func_name") or each.get("fn_name") or function
            if not name:
                raise RewardError("The task has functional tests, and no `func_name` that says of what.")
            _function(name, "func_name")
            output = _output(each["output"])
            calls.append(_call(name, _arguments(each["input"]), output, is_boxed=kind == "function_call"))
        else:
            runs.append(_run(each["input"], each["output"]))
    if calls and runs:
        raise RewardError("The task mixes functional tests with tests by stdin; it must be one of the two.")
    _some([*calls, *runs], "tests")
    return CodeProblem(
        format=form,
        tests=CodeTests(calls=tuple(calls), runs=tuple(runs)),
        functions=(name,) if calls and name else (),
        has_prelude=True,
    )


def _arguments(value: Any) -> list[Any]:
    if not isinstance(value, str):
        return value if isinstance(value, list) else [value]
    return [_json(line, "input") for line in value.split("\n") if line.strip()]


def _output(value: Any) -> Any:
    return _json(value, "output") if isinstance(value, str) else value


def _codeforces(task: Mapping[str, Any]) -> CodeProblem:
    if task.get("input_mode") == "file":
        raise RewardError(
            "The task reads its input from a file; the code grader knows stdin and stdout only."
        )
    tests = [*_json(task["official_tests"], "official_tests")] or [*(task.get("examples") or [])]
    runs = [_run(each["input"], each["output"]) for each in tests]
    checker = task.get("generated_checker") or ""
    if checker:
        parse_python(checker, "`generated_checker`")
    return CodeProblem(
        format="codeforces",
        tests=CodeTests(runs=_some(runs, "official_tests"), checker=checker),
        has_prelude=True,
    )


def _contests(task: Mapping[str, Any]) -> CodeProblem:
    runs: list[AssertRun] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        tests = task.get(name) or {"input": [], "output": []}
        runs += [_run(stdin, stdout) for stdin, stdout in zip(tests["input"], tests["output"], strict=True)]
    return CodeProblem(
        format="code_contests", tests=CodeTests(runs=_some(runs, "public_tests")), has_prelude=True
    )


def _published_problem(task: Mapping[str, Any]) -> CodeProblem:
    """`ground_truth` as published reward functions are given it: JSON of tests, or a text of assertions."""
    truth = task["ground_truth"]
    if isinstance(truth, str) and not truth.lstrip().startswith(("[", "{")):
        if "entry_point" in task:
            return _humaneval({**task, "test": truth})
        return _by_assertions("asserts", [truth], "", [])
    tests = _json(truth, "ground_truth")
    if isinstance(tests, Mapping):
        reader = next((read for fields, read in _FORMATS if all(name in tests for name in fields)), None)
        return _inputs_outputs("taco", tests) if reader is None else reader(tests)
    if tests and isinstance(tests[0], str):
        return _by_assertions("asserts", tests, "", [])
    return _cases("deepcoder", tests, (task.get("metadata") or {}).get("func_name"))


def _pytest(task: Mapping[str, Any]) -> CodeProblem:
    """Tests as functions `test_…` that call the program, or import it from `solution` (KodCode)."""
    test = task["test"]
    tree = parse_python(test, "`test`")
    names = tuple(unknown_names(tree))
    if not names and PROGRAM not in test:
        raise RewardError("The task's `test` calls nothing that it does not define itself.")
    exam = AssertExam(setup="", test=test, names=names, entry=names[0] if names else PROGRAM)
    return CodeProblem(format="pytest", tests=CodeTests(exam=exam), functions=names[:1])


# The first that fits is taken, so a format stands before those whose fields are a part of its own.
_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], CodeProblem]], ...] = (
    (("function", "tests"), _plain),
    (("stdin_tests",), _stdin),
    (("asserts",), _asserts),
    (("entry_point", "test"), _humaneval),
    (("test_list",), _mbpp),
    (("input_output",), _apps),
    (("public_test_cases",), _livecodebench),
    (("private_test_cases",), _livecodebench),
    (("official_tests",), _codeforces),
    (("public_tests",), _contests),
    (("tests",), _deepcoder),
    (("ground_truth",), _published_problem),
    (("test",), _pytest),
)


def _call(
    name: str, args: Sequence[Any], expected: Any, kwargs: Mapping[str, Any] = {}, *, is_boxed: bool = False
) -> CallCheck:
    """`is_boxed`: an expected list of one value may also mean that value, as APPS writes it."""
    if not isinstance(name, str) or not isinstance(args, list | tuple):
        raise RewardError(f"A test calls {name!r:.80} with {args!r:.200}; write a name and a list.")
    values = (
        [expected, expected[0]]
        if is_boxed and isinstance(expected, list) and len(expected) == 1
        else [expected]
    )
    arg_nodes = [as_node(each) for each in args]
    kwarg_nodes = {key: as_node(each) for key, each in kwargs.items()}
    shown_args = [display_text(node) for node in arg_nodes]
    shown_kwargs = [f"{key}={display_text(node)}" for key, node in kwarg_nodes.items()]
    return CallCheck(
        call={
            "do": "call",
            "name": name,
            "args": arg_nodes,
            "kwargs": kwarg_nodes,
        },
        expected=tuple(map(as_node, values)),
        tuples_are_lists=True,
        tolerance=FLOAT_TOLERANCE,
        display_text=f"{name}({', '.join([*shown_args, *shown_kwargs]):.120})",
    )


def _run(stdin: Any, stdout: Any) -> AssertRun:
    return AssertRun(stdin=_text(stdin), stdout=_text(stdout))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, str):
        return value
    raise RewardError(f"A test has {value!r:.200} as input or output; it must be text or a list of lines.")


def _json(value: Any, field_name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json_value(value)
    except (ValueError, RecursionError) as error:
        raise RewardError(
            f"The task's `{field_name}` is {value!r:.200}, which is no JSON: {error}"
        ) from error


def _as_list(value: Any, field_name: str) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise RewardError(f"The task's `{field_name}` is {value!r:.200}; it must be a list of tests.")
    return list(value)


def _some(tests: Sequence[Any], field_name: str) -> tuple[Any, ...]:
    if not tests:
        raise RewardError(f"The task's `{field_name}` holds no test; a program that does nothing would pass.")
    return tuple(tests)
