"""Programs to write. The rows' own tests go to the code grader as they were published, in the fields it
knows.

    HumanEval       prompt, test, entry_point
    MBPP            test_list, test_setup_code
    BigCodeBench    test, entry_point, libs (what programs may import)
    APPS, TACO      input_output: {"inputs", "outputs"[, "fn_name"]}
    LiveCodeBench   public_test_cases, private_test_cases, metadata
    Codeforces      official_tests, examples: [{"input", "output"}]
    DeepCoder       tests
"""

import ast
import json
import sys
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row

_RUN_TEST_CASES = """

def check(candidate):
    import io
    import unittest
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(TestCases)
    assert unittest.TextTestRunner(stream=io.StringIO()).run(tests).wasSuccessful()
"""
"""BigCodeBench's tests are a class of unittest: this is what runs them."""


def humaneval(row: Row, options: Mapping[str, Any]) -> Question:
    prompt, entry_point = row.text("prompt"), row.text("entry_point")
    return Question(
        prompt_values={"question": prompt, "entry_point": entry_point},
        grading={"prompt": prompt, "test": row.text("test"), "entry_point": entry_point},
        oracle=fence(prompt + row.text("canonical_solution")),
    )


def mbpp(row: Row, options: Mapping[str, Any]) -> Question:
    tests = row.texts("test_list")
    return Question(
        prompt_values={"question": row.text("text"), "tests": "\n".join(tests)},
        grading={"test_list": tests, "test_setup_code": row.optional_text("test_setup_code")},
        oracle=fence(row.text("code")),
    )


def bigcodebench(row: Row, options: Mapping[str, Any]) -> Question:
    return Question(
        prompt_values={"question": row.text("instruct_prompt")},
        grading={
            "test": row.text("test") + _RUN_TEST_CASES,
            "entry_point": row.text("entry_point"),
            "packages": _packages(row),
        },
        oracle=fence(row.text("code_prompt") + row.text("canonical_solution")),
    )


_DISTRIBUTION_OF = {
    "bs4": "beautifulsoup4", "Crypto": "pycryptodome", "cv2": "opencv-python", "dateutil": "python-dateutil",
    "docx": "python-docx", "Levenshtein": "python-Levenshtein", "PIL": "pillow", "skimage": "scikit-image",
    "sklearn": "scikit-learn", "yaml": "PyYAML",
}  # fmt: skip
"""Modules that bear another name than what one installs."""


def _packages(row: Row) -> list[str]:
    """`libs` is the text of a list of modules; those that Python does not bring itself have to be installed
    here, or the row cannot be graded."""
    try:
        modules = ast.literal_eval(row.optional_text("libs") or "[]")
    except (ValueError, SyntaxError) as error:
        raise row.error(f"has `libs` that are no list: {row.value('libs')!r}.") from error
    tops = {str(module).partition(".")[0] for module in modules}
    return sorted(_DISTRIBUTION_OF.get(top, top) for top in tops - sys.stdlib_module_names)


def apps(row: Row, options: Mapping[str, Any]) -> Question:
    """APPS and TACO: `input_output` and `solutions` are texts of JSON."""
    tests = _json(row, "input_output")
    if not isinstance(tests, dict) or not tests.get("inputs"):
        raise row.error(f"has no tests to grade by: {str(tests)[:80]!r}.")
    solutions = _json(row, "solutions") if row.optional("solutions") else []
    return Question(
        prompt_values=_shown_fields(row, row.text("question"), tests.get("fn_name")),
        grading={"input_output": tests},
        oracle=fence(solutions[0]) if solutions else None,
        category=row.optional_text("difficulty"),
    )


def livecodebench(row: Row, options: Mapping[str, Any]) -> Question:
    """Private tests come packed; the grader unpacks them."""
    metadata = _json(row, "metadata") if row.optional("metadata") else {}
    grading = {"public_test_cases": row.value("public_test_cases"), "metadata": metadata}
    if row.optional("private_test_cases"):
        grading["private_test_cases"] = row.value("private_test_cases")
    return Question(
        prompt_values=_shown_fields(row, row.text("question_content"), metadata.get("func_name")),
        grading=grading,
        category=row.optional_text("difficulty"),
    )


def codeforces(row: Row, options: Mapping[str, Any]) -> Question:
    """open-r1/codeforces: the official tests, and the examples where there are none."""
    parts = [row.text("description")]
    for name in ("input_format", "output_format", "note"):
        if text := row.optional_text(name):
            parts.append(f"## {name.replace('_', ' ').capitalize()}\n{text}")
    examples = row.records("examples") if row.optional("examples") else []
    if examples:
        lines = "\n\n".join(f"Input:\n{each['input']}\nOutput:\n{each['output']}" for each in examples)
        parts.append(f"## Examples\n{lines}")
    grading: dict[str, Any] = {"official_tests": row.optional("official_tests") or [], "examples": examples}
    for name in ("input_mode", "generated_checker"):
        if row.optional(name):
            grading[name] = row.value(name)
    if not (grading["official_tests"] or examples):
        raise row.error("has neither `official_tests` nor `examples` to grade by.")
    return Question(
        prompt_values=_shown_fields(row, "\n\n".join(parts), None),
        grading=grading,
        category=str(row.optional("rating") or ""),
    )


def deepcoder(row: Row, options: Mapping[str, Any]) -> Question:
    """DeepCoder's sources in one: `tests` is a list of cases, or APPS' object, as JSON."""
    tests = _json(row, "tests")
    metadata = _json(row, "metadata") if row.optional("metadata") else {}
    function = metadata.get("func_name") or (tests.get("fn_name") if isinstance(tests, dict) else None)
    solutions = row.optional("solutions") or []
    return Question(
        prompt_values=_shown_fields(row, row.text("problem"), function),
        grading={"tests": tests, **({"fn_name": function} if function else {})},
        oracle=fence(without_fence(str(solutions[0]))) if solutions else None,
        category=row.optional_text("subset"),
    )


def fence(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def without_fence(text: str) -> str:
    """The code of a text that may stand in a block."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        return text.removesuffix("```").partition("\n")[2]
    return text


def _shown_fields(row: Row, question: str, function: str | None) -> dict[str, Any]:
    starter = row.optional_text("starter_code").strip()
    if function or "class Solution" in starter:
        how = f"Write the function `{function}`." if function else "Write this class with its method."
    else:
        how = "Write a program that reads from standard input and writes to standard output."
    begin = f"\n\nBegin with this code:\n{fence(starter)}" if starter else ""
    return {"question": question, "starter_code": begin, "how": how}


def _json(row: Row, name: str) -> Any:
    value = row.value(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise row.wrong(name, value, "JSON") from error
