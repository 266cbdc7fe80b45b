"""The actions of an agent in a browser, by BrowserGym's names, and how they are written.

    'click("12")'  ──► parse_actions ──► [WebAction("click", {"bid": "12"})]
    tool calls     ──► action_of_call ──►        the same

Text is read as Python's syntax tree of calls with literal arguments; nothing of it is run.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllm.rewards.foreign_python import UNREADABLE, foreign_tree

MAX_ACTIONS = 10
"""In one answer."""
MAX_TEXT = 20_000
"""Characters of one answer that are read."""


class UnreadableAction(ValueError):
    """Text that is no action; the message says why, for the agent."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Parameter:
    name: str
    kind: str
    """`element`, `text`, `number`, `texts`, `button`, `modifiers`."""
    description: str = ""
    default: Any = None
    is_required: bool = True


@dataclass(kw_only=True, slots=True, frozen=True)
class ActionSpec:
    name: str
    description: str
    parameters: tuple[Parameter, ...] = ()

    @property
    def signature(self) -> str:
        """As BrowserGym writes it: `click(bid, button="left")`."""
        parts = [
            each.name if each.is_required else f"{each.name}={json.dumps(each.default)}"
            for each in self.parameters
        ]
        return f"{self.name}({', '.join(parts)})"

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {each.name: _schema_of(each) for each in self.parameters},
                    "required": [each.name for each in self.parameters if each.is_required],
                },
            },
        }


@dataclass(kw_only=True, slots=True, frozen=True)
class WebAction:
    """One action with checked arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        arguments = ", ".join(json.dumps(each, ensure_ascii=False) for each in self.arguments.values())
        return f"{self.name}({arguments})"


_BUTTONS = ("left", "middle", "right")
_MODIFIERS = ("Alt", "Control", "ControlOrMeta", "Meta", "Shift")
_BID = Parameter(name="bid", kind="element", description="Id of the element")
_X = Parameter(name="x", kind="number")
_Y = Parameter(name="y", kind="number")
_BUTTON = Parameter(name="button", kind="button", default="left", is_required=False)
_KEY = Parameter(name="key", kind="text", description="Such as Enter, ArrowDown, a or Control+a")
_TEXT = Parameter(name="text", kind="text")
_CLICK = (_BID, _BUTTON, Parameter(name="modifiers", kind="modifiers", default=[], is_required=False))
_FROM_TO = tuple(Parameter(name=name, kind="number") for name in ("from_x", "from_y", "to_x", "to_y"))

_SPECS = (
    ActionSpec(
        name="noop",
        description="Wait.",
        parameters=(Parameter(name="wait_ms", kind="number", default=1000, is_required=False),),
    ),
    ActionSpec(name="click", description="Click an element.", parameters=_CLICK),
    ActionSpec(name="dblclick", description="Double-click an element.", parameters=_CLICK),
    ActionSpec(name="hover", description="Move the mouse over an element.", parameters=(_BID,)),
    ActionSpec(
        name="fill",
        description="Replace the text of a field.",
        parameters=(_BID, Parameter(name="value", kind="text")),
    ),
    ActionSpec(name="clear", description="Empty a field.", parameters=(_BID,)),
    ActionSpec(name="focus", description="Focus an element.", parameters=(_BID,)),
    ActionSpec(
        name="select_option",
        description="Choose one or several options of a list by their text.",
        parameters=(_BID, Parameter(name="options", kind="texts")),
    ),
    ActionSpec(
        name="press",
        description="Focus an element and press keys, such as Enter or Control+a.",
        parameters=(_BID, Parameter(name="key_comb", kind="text")),
    ),
    ActionSpec(
        name="drag_and_drop",
        description="Drag one element to another.",
        parameters=(
            Parameter(name="from_bid", kind="element"),
            Parameter(name="to_bid", kind="element"),
        ),
    ),
    ActionSpec(
        name="scroll",
        description="Scroll by pixels: right, and down.",
        parameters=(Parameter(name="delta_x", kind="number"), Parameter(name="delta_y", kind="number")),
    ),
    ActionSpec(name="mouse_move", description="Move the mouse.", parameters=(_X, _Y)),
    ActionSpec(name="mouse_down", description="Press a mouse button.", parameters=(_X, _Y, _BUTTON)),
    ActionSpec(name="mouse_up", description="Release a mouse button.", parameters=(_X, _Y, _BUTTON)),
    ActionSpec(name="mouse_click", description="Click at a point.", parameters=(_X, _Y, _BUTTON)),
    ActionSpec(name="mouse_dblclick", description="Double-click at a point.", parameters=(_X, _Y, _BUTTON)),
    ActionSpec(
        name="mouse_drag_and_drop", description="Drag from one point to another.", parameters=_FROM_TO
    ),
    ActionSpec(name="keyboard_press", description="Press a key.", parameters=(_KEY,)),
    ActionSpec(name="keyboard_down", description="Press a key and hold it.", parameters=(_KEY,)),
    ActionSpec(name="keyboard_up", description="Release a key.", parameters=(_KEY,)),
    ActionSpec(name="keyboard_type", description="Type text, key by key.", parameters=(_TEXT,)),
    ActionSpec(name="keyboard_insert_text", description="Insert text at once.", parameters=(_TEXT,)),
    ActionSpec(
        name="goto",
        description="Go to an address.",
        parameters=(Parameter(name="url", kind="text"),),
    ),
    ActionSpec(name="go_back", description="Go to the page before."),
    ActionSpec(name="go_forward", description="Go to the page after."),
    ActionSpec(name="new_tab", description="Open an empty tab."),
    ActionSpec(name="tab_close", description="Close the tab."),
    ActionSpec(
        name="tab_focus",
        description="Bring a tab to the front.",
        parameters=(Parameter(name="index", kind="number"),),
    ),
    ActionSpec(
        name="upload_file",
        description="Put a file of the task into a file field.",
        parameters=(_BID, Parameter(name="file", kind="texts", description="Name of the file")),
    ),
    ActionSpec(
        name="send_msg_to_user",
        description="Tell the user something, such as the answer. It ends the task.",
        parameters=(_TEXT,),
    ),
    ActionSpec(
        name="report_infeasible",
        description="Say that the task cannot be done, and why. It ends the task.",
        parameters=(Parameter(name="reason", kind="text"),),
    ),
)
ACTIONS = {each.name: each for each in _SPECS}
"""Name -> what it is, in the order in which agents are told."""


def action_schemas() -> list[dict[str, Any]]:
    """All actions as tools in OpenAI's form."""
    return [each.schema for each in _SPECS]


def action_list() -> str:
    """All actions as text, one a line."""
    return "\n".join(f"{each.signature}: {each.description}" for each in _SPECS)


def parse_actions(text: str) -> list[WebAction]:
    """The calls that a text consists of. Raises UnreadableAction for anything else."""
    if len(text) > MAX_TEXT:
        raise UnreadableAction(f"the answer has {len(text)} characters; {MAX_TEXT} are read.")
    if not text.strip():
        raise UnreadableAction("there is no action in the answer.")
    try:
        body = foreign_tree(text.strip()).body
    except UNREADABLE as error:
        raise UnreadableAction(f'{_excerpt(text)} is no call such as click("3").') from error
    if len(body) > MAX_ACTIONS:
        raise UnreadableAction(f"there are {len(body)} actions; {MAX_ACTIONS} are taken at once.")
    return [_action_of(statement, text) for statement in body]


def action_of_call(name: str, arguments: Any) -> WebAction:
    """The action that a tool call asks for. Raises UnreadableAction."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise UnreadableAction(f"the arguments of `{name[:50]}` are no JSON.") from error
    if not isinstance(arguments, Mapping):
        raise UnreadableAction(f"the arguments of `{name[:50]}` are no object.")
    return _with_arguments(name, (), {str(key): value for key, value in arguments.items()})


def _action_of(statement: ast.stmt, text: str) -> WebAction:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UnreadableAction(f'{_excerpt(text)} is no call such as click("3").')
    try:
        positional = [ast.literal_eval(each) for each in call.args]
        keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg is not None}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise UnreadableAction(f"the arguments of `{call.func.id}` must be plain values.") from error
    # An argument with `**` has no name, and a name that is given twice leaves one entry.
    if len(keywords) != len(call.keywords):
        raise UnreadableAction(f"the arguments of `{call.func.id}` must be plain values.")
    return _with_arguments(call.func.id, tuple(positional), keywords)


def _with_arguments(name: str, positional: tuple[Any, ...], keywords: Mapping[str, Any]) -> WebAction:
    spec = ACTIONS.get(name)
    if spec is None:
        raise UnreadableAction(f"there is no action `{name[:50]}`; there are {', '.join(ACTIONS)}.")
    if len(positional) > len(spec.parameters):
        raise UnreadableAction(
            f"`{spec.signature}` takes {len(spec.parameters)} arguments, not {len(positional)}."
        )
    names = [each.name for each in spec.parameters]
    values = dict(zip(names, positional, strict=False))
    for key, value in keywords.items():
        if key not in names or key in values:
            raise UnreadableAction(f"`{spec.signature}` takes no `{key[:50]}` here.")
        values[key] = value
    arguments: dict[str, Any] = {}
    for each in spec.parameters:
        if each.name in values:
            try:
                arguments[each.name] = _value_of(spec, each, values[each.name])
            except UnreadableAction:
                raise
            except ValueError as error:  # an integer with more digits than Python writes
                raise UnreadableAction(f"`{each.name}` of `{name}` has too many digits.") from error
        elif each.is_required:
            raise UnreadableAction(f"`{spec.signature}` needs `{each.name}`.")
        else:
            arguments[each.name] = each.default
    return WebAction(name=name, arguments=arguments)


def _value_of(spec: ActionSpec, parameter: Parameter, value: Any) -> Any:
    match parameter.kind:
        case "element":
            # `isdigit` alone takes characters such as `²`, which `int` refuses.
            number = str(value).strip().strip("[]")
            if not isinstance(value, bool) and number.isascii() and number.isdigit() and len(number) < 10:
                return int(number)
        case "text":
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                return str(value)
        case "number":
            # NaN does not pass the comparison either.
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 100_000:
                return value
        case "texts":
            values = [value] if isinstance(value, str | int) else value
            if (
                isinstance(values, list | tuple)
                and values
                and all(isinstance(each, str | int) for each in values)
            ):
                return [str(each) for each in values]
        case "button":
            if value in _BUTTONS:
                return value
        case _:
            if isinstance(value, list | tuple) and all(each in _MODIFIERS for each in value):
                return list(value)
    raise UnreadableAction(
        f"`{parameter.name}` of `{spec.name}` is {_excerpt(repr(value))}; it must be "
        f"{_KINDS[parameter.kind]}."
    )


_KINDS = {
    "element": 'the id of an element, such as "3"',
    "text": "a text",
    "number": "a number",
    "texts": "a text, or a list of texts",
    "button": f"one of {', '.join(_BUTTONS)}",
    "modifiers": f"a list of {', '.join(_MODIFIERS)}",
}


def _schema_of(parameter: Parameter) -> dict[str, Any]:
    texts = {"type": "array", "items": {"type": "string"}}
    schema: dict[str, Any] = {
        "element": {"type": "string"},
        "text": {"type": "string"},
        "number": {"type": "number"},
        "texts": texts,
        "button": {"type": "string", "enum": list(_BUTTONS)},
        "modifiers": {"type": "array", "items": {"type": "string", "enum": list(_MODIFIERS)}},
    }[parameter.kind]
    return {**schema, "description": parameter.description} if parameter.description else dict(schema)


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return f"`{line[:60]}{'…' if len(line) > 60 else ''}`"
