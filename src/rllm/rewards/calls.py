"""Did an answer call the right functions with the right arguments? By structure, nothing is run.

    [{"name": "area", "arguments": {"base": 10}}] ──► each right call matched by exactly one ──► Grade

A task has `calls`: for each right call `{name: {argument: [values that count as right]}}`. An argument may
be left out where `""` is among its values (the form of the Berkeley function-calling leaderboard). A call
too many, an argument that nobody asked for, or a call twice is wrong.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import RewardError
from rllm.rewards.extraction import final_text
from rllm.rewards.grade import Grade, require_answer, right, task_field, wrong
from rllm.rewards.schema import json_text

MAX_ANSWER_CHARS = 100_000


@dataclass(kw_only=True, slots=True)
class CallsGrader:
    """A `Grader` of function calls written as JSON: one object or a list, of `name` and `arguments`.

    `in_order`: the calls must come in the order of the task.
    """

    in_order: bool = False
    name: str = field(default="calls", init=False)
    task_fields: tuple[str, ...] = field(default=("calls",), init=False)

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a task whose calls cannot be read."""
        expected_calls = [_expected_call(each) for each in _as_list(task_field(task, "calls", self.name))]
        text = final_text(require_answer(answer, self.name))
        if text is None:
            return wrong("unfinished")
        calls = _calls_in(text)
        if isinstance(calls, str):
            return wrong(calls, text[:200])
        calls_json = json.dumps(calls)
        if len(calls) != len(expected_calls):
            return wrong(f"{len(calls)} calls instead of {len(expected_calls)}", calls_json)
        left = list(calls)
        for name, arguments in expected_calls:
            candidates = left[:1] if self.in_order else left
            match = next((each for each in candidates if _fits(each, name, arguments)), None)
            if match is None:
                return wrong(f"no right call of {name}", calls_json)
            left.remove(match)
        return right("right", calls_json)

    def close(self) -> None:
        """Holds nothing."""


def _calls_in(answer_text: str) -> list[dict[str, Any]] | str:
    """The calls of an answer, or why there are none."""
    text = json_text(answer_text)
    if len(text) > MAX_ANSWER_CHARS:
        return "too_long"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "malformed"
    calls = value if isinstance(value, list) else [value]
    for each in calls:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return "malformed"
        if not isinstance(each.setdefault("arguments", {}), dict) or each.keys() != {"name", "arguments"}:
            return "malformed"
    return calls


def _fits(call: Mapping[str, Any], name: str, arguments: Mapping[str, Sequence[Any]]) -> bool:
    call_arguments = call["arguments"]
    if call["name"] != name or not call_arguments.keys() <= arguments.keys():
        return False
    return all(
        any(_same(call_arguments[each], value) for value in values)
        if each in call_arguments
        else "" in values
        for each, values in arguments.items()
    )


def _same(argument: Any, value: Any) -> bool:
    """Numbers by value, texts without case, blanks and punctuation, lists and objects by their parts."""
    if isinstance(argument, bool) or isinstance(value, bool):
        return argument is value
    if isinstance(argument, int | float) and isinstance(value, int | float):
        return argument == value
    if isinstance(argument, str) and isinstance(value, str):
        return _plain(argument) == _plain(value)
    if isinstance(argument, list) and isinstance(value, list):
        return len(argument) == len(value) and all(map(_same, argument, value))
    if isinstance(argument, dict) and isinstance(value, dict):
        return argument.keys() <= value.keys() and all(
            any(_same(argument[key], one) for one in _as_list(values))
            if key in argument
            else "" in _as_list(values)
            for key, values in value.items()
        )
    return argument is None and value is None


def _plain(text: str) -> str:
    return re.sub(r"[ ,./\-_*^()'\"]", "", text).casefold()


def _expected_call(call: Any) -> tuple[str, Mapping[str, Sequence[Any]]]:
    if not isinstance(call, Mapping) or len(call) != 1:
        raise RewardError(
            f"The task's `calls` hold {call!r:.200}; each is one `{{name: {{argument: values}}}}`."
        )
    ((name, arguments),) = call.items()
    if not isinstance(arguments, Mapping) or not all(isinstance(each, list) for each in arguments.values()):
        raise RewardError(
            f"The task's call of `{name}` has {arguments!r:.200}; each argument has a list of values."
        )
    return str(name), arguments


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
