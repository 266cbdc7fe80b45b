"""The form of an agent's calls, by name of the scaffold, and the tools that each offers.

| scaffold | an answer makes its call as | tools |
|---|---|---|
| r2egym | `<function=NAME><parameter=P>…</parameter></function>`, as R2E-Gym and DeepSWE do | \
execute_bash, file_editor, search, finish |
| sweagent | the same, with the names of SWE-agent | execute_bash, str_replace_editor, submit |
| bash | one command in a ```bash block; `submit` alone in it ends | execute_bash, submit |

Between agent and environment every call is text in the form of R2E-Gym, or a list of calls in OpenAI's form.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllm.errors import ConfigError, choices_of

BASH, EDITOR, SEARCH, SUBMIT = "bash", "editor", "search", "submit"
"""The four tools, whatever a scaffold calls them."""
TOOLS = {
    "execute_bash": BASH,
    "bash": BASH,
    "file_editor": EDITOR,
    "str_replace_editor": EDITOR,
    "search": SEARCH,
    "finish": SUBMIT,
    "submit": SUBMIT,
}
"""Name -> which of the four it is."""
SCAFFOLDS = {
    "r2egym": ("execute_bash", "file_editor", "search", "finish"),
    "sweagent": ("execute_bash", "str_replace_editor", "submit"),
    "bash": ("execute_bash", "submit"),
}
"""Scaffold -> the tools that it offers."""
DEFAULT_SCAFFOLD = "r2egym"
_FUNCTION = re.compile(r"<function\s*=\s*([^>\s]+)\s*>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter\s*=\s*([^>\s]+)\s*>(.*?)</parameter>", re.DOTALL)
_BLOCK = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


@dataclass(kw_only=True, slots=True, frozen=True)
class SWECall:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]
    """By name; texts where the scaffold writes texts."""
    call_id: str = ""
    """The id of a call in OpenAI's form."""


def require_scaffold(name: str) -> str:
    """Raises ConfigError for a name that is none."""
    if name not in SCAFFOLDS:
        raise ConfigError(f"`scaffold` is {name!r}; {choices_of(name, SCAFFOLDS)}.")
    return name


def call_text(answer: str, scaffold: str) -> tuple[str, str, str]:
    """(what stands before the call, the call as it was written, the same in the form of R2E-Gym); the last
    two are empty where there is none.

    The first function of an answer counts, and the last block.
    """
    if scaffold != "bash":
        match = _FUNCTION.search(answer)
        return (answer, "", "") if match is None else (answer[: match.start()], match[0], match[0])
    blocks = list(_BLOCK.finditer(answer))
    if not blocks:
        return answer, "", ""
    command = blocks[-1][1].strip("\n")
    if command.strip() == "submit":
        call = SWECall(name="submit", arguments={})
    else:
        call = SWECall(name="execute_bash", arguments={"command": command})
    return answer[: blocks[-1].start()], blocks[-1][0], written(call)


def written(call: SWECall) -> str:
    """A call in the form of R2E-Gym."""
    lines = [f"<parameter={name}>{value}</parameter>" for name, value in call.arguments.items()]
    return "\n".join([f"<function={call.name}>", *lines, "</function>"])


def call_as_answer(call: SWECall, scaffold: str) -> str:
    """A call as an answer of a model makes it, so that `call_text` reads it."""
    if scaffold != "bash":
        return written(call)
    command = "submit" if TOOLS[call.name] == SUBMIT else call.arguments["command"]
    return f"```bash\n{command}\n```"


def submit_of(scaffold: str) -> str:
    """The name of the tool that ends the work."""
    return next(name for name in SCAFFOLDS[scaffold] if TOOLS[name] == SUBMIT)


def steps_left(left: int) -> str:
    """The remark behind an output, so that a model knows how often it may still act."""
    return "\nThis is the last step: submit now." if left == 1 else f"\nSteps remaining: {left}"


def read_calls(action: Any) -> list[SWECall]:
    """The calls of an action: a text with at most one function, or a list in OpenAI's form."""
    if isinstance(action, list):
        return [_read(each, number) for number, each in enumerate(action)]
    match = _FUNCTION.search(str(action))
    if match is None:
        return []
    arguments = {name: _without_frame(value) for name, value in _PARAMETER.findall(match[2])}
    return [SWECall(name=match[1], arguments=arguments)]


def _read(call: Mapping[str, Any], number: int) -> SWECall:
    function = call.get("function", call)
    arguments: Any = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {"": arguments}
    if not isinstance(arguments, Mapping):
        arguments = {"": str(arguments)}
    return SWECall(
        name=str(function.get("name", "")),
        arguments=dict(arguments),
        call_id=str(call.get("id") or f"call_{number}"),
    )


def _without_frame(value: str) -> str:
    """Without the line break after the tag and before the closing one, which are there to be read."""
    return value.removeprefix("\n").removesuffix("\n") if value.startswith("\n") else value


# ---- what a model is told of the tools ---------------------------------------------------------------------

_COMMANDS = "view, create, str_replace, insert or undo_edit"


def tool_schemas(scaffold: str) -> list[dict[str, Any]]:
    """The tools of a scaffold as OpenAI function schemas."""
    return [
        {"type": "function", "function": {"name": name, **_SCHEMAS[TOOLS[name]]}}
        for name in SCAFFOLDS[require_scaffold(scaffold)]
    ]


def tool_texts(scaffold: str) -> str:
    """The same for people, and for models that write calls as text."""
    parts: list[str] = []
    for schema in tool_schemas(scaffold):
        function = schema["function"]
        lines = [f"{function['name']}: {function['description']}"]
        for name, about in function["parameters"]["properties"].items():
            required_mark = " (required)" if name in function["parameters"].get("required", ()) else ""
            lines.append(f"  - {name}{required_mark}: {about['description']}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _object(required: tuple[str, ...] = (), **properties: tuple[str, str]) -> dict[str, Any]:
    property_schemas = {
        name: {"type": kind, "description": text} for name, (kind, text) in properties.items()
    }
    return {"type": "object", "properties": property_schemas, "required": list(required)}


_SCHEMAS: dict[str, dict[str, Any]] = {
    BASH: {
        "description": "Run a command with bash in /testbed. Files stay, processes and `cd` do not.",
        "parameters": _object(("command",), command=("string", "The command.")),
    },
    EDITOR: {
        "description": f"Look at and change files; `command` is {_COMMANDS}.",
        "parameters": _object(
            ("command", "path"),
            command=("string", f"One of {_COMMANDS}."),
            path=("string", "A file or directory, absolute or from /testbed on."),
            file_text=("string", "For create: the content of the new file."),
            old_str=("string", "For str_replace: text that stands in the file exactly once."),
            new_str=("string", "For str_replace and insert: the text to put there."),
            insert_line=("integer", "For insert: the line after which it goes; 0 is the beginning."),
            view_range=("string", "For view: first and last line, as [10, 40]; -1 is the last of the file."),
        ),
    },
    SEARCH: {
        "description": "Find lines that contain a text, in all files below a path.",
        "parameters": _object(
            ("search_term",),
            search_term=("string", "The text to find."),
            path=("string", "Where to look; /testbed unless given."),
        ),
    },
    SUBMIT: {
        "description": "End the work: what is in /testbed now is judged.",
        "parameters": _object(),
    },
}
