"""Is an answer JSON that fits a schema? Checked by jsonschema (Draft 2020-12, or the one that it names).

    {"schema": {...}}    answer ──► without thoughts ──► the last ``` block, or all ──► JSON ──► fits or not

Strict about what JSON is: no NaN, no key twice, nothing around it but one block. A schema that is itself
wrong, or refers to what is not in it, is a mistake in the task. A schema with patterns is checked in a
process that can be killed, because a pattern can take for ever over a text that a model chose.
"""

import functools
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import ConfigError, MissingExtraError, RewardError
from rllm.rewards.extraction import final_text
from rllm.rewards.fences import fenced_blocks
from rllm.rewards.grade import Grade, require_answer, right, task_field, wrong
from rllm.rewards.workers import WorkerPool, WorkerStatus

MAX_JSON_CHARS = 1_000_000
_INLINE = re.compile(r"```(?:json)?\s*([{\[].*?)```", re.DOTALL | re.IGNORECASE)
_SHOWN_CHARS = 300


@dataclass(kw_only=True, slots=True)
class SchemaGrader:
    """A `Grader`: 1 for JSON that fits the task's schema, else 0. `timeout_s` is of schemas with patterns."""

    timeout_s: float = 5.0
    name: str = field(default="schema", init=False)
    task_fields: tuple[str, ...] = field(default=("schema",), init=False)
    _pool: WorkerPool | None = field(default=None, init=False, repr=False)
    _lock: Any = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.timeout_s > 0.0:
            raise ConfigError(f"`timeout_s` is {self.timeout_s}; it must be above 0.")
        _jsonschema()

    def grade(self, answer: str, task: Mapping[str, Any]) -> Grade:
        """Raises RewardError for a schema that is none."""
        schema = _schema_of(task)
        answer_text = final_text(require_answer(answer, self.name))
        if answer_text is None:
            return wrong("unfinished thinking")
        text = json_text(answer_text)
        if not text:
            return wrong("empty")
        rule = "the whole text behind the thoughts" if text == answer_text else "the last fenced block"
        try:
            value = strict_json(text)
        except ValueError as error:
            return wrong(f"no JSON: {error}"[:_SHOWN_CHARS], text, rule=rule)
        misfit = self._misfit(value, schema)
        grade = right if misfit is None else wrong
        return grade(misfit or "fits the schema", text, rule=rule)

    def close(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _misfit(self, value: Any, schema: Any) -> str | None:
        if '"pattern' not in json.dumps(schema):
            return misfit_of(value, schema)
        with self._lock:
            if self._pool is None:
                self._pool = WorkerPool("rllm.rewards.schema:misfit_of", workers=1, timeout_s=self.timeout_s)
            pool = self._pool
        reply = pool.call(value, schema)
        if reply.status is WorkerStatus.OK:
            return reply.value
        if reply.status is WorkerStatus.TIMEOUT:
            return f"the schema's patterns were not done with it after {self.timeout_s:g} s"
        raise RewardError(f"The schema could not be checked: {reply.status} {reply.detail} {reply.value}")


def json_text(text: str) -> str:
    """The text to read as JSON: the last ``` block, in lines of its own or within one, or else all of it."""
    blocks = [block.text for block in fenced_blocks(text) if block.language in ("", "json")]
    blocks = blocks or _INLINE.findall(text)
    return (blocks[-1] if blocks else text).strip()


def strict_json(text: str) -> Any:
    """The value. Raises ValueError for what RFC 8259 does not know, and for a key that is there twice."""
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"{len(text)} characters, limit {MAX_JSON_CHARS}")
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def misfit_of(value: Any, schema: Any) -> str | None:
    """The misfit of a value with a schema, or None where it fits. Raises RewardError for no schema."""
    jsonschema = _jsonschema()
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise RewardError(f"The task's `schema` is no JSON schema: {error.message:.200}") from error
    checker = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())  # nothing is fetched
    try:
        worst = jsonschema.exceptions.best_match(checker.iter_errors(value))
    except Unresolvable as error:
        raise RewardError(f"The task's `schema` refers to what is not in it: {error}") from error
    except RecursionError:
        return "nested too deeply"
    return None if worst is None else f"{worst.json_path}: {worst.message}"[:_SHOWN_CHARS]


def _schema_of(task: Mapping[str, Any]) -> Any:
    schema = task_field(task, "schema", "schema")
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise RewardError(f"The task's `schema` is {schema!r:.200}, which is no JSON: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise RewardError(f"The task's `schema` is {schema!r:.200}; it must be an object such as {{}}.")
    return dict(schema) if isinstance(schema, Mapping) else schema


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r:.80} is there twice")
    return members


@functools.cache
def _jsonschema() -> Any:
    try:
        import jsonschema
    except ModuleNotFoundError as error:
        raise MissingExtraError("jsonschema", "grading") from error
    return jsonschema
