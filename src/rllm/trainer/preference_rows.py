"""Dataset rows in chat form ──► answers that are compared.

    {"prompt", "chosen", "rejected"} ─┐
    {"prompt", "completion", "label"} ┴─► PreferenceRow: conversations with +1 better, -1 worse

Each answer of a row is a conversation of `rllm.trainer.chat_rows` whose prompt is read and whose rest is
learned, so tools, several turns and everything that is refused there are the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllm.errors import ConfigError
from rllm.files.jsonl import read_jsonl_lines
from rllm.trainer.chat_rows import Chat, Problems, chat_of
from rllm.types.messages import Message


@dataclass(kw_only=True, slots=True, frozen=True)
class PreferenceRow:
    """One prompt and what was answered to it."""

    where: str
    """Its row, for people."""
    answers: tuple[tuple[int, Chat], ...]
    """(1, better) and (-1, worse) of a pair; one of the two of an answer with a label."""


def read_comparisons(path: Path, *, is_paired: bool) -> list[PreferenceRow]:
    """The rows of a JSONL file.

    `is_paired`: with `chosen` and `rejected`, else with `completion` and `label`. Raises ConfigError
    naming the lines that are none.
    """
    return _comparisons(
        ((f"{path.name}:{number}", row) for number, row in read_jsonl_lines(path)), is_paired=is_paired
    )


def comparisons_of(rows: Iterable[Any], *, is_paired: bool) -> list[PreferenceRow]:
    """The same for rows from Python, counted from 0."""
    return _comparisons(((f"row {number}", row) for number, row in enumerate(rows)), is_paired=is_paired)


def _comparisons(rows: Iterable[tuple[str, Any]], *, is_paired: bool) -> list[PreferenceRow]:
    comparisons: list[PreferenceRow] = []
    problems = Problems()
    for where, row in rows:
        try:
            if not isinstance(row, Mapping):
                raise ConfigError(f"it is a {type(row).__name__}; give an object with `prompt`.")
            answers = _pair(row, where) if is_paired else _labels(row, where)
            comparisons.append(PreferenceRow(where=where, answers=answers))
        except ConfigError as error:
            problems.note(where, error)
    problems.raise_any()
    if not comparisons:
        raise ConfigError("The dataset is empty; give at least one preference.")
    return comparisons


def _pair(row: Mapping[str, Any], where: str) -> tuple[tuple[int, Chat], ...]:
    better = _answer(row, "chosen", "give `prompt`, `chosen` and `rejected`, or choose `kto` for labels")
    worse = _answer(row, "rejected", "give `prompt`, `chosen` and `rejected`")
    if "prompt" in row or "messages" in row:
        prompt = _prompt(row)
    else:
        prompt = _common(better, worse)
        better, worse = better[len(prompt) :], worse[len(prompt) :]
    if better == worse:
        raise ConfigError("`chosen` and `rejected` are the same, so nothing is preferred; leave the row out.")
    return (1, _chat(row, prompt, better, "chosen", where)), (
        -1,
        _chat(row, prompt, worse, "rejected", where),
    )


def _labels(row: Mapping[str, Any], where: str) -> tuple[tuple[int, Chat], ...]:
    hint = "give `prompt`, `completion` and `label`"
    completion = _answer(row, "completion", hint)
    label = row.get("label")
    if not isinstance(label, bool):
        raise ConfigError(f"`label` is {label!r}; it must be true (desirable) or false.")
    return ((1 if label else -1, _chat(row, _prompt(row), completion, "completion", where)),)


def _answer(row: Mapping[str, Any], name: str, hint: str) -> list[Message]:
    value = row.get(name)
    if value is None and name in row:
        raise ConfigError(f"its `{name}` is None; {hint}.")
    if value is None:
        raise ConfigError(f"it has no `{name}`, but {', '.join(map(str, row)) or 'nothing'}; {hint}.")
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    return _messages([value] if isinstance(value, Mapping) else value, name)


def _prompt(row: Mapping[str, Any]) -> list[Message]:
    name = "prompt" if "prompt" in row else "messages"
    value = row.get(name)
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else _messages(value, name)
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"`{name}` ends with an answer; put it into the answers that are compared.")
    return messages


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"`{name}` is {value!r:.60}; it must be text, or a list of messages.")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"`{name}[{place}]` is {message!r:.60}; it must be an object with a `role`.")
    return [dict(message) for message in value]


def _common(better: Sequence[Message], worse: Sequence[Message]) -> list[Message]:
    """The common beginning of two whole conversations, up to the last question in it."""
    num_shared = 0
    for one, other in zip(better, worse, strict=False):
        if one != other:
            break
        num_shared += 1
    while num_shared and better[num_shared - 1]["role"] == "assistant":
        num_shared -= 1
    if not num_shared:
        raise ConfigError(
            "it has no `prompt`, and `chosen` and `rejected` begin differently; give the prompt."
        )
    return list(better[:num_shared])


def _chat(
    row: Mapping[str, Any], prompt: list[Message], answer: list[Message], name: str, where: str
) -> Chat:
    if answer and answer[0]["role"] != "assistant":
        raise ConfigError(
            f"`{name}` begins with the role {answer[0]['role']!r}; an answer is the assistant's."
        )
    try:
        return chat_of({"prompt": prompt, "completion": answer, "tools": row.get("tools")}, where)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
