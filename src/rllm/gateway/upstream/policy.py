"""Model calls answered by other servers: vLLM, SGLang, anything that speaks OpenAI's protocols, Anthropic.

    CallRequest ──session's sampling──► pool ──► server ──► Answer ──► conversation, segment, policy versions
                                         ▲          │
                                         └─ again ──┘  no connection, 429, 502, 503, 504, a drop before
                                                       the first byte

This is the one layer that tries again: at most `max_retries` times, on another server where there is one, and
never once a part of an answer was passed on. What the gateway captures is asked for beside what the client
asks for; a server that refuses such a field is asked again without it, and the answer says what is missing.
"""

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from rllm.errors import ConfigError, PartialAnswer, RequestRefused, choices_of
from rllm.errors.redaction import hide_key
from rllm.gateway.dialects.openai_fields import require_no_seed
from rllm.gateway.dialects.registry import UPSTREAMS
from rllm.gateway.upstream.call import Failed, UpstreamCall, ask
from rllm.gateway.upstream.continuity import Continuity
from rllm.gateway.upstream.counting import counted_tokens, unreachable
from rllm.gateway.upstream.http import Dropped, HttpClient, SlowToConnect, Unreachable
from rllm.gateway.upstream.pool import HealthChecks, Upstream, UpstreamPool
from rllm.gateway.upstream.retry_waits import RetryWaits, Tries
from rllm.gateway.upstream.seeds import Draws
from rllm.gateway.upstream.server_facts import CAPTURES, Known, added_fields, all_models
from rllm.types.wire import Answer, CallRequest, Dialect, Emit, PolicySession

MAX_BODY_BYTES = 128 << 20
_MAX_TOKEN_ID = 2**31 - 1
_STATE = "upstream"
_DRAWS = "upstream_draws"
_REQUEST_FIELDS = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_WITH_CAPTURE = (Dialect.CHAT, Dialect.COMPLETIONS)
"""The protocols in which more can be asked for than a client asks for."""
_ANTHROPIC_VERSION = "2023-06-01"


class UpstreamPolicy:
    """Implements `rllm.types.wire.Policy`.

    `dialect` is what the servers are spoken to in; bare prompts go to `/completions` of servers that speak
    chat. `capture` names what the gateway asks for itself (`logprobs`, `token_ids`, `usage`); None means all
    that the engine is known to give. `processed_logprobs`: vLLM was started with `--logprobs-mode
    processed_logprobs`. A call that names no seed is sent to vLLM with one that follows from the session's
    and from the prompt; the draws of other servers are their own. With `sends_seeds=False` all servers choose
    theirs, and a call that names a seed is refused.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        dialect: Dialect = Dialect.CHAT,
        api_key: str | None = None,
        capture: frozenset[str] | None = None,
        weights: Sequence[float] | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        max_retries: int = 4,
        max_wait_s: float = 30.0,
        max_body_bytes: int = MAX_BODY_BYTES,
        checks: HealthChecks | None = None,
        processed_logprobs: bool = False,
        sends_seeds: bool = True,
    ) -> None:
        if capture is not None and not capture <= CAPTURES:
            unknown = min(capture - CAPTURES)
            raise ConfigError(f"`capture` holds {unknown!r}; {choices_of(unknown, sorted(CAPTURES))}.")
        for name, value in (("timeout_s", timeout_s), ("connect_timeout_s", connect_timeout_s)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"`{name}` is {value}; it must be a number of seconds above 0.")
        if max_retries < 0 or max_wait_s < 0:
            raise ConfigError(
                f"`max_retries` is {max_retries} and `max_wait_s` {max_wait_s}; both must be 0 or more."
            )
        self.pool = UpstreamPool.of(urls, weights=weights, checks=checks)
        self.dialect = dialect
        self.capture = capture
        self._retries = RetryWaits(max_retries=max_retries, max_wait_s=max_wait_s)
        self._processed_logprobs = processed_logprobs
        self._sends_seeds = sends_seeds
        self._http = HttpClient(
            headers=_key_headers(dialect, api_key),
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_body_bytes=max_body_bytes,
        )
        # Weak, since calls under way still ask for what is known of a server that was removed.
        self._facts = WeakKeyDictionary[Upstream, Known]((each, Known()) for each in self.pool.upstreams)
        self._policy_version = 0
        self._in_flight = 0
        self._waiting = 0
        """Calls between two tries."""
        self._num_retries = 0
        self._num_across_versions = 0

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Asks every server what it is. One that is not there yet is asked when it comes."""
        await asyncio.gather(*(self._first_look(each) for each in self.pool.upstreams))
        self.pool.start(self._check)

    async def close(self) -> None:
        await self.pool.close()
        await self._http.close()

    def set_policy_version(self, policy_version: int) -> None:
        """The weights that answer calls from now on, for servers that do not tell it themselves."""
        self._policy_version = policy_version

    def models(self) -> list[str]:
        return all_models([self._facts[each] for each in self.pool.upstreams])

    async def add_server(self, url: str, weight: float) -> dict[str, Any]:
        """Send calls to one more server; its health, as `health` has it, and its `models`.

        Raises ConfigError for no URL, and for a server that is there already.
        """
        upstream = self.pool.add(url, weight)
        self._facts[upstream] = Known()
        await self._first_look(upstream)
        return {**self._server_health(upstream), "models": all_models([self._facts[upstream]])}

    async def remove_server(self, url: str) -> None:
        """Send no further calls to a server. Raises ConfigError for the last one."""
        await self.pool.remove(url)

    async def look_again(self) -> None:
        """Ask every server anew what it is."""
        for upstream in self.pool.upstreams:
            self._facts[upstream].is_probed = False
        await asyncio.gather(*(self._first_look(each) for each in self.pool.upstreams))

    def _server_health(self, upstream: Upstream) -> dict[str, Any]:
        facts = self._facts[upstream]
        capture = sorted(facts.known_captures if self.capture is None else self.capture)
        return {**self.pool.health(upstream), **facts.health(), "capture": capture}

    def health(self) -> dict[str, Any]:
        all_facts = [self._facts[each] for each in self.pool.upstreams]
        versions = [each.policy_version for each in all_facts if each.policy_version is not None]
        return {
            "healthy": any(each.in_service for each in self.pool.upstreams),
            "queued": self._waiting + self._http.num_waiting,
            "in_flight": self._in_flight,
            "policy_versions": sorted(set(versions)) or [self._policy_version],
            "retries": self._num_retries,
            "calls_across_versions": self._num_across_versions,
            "upstreams": [self._server_health(each) for each in self.pool.upstreams],
        }

    # ---- answers -------------------------------------------------------------------------------------------

    async def answer(self, request: CallRequest, session: PolicySession, emit: Emit | None = None) -> Answer:
        """See `Policy`. Policy versions are those of the weights that the call began with."""
        sampling = {name: session.sampling[name] for name in _REQUEST_FIELDS if name in session.sampling}
        if request.tokens_left is not None:
            left = request.tokens_left // request.n
            sampling["max_tokens"] = min(sampling.get("max_tokens", request.max_tokens) or left, left)
        call = UpstreamCall(
            request=replace(request, **sampling) if sampling else request,
            dialect=UPSTREAMS[self._dialect_for(request)],
            extras=_extras(session.sampling),
            emit=emit,
        )
        if not self._sends_seeds:
            require_no_seed(call.request)
        self._in_flight += 1
        try:
            return await self._answer(call, session)
        except BaseException:
            if call.draw is not None:
                _draws_of(session).give_back(call.draw)
            raise
        finally:
            self._in_flight -= 1

    async def _answer(self, call: UpstreamCall, session: PolicySession) -> Answer:
        tries = Tries(retries=self._retries)
        while True:
            try:
                with self.pool.lease(session.id, avoid=tries.avoid) as upstream:
                    tries.last = upstream
                    return await self._try(call, upstream, session)
            except Failed as failure:
                wait_s = tries.wait_before_next(failure, self.pool)
            except RequestRefused as error:
                if error.code != "no_upstream":
                    raise
                wait_s = tries.wait_for_service(error, self.pool)
            self._num_retries += 1
            self._waiting += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                self._waiting -= 1

    async def _try(self, call: UpstreamCall, upstream: Upstream, session: PolicySession) -> Answer:
        facts = self._facts[upstream]
        # At the beginning of the try: weights that are changed while it samples are seen in `_finish`.
        call.policy_version = self._policy_version
        try:
            if not facts.is_probed:
                await self._probe(upstream)
            # Once for all tries: a call that goes to another server draws the same.
            if call.draw is None and call.request.seed is None and self._seeds(facts, call.request):
                call.draw = _draws_of(session).draw_of(call.request, session.seed)
            answer, server_policy_version, capture = await self._ask(call, upstream, facts)
        except PartialAnswer as partial:
            self.pool.note_trouble(upstream, str(partial))
            # What came is recorded with its place and versions, but no later prompt goes on from it.
            if isinstance(partial.answer, Answer):
                self._finish(call, upstream, facts, session, partial.answer, whole=False)
            raise
        except Failed as failure:
            self._note(upstream, failure)
            raise
        except RequestRefused as error:
            if error.status >= 500:
                self.pool.note_trouble(upstream, error.message)
            elif call.has_answered:
                # A server that refuses a request is well.
                upstream.note_success()
            raise
        upstream.note_success()
        if server_policy_version is not None:
            facts.policy_version = server_policy_version
        if answer.no_ids_because:
            answer.no_ids_because = self._why_no_ids(call.request, facts, capture) or answer.no_ids_because
        return self._finish(call, upstream, facts, session, answer, server_policy_version, whole=True)

    async def _ask(
        self, call: UpstreamCall, upstream: Upstream, facts: Known
    ) -> tuple[Answer, int | None, frozenset[str]]:
        """Without a field of ours that the server refuses: once for each, and remembered when that helped."""
        request = call.request
        capture = facts.capture_for(request, self.capture)
        if self._seeds(facts, request):
            capture |= {"seed"}
        if call.dialect.name not in _WITH_CAPTURE:
            capture = frozenset()
        first_error: RequestRefused | None = None
        dropped_fields: frozenset[str] = frozenset()
        while True:
            try:
                reply = await ask(call, self._http, upstream.url, capture)
            except RequestRefused as error:
                blamed_fields = (
                    facts.fields_at_fault(error, request, capture) if call.has_answered else frozenset[str]()
                )
                if not blamed_fields:
                    raise first_error or error from None
                first_error = first_error or error
                dropped_fields |= blamed_fields
                capture -= blamed_fields
                continue
            if first_error is not None:
                facts.note_refused(request, dropped_fields, first_error.message)
            facts.note_accepted(request, added_fields(request, capture))
            return reply.answer, reply.policy_version, capture

    def _seeds(self, facts: Known, request: CallRequest) -> bool:
        return self._sends_seeds and facts.takes_seed(request)

    def _finish(
        self,
        call: UpstreamCall,
        upstream: Upstream,
        facts: Known,
        session: PolicySession,
        answer: Answer,
        server_policy_version: int | None = None,
        *,
        whole: bool,
    ) -> Answer:
        """Add what the server cannot know: versions, meanings, and the place in the session.

        `server_policy_version` is the version that it knows itself.
        """
        answer.upstream = upstream.url
        answer.first_token_s = call.first_token_s
        meaning = facts.logprob_meaning(call.request, processed_logprobs=self._processed_logprobs)
        version = call.policy_version if server_policy_version is None else server_policy_version
        versions_differ = call.policy_version != self._policy_version
        self._num_across_versions += versions_differ
        for choice in answer.choices:
            if not (_are_tokens(choice.completion_ids) and _are_tokens(choice.prompt_ids)):
                choice.completion_ids, choice.prompt_ids, choice.logprobs = [], [], []
                answer.no_ids_because = f"The upstream gave token ids outside of 0 to {_MAX_TOKEN_ID}."
            choice.policy_versions = [version] * len(choice.completion_ids)
            choice.mixed_versions = versions_differ
            choice.logprob_meaning = meaning
            choice.temperature = call.request.temperature
            choice.seed = call.sent_seed
        self._place(call.request, session, answer, whole=whole)
        return answer

    def _place(self, request: CallRequest, session: PolicySession, answer: Answer, *, whole: bool) -> None:
        if not answer.choices:
            return
        continuity: Continuity | None = session.state.get(_STATE)
        if continuity is None:
            continuity = session.state[_STATE] = Continuity.from_history(session.history())
        prompt_ids = answer.choices[0].prompt_ids
        if not prompt_ids and isinstance(request.prompt, list):
            prompt_ids = request.prompt
        prompt = continuity.place(request, prompt_ids)
        for choice in answer.choices:
            prompt.place.stamp(choice)
            if whole:
                continuity.record(prompt, choice)

    def _why_no_ids(self, request: CallRequest, facts: Known, capture: frozenset[str]) -> str:
        """Empty when ids were asked for: then the dialect knows better."""
        for each in ("token_ids", "logprobs"):
            reason = facts.why_refused(request, each)
            if reason and each not in capture:
                return (
                    f"The upstream refused to give {each.replace('_', ' ')} ({reason}). Serve the model "
                    "with vLLM 0.10.2 or newer, whose /v1/chat/completions takes `return_token_ids` and "
                    "`logprobs`."
                )
            if self.capture is not None and each not in self.capture:
                return (
                    f"The gateway was started without `--capture {each}`; add it where the server gives it."
                )
            if self.capture is None and each not in facts.known_captures:
                return (
                    "The upstream does not say that it is vLLM, SGLang or rLLM, so it was not asked for "
                    f"{each.replace('_', ' ')}. Where it can give them, start the gateway with "
                    f"`--capture {','.join(sorted(CAPTURES))}`."
                )
        return ""

    def _dialect_for(self, request: CallRequest) -> Dialect:
        """Servers that speak chat answer bare prompts beside it."""
        if self.dialect is Dialect.CHAT and request.dialect is Dialect.COMPLETIONS:
            return Dialect.COMPLETIONS
        return self.dialect

    # ---- servers -------------------------------------------------------------------------------------------

    def _note(self, upstream: Upstream, failure: Failed) -> None:
        if failure.slow:
            self.pool.note_trouble(upstream, failure.error.message)
        elif not failure.is_reached:
            self._facts[upstream].is_probed = False  # who comes back may be someone else
            self.pool.unreachable(upstream, failure.error.message)
        elif failure.error.status == 429:
            # Too busy is not broken: it answered, and keeps its sessions with their caches.
            upstream.note_success()
        elif not failure.stale:
            self.pool.note_trouble(upstream, failure.error.message)

    async def _first_look(self, upstream: Upstream) -> None:
        try:
            await self._probe(upstream)
        except Failed as failure:
            self._note(upstream, failure)

    async def _probe(self, upstream: Upstream) -> None:
        try:
            await self._facts[upstream].ready(upstream, self._http)
        except (Unreachable, Dropped, TimeoutError) as error:
            is_reached, slow = not isinstance(error, Unreachable), isinstance(error, SlowToConnect)
            raise Failed(unreachable(upstream.url, error), is_reached=is_reached, slow=slow) from error

    async def _check(self, upstream: Upstream) -> None:
        """Raises OSError when the server is not well. Any answer that is no 5xx is a sign of life."""
        status, _ = await self._http.get(f"{upstream.root}/health")
        # Not every server has /health, and each has its list of models.
        if status in (404, 405, 501):
            status, _ = await self._http.get(f"{upstream.url}/models")
        if status >= 500:
            raise OSError(f"its health check answered {status}")
        facts = self._facts[upstream]
        # Behind one address there may be another server by now, with other fields and models.
        if not facts.is_probed or not upstream.in_service:
            facts.is_probed = False
            await facts.ready(upstream, self._http)

    # ---- counting ------------------------------------------------------------------------------------------

    async def count_tokens(self, request: CallRequest) -> int:
        """As the server counts. Raises RequestRefused (400) where none does."""
        if isinstance(request.prompt, list):
            return len(request.prompt)
        with self.pool.lease("") as upstream:
            dialect = UPSTREAMS[self._dialect_for(request)]
            return await counted_tokens(request, dialect, upstream, self._facts[upstream], self._http)


def _draws_of(session: PolicySession) -> Draws:
    draws: Draws | None = session.state.get(_DRAWS)
    if draws is None:
        draws = session.state[_DRAWS] = Draws.from_history(session.history())
    return draws


def _are_tokens(ids: list[int]) -> bool:
    try:
        packed = struct.pack(f"<{len(ids)}I", *ids)
    except struct.error:
        return False
    return packed[3::4].isascii()  # the highest bit of each is 0


def _extras(sampling: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if name not in _REQUEST_FIELDS}


def _key_headers(dialect: Dialect, api_key: str | None) -> dict[str, str]:
    hide_key(api_key)
    if dialect is Dialect.MESSAGES:
        key = {} if api_key is None else {"x-api-key": api_key}
        return {"anthropic-version": _ANTHROPIC_VERSION, **key}
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
