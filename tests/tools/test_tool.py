"""A typed function becomes a tool: what the model is told, and what the function is given."""

import asyncio
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rllm.tools
from rllm.errors import ConfigError
from rllm.tools import MultiTool, Tool, ToolError, ToolOutput, tool, tool_named
from rllm.tools.values import problem_of


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


@dataclass
class Place:
    name: str
    height_m: float = 0.0
    tags: list[str] = field(default_factory=list)


class Filter(TypedDict):
    word: str
    limit: NotRequired[int]


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(Tool(function=function).parameters)


def test_a_function_says_its_name_its_description_and_its_parameters() -> None:
    @tool
    def weather(city: str, days: int = 1) -> str:
        """Look up the weather.

        It is never right.

        Args:
            city: Where,
                in English.
            days (int): How many.

        Returns:
            A forecast.
        """
        return f"{city} {days}"

    assert weather.json == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.\n\nIt is never right.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where, in English."},
                    "days": {"type": "integer", "description": "How many.", "default": 1},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    assert weather(city="Oslo") == ToolOutput(name="weather", output="Oslo 1")


@pytest.mark.parametrize(
    "text",
    [
        "Says.\n\nParameters\n----------\na : int\n    The first.\nb\n    The second,\n    too.\n\n"
        "Returns\n-------\nint",
        "Says.\n\n:param a: The first.\n:param int b: The second,\n    too.\n:returns: nothing",
        "Says.\n\nArgs:\n    a: The first.\n    b: The second,\n        too.\n",
    ],
)
def test_docstrings_are_read_in_the_forms_that_people_write(text: str) -> None:
    def function(a: int, b: int) -> None: ...

    function.__doc__ = text
    made = Tool(function=function)
    said = {name: each.get("description") for name, each in made.parameters["properties"].items()}
    assert (made.description, said) == ("Says.", {"a": "The first.", "b": "The second, too."})


def test_an_annotation_has_a_schema(subtests: pytest.Subtests) -> None:
    for annotation, schema in [
        (str, {"type": "string"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (Any, {}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "b", None], {"type": ["integer", "null", "string"], "enum": [1, "b", None]}),
        (int | None, {"type": ["integer", "null"]}),
        (Unit, {"type": "string", "enum": ["C", "F"]}),
        (list, {"type": "array"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (list[dict], {"type": "array", "items": {"type": "object"}}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (
            Filter,
            {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["word"],
                "additionalProperties": False,
            },
        ),
    ]:
        with subtests.test(annotation=annotation, schema=schema):

            def function(a: Any) -> None: ...

            function.__annotations__["a"] = annotation
            assert parameters(function)["properties"]["a"] == schema


def test_a_dataclass_an_enum_and_a_tuple_come_out_of_json_as_they_are_annotated() -> None:
    seen: list[Any] = []

    @tool
    def go(place: Place | None, unit: Unit, pair: tuple[int, str], many: list[Place], x: float) -> None:
        seen.extend([place, unit, pair, many, x])

    arguments = {
        "place": {"name": "Oslo", "tags": ["N"]},
        "unit": "F",
        "pair": [1, "a"],
        "many": [{"name": "Rome", "height_m": 21}],
        "x": 3,
    }
    assert MultiTool([go]).call({"name": "go", "arguments": arguments}).error is None
    rome = Place("Rome", 21.0)
    assert seen == [Place("Oslo", tags=["N"]), Unit.FAHRENHEIT, (1, "a"), [rome], 3.0]
    assert type(seen[-1]) is float


@pytest.mark.parametrize("annotation", [bytes, complex, dict[int, str], Callable[[], int], Literal[b"a"]])
def test_an_annotation_that_json_cannot_carry_is_refused_when_the_tool_is_made(annotation: Any) -> None:
    def function(a: Any) -> None: ...

    function.__annotations__["a"] = annotation
    with pytest.raises(ConfigError, match="`a` of the tool `function`"):
        Tool(function=function)


def test_a_function_that_is_half_given_is_a_tool_of_the_rest() -> None:
    def power(base: int, exponent: int) -> int:
        """Raise."""
        return base**exponent

    square = Tool("square", function=functools.partial(power, exponent=2))
    assert square.parameters["properties"]["exponent"] == {"type": "integer", "default": 2}
    assert MultiTool([square]).call({"name": "square", "arguments": '{"base": 3}'}).output == 9


def test_what_cannot_be_a_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="positional"):
        Tool(function=lambda a, /: a)
    with pytest.raises(ConfigError, match="'two words'"):
        Tool("two words", function=lambda: None)
    with pytest.raises(ConfigError, match="timeout_s"):
        Tool("f", function=lambda: None, timeout_s=0.0)

    class Silent(Tool):
        pass

    with pytest.raises(ConfigError, match="write `forward`"):
        Silent()


async def test_a_class_is_told_by_its_forward_and_coroutines_run_both_ways() -> None:
    class AddOne(Tool):
        async def async_forward(self, n: int) -> int:
            """Add one."""
            await asyncio.sleep(0)
            return n + 1

    made = AddOne()
    assert (made.name, made.description, made.parameters["required"]) == ("add_one", "Add one.", ["n"])
    assert await made.async_forward(n=1) == 2
    assert (await asyncio.to_thread(made, n=1)).output == 2

    @tool(name="plus-one", description="Adds.")
    async def other(n: int) -> int:
        return n + 1

    assert (other.name, other.description) == ("plus-one", "Adds.")
    assert (await MultiTool([other]).async_call({"name": "plus-one", "arguments": {"n": 1}})).output == 2


def test_what_the_model_did_wrong_is_an_output_and_a_bug_in_a_tool_flies() -> None:
    @tool
    def strict(n: int) -> int:
        if n < 0:
            raise ToolError("n is negative", n=n)
        return 1 // n

    assert strict(n=-1) == ToolOutput(name="strict", error="n is negative", metadata={"n": -1})
    with pytest.raises(ZeroDivisionError):
        strict(n=0)


def test_an_output_is_text_that_every_encoder_takes() -> None:
    assert ToolOutput(name="f", output={"a": [1, None], "b": "é"}).text == '{"a": [1, null], "b": "é"}'
    assert ToolOutput(name="f", output="half \ud800").text == "half ?"
    assert ToolOutput(name="f").text == ""
    assert ToolOutput(name="f", output="so far", error="no").text == "so far\nError: no"
    assert ToolOutput(name="f", output=1, id="c1").message() == {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "f",
        "content": "1",
    }


# ---- arguments -----------------------------------------------------------------------------------------

NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}},
    "required": ["value"],
    "additionalProperties": False,
}


def test_a_value_that_breaks_its_schema_is_told_where_and_how(subtests: pytest.Subtests) -> None:
    for value, schema, words in [
        ("3", {"type": "integer"}, "an integer, not the string"),
        (True, {"type": "number"}, "a number, not true"),
        (2.5, {"type": "integer"}, "an integer, not the number 2.5"),
        (None, {"type": ["string", "integer"]}, "a string or an integer, not null"),
        ("K", {"enum": ["C", "F"]}, 'one of "C", "F", not "K"'),
        (True, {"enum": [1]}, "one of 1"),
        (11, {"maximum": 10}, "at most 10"),
        ("", {"type": "string", "minLength": 1}, "at least 1 characters"),
        ("a", {"pattern": "^b"}, "the pattern"),
        ([1, 1], {"uniqueItems": True}, "twice"),
        ([1, "a"], {"items": {"type": "integer"}}, r"`\[1\]` must be an integer"),
        ({"value": 1, "next": {"value": "x"}}, NODE, "`next.value` must be an integer"),
        ({"valeu": 1}, NODE, "there is no parameter `valeu`; did you mean `value`"),
        ({}, NODE, "`value` is missing"),
        (1.5, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "none of what is allowed"),
        (float("nan"), {"type": "number"}, "finite"),
    ]:
        with subtests.test(value=value, schema=schema, words=words):
            problem = problem_of(value, schema)
            assert problem is not None
            assert re.search(words, problem), problem


def test_a_value_that_keeps_to_its_schema_or_to_what_is_not_checked_passes(subtests: pytest.Subtests) -> None:
    for value, schema in [
        (3.0, {"type": "integer"}),
        ({"value": 1, "next": {"value": 2, "next": {"value": 3}}}, NODE),
        ({"a": 1}, {"type": "object", "additionalProperties": {"type": "integer"}}),
        ("x", {"$ref": "https://elsewhere.example/schema"}),
        ("x", {"pattern": "(?<broken"}),
        (1, {"unknown": "word"}),
    ]:
        with subtests.test(value=value, schema=schema):
            assert problem_of(value, schema) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=JSON, as_text=st.booleans())
def test_whatever_a_model_gives_as_arguments_an_output_comes_back(arguments: Any, as_text: bool) -> None:
    @tool
    def f(a: int, b: list[Place] = [], c: Literal["x", "y"] | None = None) -> str:  # noqa: B006
        return "ok"

    given = json.dumps(arguments) if as_text else arguments
    output = MultiTool([f]).call({"id": "1", "function": {"name": "f", "arguments": given}})
    assert (output.output == "ok") != (output.error is not None)
    assert output.id == "1"
    output.text.encode()


# ---- by name -------------------------------------------------------------------------------------------


def test_a_tool_is_found_by_name_and_unknown_names_and_options_are_refused() -> None:
    assert tool_named("calculator")(expression="6 * 7").output == "42"
    with pytest.raises(ConfigError, match="did you mean `calculator`"):
        tool_named("calculater")
    with pytest.raises(ConfigError, match=r"`num_hit`.*`num_hits`"):
        tool_named("local_search", corpus=["a"], num_hit=3)


def test_a_tool_may_be_named_by_its_place(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def double(n: int) -> int:\n    'Double it.'\n    return 2 * n\n")
    assert tool_named(f"{file}:double")(n=2).output == 4


def test_every_name_of_the_room_is_there() -> None:
    names = [name for name in dir(rllm.tools) if name[0] != "_"]
    assert {"MultiTool", "PythonInterpreter", "MCPTool", "ToolCall", "tool"} <= set(names)
    assert all(getattr(rllm.tools, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute `Hammer`"):
        _ = rllm.tools.Hammer
