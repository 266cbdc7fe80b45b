"""worker.md ──► Contract, with the line of whatever is wrong.

    ---                                front matter (YAML): id, version, tags, `rllm:` binding, provenance
    # any title, any text              for people
    ## worker.md contract              the contract: Purpose, input and output schema, constraints
    ## How this should be used         for people; kept

Nothing in the contract's section is skipped: what is not known is an error, not a comment.
"""

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rllm.contracts.contract import MAX_ATTEMPTS, MAX_TIMEOUT_S, Binding, Constraints, Contract, RunStatus
from rllm.contracts.references import SchemaFault
from rllm.contracts.schemas import Schema
from rllm.errors import ConfigError, ContractError, MissingExtraError

MAX_BYTES = 1 << 20
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEYS = ("id", "name", "version", "description", "tags", "worker_mode", "rllm")
_PROVENANCE = ("source_", "repository_", "derivation_", "derived_")
_CONTRACT_HEADING = re.compile(r"worker\.md contract\b", re.IGNORECASE)
_USAGE_HEADING = re.compile(r"how (this should be used|to use( this)?)\s*$", re.IGNORECASE)
_PRICES = ("prompt_price", "completion_price")
_PARTS = {"purpose": "Purpose", "input schema": "Input schema", "output schema": "Output schema"}
_PARTS["constraints"] = "Constraints"
_ITEM = re.compile(r"[-*]\s+`?(?P<key>[A-Za-z_]+)`?\s*:(?P<value>.*)")


@dataclass(slots=True)
class _Heading:
    level: int
    title: str
    line: int
    body: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _File:
    """A file under way, so that an error names it."""

    name: str

    def error(self, line: int, message: str) -> ContractError:
        return ContractError(f"{self.name}:{line}: {message}")


def read_contract(path: str | Path) -> Contract:
    """The contract in a file. Raises ContractError with file and line for what is wrong in it."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ContractError(f"{path} is no file; a contract is one.")
        if path.stat().st_size > MAX_BYTES:
            raise ContractError(
                f"{path} has {path.stat().st_size:,} bytes; a contract has at most {MAX_BYTES:,}."
            )
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{path} is no UTF-8 text at byte {error.start}; write it as UTF-8.") from error
    except OSError as error:
        raise ContractError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_contract(text, source=str(path))


def parse_contract(text: str, *, source: str = "worker.md") -> Contract:
    """The contract in a text; `source` is what errors call it."""
    file = _File(source)
    # Not `splitlines`: it ends a line at characters that JSON has in its texts and editors do not count.
    lines = re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))
    front, end = _front_matter(file, lines)
    parts, usage = _contract_parts(file, _headings(lines, start=end))
    input_schema = _schema(file, parts["input schema"])
    output_schema = _schema(file, parts["output schema"])
    constraints, constraint_lines = _constraints(file, parts.get("constraints"))
    contract = Contract(
        **front,
        purpose=_purpose(file, parts["purpose"]),
        input_schema=input_schema,
        output_schema=output_schema,
        constraints=constraints,
        usage=usage,
        source=source,
    )
    _require_consistent(file, contract, constraint_lines)
    _require_fillable(file, contract, parts["output schema"])
    return contract


# ---- front matter ------------------------------------------------------------------------------------------


def _front_matter(file: _File, lines: list[str]) -> tuple[dict[str, Any], int]:
    """Fields of the Contract, and the line (from 0) after the front matter."""
    if not lines or lines[0].strip() != "---":
        raise file.error(1, "a worker.md file begins with `---` and its front matter (YAML).")
    end = next((number for number, line in enumerate(lines[1:], 1) if line.strip() == "---"), None)
    if end is None:
        raise file.error(1, "the front matter has no second `---` to end it.")
    values, nodes, line_of = _yaml_mapping(file, "\n".join(lines[1:end]), first_line=2)
    for key, line in line_of.items():
        if key not in _KEYS and not key.startswith(_PROVENANCE):
            raise file.error(line, f"`{key}` is unknown in the front matter{_did_you_mean(key, _KEYS)}")
    for key in ("id", "version"):
        if not isinstance(values.get(key), str):
            fault = f"is {values[key]!r:.80}, no text; write it in quotes" if key in values else "is missing"
            raise file.error(line_of.get(key, 1), f"`{key}` {fault}.")
    if not _ID.fullmatch(values["id"]):
        raise file.error(
            line_of["id"],
            f"`id` is {values['id']!r:.80}; it has letters, digits, `.`, `_` and `-`, at most 64.",
        )
    tags = values.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise file.error(line_of["tags"], f"`tags` is {tags!r:.80}; it is a list of words.")
    for key in ("name", "description"):
        if not isinstance(values.get(key, ""), str):
            raise file.error(line_of[key], f"`{key}` is {values[key]!r:.80}, no text.")
    front = {
        "id": values["id"],
        "version": values["version"],
        "name": values.get("name", ""),
        "description": values.get("description", ""),
        "tags": tuple(tags),
        "binding": _binding(
            file,
            values.get("rllm"),
            line_of.get("rllm", 1),
            _key_lines(nodes.get("rllm"), first_line=2),
        ),
        "provenance": {
            key: str(value)
            for key, value in values.items()
            if key.startswith(_PROVENANCE) or key == "worker_mode"
        },
    }
    return front, end + 1


def _binding(file: _File, value: Any, line: int, line_of: Mapping[str, int]) -> Binding:
    """`line`: of `rllm` itself; `line_of`: of its keys."""
    if value is None:
        return Binding()
    names = [each.name for each in fields(Binding)]
    if not isinstance(value, Mapping):
        raise file.error(
            line, f"`rllm` is {value!r:.80}; write `rllm: {{program: file.py:NAME, model: NAME}}`."
        )
    for key, each in value.items():
        own_line = line_of.get(str(key), line)
        if key not in names:
            raise file.error(own_line, f"`rllm.{key}` is unknown{_did_you_mean(str(key), names)}")
        if key in _PRICES:
            _require_price(file, own_line, key, each)
        elif not isinstance(each, str) or not each:
            raise file.error(own_line, f"`rllm.{key}` is {each!r:.80}; it is a name.")
    actors = [key for key in ("program", "agent", "workflow") if value.get(key)]
    if len(actors) > 1:
        raise file.error(
            line_of[actors[-1]], f"`rllm` names {' and '.join(actors)}; one of them does the work."
        )
    if not value.get("model"):
        for key, what in (
            ("agent", "the model that it asks"),
            ("workflow", "the model that it asks"),
            ("base_url", "the server's name for the model"),
            *((price, "the model that has it") for price in _PRICES),
        ):
            if value.get(key):
                raise file.error(line_of[key], f"`rllm.{key}` needs `rllm.model`, {what}.")
    return Binding(**value)


def _require_price(file: _File, line: int, key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise file.error(
            line, f"`rllm.{key}` is {value!r:.80}; it is the price of a million tokens, 0 or more."
        )


def _yaml_mapping(
    file: _File, text: str, *, first_line: int
) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """A mapping with text keys, the node of each value, the line of each key. Raises for keys that come
    twice."""
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError("yaml", "worker") from error
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                line = first_line + event.start_mark.line
                raise file.error(line, f"`*{event.anchor:.80}` stands for something else; write that itself.")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _require_own_keys(file, node, first_line)
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = first_line + (mark.line if mark is not None else 0)
        raise file.error(line, f"this is no YAML: {getattr(error, 'problem', None) or error}.") from error
    except (ValueError, RecursionError) as error:
        raise file.error(first_line, f"this YAML cannot be read: {error}.") from error
    if not isinstance(node, yaml.MappingNode) or not isinstance(values, dict):
        raise file.error(first_line, "the front matter is no mapping; write `id: my-worker` and so on.")
    return values, {key.value: value for key, value in node.value}, _key_lines(node, first_line=first_line)


def _key_lines(node: Any, *, first_line: int) -> dict[str, int]:
    """The line of each key of a mapping; none of another node."""
    pairs = node.value if node is not None and node.id == "mapping" else ()
    return {str(key.value): first_line + key.start_mark.line for key, _ in pairs}


def _require_own_keys(file: _File, node: Any, first_line: int) -> None:
    """Raises for a key that is written twice in one mapping, at any depth."""
    if node.id == "mapping":
        line_of: dict[Any, int] = {}
        for key, value in node.value:
            line = first_line + key.start_mark.line
            if key.value == "<<":
                raise file.error(line, "`<<` takes keys from elsewhere; write them here.")
            if key.id == "scalar":
                if key.value in line_of:
                    raise file.error(
                        line,
                        f"`{key.value:.80}` is written twice; the first is in line {line_of[key.value]}.",
                    )
                line_of[key.value] = line
            _require_own_keys(file, value, first_line)
    elif node.id == "sequence":
        for each in node.value:
            _require_own_keys(file, each, first_line)


# ---- sections ----------------------------------------------------------------------------------------------


def _headings(lines: list[str], *, start: int) -> list[_Heading]:
    """Headings with the lines below each; `#` in a fenced block is no heading."""
    headings = [_Heading(0, "", start)]
    fence = ""
    for number, line in enumerate(lines[start:], start + 1):
        mark = re.match(r"\s{0,3}(`{3,}|~{3,})", line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark[1]
        title = re.match(r"(#{1,6})\s+(.*)", line)
        if title and not fence:
            headings.append(_Heading(len(title[1]), title[2].strip().rstrip("#").rstrip(), number))
        else:
            headings[-1].body.append(line)
    return headings


def _contract_parts(file: _File, headings: list[_Heading]) -> tuple[dict[str, _Heading], str]:
    """The parts of the contract by their name in lower case, and how to use it."""
    starts = [place for place, each in enumerate(headings) if _CONTRACT_HEADING.match(each.title)]
    if len(starts) != 1:
        line = headings[starts[1]].line if starts else 1
        raise file.error(
            line,
            "there are two contracts; one is allowed."
            if starts
            else "there is no contract: write a heading `## worker.md contract` with Purpose, Input schema, "
            "Output schema and Constraints below it.",
        )
    top = headings[starts[0]]
    usages = [each for each in headings if _USAGE_HEADING.match(each.title)]
    if len(usages) > 1:
        raise file.error(usages[1].line, f"`{usages[1].title}` is there twice.")
    usage = usages[0] if usages else None
    parts: dict[str, _Heading] = {}
    for heading in headings[starts[0] + 1 :]:
        if heading.level <= top.level:
            break
        name = heading.title.lower()
        if heading is usage:
            continue
        if name not in _PARTS:
            hint = _did_you_mean(heading.title[:80], list(_PARTS.values()))
            raise file.error(heading.line, f"`{heading.title:.80}` is no part of a contract{hint}")
        if name in parts:
            raise file.error(heading.line, f"`{heading.title}` is there twice.")
        parts[name] = heading
    _split_purpose(file, top, parts)
    for name, title in _PARTS.items():
        if name not in parts and name != "constraints":
            raise file.error(top.line, f"the contract has no `{title}`.")
    return parts, "\n".join(usage.body).strip() if usage else ""


def _split_purpose(file: _File, top: _Heading, parts: dict[str, _Heading]) -> None:
    """`Purpose: …` directly below the contract's heading is the published form."""
    text = "\n".join(top.body).strip()
    if not text:
        return
    first = next(number for number, line in enumerate(top.body, top.line + 1) if line.strip())
    match = re.match(r"\**purpose\**\s*:\**\s*", text, re.IGNORECASE)
    if not match:
        raise file.error(first, f"{text.splitlines()[0]!r:.80} is no part of a contract; write `Purpose: …`.")
    if "purpose" in parts:
        raise file.error(first, "the purpose is there twice.")
    parts["purpose"] = _Heading(top.level + 1, "Purpose", first, [text[match.end() :]])


def _purpose(file: _File, part: _Heading) -> str:
    text = " ".join("\n".join(part.body).split())
    if not text:
        raise file.error(part.line, "the purpose is empty; say in a sentence what the worker does.")
    return text


def _schema(file: _File, part: _Heading) -> Schema:
    text, line = _only_block(file, part)
    try:
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_doubles)
    except json.JSONDecodeError as error:
        raise file.error(line + error.lineno, f"`{part.title}` is no JSON: {error.msg}.") from error
    except (ValueError, RecursionError) as error:
        raise file.error(line, f"`{part.title}` is no JSON to rely on: {error}.") from error
    if not isinstance(document, dict) or document.get("type") != "object":
        raise file.error(line, f'`{part.title}` describes no object; write {{"type": "object", …}}.')
    try:
        schema = Schema(document)
    except MissingExtraError:
        raise
    except SchemaFault as fault:
        raise file.error(_line_of(text, line, fault.pointer), f"`{part.title}`: {fault}") from fault
    except ConfigError as error:
        raise file.error(line, f"`{part.title}`: {error}") from error
    return schema


def _line_of(text: str, fence: int, pointer: str) -> int:
    """The line of the file where `pointer` leads to in the JSON below the line `fence`; that line itself
    where it leads nowhere. To YAML, which knows lines, JSON without tabs is YAML."""
    import yaml

    try:
        node: Any = yaml.compose(text.replace("\t", " "), Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return fence
    line = -1
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, yaml.SequenceNode):
            node = node.value[int(name)]
            line = node.start_mark.line
        else:
            key, node = next((pair for pair in node.value if pair[0].value == name), (None, None))
            if key is None:
                return fence
            line = key.start_mark.line
    return fence + 1 + line


def _only_block(file: _File, part: _Heading) -> tuple[str, int]:
    """The text of the one fenced block, and the line of its fence."""
    blocks: list[tuple[list[str], int]] = []
    is_open = False
    for number, line in enumerate(part.body, part.line + 1):
        if re.match(r"\s{0,3}(```|~~~)", line):
            is_open = not is_open
            if is_open:
                blocks.append(([], number))
        elif is_open:
            blocks[-1][0].append(line)
        elif line.strip():
            raise file.error(number, f"{line.strip()!r:.80} is no part of a schema; write it elsewhere.")
    if len(blocks) != 1 or is_open:
        raise file.error(
            part.line,
            f"`{part.title}` has {len(blocks)} fenced blocks of JSON{' left open' * is_open}, not 1.",
        )
    return "\n".join(blocks[0][0]), blocks[0][1]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"`{name:.80}` is written twice in one object")
    return values


# ---- constraints -------------------------------------------------------------------------------------------


def _constraints(file: _File, part: _Heading | None) -> tuple[Constraints, dict[str, int]]:
    """The constraints, and the line of each that is written."""
    values: dict[str, Any] = {}
    line_of: dict[str, int] = {}
    notes: list[str] = []
    names = [each.name for each in fields(Constraints)]
    for number, line in enumerate(part.body if part else (), (part.line if part else 0) + 1):
        if not line.strip():
            continue
        item = _ITEM.match(line.strip())
        if item is None:
            raise file.error(number, f"{line.strip()!r:.80} is no constraint; write `- key: value`.")
        key, text = item["key"], item["value"].strip().strip("`")
        if key == "notes":
            notes.append(text)
        elif key not in names:
            raise file.error(number, f"`{key}` is no constraint{_did_you_mean(key, names)}")
        elif key in values:
            raise file.error(number, f"`{key}` is there twice.")
        else:
            values[key], line_of[key] = _constraint(file, number, key, text), number
    return Constraints(**values, notes=tuple(notes)), line_of


def _constraint(file: _File, line: int, key: str, text: str) -> Any:
    if key == "idempotency_key":
        if not text:
            raise file.error(line, "`idempotency_key` is empty; name a property of the input.")
        return text
    if key == "repair":
        if text not in ("true", "false"):
            raise file.error(line, f"`repair` is {text!r:.80}; it is true or false.")
        return text == "true"
    if key == "status_enum":
        statuses = tuple(each.strip().strip("`\"'") for each in text.strip("[]").split(",") if each.strip())
        unknown = [each for each in statuses if each not in tuple(RunStatus)]
        if unknown or not statuses:
            raise file.error(
                line,
                f"`status_enum` holds {', '.join(unknown) or 'nothing'}; there are {', '.join(RunStatus)}.",
            )
        return statuses
    try:
        value = float(text)
    except ValueError:
        raise file.error(line, f"`{key}` is {text!r:.80}, no number.") from None
    limit = MAX_TIMEOUT_S if key == "timeout_seconds" else MAX_ATTEMPTS
    if not 0 < value <= limit:
        raise file.error(line, f"`{key}` is {text:.80}; it is above 0 and at most {limit:g}.")
    if key == "max_attempts":
        if value != int(value):
            raise file.error(line, f"`max_attempts` is {text:.80}; it is a whole number.")
        return int(value)
    return value


def _require_consistent(file: _File, contract: Contract, line_of: Mapping[str, int]) -> None:
    """Raises for constraints that cannot be true together with the schemas. `line_of`: of each that is
    written."""
    key, schema = contract.constraints.idempotency_key, contract.input_schema
    line = line_of.get("idempotency_key", 1)
    if key and key not in schema.properties:
        raise file.error(line, f"`idempotency_key` is `{key}`, and the input schema has no such property.")
    if key and key not in schema.required:
        raise file.error(line, f"`idempotency_key` is `{key}`, which the input schema does not require.")
    if key and contract.key_type not in ("string", "integer"):
        raise file.error(line, f"`idempotency_key` is `{key}`, whose type is no string and no integer.")
    if missing := [each for each in RunStatus if each not in contract.constraints.status_enum]:
        raise file.error(
            line_of["status_enum"],
            f"`status_enum` lacks {', '.join(missing)}, and any run may end with it; name all four.",
        )


def _require_fillable(file: _File, contract: Contract, part: _Heading) -> None:
    """Raises where what the runtime fills in would break the output schema, `part`, in every run."""
    text, fence = _only_block(file, part)
    properties = contract.output_schema.properties
    status = properties.get("status", {})
    statuses = status.get("enum") if isinstance(status, Mapping) else None
    if statuses is not None and set(map(str, statuses)) != set(contract.constraints.status_enum):
        raise file.error(
            _line_of(text, fence, "/properties/status/enum"),
            f"the output's `status` is one of {', '.join(map(str, statuses))}, and `status_enum` says "
            f"{', '.join(contract.constraints.status_enum)}.",
        )
    if "status" in properties and not contract.output_schema.accepts("status", str(RunStatus.OK)):
        raise file.error(
            _line_of(text, fence, "/properties/status"),
            f"the runtime fills `status` with {str(RunStatus.OK)!r}, which the output schema refuses.",
        )
    own = properties.get("run_id", True)
    type_name = own.get("type", "string") if isinstance(own, Mapping) else "string" if own else "none"
    kind = contract.key_type if contract.constraints.idempotency_key == "run_id" else "string"
    fits = {"string", kind}  # the text of a number is one as well
    if fits.isdisjoint([type_name] if isinstance(type_name, str) else type_name):
        raise file.error(
            _line_of(text, fence, "/properties/run_id"),
            f"the runtime fills `run_id` with a value of type {kind}, which the output schema refuses.",
        )


def _did_you_mean(name: str, names: Any) -> str:
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean `{nearest[0]}`?" if nearest else f"; there are: {', '.join(names)}."
