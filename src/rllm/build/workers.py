"""A contract's binding ──► who does the work, and the model behind a gateway, ready to be called.

Models ──one client a model, shared──► WorkerModel: a gateway, whose sessions stay with the model that
                                       they began with ──switch_to──► sessions from now on have another
"""

import inspect
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_type_hints, is_typeddict

from rllm.agents.flow import ENTRY_POINTS
from rllm.agents.typed_programs import input_schemas, is_typed, output_schemas, typed_flow, typed_function
from rllm.build.actors import Actor, actor_named, is_place
from rllm.build.evaluation_engines import answering, program_client
from rllm.build.gateways import upstream_policy
from rllm.build.program_player import local_policy
from rllm.build.providers import BUILTIN, ModelPlace, resolve_model
from rllm.contracts.contract import Binding
from rllm.errors import ConfigError, MissingExtraError
from rllm.types.names import object_named

if TYPE_CHECKING:
    from rllm.gateway.server import Gateway
    from rllm.types.wire import Answer, CallRequest, Emit, Policy, PolicySession


def actor_of(binding: Binding, *, beside: Path, what: str) -> Actor | None:
    """The one who does the work; None where the model itself answers. `beside`: where relative names begin.

    Raises ConfigError for a binding that names nobody, names that lead nowhere, and another kind of actor.
    """
    if not binding.is_bound:
        raise ConfigError(
            f"{what} names nobody who does the work; write `rllm: {{program: file.py:NAME, model: NAME}}` in "
            "its front matter, or give --program, --agent, --workflow or --model."
        )
    if not binding.actor:
        return None
    actor = _worker_actor(_actor_beside(binding.actor, beside))
    kinds = {"program": actor.flow, "agent": actor.agent, "workflow": actor.workflow}
    kind = next(name for name, value in kinds.items() if value is not None)
    title = "an agent" if kind == "agent" else f"a {kind}"
    if not getattr(binding, kind):
        raise ConfigError(f"{what}: `{binding.actor}` is {title}; write `rllm: {{{kind}: {binding.actor}}}`.")
    if kind != "program" and not binding.model:
        raise ConfigError(f"{what}: {title} asks a model; write `model: NAME` beside it, or give --model.")
    return actor


def _worker_actor(name: str) -> Actor:
    """A function of typed inputs is a program too."""
    if is_place(name):
        target = object_named(name, group=ENTRY_POINTS, what="program")
        if is_typed(target):
            flow = typed_flow(target)
            return Actor(name=flow.name, flow=flow)
    return actor_named(name)


@dataclass(kw_only=True, slots=True)
class ActorFacts:
    """Purpose and schemas of a worker, as far as its function tells them; else those of any task."""

    purpose: str = "Execute one task as a bounded worker step."
    inputs: dict[str, Any] = field(
        default_factory=lambda: {"task": {"type": "string"}, "context": {"type": "object"}}
    )
    mandatory: list[str] = field(default_factory=lambda: ["task", "context"])
    outputs: dict[str, Any] = field(default_factory=lambda: {"result": {"type": "object"}})


def actor_facts(binding: Binding, path: Path) -> ActorFacts:
    """Purpose and schemas from the signature and the docstring of the actor of the contract at `path`.

    Raises ConfigError as `actor_of` does.
    """
    facts = ActorFacts()
    if not binding.actor:
        return facts
    actor = actor_of(binding, beside=path.parent, what=str(path))
    assert actor is not None, "the binding names one"
    lines = (inspect.getdoc(actor.source) or "").strip().splitlines()
    if lines:
        facts.purpose = " ".join(lines[0].split())
    if actor.flow is None:
        return facts
    function = typed_function(actor.source)
    if function is not None:
        facts.inputs, facts.mandatory = input_schemas(function)
    # A program of a task and a configuration may return an Episode, which says nothing of the outputs.
    elif not is_typeddict(get_type_hints(actor.flow.function).get("return")):
        return facts
    outputs = output_schemas(function or actor.flow.function, actor.name)
    if outputs is not None:
        facts.outputs = {name: each for name, each in outputs.items() if name not in ("run_id", "status")}
    return facts


@dataclass(kw_only=True, slots=True, eq=False)
class OpenModel:
    """A model that answers, and how many use it."""

    place: ModelPlace
    client: Any = None
    """None for a server."""
    num_users: int = 0

    @property
    def name(self) -> str:
        return self.place.name if self.place.is_server else Path(self.place.path).name

    def policy(self) -> "Policy":
        """For one gateway."""
        return upstream_policy(self.place) if self.client is None else local_policy(self.client, self.name)


class Models:
    """The models of one process: workers with the same one share its weights and its engine."""

    def __init__(self, *, threads: int = 0) -> None:
        """`threads` of torch; 0 takes one per core."""
        self._threads = threads
        self._open: list[OpenModel] = []

    async def open(self, place: ModelPlace, *, anew: bool = False) -> OpenModel:
        """`anew` reads files again that may have changed since."""
        open_model = next((each for each in self._open if each.place == place and not anew), None)
        if open_model is None:
            client = None if place.is_server else program_client(place, threads=self._threads)
            open_model = OpenModel(place=await answering(place) if client is None else place, client=client)
            self._open.append(open_model)
        open_model.num_users += 1
        return open_model

    async def release(self, model: OpenModel) -> None:
        model.num_users -= 1
        if not model.num_users:
            self._open.remove(model)
            if model.client is not None:
                await model.client.close()


@dataclass(kw_only=True, slots=True, eq=False)
class _Served:
    model: OpenModel
    policy: "Policy"
    sessions: set[str] = field(default_factory=set[str])


class WorkerModel:
    """The model behind one worker, as its gateway's policy. An asynchronous context manager."""

    def __init__(self, models: Models, calls: Path) -> None:
        self._models = models
        self._calls = calls
        self._served: list[_Served] = []
        """The last is the one of new sessions; the others end with their last session."""
        self._gateway: Gateway | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        for served in list(self._served):
            await self._end(served)

    @property
    def current(self) -> OpenModel:
        return self._served[-1].model

    async def switch_to(self, place: ModelPlace, *, anew: bool = False) -> None:
        """New sessions are answered by this model; those that are open keep theirs. Nothing changes where it
        cannot be loaded."""
        model = await self._models.open(place, anew=anew)
        try:
            policy = model.policy()
            await policy.start()
        except BaseException:
            await self._models.release(model)
            raise
        previous = self._served[-1:]
        self._served.append(_Served(model=model, policy=policy))
        for served in previous:
            await self._end_if_idle(served)
        if self._gateway is None:
            self._gateway = await self._stack.enter_async_context(_gateway(self, self._calls))

    async def can_enforce(self, schema: Mapping[str, Any]) -> bool:
        """Whether new sessions can be sampled by a JSON schema."""
        client = self.current.client
        if client is None:
            return False
        return await client.can_follow(client.renderer.plain_format.schema_grammar(schema))

    def open_session(self, session: str, *, seed: int | None = None) -> Any:
        """A session of the gateway. `close_session` must follow."""
        assert self._gateway is not None, "`switch_to` was called before"
        self._served[-1].sessions.add(session)
        return self._gateway.open_session(session, seed=seed)

    async def close_session(self, session: str) -> None:
        served = self._of(session)
        served.sessions.discard(session)
        await self._end_if_idle(served)

    def _of(self, session: str) -> _Served:
        return next((each for each in self._served if session in each.sessions), self._served[-1])

    async def _end_if_idle(self, served: _Served) -> None:
        if not served.sessions and served is not self._served[-1]:
            await self._end(served)

    async def _end(self, served: _Served) -> None:
        if served in self._served:
            self._served.remove(served)
            await served.policy.close()
            await self._models.release(served.model)

    # ---- `rllm.types.wire.Policy` ------------------------------------------------------------------------

    async def answer(
        self, request: "CallRequest", session: "PolicySession", emit: "Emit | None" = None
    ) -> "Answer":
        return await self._of(session.id).policy.answer(request, session, emit)

    async def count_tokens(self, request: "CallRequest") -> int:
        return await self._served[-1].policy.count_tokens(request)

    def models(self) -> list[str]:
        return self._served[-1].policy.models()

    def health(self) -> dict[str, Any]:
        return self._served[-1].policy.health()

    async def start(self) -> None:
        """Each model was started when it was switched to."""

    async def close(self) -> None:
        """Each model ends with its last session."""


@asynccontextmanager
async def open_worker_model(
    binding: Binding, models: Models, *, beside: Path, calls: Path
) -> AsyncIterator[WorkerModel | None]:
    """None where the binding names no model. `calls`: the directory of the gateway's ledger."""
    if not binding.model:
        yield None
        return
    async with WorkerModel(models, calls) as model:
        await model.switch_to(place_of(binding, beside))
        yield model


def place_of(binding: Binding, beside: Path) -> ModelPlace:
    """The place of a binding's model."""
    return resolve_model(_beside(binding.model, beside), base_url=binding.base_url)


def _actor_beside(name: str, beside: Path) -> str:
    place = name if name.endswith(".py") else name.rpartition(":")[0]
    if not place.endswith(".py"):
        return name
    # A file that was brought from another machine is here by that name alone.
    is_elsewhere = Path(place).is_file() and not (beside / place).is_file()
    return name if is_elsewhere else os.fspath(beside / name)


def _beside(name: str, beside: Path) -> str:
    """A path that a contract names is relative to the contract's file."""
    if name.startswith(BUILTIN) or Path(name).is_absolute():
        return name
    nearby = beside / name
    return os.fspath(nearby) if nearby.exists() else name


@asynccontextmanager
async def _gateway(policy: "Policy", calls: Path) -> "AsyncIterator[Gateway]":
    """For sessions that the worker opens alone. What was captured stays."""
    try:
        from rllm.gateway.server import Gateway
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "aiohttp", "worker") from error
    async with Gateway(policy, calls, require_session=True) as gateway:
        yield gateway
