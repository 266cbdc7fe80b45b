"""A calculator served over MCP, exact: the smallest server that an agent can be trained on.

    in this process   MCPServer(target="rllm.tools.mcp_calculator:calculator_server", shared=True)
    as a process      MCPServer(command="python -m rllm.tools.mcp_calculator", shared=True)

Numbers come in as JSON numbers or as text ("1/3", "2.50"). Results are integers where they are whole, else
fractions in lowest terms: 0.1 + 0.2 is 3/10.
"""

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rllm.errors import MissingExtraError

MAX_DIGITS = 1000
"""The digits of a number that goes in or comes out."""
MAX_EXPONENT = 1000
_NUMBER = re.compile(r"[+-]?(\d+(/\d+)?|(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d{1,3})?)", re.ASCII)

Number = int | float | str


def add(a: Number, b: Number) -> str:
    """a + b, exactly."""
    return _text(_number(a, "a") + _number(b, "b"))


def subtract(a: Number, b: Number) -> str:
    """a - b, exactly."""
    return _text(_number(a, "a") - _number(b, "b"))


def multiply(a: Number, b: Number) -> str:
    """a * b, exactly."""
    return _text(_number(a, "a") * _number(b, "b"))


def divide(a: Number, b: Number) -> str:
    """a / b, exactly: an integer, or a fraction in lowest terms."""
    divisor = _number(b, "b")
    if divisor == 0:
        raise ValueError("b is 0: nothing is divided by zero.")
    return _text(_number(a, "a") / divisor)


def power(a: Number, exponent: int) -> str:
    """a to the power of a whole exponent, exactly."""
    base = _number(a, "a")
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponent is {exponent}; it goes from -{MAX_EXPONENT} to {MAX_EXPONENT}.")
    if base == 0 and exponent < 0:
        raise ValueError("a is 0 and the exponent below 0: nothing is divided by zero.")
    return _text(base**exponent)


FUNCTIONS = (add, subtract, multiply, divide, power)


def calculator_server() -> Any:
    """A new server object of the SDK with the five tools. It keeps nothing between calls."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ModuleNotFoundError as error:
        raise MissingExtraError("mcp", "mcp") from error
    server = MCPServer("calculator", log_level="ERROR")
    for function in FUNCTIONS:
        server.add_tool(_as_tool(function))
    return server


def _as_tool(function: Callable[..., str]) -> Callable[..., Any]:
    """As the server takes it: in its loop, and with what is wrong with a call as an answer to the model."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(function)
    async def answer(*args: Any, **arguments: Any) -> str:
        try:
            return function(*args, **arguments)
        except ValueError as error:
            raise ToolError(str(error)) from error

    return answer


def _number(value: Number, name: str) -> Fraction:
    """The number that was written: 0.1 is a tenth, not the double nearest to it."""
    if isinstance(value, int) and abs(value) < 10**MAX_DIGITS:
        return Fraction(value)
    text = value.strip() if isinstance(value, str) else repr(value) if isinstance(value, float) else ""
    if len(text) > MAX_DIGITS or isinstance(value, int):
        raise ValueError(f"{name} has more than {MAX_DIGITS} digits.")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{name} is {text[:50]!r}, which is no number.")
    try:
        return Fraction(text)
    except ZeroDivisionError:
        raise ValueError(f"{name} is {text[:50]!r}: nothing is divided by zero.") from None


def _text(value: Fraction) -> str:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"The result has more than {MAX_DIGITS} digits.")
    return str(value)


if __name__ == "__main__":
    calculator_server().run()
