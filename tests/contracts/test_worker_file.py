"""worker.md files: the published starter is read whole, and what is wrong is named with its line."""

import json
import os
from pathlib import Path

import pytest

from rllm.contracts import RunStatus, parse_contract, read_contract
from rllm.errors import ContractError

STARTER = """\
---
id: rllm-repo-derived-worker
name: rllm Repo-Derived Worker
version: 1.0.0
source_registry_url: https://registry.example/rllm
repository_default_branch: main
repository_updated_at: 2026-04-05
worker_mode: agent-orchestration-worker
derivation_confidence: 0.95
derived_on: 2026-04-05
tags: [agent-framework, llm-training]
---

# rllm Repo-Derived Worker

What it was extracted from.

```
# no heading
```

## worker.md contract (derived starter)

Purpose: Execute one orchestrated agent task as a bounded worker step.

### Input schema

```json
{"type": "object", "additionalProperties": false, "required": ["run_id", "task", "context"],
 "properties": {"run_id": {"type": "string"}, "task": {"type": "string"}, "context": {"type": "object"}}}
```

### Output schema

```json
{"type": "object", "additionalProperties": false, "required": ["run_id", "status", "result"],
 "properties": {"run_id": {"type": "string"},
                "status": {"type": "string",
                           "enum": ["ok", "retryable_error", "invalid_request", "invalid_output"]},
                "result": {"type": "object"}}}
```

### Constraints

- timeout_seconds: 30
- max_attempts: 2
- idempotency_key: run_id
- status_enum: [ok, retryable_error, invalid_request, invalid_output]
- notes: adapt to concrete APIs/classes documented in this repository before production use

## How this should be used

Replace the schemas with your real bounded task.
"""


def test_the_published_starter_is_read_whole() -> None:
    contract = parse_contract(STARTER)
    assert (contract.id, contract.version) == ("rllm-repo-derived-worker", "1.0.0")
    assert contract.purpose == "Execute one orchestrated agent task as a bounded worker step."
    assert contract.input_schema.required == ["run_id", "task", "context"]
    assert contract.runtime_properties == ("run_id", "status")
    limits = contract.constraints
    assert (limits.timeout_seconds, limits.max_attempts, limits.idempotency_key) == (30.0, 2, "run_id")
    assert set(limits.status_enum) == set(RunStatus)
    assert limits.notes == (
        "adapt to concrete APIs/classes documented in this repository before production use",
    )
    assert contract.provenance["derived_on"] == "2026-04-05"
    assert contract.tags == ("agent-framework", "llm-training")
    assert contract.usage == "Replace the schemas with your real bounded task."
    assert (contract.binding.program, contract.binding.model) == ("", "")


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


SAME = "what replaced it"
BROKEN = [
    # what is replaced, by what, the line that is named as the one that holds this text, a word of the message
    ("id: rllm", "idd: rllm", "idd: rllm", "did you mean `id`"),
    ("id: rllm-repo-derived-worker", "id: a b", "id: a b", "'a b'"),
    ("version: 1.0.0", "version: 1.0", "version: 1.0", "in quotes"),
    ("version: 1.0.0\n", "", "---", "`version` is missing"),
    ("name: rllm", "id: twice\nname: rllm", "id: twice", "twice"),
    ("tags: [agent-framework, llm-training]", "tags: word", "tags: word", "list of words"),
    ("tags: [", "rllm: {agnet: x}\ntags: [", "rllm: {agnet", "rllm.agnet"),
    ("tags: [", "rllm: {base_url: x}\ntags: [", "rllm: {base_url", "needs `rllm.model`"),
    ("tags: [agent", "tags: [[agent", "tags: [[", "no YAML"),
    ("### Input schema", "### Input shema", "### Input shema", "did you mean `Input schema`"),
    ("### Constraints", "### Output schema", "### Output schema\n\n- timeout", "twice"),
    ("Purpose: Execute", "Aim: Execute", "Aim: Execute", "Purpose"),
    ("Purpose: Execute one orchestrated agent task as a bounded worker step.", "Purpose:",
     "Purpose:", "empty"),
    ('"task": {"type": "string"}, "context"', '"task": {"type": "strnig"}, "context"',
     SAME, "no JSON Schema"),
    ('{"type": "object", "additionalProperties": false, "required": ["run_id", "task"',
     '{"type": "object", "additionalProperties": false, "required": ["run_id", "tsak"', SAME, "tsak"),
    ('"context": {"type": "object"}}}', '"context": {"type": "object"}}', "", "no JSON"),
    ('"context": {"type": "object"}}}', '"context": {"$ref": "https://a.example/b"}}}',
     SAME, "refers to itself"),
    ("timeout_seconds: 30", "timeout_seconds: 0", "- timeout_seconds: 0", "above 0"),
    ("timeout_seconds: 30", "timeout_seconds: soon", "- timeout_seconds: soon", "no number"),
    ("max_attempts: 2", "max_attempts: 1.5", "- max_attempts: 1.5", "whole number"),
    ("max_attempts: 2", "max_attempts: 2\n- max_attempts: 3", "- max_attempts: 3", "twice"),
    ("max_attempts", "max_atempts", "- max_atempts", "did you mean `max_attempts`"),
    ("idempotency_key: run_id", "idempotency_key: key", SAME, "no such property"),
    ("idempotency_key: run_id", "idempotency_key: context", SAME, "no string"),
    ("status_enum: [ok, retryable_error, invalid_request, invalid_output]", "status_enum: [ok, failed]",
     "- status_enum", "failed"),
    ('"enum": ["ok", ', '"enum": [', SAME, "status_enum"),
    ('"enum": ["ok", ', '"enum": [{}, ', SAME, "status_enum"),
    ("- max_attempts: 2", "max_attempts 2", "max_attempts 2", "no constraint"),
    ("## worker.md contract (derived starter)", "## contract", "---", "no contract"),
    ("## How this", "## worker.md contract\n\n## How this", "## worker.md contract\n", "two contracts"),
    ("tags: [", "rllm:\n  model: a\n  program: x.py:y\n  model: b\ntags: [", "  model: b",
     "first is in line 12"),
    ("tags: [", "rllm:\n  model: a\n  agnet: b\ntags: [", "  agnet: b", "`rllm.agnet` is unknown"),
    ("tags: [", "rllm:\n  model: a\n  prompt_price: -1\ntags: [", "  prompt_price", "0 or more"),
    ("tags: [", "rllm:\n  program: a\n  workflow: b\ntags: [", "  workflow: b", "program and workflow"),
    ("tags: [", "rllm:\n  program: a\n  prompt_price: 1\ntags: [", "  prompt_price", "needs `rllm.model`"),
    ("tags: [", "rllm: {<<: {model: a}}\ntags: [", "rllm: {<<", "`<<`"),
    ("derived_on: 2026-04-05", "derived_on: &a [x, y]\nderived_by: *a", "derived_by: *a", "`*a`"),
    ('"task": {"type": "string"}', '"task": {"type": "string"}, "task": {}', "```json",
     "`task` is written twice"),
    ('"task": {"type": "string"}', '"task": {"type": "string", "maxlength": 3}', SAME,
     "did you mean `maxLength`"),
    ('"task": {"type": "string"}', '"task": {"type": "string", "nullable": true}', SAME, "`nullable`"),
    ('"task": {"type": "string"}', '"task": {"minLength": 5, "maxLength": 3}', SAME, "`maxLength` 3"),
    ('"task": {"type": "string"}', '"task": {"type": "string", "enum": [1]}', SAME, "nothing fits"),
    ('"task": {"type": "string"}', '"task": {"minimum": 5, "exclusiveMaximum": 5}', SAME, "no room"),
    ('"task": {"type": "string"}', '"task": {"enum": ["abc"], "maxLength": 2}', SAME, "nothing fits"),
    ('"task": {"type": "string"}', '"task": {"required": ["a", "b"], "maxProperties": 1}', SAME, "the 2"),
    ('"task": {"type": "string"}', '"task": {"required": ["a"], "additionalProperties": false}', SAME,
     "`a` is required"),
    ('"task": {"type": "string"}', '"task": false', SAME, "allowed no value"),
    ('"properties": {"run_id": {"type": "string"}, "task"', '"properties": {"run_id": true, "task"',
     "- idempotency_key", "no string"),
    ('{"type": "object", "add', '{"$schema": 3, "type": "object", "add', SAME, "`$schema` is 3"),
    ('"properties": {"run_id": {"type": "string"},\n', '"properties": {"run_id": {"type": "integer"},\n',
     SAME, "`run_id`"),
    ("## How this", "## How to use\n\n## How this", "## How this", "twice"),
    ('"task": {"type": "string"}', '"task": {"pattern": "(?=a)b"}', SAME, "without lookaround"),
    ('"task": {"type": "string"}', '"task": {"patternProperties": {"[": {}}}', SAME, "ECMA"),
    ('"task": {"type": "string"}', '"task": {"patternProperties": {"a": {}}, "unevaluatedProperties": {}}',
     SAME, "write `additionalProperties`"),
    ('"task": {"type": "string"}', '"task": {"$schema": "http://json-schema.org/draft-07/schema#"}',
     SAME, "only the whole schema"),
]  # fmt: skip


def test_what_is_wrong_in_a_schema_of_many_lines_is_named_with_its_own_line() -> None:
    """Also where the way there leads through lists and odd names."""
    start, end = (
        STARTER.index('{"type": "object", "additionalProperties"'),
        STARTER.index("```\n\n### Output"),
    )
    schema = {
        "type": "object",
        "required": ["run_id"],
        "properties": {"run_id": {"type": "string"}, "a/b~c": {"anyOf": [{"x-note": 1}, {"minLenght": 2}]}},
    }
    for indent in ("  ", "\t"):
        text = STARTER[:start] + json.dumps(schema, indent=indent) + "\n" + STARTER[end:]
        with pytest.raises(ContractError, match="`minLenght` at /properties/a~1b~0c/anyOf/1") as raised:
            parse_contract(text, source="a.md")
        assert int(str(raised.value).split(":")[1]) == line_of(text, '"minLenght"')


def test_what_is_wrong_is_named_with_its_line() -> None:
    for old, new, named, word in BROKEN:
        assert STARTER.count(old) >= 1, old
        text = STARTER.replace(old, new, 1)
        with pytest.raises(ContractError) as raised:
            parse_contract(text, source="a.md")
        message = str(raised.value)
        assert word in message, new
        assert message.startswith("a.md:")
        if named:
            assert int(message.split(":")[1]) == line_of(text, new if named is SAME else named), new


@pytest.mark.parametrize(
    "task",
    [
        '{"required": ["xa"], "patternProperties": {"^x": {}}, "additionalProperties": false}',
        '{"required": ["a"], "properties": {"a": {}}, "additionalProperties": false, "maxProperties": 1}',
        '{"minimum": 5, "maximum": 5, "exclusiveMinimum": 4}',
        f'{{"enum": [1, {10**400}], "multipleOf": 0.5}}',
    ],
)
def test_keywords_that_agree_are_no_contradiction(task: str) -> None:
    text = STARTER.replace('"task": {"type": "string"}', f'"task": {task}')
    text = text.replace(
        '"required": ["run_id",', '"patternProperties": {"^x": {}}, "required": ["xa", "run_id",'
    )
    assert parse_contract(text).input_schema.properties["task"]


@pytest.mark.parametrize(
    "status", ['{"const": "done"}', '{"type": "integer"}', '{"type": "string", "minLength": 3}']
)
def test_an_output_that_the_runtimes_own_part_breaks_is_refused(status: str) -> None:
    start = STARTER.index('"status": {"type"') + len('"status": ')
    text = STARTER[:start] + status + STARTER[STARTER.index("},", start) + 1 :]
    line = line_of(text, '"status": ')
    with pytest.raises(ContractError, match=rf"^worker.md:{line}: .*`status`"):
        parse_contract(text)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + STARTER,
        STARTER.replace("\n", "\r\n"),
        STARTER.replace(
            '"task": {"type": "string"}', '"task": {"description": "a\u2028b\x85c", "x-note": 1}'
        ),
    ],
)
def test_texts_of_every_editor_are_read(text: str) -> None:
    assert parse_contract(text).constraints.max_attempts == 2


def test_lines_are_counted_as_editors_do() -> None:
    text = STARTER.replace("What it was", "What\u2028it\x85\x0cwas").replace(
        "max_attempts: 2", "max_attempts: 0"
    )
    with pytest.raises(ContractError, match=rf"^worker.md:{line_of(text, '- max_attempts')}: "):
        parse_contract(text)


def test_a_file_of_the_longest_lines_is_read_in_time() -> None:
    """What once took minutes: aliases of aliases, and gaps within one line."""
    gap = " " * 400_000
    tower = "".join(f"derived_{number}: &a{number} [{f'*a{number - 1},' * 9}]\n" for number in range(1, 12))
    for old, new in (
        ("max_attempts: 2", f"max_attempts: 2{gap}x"),
        ("## How this", f"### Constraint{gap}x\n\n## How this"),
        ("tags: [", f"derived_0: &a0 [x]\n{tower}tags: ["),
    ):
        with pytest.raises(ContractError) as raised:
            parse_contract(STARTER.replace(old, new, 1))
        assert len(str(raised.value)) < 1000


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.md")
    (tmp_path / "loop.md").symlink_to(tmp_path / "loop.md")
    for path in (tmp_path / "pipe.md", tmp_path / "loop.md", tmp_path, Path("/dev/zero")):
        with pytest.raises(ContractError):
            read_contract(path)


def test_a_text_that_ends_anywhere_is_refused_or_read_and_never_crashes() -> None:
    lines = STARTER.splitlines(keepends=True)
    num_read = 0
    for count in range(len(lines) + 1):
        try:
            parse_contract("".join(lines[:count]))
            num_read += 1
        except ContractError:
            pass
    assert 5 <= num_read < len(lines)
