"""The model as a workflow sees it: one of these for each attempt, shared by all its agents.

    output = await rollout_engine.get_model_response(messages, role="solver", max_tokens=64)

    messages, role ──► policy of the role ──► the conversation they go on with ──► prompt ids, appended
                                                                                      │ budget: does it fit?
    calls: role, messages, output  ◄── text, reasoning, tool calls ◄── client ◄───────┘ seed of the call's key

A draw depends on what is asked and by which branch of the workflow (see `rllm.inference.branches`), never on
when. So an attempt samples the same tokens whatever runs beside it, and in whatever order its own calls are
answered.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, TypeGuard

from rllm.errors import AgentError, ConfigError, ContextLengthError, InferenceError, RewardError
from rllm.inference.branches import BranchConversation, Branches
from rllm.inference.call_retries import CallPatience, answer_of
from rllm.inference.client import ModelClient, ModelSession, TokenClient, takes_tools
from rllm.inference.reading import as_it_may_come_back, no_tools, parsed_text, read_into
from rllm.rendering.answers import without_thoughts
from rllm.rendering.conversations import ConversationTree
from rllm.types.budget import BudgetExceeded, BudgetMeter, TokenBudget
from rllm.types.draws import draw_seed
from rllm.types.episode import TerminationEvent, TerminationReason
from rllm.types.episode_clock import EpisodeClock
from rllm.types.messages import Message, ModelOutput, SamplingParams

Client = ModelClient | TokenClient
DEFAULT_POLICY = "policy"
_CHOSEN_BY_CALLS = tuple(
    each.name for each in fields(SamplingParams) if each.name not in ("seed", "grammar", "top_logprobs")
)
_GRACE_S = 1.0
"""For a task that was cancelled and does not end."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleSettings:
    """The settings of one role of a workflow; None leaves a value to the run."""

    policy: str = ""
    """Which client answers; "" is the first."""
    temperature: float | None = None
    """Not for greedy runs, such as evaluations at temperature 0: they stay greedy."""
    max_tokens: int | None = None
    history: str = "keep"
    """`strip` sends earlier answers without their thoughts: every prompt is made anew."""


@dataclass(kw_only=True, slots=True)
class RecordedCall:
    """One answered call."""

    role: str
    policy: str
    messages: list[Message]
    """The messages of the request."""
    output: ModelOutput


class RolloutEngine:
    """Answers one attempt's model calls and remembers them. Close it when the attempt is over."""

    def __init__(
        self,
        clients: Client | Mapping[str, Client],
        *,
        key: tuple[str | int, ...] = (),
        sampling: SamplingParams = SamplingParams(),
        roles: Mapping[str, RoleSettings] | None = None,
        budget: TokenBudget | None = None,
        patience: CallPatience | None = None,
        clock: EpisodeClock | None = None,
    ) -> None:
        """`key`: seed, purpose, task and attempt; every draw is derived from it. `clock`: of the
        attempt, whose own time stands still while a call is open.
        """
        self.clients = clients_by_policy(clients)
        self.roles = roles_checked(roles or {}, self.clients)
        self.key = key
        self.sampling = sampling
        self.budget = budget or TokenBudget()
        self.patience = patience or CallPatience()
        self.calls: list[RecordedCall] = []
        """Every answer, in the order of arrival."""
        self._names = set[str]()
        """The `completion_id` of each."""
        self.num_retries = 0
        """Calls that were asked again."""
        self.waits_for = ""
        """The reason that the latest call waits; "" when none is under way."""
        self._clock = clock
        self._sessions: list[ModelSession] = []
        self._branches = Branches()
        self._failed: dict[str, Exception] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._is_abandoned = False

    @property
    def failure(self) -> Exception | None:
        """The error of a call that failed for good, also when the workflow went on without it; None when the
        same was answered later.
        """
        return next(reversed(self._failed.values()), None)

    def draw(self, *purpose: str | int) -> int:
        """A seed for whatever else the attempt draws, such as its environment."""
        return draw_seed(*self.key, *purpose)

    async def get_model_response(
        self,
        messages: Sequence[Message],
        *,
        role: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        budget: TokenBudget | None = None,
        application_id: str | None = None,
        response_schema: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> ModelOutput:
        """The answer to `messages`, a whole conversation as it is so far.

        `role` picks policy and settings; `sampling` (temperature, max_tokens, top_p, top_k, stop,
        stop_token_ids) is for this call alone and wins over them; `budget` stands in for the engine's.
        `application_id` is what published programs give: nobody needs it here. `response_schema`, a JSON
        schema of the answer, is enforced while sampling, by a model of which `enforces` says so.

        Raises BudgetExceeded, a TerminationEvent, for a prompt that leaves no room, and InferenceError when
        the model could not be reached.
        """
        if self._closed:
            if self._is_abandoned:
                await asyncio.get_running_loop().create_future()  # an error would only be asked again
            raise InferenceError(
                "The attempt is over, so its model answers no more; await every call in run()."
            )
        conversation_messages, tool_list = list(messages), list(tools or ())
        settings = self.roles.get(role or "", RoleSettings())
        policy = settings.policy or next(iter(self.clients))
        # Before anything is awaited: branches are numbered in the order in which tasks come here.
        branch_request = self._branches.ask(policy, role or "", conversation_messages, tool_list)
        params = self._choose_sampling(settings, sampling, branch_request.seed(*self.key))
        if response_schema is not None:
            params = replace(params, grammar=_grammar_of(self.clients[policy], response_schema))
        conversation = self._branches.conversation(branch_request, conversation_messages)
        request_messages = conversation_messages
        # The ids of a tree have the thoughts in them, so each prompt begins a new one.
        if settings.history == "strip":
            request_messages, conversation.tree = (
                [without_thoughts(message) for message in conversation_messages],
                None,
            )
        meter = BudgetMeter(
            budget or self.budget, conversation.first_prompt_tokens, conversation.known_tokens
        )
        asking = asyncio.current_task()
        assert asking is not None, "a coroutine runs in a task"
        self._asking.add(asking)
        self.waits_for = "model"
        try:
            with nullcontext() if self._clock is None else self._clock.call():
                output = await self._answer(
                    self.clients[policy], conversation, meter, request_messages, tool_list, params
                )
        except ContextLengthError as error:
            raise BudgetExceeded(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED, str(error)) from error
        except (AgentError, ConfigError, RewardError, TerminationEvent):
            raise
        except Exception as error:  # whatever a client raises says nothing about the policy
            self._failed[branch_request.digest] = error
            raise
        finally:
            self._asking.discard(asking)
            self.waits_for = "model" if self._asking else ""
        self._failed.pop(branch_request.digest, None)
        self._branches.record(branch_request, conversation, as_it_may_come_back(output))
        output.completion_id = self._own_name(output.completion_id)
        call = RecordedCall(role=role or "", policy=policy, messages=request_messages, output=output)
        self.calls.append(call)
        # Not `cut_off`: the workflow gets the answer, sees its finish reason, and cannot ask another time.
        meter.record(*_tokens_of(output), cut_off=False)
        conversation.first_prompt_tokens = meter.first_prompt_tokens
        conversation.known_tokens = meter.known_tokens
        return output

    def _own_name(self, name: str) -> str:
        """`name`, or another where it is empty or that of an earlier answer: servers that know nothing of
        each other may count from 1, and steps are told apart by it."""
        number = len(self.calls) + 1
        while not name or name in self._names:
            name, number = f"call-{number}", number + 1
        self._names.add(name)
        return name

    async def enforces(self, schema: Mapping[str, Any], *, role: str | None = None) -> bool:
        """Whether the model of a role samples answers by a JSON schema: its engine follows grammars, and can
        follow the one of this schema."""
        settings = self.roles.get(role or "", RoleSettings())
        client = self.clients[settings.policy or next(iter(self.clients))]
        can_follow = getattr(client, "can_follow", None)
        return can_follow is not None and await can_follow(_grammar_of(client, schema))

    async def close(self, *, is_abandoned: bool = False) -> None:
        """End what the workflow left behind: calls that nobody awaits are cancelled, later ones refused.

        `is_abandoned`: the workflow does not end and swallows every error, so later calls never come back.
        """
        self._closed, self._is_abandoned = True, is_abandoned
        # A task that asks may also be the one that closes, and must not cancel itself.
        left = self._asking - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            done_calls, _ = await asyncio.wait(left, timeout=_GRACE_S)
            for task in done_calls:
                with suppress(asyncio.CancelledError):
                    task.exception()  # asked for here, so that nobody is told that it never was
        for session in self._sessions:
            session.close()

    # ---- how a call samples ----------------------------------------------------------------------------

    def _choose_sampling(
        self, settings: RoleSettings, sampling: Mapping[str, Any], seed: int
    ) -> SamplingParams:
        unknown = [name for name in sampling if name not in _CHOSEN_BY_CALLS]
        if unknown:
            raise ConfigError(
                f"get_model_response does not know `{unknown[0]}`; a call may set "
                f"{', '.join(_CHOSEN_BY_CALLS)}."
            )
        values: dict[str, Any] = {}
        if settings.temperature is not None and self.sampling.temperature > 0.0:
            values["temperature"] = settings.temperature
        if settings.max_tokens is not None:
            values["max_tokens"] = settings.max_tokens
        values |= sampling
        for name in ("stop", "stop_token_ids"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        try:
            return replace(self.sampling, **values, seed=seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    # ---- asking ----------------------------------------------------------------------------------------

    async def _answer(
        self,
        client: Client,
        conversation: BranchConversation,
        meter: BudgetMeter,
        messages: list[Message],
        tools: list[Mapping[str, Any]],
        sampling: SamplingParams,
    ) -> ModelOutput:
        if takes_ids(client):
            return await self._answer_by_ids(client, conversation, meter, messages, tools, sampling)
        assert takes_messages(client), "`clients_by_policy` made sure of it"
        return await self._answer_by_messages(client, conversation, meter, messages, tools, sampling)

    async def _answer_by_ids(
        self,
        client: TokenClient,
        conversation: BranchConversation,
        meter: BudgetMeter,
        messages: list[Message],
        tools: list[Mapping[str, Any]],
        sampling: SamplingParams,
    ) -> ModelOutput:
        renderer = client.renderer
        if tools and renderer.tool_format is None:
            raise no_tools(tools, "the model's chat template does not know tools")
        if conversation.tree is None:
            conversation.tree = ConversationTree(renderer)
        turn = conversation.tree.begin(messages, tools)
        room = min(meter.allow(len(turn.prompt_ids)), _room_in_context(client, len(turn.prompt_ids)))
        params = renderer.with_stops(_limit(sampling, room))
        output = await self._until_answered(
            lambda: client.generate_ids(turn.prompt_ids, params), sampling.seed
        )
        text = output.text
        read_into(output, parsed_text(text, renderer, tools) if tools else renderer.plain_format.parse(text))
        for message in as_it_may_come_back(output):
            conversation.tree.record(turn, output.completion_ids, message)
        return output

    async def _answer_by_messages(
        self,
        client: ModelClient,
        conversation: BranchConversation,
        meter: BudgetMeter,
        messages: list[Message],
        tools: list[Mapping[str, Any]],
        sampling: SamplingParams,
    ) -> ModelOutput:
        session = conversation.session
        if session is None:
            session = conversation.session = client.session(("", 0))
            self._sessions.append(session)
        tool_arguments: dict[str, Any] = {"tools": tools} if tools else {}
        if tools and not takes_tools(type(session)):
            raise no_tools(tools, f"{type(client).__name__} takes none")
        measure: Callable[[list[Message]], int] | None = getattr(session, "prompt_tokens", None)
        room = meter.allow(-1 if measure is None or tools else measure(messages))
        params = _limit(sampling, room)
        return await self._until_answered(
            lambda: session.respond(messages, params, **tool_arguments), sampling.seed
        )

    async def _until_answered(self, ask: Callable[[], Awaitable[ModelOutput]], seed: int) -> ModelOutput:
        def note(wait_s: float, error: BaseException) -> None:
            self.num_retries += 1
            self.waits_for = f"the model, again in {wait_s:.1f} s after {type(error).__name__}: {error}"

        return await answer_of(ask, self.patience, seed=seed, on_retry=note)


def clients_by_policy(clients: Client | Mapping[str, Client]) -> dict[str, Client]:
    """The clients under the names of their policies; the first is the one of roles that name none."""
    by_policy = dict(clients) if isinstance(clients, Mapping) else {DEFAULT_POLICY: clients}
    if not by_policy:
        raise ConfigError("`clients` is empty; give at least one model client.")
    for policy, client in by_policy.items():
        if not takes_ids(client) and not takes_messages(client):
            raise ConfigError(
                f"The client of policy `{policy}` is {client!r:.100} (a {type(client).__name__}); it must "
                "have `generate_ids` and `renderer` (TokenClient of rllm.inference.client), or `session` "
                "(ModelClient)."
            )
    return by_policy


def roles_checked(roles: Mapping[str, RoleSettings], policies: Mapping[str, Any]) -> dict[str, RoleSettings]:
    """Raises ConfigError for a role of a policy that nobody serves."""
    for role, settings in roles.items():
        if settings.policy and settings.policy not in policies:
            raise ConfigError(
                f"Role `{role}` is of policy `{settings.policy}`; the clients serve {', '.join(policies)}."
            )
    return dict(roles)


def takes_ids(client: Client) -> TypeGuard[TokenClient]:
    """Whether a client is asked by token ids."""
    return callable(getattr(client, "generate_ids", None)) and hasattr(client, "renderer")


def takes_messages(client: Client) -> TypeGuard[ModelClient]:
    """Whether a client can be asked by messages."""
    return callable(getattr(client, "session", None))


def _grammar_of(client: Any, schema: Mapping[str, Any]) -> str:
    """In the form that its engine, or its server, reads."""
    write = getattr(client, "schema_grammar", None) or client.renderer.plain_format.schema_grammar
    return write(schema)


def _limit(sampling: SamplingParams, room: int) -> SamplingParams:
    return replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _room_in_context(client: TokenClient, prompt_tokens: int) -> int:
    room = client.max_context - prompt_tokens
    if room < 1:
        raise BudgetExceeded(
            TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
            f"The prompt has {prompt_tokens} tokens and the model's context holds {client.max_context}, so "
            "no token fits behind it.",
        )
    return room


def _tokens_of(output: ModelOutput) -> tuple[int, int]:
    """The numbers of prompt and answer tokens; as the server counted them, where it returned no ids."""
    usage = output.usage
    return (
        len(output.prompt_ids) or usage.get("prompt_tokens", 0),
        len(output.completion_ids) or usage.get("completion_tokens", 0),
    )
