"""Many calls, each with an output, in order, whatever the tools and the model do."""

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllm.errors import ConfigError, SandboxError
from rllm.tools import MultiTool, ToolError, tool
from rllm.tools.clipping import MIN_LIMIT_CHARS, clip
from rllm.types.messages import ToolCall


class _LateFuture(Future[str]):
    """Ends between the question for its result and the question whether it has ended."""

    def result(self, timeout: float | None = None) -> str:
        try:
            return super().result(timeout)
        finally:
            self.set_result("late")


def test_a_call_that_ends_just_behind_its_limit_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllm.tools.multi.start_in_thread", lambda run: _LateFuture())
    output = MultiTool([say], timeout_s=0.05).call({"name": "say", "arguments": {"text": "x"}})
    assert output.metadata.get("timed_out") is True
    assert "raised" not in output.metadata


@tool
def double(n: int) -> int:
    return 2 * n


@tool
def say(text: str, times: int = 1) -> str:
    return text * times


@tool
def refuse() -> str:
    raise ToolError("not today", kind="weather")


@tool
def broken() -> str:
    raise KeyError("x")


@tool
def no_sandbox() -> str:
    raise SandboxError("it does not start")


def call(name: str, call_id: str = "", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=call_id)


def openai(name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


async def both_ways(tools: MultiTool, calls: list[Any]) -> list[Any]:
    """The outputs, which are the same for threads and for coroutines."""
    in_threads = await asyncio.to_thread(tools.call_many, calls)
    awaited = await tools.async_call_many(calls)
    for outputs in (in_threads, awaited):
        for output in outputs:
            output.metadata.pop("duration_s", None)
    assert in_threads == awaited
    return awaited


async def test_calls_run_side_by_side_and_come_back_in_order() -> None:
    everyone = threading.Barrier(3)

    @tool
    def meet(n: int) -> int:
        everyone.wait(10)
        return n

    calls = [call("meet", str(n), n=n) for n in (3, 1, 2)]
    outputs = await both_ways(MultiTool([meet]), calls)
    assert [(output.output, output.id) for output in outputs] == [(3, "3"), (1, "1"), (2, "2")]


async def test_no_more_calls_run_at_once_than_may() -> None:
    running, most = [0], [0]
    lock = threading.Lock()

    @tool
    def count() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        with lock:
            running[0] -= 1

    outputs = await both_ways(MultiTool([count], max_parallel=2), [call("count")] * 9)
    assert len(outputs) == 9
    assert most[0] <= 2


async def test_a_call_that_fails_is_an_output_that_says_why(subtests: pytest.Subtests) -> None:
    for made, error in [
        (call("duble"), "There is no tool `duble`; did you mean `double`?"),
        (call("fly"), "There is no tool `fly`; the tools are: double, say, refuse, broken."),
        (call("double", n="2"), 'Bad arguments for `double`: `n` must be an integer, not the string "2".'),
        (call("double"), "Bad arguments for `double`: `n` is missing."),
        (call("double", n=1, m=2), "there is no parameter `m`"),
        (openai("double", '{"n": 2'), 'Write an object such as {"n": 1}.'),
        (openai("double", "[1]"), "must be a JSON object"),
        (openai("double", "[" * 100_000), "nested too deeply"),
        (openai(None, None), "There is no tool `None`"),
        ({}, "There is no tool ``"),
        (call("refuse"), "not today"),
        (call("broken"), "KeyError: 'x'"),
    ]:
        with subtests.test(made=made, error=error):
            logging.getLogger("rllm.tools.multi").setLevel(logging.CRITICAL)
            (output,) = await both_ways(MultiTool([double, say, refuse, broken]), [made])
            assert error in str(output.error)
            assert output.output is None


async def test_arguments_may_be_the_text_that_the_model_wrote() -> None:
    (output,) = await both_ways(MultiTool([double]), [openai("double", '{"n": 21}')])
    assert (output.output, output.id, output.error) == (42, "c", None)


async def test_a_call_that_takes_too_long_is_given_up_and_the_others_are_not() -> None:
    release = threading.Event()

    @tool(timeout_s=0.05)
    def hang() -> None:
        release.wait(30)

    try:
        outputs = await both_ways(MultiTool([hang, double]), [call("hang"), call("double", n=1)])
    finally:
        release.set()
    assert outputs[0].error == "`hang` took longer than 0.05 s and was given up."
    assert outputs[0].metadata == {"timed_out": True}
    assert outputs[1].output == 2


async def test_a_tools_own_timeout_is_an_exception_like_others() -> None:
    @tool
    def slow() -> None:
        raise TimeoutError("the far side is asleep")

    logging.getLogger("rllm.tools.multi").setLevel(logging.CRITICAL)
    (output,) = await both_ways(MultiTool([slow]), [call("slow")])
    assert output.error == "TimeoutError: the far side is asleep"


async def test_what_failed_around_the_tools_is_no_output() -> None:
    tools = MultiTool([no_sandbox, double])
    calls = [call("double", n=1), call("no_sandbox")]
    with pytest.raises(SandboxError, match="does not start"):
        tools.call_many(calls)
    with pytest.raises(SandboxError, match="does not start"):
        await tools.async_call_many(calls)


async def test_a_long_output_is_clipped_and_says_so() -> None:
    tools = MultiTool([say], max_chars=300)
    (output,) = await both_ways(tools, [call("say", text="ab", times=1000)])
    assert len(output.text) == 300
    assert "characters left out" in output.text
    assert output.metadata["num_clipped_chars"] == 1700


@given(
    said=st.text(max_size=2000),
    error=st.none() | st.text(min_size=1, max_size=2000),
    limit=st.integers(4 * MIN_LIMIT_CHARS, 1500),
)
def test_an_output_is_never_longer_than_may_be_and_keeps_its_error(
    said: str, error: str | None, limit: int
) -> None:
    from rllm.tools import ToolOutput

    @tool
    def f() -> ToolOutput:
        return ToolOutput(name="f", output=said, error=error)

    output = MultiTool([f], max_chars=limit).call(call("f"))
    assert len(output.text) <= limit
    assert (output.error is None) == (error is None)


@given(text=st.text(max_size=3000), limit=st.integers(MIN_LIMIT_CHARS, 1000))
def test_clipped_text_keeps_both_ends_and_counts_what_is_gone(text: str, limit: int) -> None:
    short = clip(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
        return
    head, _, rest = short.partition("\n[… ")
    mark, _, tail = rest.partition(" characters left out …]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + int(mark.replace(",", "")) + len(tail) == len(text)


def test_tools_that_cannot_stand_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Two tools .*`double`"):
        MultiTool([double, double])
    with pytest.raises(ConfigError, match="3 is no tool"):
        MultiTool([3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="timeout_s"):
        MultiTool([], timeout_s=0)


def test_tools_are_made_of_names_and_functions_and_closed_together() -> None:
    closed: list[str] = []

    class Held(type(double)):
        name = "held"

        def forward(self) -> None:
            """Hold."""

        def close(self) -> None:
            closed.append(self.name)

    def half(n: int) -> float:
        return n / 2

    with MultiTool(["calculator", half, Held()]) as tools:
        assert tools.names == ["calculator", "half", "held"]
        assert [each["function"]["name"] for each in tools.json] == tools.names
    assert closed == ["held"]


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no")])
def test_a_tool_that_leaves_the_program_is_told_to_the_model(error: BaseException) -> None:
    @tool
    def leaves() -> int:
        """Raises."""
        raise error

    output = MultiTool([leaves]).call(ToolCall(name="leaves"))
    assert output.error is not None
    assert type(error).__name__ in output.error


async def test_an_exception_that_cannot_say_what_it_is_is_an_output_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise TypeError("no words")

    @tool
    def mute() -> str:
        raise Mute

    tools = MultiTool([mute, double])
    calls = [ToolCall(name="mute", arguments={}, id="a"), ToolCall(name="double", arguments={"n": 2}, id="b")]
    for outputs in (tools.call_many(calls), await tools.async_call_many(calls)):
        assert outputs[0].error == "Mute: (and its text could not be had: TypeError)"
        assert outputs[1].text == "4"
