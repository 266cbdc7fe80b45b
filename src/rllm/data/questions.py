"""A row as it was published ──► a question, what grades its answer, and an answer that is right.

    row ──Row(fields)──► transform ──► Question ──question_task──► task

A task is {"task_id", "question" | "messages", "grader", "grader_args", "grading", "oracle", "category"}. A
row that lacks a field, or has something else there than it should, raises ConfigError with the name of the
data set, the number of the row and the field.
"""

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import ConfigError

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_MAGIC = ((b"\x89PNG", "png"), (b"\xff\xd8", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))


@dataclass(kw_only=True, slots=True)
class Row:
    """One row of a data set, read by the names that the transform knows its fields under."""

    values: Mapping[str, Any]
    number: int
    """Counted from 0."""
    dataset: str
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name in the transform -> column of the row, with dots for what lies deeper; names that are not there
    are columns themselves."""

    def value(self, name: str) -> Any:
        """The value of the field; None is nothing."""
        content = self.optional(name)
        if content is None:
            raise self.error(
                f"has no `{self._column(name)}`; it has {', '.join(map(str, self.values)) or 'nothing'}."
            )
        return content

    def optional(self, name: str) -> Any:
        """The same, or None."""
        value: Any = self.values
        column = self._column(name)
        # Whole first, because the name of a column may itself have a dot.
        if column in self.values:
            return _plain_list(self.values[column])
        for part in column.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(part)
        return _plain_list(value)

    def text(self, name: str) -> str:
        """A text; numbers are written out."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self.wrong(name, value, "text")
        return str(value)

    def optional_text(self, name: str) -> str:
        """The same, or an empty text."""
        return "" if self.optional(name) is None else self.text(name)

    def texts(self, name: str) -> list[str]:
        """One text or a list of them, not empty."""
        value = self.value(name)
        items = value if isinstance(value, list) else [value]
        if not items or not all(
            isinstance(each, str | int | float) and not isinstance(each, bool) for each in items
        ):
            raise self.wrong(name, value, "texts")
        return [str(each) for each in items]

    def integer(self, name: str) -> int:
        """A whole number, or a text that is one."""
        value = self.value(name)
        text = str(value).strip()
        if isinstance(value, float) and value.is_integer():
            text = str(int(value))
        if isinstance(value, bool) or not re.fullmatch(r"-?\d+", text):
            raise self.wrong(name, value, "a whole number")
        return int(text)

    def records(self, name: str) -> list[Mapping[str, Any]]:
        """A list of objects."""
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            raise self.wrong(name, value, "a list of objects")
        return value

    def wrong(self, name: str, value: Any, requirement: str) -> ConfigError:
        return self.error(
            f"has {value!r:.120} (a {type(value).__name__}) in `{self._column(name)}`; it must be "
            f"{requirement}."
        )

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.dataset}: row {self.number} {what}")

    def _column(self, name: str) -> str:
        return self.fields.get(name, name)


@dataclass(kw_only=True, slots=True)
class Question:
    """A question, made of a row by a transform."""

    prompt_values: dict[str, Any]
    """The values that the prompt may show, by name; lists are shown as lettered lines."""
    grading: dict[str, Any]
    """The fields that the grader reads."""
    oracle: str | None = None
    """An answer that is right, as a model would write it; None where the data has none."""
    pictures: list[Any] = field(default_factory=list[Any])
    """Bytes of images, or what a hub's row holds for one."""
    history: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Messages before the question."""
    category: str = ""
    """Subject, language or level, for the report per category."""
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """More keys of the task, for environments that need them."""


Transform = Callable[[Row, Mapping[str, Any]], Question]
"""(row, options of the benchmark) -> question. Pure: the same row gives the same question."""


def question_task(
    question: Question, *, task_id: str, prompt: str, system: str, grader: str, grader_args: Mapping[str, Any]
) -> dict[str, Any]:
    """The task of a single-turn environment."""
    text = render(prompt, question.prompt_values)
    task: dict[str, Any] = {"task_id": task_id}
    if question.pictures or question.history or system:
        task["messages"] = [
            *([{"role": "system", "content": system}] if system else []),
            *question.history,
            {"role": "user", "content": _content(text, question.pictures)},
        ]
    else:
        task["question"] = text
    return {
        **task,
        "grader": grader,
        "grader_args": dict(grader_args),
        "grading": question.grading,
        "oracle": question.oracle,
        "category": question.category,
        **question.extra,
    }


def render(prompt: str, values: Mapping[str, Any]) -> str:
    """The prompt with every `{{name}}` filled in; a list becomes lines (A), (B), …

    Raises ConfigError for a name that the transform does not show.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in values:
            raise ConfigError(f"The prompt shows `{{{{{name}}}}}`; there is {', '.join(values)}.")
        value = values[name]
        return lettered_list(value) if isinstance(value, list) else str(value)

    return _PLACE.sub(fill, prompt)


def lettered_list(choices: list[Any]) -> str:
    return "\n".join(f"({letter(place)}) {choice}" for place, choice in enumerate(choices))


def letter(place: int) -> str:
    """0 is A."""
    return chr(ord("A") + place)


def picture_url(picture: Any) -> str:
    """A data URL of an image: one already, its bytes, or `{"bytes": …}` as rows of hubs hold it."""
    if isinstance(picture, str) and picture.startswith("data:image/"):
        return picture
    data = picture.get("bytes") if isinstance(picture, Mapping) else picture
    if not isinstance(data, bytes):
        raise ConfigError(
            f"A picture is {picture!r:.80}; rows must hold its bytes. Pull the data set again, in Parquet."
        )
    kind = next((name for magic, name in _MAGIC if data.startswith(magic)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _content(text: str, pictures: list[Any]) -> str | list[dict[str, Any]]:
    if not pictures:
        return text
    image_parts = [{"type": "image_url", "image_url": {"url": picture_url(each)}} for each in pictures]
    return [*image_parts, {"type": "text", "text": text}]


def _plain_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
