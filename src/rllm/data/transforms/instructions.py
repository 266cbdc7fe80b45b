"""Instructions that a program can check: IFEval, IFBench, and their chains over several turns."""

import json
from collections.abc import Mapping
from typing import Any

from rllm.data.questions import Question, Row

_TURNS = 3


def instructions(row: Row, options: Mapping[str, Any]) -> Question:
    """Fields: prompt, instruction_id_list, kwargs (one object for each id, with null for what it does not
    use)."""
    ids = row.texts("instruction_id_list")
    arguments = row.records("kwargs")
    if len(ids) != len(arguments):
        raise row.error(f"has {len(ids)} instructions and {len(arguments)} sets of arguments.")
    return Question(
        prompt_values={"question": row.text("prompt")},
        grading={"instructions": _instructions(ids, arguments)},
        category=ids[0].partition(":")[0],
    )


def multi_if(row: Row, options: Mapping[str, Any]) -> Question:
    """A conversation of up to three questions. Each answer is held to the instructions of its turn, which the
    published rows repeat from the turns before it."""
    last = max((turn for turn in range(1, _TURNS + 1) if row.optional(f"turn_{turn}_prompt")), default=1)
    turns: list[str] = []
    gradings: list[dict[str, Any]] = []
    for turn in range(1, last + 1):
        turns.append(_content(row.value(f"turn_{turn}_prompt")))
        ids = _parse(row, row.value(f"turn_{turn}_instruction_id_list"))
        arguments = [_parse(row, each) for each in _parse(row, row.value(f"turn_{turn}_kwargs"))]
        gradings.append({"instructions": _instructions(ids, arguments)})
    return Question(
        prompt_values={"question": turns[0]},
        grading={**gradings[-1], "turns": gradings},
        category=row.optional_text("language"),
        extra={"follow_ups": turns[1:]},
    )


def _instructions(ids: list[str], arguments: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": each, "kwargs": {name: value for name, value in argument.items() if value is not None}}
        for each, argument in zip(ids, arguments, strict=True)
    ]


def _content(message: Any) -> str:
    """A message as JSON text, or the text itself."""
    try:
        value = json.loads(message)
    except (TypeError, ValueError):
        return str(message)
    return str(value.get("content", message)) if isinstance(value, dict) else str(message)


def _parse(row: Row, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise row.error(f"holds {value!r:.80}, which is not JSON.") from error
