"""Which function is to be called with what: the rows of the Berkeley function-calling leaderboard."""

import json
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row


def bfcl(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: question (turns of messages), function (schemas), ground_truth (of the answers' file).

    The right call is one object `{name: {argument: [values that count as right]}}`.
    """
    functions = row.records("function")
    right = row.records("ground_truth")
    turns = row.value("question")
    messages = turns[0] if turns and isinstance(turns[0], list) else turns
    if not isinstance(messages, list) or not messages:
        raise row.wrong("question", turns, "a list of messages")
    return Question(
        prompt_values={
            "question": str(messages[-1]["content"]),
            "functions": json.dumps(functions, indent=1),
        },
        grading={"calls": [dict(each) for each in right], "functions": [dict(each) for each in functions]},
        oracle=json.dumps([_call(each) for each in right]),
        history=[dict(each) for each in messages[:-1]],
        category=row.optional_text("id").rpartition("_")[0],
    )


def _call(right: Mapping[str, Any]) -> dict[str, Any]:
    """The first of the values that count as right; one that may be left out is."""
    ((name, arguments),) = right.items()
    return {"name": name, "arguments": {each: v[0] for each, v in arguments.items() if v and v[0] != ""}}
