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
        shown={"question": row.text("prompt")},
        grading={"instructions": _asked(ids, arguments)},
        category=ids[0].partition(":")[0],
    )


def multi_if(row: Row, options: Mapping[str, Any]) -> Question:
    """A conversation of up to three questions. Each answer is held to the instructions of its turn, which the
    published rows repeat from the turns before it."""
    last = max((turn for turn in range(1, _TURNS + 1) if row.optional(f"turn_{turn}_prompt")), default=1)
    asked: list[str] = []
    gradings: list[dict[str, Any]] = []
    for turn in range(1, last + 1):
        asked.append(_content(row.value(f"turn_{turn}_prompt")))
        ids = _parsed(row, row.value(f"turn_{turn}_instruction_id_list"))
        arguments = [_parsed(row, each) for each in _parsed(row, row.value(f"turn_{turn}_kwargs"))]
        gradings.append({"instructions": _asked(ids, arguments)})
    return Question(
        shown={"question": asked[0]},
        grading={**gradings[-1], "turns": gradings},
        category=row.optional_text("language"),
        extra={"follow_ups": asked[1:]},
    )


def _asked(ids: list[str], arguments: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": each, "kwargs": {name: value for name, value in given.items() if value is not None}}
        for each, given in zip(ids, arguments, strict=True)
    ]


def _content(message: Any) -> str:
    """A message as JSON text, or the text itself."""
    try:
        found = json.loads(message)
    except (TypeError, ValueError):
        return str(message)
    return str(found.get("content", message)) if isinstance(found, dict) else str(message)


def _parsed(row: Row, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise row.error(f"holds {value!r:.80}, which is not JSON.") from error
