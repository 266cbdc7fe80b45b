"""`rllm.sdk`: OpenAI clients that remember what they were asked, sessions that hold it, `@trajectory`.

    with session(task="a") as calls:                     a client made by `get_chat_client` adds each of its
        get_chat_client(base_url=…).chat.completions…    calls to every session that is open around it
    calls.llm_calls  ──► list of CallTrace

Sessions are open for the code inside of them, in threads and tasks that were started there alone.
"""

import contextvars
import functools
import inspect
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rllm.errors import ConfigError
from rllm.types.episode import Step, Trajectory


@dataclass(kw_only=True, slots=True)
class CallTrace:
    """One answered call of a model."""

    trace_id: str
    """The server's name of the answer."""
    session_name: str
    model: str
    input: dict[str, Any]
    """The arguments of the call, `messages` among them."""
    output: dict[str, Any]
    """The answer as the server sent it."""
    latency_ms: float
    metadata: dict[str, Any]
    """The metadata of all sessions that were open, the innermost last."""

    def to_step(self) -> Step:
        """The call as a Step whose id binds it to the tokens that the gateway captured."""
        choice = (self.output.get("choices") or [{}])[0]
        message = choice.get("message") or {"role": "assistant", "content": choice.get("text") or ""}
        text = message.get("content") or ""
        return Step(
            id=self.trace_id,
            chat_completions=[*self.input.get("messages", ()), message],
            model_response=text,
            action=text,
        )


@dataclass(kw_only=True)
class CallSession:
    """The calls that were made while it was open."""

    name: str
    metadata: dict[str, Any]
    uid: str = field(default_factory=lambda: f"ctx_{uuid.uuid4().hex[:16]}")
    llm_calls: list[CallTrace] = field(default_factory=list[CallTrace])

    @property
    def steps(self) -> list[Step]:
        return [each.to_step() for each in self.llm_calls]

    def clear_calls(self) -> None:
        self.llm_calls.clear()

    def __len__(self) -> int:
        return len(self.llm_calls)


_SESSIONS: contextvars.ContextVar[tuple[CallSession, ...]] = contextvars.ContextVar(
    "rllm_sessions", default=()
)
"""Those that are open here, the innermost last."""


@contextmanager
def session(**metadata: Any) -> Iterator[CallSession]:
    """Hold the calls that are made inside; an inner session has the metadata of the outer ones too."""
    if "name" in metadata:
        raise ConfigError("`session(name=…)` is given; a session names itself: give another keyword.")
    outer = _SESSIONS.get()
    outer_metadata = outer[-1].metadata if outer else {}
    inner = CallSession(name=f"sess_{uuid.uuid4().hex[:16]}", metadata={**outer_metadata, **metadata})
    token = _SESSIONS.set((*outer, inner))
    try:
        yield inner
    finally:
        _SESSIONS.reset(token)


def get_current_session() -> CallSession | None:
    """The innermost open session."""
    sessions = _SESSIONS.get()
    return sessions[-1] if sessions else None


def get_current_session_name() -> str | None:
    current = get_current_session()
    return None if current is None else current.name


def get_current_metadata() -> dict[str, Any]:
    current = get_current_session()
    return dict(current.metadata) if current else {}


def get_active_session_uids() -> list[str]:
    """The open sessions, the outermost first."""
    return [each.uid for each in _SESSIONS.get()]


def get_chat_client(provider: str = "openai", *, use_proxy: bool = True, **options: Any) -> Any:
    """An `openai.OpenAI` whose answered calls are kept in the open sessions. `options` are its own."""
    return _recorded(_openai(provider).OpenAI(**_keyed(options)))


def get_chat_client_async(provider: str = "openai", *, use_proxy: bool = True, **options: Any) -> Any:
    """The same for `openai.AsyncOpenAI`."""
    return _recorded(_openai(provider).AsyncOpenAI(**_keyed(options)))


def trajectory(
    function: Callable[..., Any] | None = None, *, name: str = "agent", **metadata: Any
) -> Callable[..., Any]:
    """Make a function, sync or async, return the Trajectory of the calls that it made.

    Its `input` are the function's arguments, its `output` what the function returned, its reward 0.
    """
    if function is None:
        return functools.partial(trajectory, name=name, **metadata)
    signature = inspect.signature(function)

    def result(arguments: inspect.BoundArguments, value: Any, calls: CallSession) -> Trajectory:
        return Trajectory(
            name=name,
            input=dict(arguments.arguments),
            output=value,
            steps=calls.steps,
            reward=0.0,
            info=dict(calls.metadata),
        )

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def asynchronous(*args: Any, **kwargs: Any) -> Trajectory:
            with session(**metadata) as calls:
                value = await function(*args, **kwargs)
            return result(signature.bind(*args, **kwargs), value, calls)

        return asynchronous

    @functools.wraps(function)
    def synchronous(*args: Any, **kwargs: Any) -> Trajectory:
        with session(**metadata) as calls:
            value = function(*args, **kwargs)
        return result(signature.bind(*args, **kwargs), value, calls)

    return synchronous


def _openai(provider: str) -> Any:
    if provider != "openai":
        raise ConfigError(f"`provider` is {provider!r}; there is `openai`, for every compatible server.")
    try:
        import openai
    except ModuleNotFoundError as error:
        raise ConfigError("`openai` is not installed; run: pip install openai") from error
    return openai


def _keyed(options: dict[str, Any]) -> dict[str, Any]:
    """With a key where only an address is given: a gateway's session opens for any."""
    return {"api_key": "EMPTY", **options} if options.get("base_url") else options


def _recorded(client: Any) -> Any:
    """The client, its `create` of chats and completions replaced by ones that keep what they answered.

    So are those of the clients that it makes of itself, by `copy` and `with_options`.
    """
    for resource in (client.chat.completions, client.completions):
        resource.create = _recording(resource.create)
    copy = client.copy
    client.copy = client.with_options = functools.wraps(copy)(
        lambda *args, **options: _recorded(copy(*args, **options))
    )
    return client


def _recording(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def recorded_create(*args: Any, **kwargs: Any) -> Any:
        started_s = time.monotonic()
        answer = create(*args, **kwargs)
        if inspect.isawaitable(answer):
            return _keep_awaited(kwargs, answer, started_s)
        _keep(kwargs, answer, started_s)
        return answer

    return recorded_create


async def _keep_awaited(arguments: dict[str, Any], answer: Awaitable[Any], started_s: float) -> Any:
    result = await answer
    _keep(arguments, result, started_s)
    return result


def _keep(arguments: dict[str, Any], answer: Any, started_s: float) -> None:
    """Add a call to each open session. A stream is read by the program, so there is nothing to keep of it."""
    if arguments.get("stream"):
        return
    output = json.loads(answer.model_dump_json())
    for each in _SESSIONS.get():
        each.llm_calls.append(
            CallTrace(
                trace_id=output.get("id") or uuid.uuid4().hex,
                session_name=each.name,
                model=output.get("model") or str(arguments.get("model", "")),
                input=dict(arguments),
                output=output,
                latency_ms=1000.0 * (time.monotonic() - started_s),
                metadata=dict(each.metadata),
            )
        )
